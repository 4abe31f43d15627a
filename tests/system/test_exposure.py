"""What a running cluster listens on, and what those who reach it cannot take from others."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2
from live import Cluster, start_cluster, wait_until

from quire.cluster.auth.access_rules import GRPC_RULES, HTTP_RULES, Right
from quire.cluster.auth.key_file import new_key
from quire.cluster.http.http_api import build_app
from quire.cluster.local.ports import listeners
from quire.cluster.local.process_session import session_pids
from quire.cluster.local.serve_api import ray_auth_header
from quire.protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.system
LOOPBACK = ("127.0.0.1", "::1")


def processes(cluster: Cluster) -> dict[int, str]:
    """Command line of each process of the cluster that runs."""
    found = {}
    for pid in session_pids(os.getsid(cluster.pids("Router")[0])):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            found[pid] = command.replace(b"\0", b" ").decode()
    return found


def test_everything_listens_on_the_loopback(cluster):
    found = listeners(os.getsid(cluster.pids("Router")[0]))
    assert {("127.0.0.1", cluster.http_port), ("127.0.0.1", cluster.grpc_port)} <= found
    assert len(found) > 15  # HAProxy, routers, replicas, Ray's own
    assert [(address, port) for address, port in found if address not in LOOPBACK] == []
    printed = [line for line in cluster.output.read_text().splitlines() if "listens" in line]
    assert printed and all(line.startswith("listens for this machine only:") for line in printed)


@pytest.mark.parametrize("num_bytes", [17_000, 60_000])
def test_much_metadata_leaves_other_streams_of_the_connection_alone(cluster, num_bytes: int):
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        asked = generation_pb2.GenerateRequest(prompt="The harbour")
        asked.sampling.max_tokens, asked.ignore_eos = 400, True
        stream = stub.Generate(asked, timeout=60)
        next(stream)
        with contextlib.suppress(grpc.RpcError):
            control_pb2_grpc.ControlStub(channel).GetLoads(
                control_pb2.GetLoadsRequest(), metadata=[("x-large", "a" * num_bytes)], timeout=10
            )
        assert sum(len(r.token_ids) for r in stream) > 300


def test_requests_are_served_beside_half_open_connections_and_those_end(cluster):
    with contextlib.ExitStack() as stack:
        clients = []
        for i in range(300):
            address = ("127.0.0.1", cluster.http_port)
            clients.append(stack.enter_context(socket.create_connection(address)))
            if i % 2 == 0:
                clients[-1].sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-le")
        body = {"prompt": "The harbour", "max_tokens": 2}
        assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30).is_success
        deadline_s = time.monotonic() + 20  # QUIRE_HAPROXY_REQUEST_TIMEOUT_S is 10
        for client in clients:
            client.settimeout(max(0.1, deadline_s - time.monotonic()))
            with contextlib.suppress(ConnectionError):
                while client.recv(4096):
                    pass


def test_watchers_are_bounded(cluster):
    streams = []
    with cluster.channel() as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        refused = None
        while refused is None and len(streams) < 200:  # two routers of 64
            stream = stub.WatchCache(control_pb2.WatchCacheRequest(), timeout=60)
            try:
                next(iter(stream))
                streams.append(stream)
            except grpc.RpcError as error:
                refused = error
        for stream in streams:
            stream.cancel()
    assert refused is not None and refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "router.max_watchers_per_client is 64" in refused.details()


def test_while_haproxy_knows_no_route_clients_hear_when_to_come_again(cluster):
    (pid,) = (p for p, c in processes(cluster).items() if "haproxy -db" in c)
    os.kill(pid, 9)
    seen: list[int] = []
    body = {"prompt": "The harbour", "max_tokens": 2}

    def served() -> bool:
        with contextlib.suppress(httpx.TransportError):  # nothing listens
            answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30)
            seen.append(answer.status_code)
            if answer.status_code == 503:
                assert answer.headers["retry-after"] == "1"
        return bool(seen) and seen[-1] == 200

    wait_until(served, 60, "HAProxy is replaced")
    print(f"statuses: {seen}")
    assert set(seen) <= {200, 503}
    wait_until(cluster.every_router_knows_every_replica, 60, "routers know all replicas")


@pytest.fixture
def small(tmp_path) -> Iterator[Cluster]:
    """A cluster of its own, to be ended."""

    def change(config: dict) -> None:
        config["applications"][0]["args"] |= {"replicas": 1, "routers": 1}

    yield from start_cluster(tmp_path, change)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory) -> dict[str, str]:
    """A key of each right, by the right; under `file` the path of the key file."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    made, entries = {"file": str(path)}, []
    for right in ("generate", "observe", "admin"):
        made[right], digest = new_key()
        entry = {"sha256": digest, "name": right, "tenant": "team-a", "rights": [right]}
        entries.append(entry)
    path.write_text(json.dumps({"keys": entries}))
    return made


@pytest.fixture(scope="module")
def keyed(tmp_path_factory, secrets) -> Iterator[Cluster]:
    """A cluster with keys. The last test that uses it may end it."""
    folder = tmp_path_factory.mktemp("keyed")

    def change(config: dict) -> None:
        config["grpc_options"]["enable_reflection"] = False
        auth = {"key_file": secrets["file"], "usage_log_folder": str(folder / "usage")}
        config["applications"][0]["args"] |= {"replicas": 1, "auth": auth}

    yield from start_cluster(folder, change, secrets["observe"])


GRANTED = {
    "generate": {Right.OPEN, Right.ANY_KEY, Right.GENERATE},
    "observe": {Right.OPEN, Right.ANY_KEY, Right.OBSERVE},
    "admin": set(Right) - {Right.DENIED},
}


def callers(secrets: dict[str, str]) -> Iterator[tuple[dict[str, str], set[Right] | None]]:
    """Headers of every kind of caller, and what its key may do; None for a caller without a valid key."""
    yield from (({}, None), ({"authorization": "Bearer sk-quire-wrong"}, None))
    for right, granted in GRANTED.items():
        yield {"authorization": f"Bearer {secrets[right]}"}, granted
        yield {"x-api-key": secrets[right]}, granted


def doors(cluster: Cluster, protocol: str) -> list[int]:
    """Ports through which clients can call: HAProxy's, a router's own, and Ray's proxy behind HAProxy."""
    variables = cluster.config["controller_options"]["runtime_env"]["env_vars"]
    own = int(variables[f"RAY_SERVE_DIRECT_INGRESS_MIN_{protocol}_PORT"])
    found = listeners(os.getsid(cluster.pids("Router")[0]))
    routers = [port for _, port in sorted(found) if own <= port < own + 50]
    assert len(routers) >= 2
    return [
        {"HTTP": cluster.http_port, "GRPC": cluster.grpc_port}[protocol],
        routers[0],
        int(variables[f"RAY_SERVE_FALLBACK_PROXY_{protocol}_PORT"]),
    ]


def test_every_route_of_every_door_needs_the_key_that_its_rule_names(keyed, secrets):
    routes = [
        (method, route.path)
        for route in build_app(lambda: None, max_body_bytes=1000).routes
        for method in sorted(route.methods)
    ]
    assert len(routes) > 10
    wrong = []
    for port in doors(keyed, "HTTP"):
        for (method, path), (headers, granted) in itertools.product(routes, callers(secrets)):
            url = f"http://127.0.0.1:{port}{path.partition('{')[0]}"
            status = httpx.request(method, url, headers=headers, timeout=60).status_code
            needed = HTTP_RULES[path]
            if needed is Right.OPEN:
                right = status == 200
            elif granted is None:
                right = status == 401
            else:
                right = (status == 403) == (needed not in granted) and status != 401
            if not right:
                wrong.append((port, method, path, list(headers), status))
        for path in ("/nothing", "/v1"):
            assert httpx.get(f"http://127.0.0.1:{port}{path}", timeout=60).status_code == 401
    assert not wrong
    assert httpx.get(f"{keyed.url}/ready").json() == {"ready": True}
    assert httpx.get(f"{keyed.url}/-/healthz").status_code == 200


def test_every_method_of_every_door_needs_the_key_that_its_rule_names(keyed, secrets):
    modules = (generation_pb2, control_pb2, health_pb2)
    services = [s for module in modules for s in module.DESCRIPTOR.services_by_name.values()]
    methods = [m for s in services for m in s.methods if m.name in GRPC_RULES]
    assert len(methods) >= 7
    wrong = []
    for port in doors(keyed, "GRPC"):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method, (headers, granted) in itertools.product(methods, callers(secrets)):
                needed = GRPC_RULES[method.name]
                status = status_of(channel, method, headers)
                if needed is Right.OPEN:
                    right = status is grpc.StatusCode.OK
                elif granted is None:
                    right = status is grpc.StatusCode.UNAUTHENTICATED
                else:
                    denied = status is grpc.StatusCode.PERMISSION_DENIED
                    right = denied == (needed not in granted)
                    right &= status is not grpc.StatusCode.UNAUTHENTICATED
                if not right:
                    wrong.append((port, method.full_name, list(headers), status))
            reflection = channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            )
            with pytest.raises(grpc.RpcError) as caught:
                list(reflection(iter([b""]), timeout=60))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not wrong


def status_of(channel: grpc.Channel, method: Any, headers: dict[str, str]) -> grpc.StatusCode:
    """The status of a call with an empty request: OK if it has an answer."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    metadata = [("application", "quire"), *headers.items()]
    try:
        if method.server_streaming:
            stream = channel.unary_stream(path)(b"", metadata=metadata, timeout=60)
            next(stream)
            stream.cancel()
        else:
            channel.unary_unary(path)(b"", metadata=metadata, timeout=60)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_a_request_with_a_key_is_answered_and_logged(keyed, secrets):
    body = {"prompt": "The harbour", "max_tokens": 3, "ignore_eos": True}
    headers = {"authorization": f"Bearer {secrets['generate']}", "x-request-id": "of-generate"}
    url = f"{keyed.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    folder = Path(keyed.config["applications"][0]["args"]["auth"]["usage_log_folder"])

    def lines() -> list[dict]:
        texts = [path.read_text() for path in folder.glob("*.jsonl")]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    wait_until(lambda: bool(lines()), 10, "the request is logged")
    (line,) = lines()
    usage = answer.json()["usage"]
    assert (line["request_id"], line["tenant"], line["key"]) == (
        "of-generate",
        "team-a",
        "generate",
    )
    assert line["prompt_tokens"] == usage["prompt_tokens"] and line["completion_tokens"] == 3


def kill_raylet(cluster: Cluster) -> None:
    (pid,) = (p for p, c in processes(cluster).items() if c.split(" ")[0].endswith("/raylet"))
    os.kill(pid, 9)


def shut_down(cluster: Cluster) -> None:
    """What `serve shutdown` does."""
    url = f"{cluster.dashboard}/api/serve/applications/"
    httpx.delete(url, headers=ray_auth_header(os.environ), timeout=60).raise_for_status()


@pytest.mark.parametrize(
    ("cluster_name", "end", "said"),
    [
        (
            "keyed",
            shut_down,
            "failed: Ray Serve no longer has the application quire; was it removed with `serve shutdown`?",
        ),
        ("small", kill_raylet, "failed: Ray's node has ended: its process raylet is gone"),
    ],
)
def test_quire_serve_ends_when_the_cluster_is_ended_without_it(
    request, cluster_name: str, end, said: str
):
    ended = request.getfixturevalue(cluster_name)
    end(ended)
    took_s = wait_until(lambda: "\nfailed:" in ended.output.read_text(), 30, "it says so")
    print(f"{end.__name__}: said after {took_s:.1f} s")
    assert took_s < 10
    assert said in ended.output.read_text()
