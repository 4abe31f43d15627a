"""What those who reach a running cluster cannot make it do: run their code, call others, mix up requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from live import Cluster, wait_until
from memory import private_bytes
from patient_channel import aio_channel
from prometheus_client.parser import text_string_to_metric_families
from raw_http2 import RawClient

from quire.cluster.local.ports import listeners
from quire.cluster.local.process_session import session_pids
from quire.protos import generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.system

GENERATE = "/quire.v1.Generation/Generate"


def ports_of(cluster: Cluster) -> set[int]:
    return {port for _, port in listeners(session_pids(os.getsid(cluster.pids("Router")[0])))}


def own_grpc_ports(cluster: Cluster) -> list[int]:
    """The routers' own gRPC ports, which are not behind HAProxy."""
    variables = cluster.config["controller_options"]["runtime_env"]["env_vars"]
    first = int(variables["RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT"])
    ports = {port for _, port in listeners(cluster.pids("Router"))}
    found = sorted(port for port in ports if first <= port < first + 50)
    assert len(found) == 2
    return found


# --------------------------------------------------------------------------------------------------
# Ray's own servers
# --------------------------------------------------------------------------------------------------


def test_rays_jobs_and_serve_want_the_token(cluster):
    calls = (
        ("GET", "/api/jobs/", None),
        ("POST", "/api/jobs/", b'{"entrypoint": "true"}'),
        ("GET", "/api/serve/applications/", None),
        ("PUT", "/api/serve/applications/", b'{"applications": []}'),
        ("DELETE", "/api/serve/applications/", None),
    )
    for (method, path, body), token in itertools.product(calls, ("", "Bearer wrong")):
        headers = {"content-type": "application/json"} | ({"authorization": token} if token else {})
        request = urllib.request.Request(cluster.dashboard + path, body, headers, method=method)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        assert caught.value.code in (401, 403), (method, path, token)
    assert cluster.is_running() and len(cluster.pids("Router")) == 2


class RunsCode:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: str):
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._marker,)


def test_no_port_unpickles_what_a_caller_without_the_token_sends(cluster, tmp_path):
    marker = tmp_path / "ran"
    raw = pickle.dumps(RunsCode(str(marker)))
    # `ASGIRequest.pickled_request_metadata`, of Serve's calls between deployments.
    message = b"\x0a" + bytes([len(raw) & 0x7F | 0x80, len(raw) >> 7]) + raw
    assert len(raw) > 0x7F or len(raw) < 1 << 14
    codes: list[grpc.StatusCode] = []

    def call(port: int, method: str, token: str) -> None:
        metadata = [("authorization", token)] if token else None
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                channel.unary_unary(f"/ray.serve.ASGIService/{method}")(
                    message, timeout=10, metadata=metadata
                )
                codes.append(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.append(error.code())

    methods = ("HandleRequest", "HandleRequestWithRejection")
    with ThreadPoolExecutor(16) as pool:
        calls = itertools.product(sorted(ports_of(cluster)), methods, ("", "Bearer wrong"))
        list(pool.map(lambda c: call(*c), calls))
    assert not marker.exists()
    assert grpc.StatusCode.OK not in codes
    # Two routers and two replicas at least, twice two calls each.
    assert codes.count(grpc.StatusCode.UNAUTHENTICATED) >= 16, codes


# --------------------------------------------------------------------------------------------------
# Requests that name other servers
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening() -> Iterator[tuple[str, list[bytes]]]:
    """A URL of this machine, and what has connected to it: nothing may."""
    server = socket.create_server(("127.0.0.1", 0))
    seen: list[bytes] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(30)
                with contextlib.suppress(OSError):
                    seen.append(connection.recv(200))

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/secret", seen
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def bodies_with(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every place of a request that other servers take a URL from."""
    schemas: tuple[dict[str, Any], ...] = (
        {"$ref": url},
        {"$schema": url, "$id": url, "type": "object", "properties": {"a": {"$ref": f"{url}#/a"}}},
    )
    user = {"role": "user", "content": "hi"}
    for schema in schemas:
        form = {
            "type": "json_schema",
            "json_schema": {"name": "x", "strict": True, "schema": schema},
        }
        function = {"name": "f", "strict": True, "parameters": schema}
        tool = {"type": "function", "function": function}
        chat = {"messages": [user], "max_tokens": 2}
        yield "/v1/chat/completions", chat | {"response_format": form}
        yield "/v1/chat/completions", chat | {"tools": [tool], "tool_choice": "required"}
        yield "/v1/chat/completions", chat | {"structured_outputs": {"json": schema}}
        yield "/v1/completions", {"prompt": "x", "structured_outputs": {"json": schema}}
        anthropic = {"name": "f", "input_schema": {**schema, "type": "object"}}
        messages = {"model": "embedded", "messages": [user], "max_tokens": 2}
        yield "/v1/messages", messages | {"tools": [anthropic], "tool_choice": {"type": "any"}}
        response = {"input": "hi", "store": False, "max_output_tokens": 2}
        text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        yield "/v1/responses", response | {"text": text}
        yield "/v1/responses", response | {"tools": [{"type": "function", **function}]}
    lark = f'start: A\n%import "{url}"\nA: "a"'
    yield "/v1/completions", {"prompt": "x", "structured_outputs": {"grammar": lark}}
    yield "/v1/completions", {"prompt": "x", "structured_outputs": {"regex": url}, "max_tokens": 2}
    parts: tuple[dict[str, Any], ...] = (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
        {"type": "input_file", "file_url": url},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "file", "file": {"file_data": url}},
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "document", "source": {"type": "url", "url": url}},
        {"type": "text", "text": f"![]({url})"},
    )
    for part in parts:
        turn = {"role": "user", "content": [part]}
        yield "/v1/chat/completions", {"messages": [turn], "max_tokens": 2}
        yield "/v1/messages", {"model": "embedded", "messages": [turn], "max_tokens": 2}
        yield "/v1/responses", {"input": [turn], "store": False, "max_output_tokens": 2}
    for kind in ("mcp", "web_search"):
        mcp = {"type": kind, "server_label": "x", "server_url": url, "name": kind}
        yield "/v1/responses", {"input": "hi", "store": False, "tools": [mcp]}
        yield (
            "/v1/messages",
            {"model": "embedded", "messages": [user], "max_tokens": 2, "tools": [mcp]},
        )
        servers = {"mcp_servers": [{"type": "url", "url": url, "name": "x"}]}
        yield "/v1/messages", {"model": "embedded", "messages": [user], "max_tokens": 2, **servers}
    yield "/v1/chat/completions", {"messages": [user], "model": url}
    yield "/v1/chat/completions", {"messages": [user], "chat_template": url, "webhook": url}


def test_no_url_of_a_request_is_ever_fetched(cluster):
    with listening() as (url, seen):
        with httpx.Client(base_url=cluster.url, timeout=60) as client:
            statuses = [client.post(path, json=body).status_code for path, body in bodies_with(url)]
        assert set(statuses) <= {200, 400, 404} and statuses.count(200) >= 4, statuses
        time.sleep(0.2)
        assert seen == []
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(url, timeout=5)
        assert len(seen) == 1, "a fetch is seen"


# --------------------------------------------------------------------------------------------------
# Equal ids
# --------------------------------------------------------------------------------------------------


def test_a_hundred_requests_with_one_id_have_their_own_answers(cluster):
    """Over HTTP and gRPC, also while clients with the same id leave."""
    label = {"x-request-id": "the-same-for-all"}
    prompts = [f"The harbour number {i}" for i in range(10)]

    def body(prompt: str) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}

    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        expected = {
            p: client.post("/v1/completions", json=body(p)).json()["choices"][0]["text"]
            for p in prompts
        }
    assert len(set(expected.values())) > 3

    async def main() -> list[tuple[str, str]]:
        async with (
            httpx.AsyncClient(base_url=cluster.url, timeout=60) as client,
            aio_channel(f"127.0.0.1:{cluster.grpc_port}") as channel,
        ):
            stub = generation_pb2_grpc.GenerationStub(channel)

            async def over_http(prompt: str) -> tuple[str, str]:
                answer = await client.post("/v1/completions", json=body(prompt), headers=label)
                assert answer.headers["x-request-id"] == "the-same-for-all"
                return prompt, answer.json()["choices"][0]["text"]

            async def over_grpc(prompt: str) -> tuple[str, str]:
                asked = generation_pb2.GenerateRequest(prompt=prompt, ignore_eos=True)
                asked.sampling.max_tokens, asked.sampling.temperature = 12, 0
                answer = await stub.GenerateOnce(asked, metadata=tuple(label.items()), timeout=60)
                return prompt, answer.text

            async def leave(prompt: str) -> None:
                streamed = {**body(prompt), "max_tokens": 200, "stream": True}
                async with client.stream(
                    "POST", "/v1/completions", json=streamed, headers=label
                ) as s:
                    async for _ in s.aiter_lines():
                        return

            calls = [c(p) for p in prompts for c in (over_http,) * 5 + (over_grpc,) * 5]
            leaving = [asyncio.create_task(leave(p)) for p in prompts * 2]
            answers = await asyncio.gather(*calls)
            await asyncio.gather(*leaving)
            return list(answers)

    answers = asyncio.run(main())
    assert len(answers) == 100
    assert [(p, text) for p, text in answers if text != expected[p]] == []


# --------------------------------------------------------------------------------------------------
# Series of metrics
# --------------------------------------------------------------------------------------------------


def series(cluster: Cluster) -> set[tuple[str, ...]]:
    """Name and labels of every series of this application's and HAProxy's metrics."""
    variables = cluster.config["controller_options"]["runtime_env"]["env_vars"]
    haproxy = f"http://127.0.0.1:{variables['RAY_SERVE_HAPROXY_METRICS_PORT']}/metrics"
    families = text_string_to_metric_families(httpx.get(haproxy, timeout=30).text)
    samples = [*cluster.metrics(), *(s for family in families for s in family.samples)]
    return {(s.name, *map(str, sorted(s.labels.items()))) for s in samples}


def test_no_word_of_a_client_becomes_a_label(cluster):
    def send(client: httpx.Client, i: int) -> None:
        word = f"canary-{i:03}-" + "x" * 20
        names = (
            "x-request-id",
            "x-session-id",
            "authorization",
            "user-agent",
            "origin",
            "x-api-key",
        )
        headers = dict.fromkeys(names, word)
        body = {"prompt": "x", "max_tokens": 1, "cache_salt": word, "user": word}
        asked = (body, body | {"metadata": {word: word}}, body | {"model": word}, body | {word: 1})
        for one in asked:
            client.post("/v1/completions", json=one, headers=headers)
        client.get(f"/{word}", headers=headers)
        client.get(f"/v1/models/{word}?{word}={word}", headers=headers)
        client.request(f"VERB{i}", "/v1/models", headers=headers)

    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        send(client, 0)  # what the first request of its kind adds
        time.sleep(1.2)  # a scrape is at most a second old
        before = series(cluster)
        for i in range(1, 20):
            send(client, i)
    time.sleep(1.2)
    after = series(cluster)
    assert [one for one in after if "canary" in str(one)] == []
    assert "canary" not in cluster.ray_metrics()
    assert len(after - before) < 20, after - before  # of families without a value before


# --------------------------------------------------------------------------------------------------
# The routers' own HTTP/2
# --------------------------------------------------------------------------------------------------


def test_a_routers_own_port_outlives_resets_and_endless_headers(cluster):
    """HAProxy is not before these ports. What it takes from a router's other clients and from its memory is bounded."""
    asked = generation_pb2.GenerateRequest(prompt="The harbour", ignore_eos=True)
    asked.sampling.max_tokens = 2
    pids = cluster.pids("Router")
    before = {pid: private_bytes(pid) for pid in pids}
    worst_s = 0.0
    for port in own_grpc_ports(cluster):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            metadata = [("application", "quire")]
            stub.GenerateOnce(asked, timeout=60, metadata=metadata)
            for attack in ("resets", "open", "headers"):
                client = RawClient(port)
                for _ in range(20):
                    if attack == "resets":
                        lives = client.reset_streams(GENERATE, 200)
                    elif attack == "open":
                        lives = client.open_streams(GENERATE, 100)
                    else:
                        # gRPC reads and drops what exceeds its bound.
                        client.continue_headers(GENERATE, 2 << 20)
                        lives = False
                    began_s = time.monotonic()
                    stub.GenerateOnce(asked, timeout=60, metadata=metadata)
                    worst_s = max(worst_s, time.monotonic() - began_s)
                    if not lives:
                        break
                client.close()
    print(f"the slowest request beside them took {worst_s:.2f} s")
    assert worst_s < 5
    assert cluster.pids("Router") == pids
    wait_until(
        lambda: all(private_bytes(pid) - before[pid] < 60 << 20 for pid in pids),
        20,
        "memory is given back",
    )
