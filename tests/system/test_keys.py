"""Keys and TLS of a real cluster: at every port through which a client can call, every route and every method."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import ssl
import string
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from authority import Authority, Issued
from cryptography import x509
from grpc_health.v1 import health_pb2
from live import Cluster, processes, start_cluster, wait_until
from prometheus_client.parser import text_string_to_metric_families

from quire.cluster.app import APIS
from quire.cluster.auth.access_rules import GRPC_RULES, HTTP_RULES, Right
from quire.cluster.auth.key_file import new_key
from quire.cluster.http.http_api import build_app
from quire.cluster.local.ports import free_ports, listeners
from quire.cluster.local.process_session import session_pids
from quire.protos import control_pb2, generation_pb2, generation_pb2_grpc
from tests.k8s.expressions import concerns_tenants, expressions, problems, series_of

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def secrets(tmp_path_factory) -> dict[str, str]:
    """A key of each right, by the right; under `file` the path of the key file."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    made, entries = {"file": str(path)}, []
    for right in ("generate", "observe", "admin"):
        made[right], digest = new_key()
        entry = {"sha256": digest, "name": right, "tenant": "team-a", "rights": [right]}
        entries.append(entry)
    made["other tenant"], digest = new_key()
    other = {"sha256": digest, "name": "other", "tenant": "team-b", "rights": ["generate"]}
    entries.append(other | {"quotas": {"tokens_per_minute": 10_000_000}})
    path.write_text(json.dumps({"keys": entries}))
    return made


class MountedSecret:
    """A certificate and its key where Kubernetes mounts a secret: behind links, replaced at once by another link."""

    def __init__(self, folder: Path):
        self.authority = Authority()
        self._folder = folder
        self._versions = itertools.count()
        self.replace(self.authority.issue())
        for name in ("tls.crt", "tls.key"):
            (folder / name).symlink_to(f"..data/{name}")

    def replace(self, issued: Issued) -> None:
        version = f"..{next(self._versions)}"
        issued.write(self._folder / version, "tls")
        link = self._folder / "..next"
        link.symlink_to(version)
        link.replace(self._folder / "..data")

    def args(self) -> dict[str, str]:
        names = {"certificate_file": "tls.crt", "key_file": "tls.key"}
        return {field: str(self._folder / name) for field, name in names.items()}


@pytest.fixture(scope="module")
def mounted(tmp_path_factory) -> MountedSecret:
    return MountedSecret(tmp_path_factory.mktemp("mounted"))


@pytest.fixture(scope="module")
def keyed(tmp_path_factory, secrets, mounted) -> Iterator[Cluster]:
    """A cluster with keys and TLS."""
    folder = tmp_path_factory.mktemp("keyed")

    def change(config: dict) -> None:
        config["grpc_options"]["enable_reflection"] = False
        auth = {"key_file": secrets["file"], "usage_log_folder": str(folder / "usage")}
        router = {"decision_log_folder": str(folder / "decisions")}
        http_port, grpc_port = free_ports(2)
        ports = {"host": "127.0.0.1", "http_port": http_port, "grpc_port": grpc_port}
        args = {"replicas": 1, "auth": auth, "router": router, "tls": mounted.args() | ports}
        config["applications"][0]["args"] |= args

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
    found = listeners(session_pids(os.getsid(cluster.pids("Router")[0])))
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
        for route in build_app(lambda: None, max_body_bytes=1000, apis=APIS).routes
        for method in sorted(route.methods)
    ]
    assert len(routes) > 10
    wrong = []
    for port in doors(keyed, "HTTP"):
        for (method, path), (headers, granted) in itertools.product(routes, callers(secrets)):
            url = f"http://127.0.0.1:{port}{path.partition('{')[0]}"
            # Without TLS: to load the certificates for each request takes longer than the request.
            status = httpx.request(
                method, url, headers=headers, timeout=60, verify=False
            ).status_code
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
    assert httpx.get(f"{keyed.url}/ready", timeout=60).json() == {"ready": True}
    assert httpx.get(f"{keyed.url}/-/healthz", timeout=60).status_code == 200


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


def test_no_prompt_and_no_key_is_written(keyed, secrets, tmp_path):
    """A canary in every place of every kind of request, and then all files and metrics of the cluster."""
    prompt, key = "zq-prompt-canary", "sk-quire-key-canary"
    part = {"type": "text", "text": prompt}
    function = {"name": "f", "description": prompt, "parameters": {"description": prompt}}
    chat = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
    turn = {"model": "embedded", **chat, "system": prompt}
    bodies = [
        ("/v1/completions", {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": prompt, "max_tokens": 2, "stop": [prompt], "user": prompt}),
        ("/v1/completions", {"prompt": prompt, "structured_outputs": {"regex": f"{prompt}(" * 9}}),
        ("/v1/completions", {"prompt": prompt, "structured_outputs": {"choice": [prompt]}}),
        ("/v1/completions", {"prompt": prompt * 9000}),
        ("/v1/completions", {"prompt": [prompt, 1]}),
        ("/v1/completions", {"prompt": prompt, prompt: prompt}),
        ("/v1/completions", {"prompt": prompt, "temperature": prompt}),
        ("/v1/completions", {"prompt": prompt, "model": prompt}),
        ("/v1/chat/completions", chat | {"tools": [{"type": "function", "function": function}]}),
        ("/v1/chat/completions", chat | {"chat_template_kwargs": {"a": prompt}, "metadata": {"a": prompt}}),
        ("/v1/chat/completions", {"messages": [{"role": prompt, "content": prompt, prompt: 1}]}),
        ("/v1/chat/completions/render", chat),
        ("/v1/messages", turn),
        ("/v1/messages", turn | {"tools": [{"name": prompt, "input_schema": {prompt: prompt}}]}),
        ("/v1/messages/count_tokens", {"model": "embedded", "messages": chat["messages"]}),
        ("/v1/responses", {"input": prompt, "instructions": prompt, "store": False, "max_output_tokens": 2}),
        ("/v1/responses", {"input": [{"type": prompt, "content": prompt}], "store": False}),
        ("/tokenize", {"prompt": prompt}),
    ]  # fmt: skip
    good = {"authorization": f"Bearer {secrets['generate']}"}
    statuses = []
    with httpx.Client(base_url=keyed.url, timeout=60) as client:
        for (path, body), stream in itertools.product(bodies, (False, True)):
            asked = body | ({"stream": True} if stream and "v1" in path else {})
            statuses.append(client.post(path, json=asked, headers=good).status_code)
        for headers in (
            {"authorization": f"Bearer {key}"},
            {"x-api-key": key},
            good | {"x-a": key},
        ):
            client.post("/v1/completions", json={"prompt": prompt}, headers=headers)
            client.get(f"/v1/models/{prompt}?key={key}", headers=headers)
        client.post("/v1/completions", content=f'{{"prompt": "{prompt}'.encode(), headers=good)
        # A client that leaves.
        body = {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body, headers=good) as response:
            next(response.iter_lines())
    for secret in (secrets["generate"], key):
        with (
            grpc.insecure_channel(f"127.0.0.1:{keyed.grpc_port}") as channel,
            pytest.raises(grpc.RpcError),
        ):
            asked = generation_pb2.GenerateRequest(prompt=prompt, resume_from=prompt)
            metadata = [("x-api-key", secret), ("x-request-id", "a")]
            list(generation_pb2_grpc.GenerationStub(channel).Generate(asked, metadata=metadata))
    assert statuses.count(200) >= 12 and statuses.count(400) >= 8, statuses
    found = re.search(r"/\S*/session_[0-9_-]+", " ".join(processes(keyed).values()))
    session = Path(found[0])
    usage = Path(keyed.config["applications"][0]["args"]["auth"]["usage_log_folder"])
    time.sleep(1)  # until the threads have written
    files = [f for folder in (session, usage.parent) for f in folder.rglob("*") if f.is_file()]
    routers = [f for f in files if "replica_quire_Router" in f.name and f.stat().st_size]
    assert len(routers) >= 2 and any(usage in f.parents for f in files)
    assert any("decisions" in str(f) for f in files)
    words = [word.encode() for word in (prompt, key, *(secrets[r] for r in GRANTED))]
    assert [(f, w) for f in files for w in words if w in f.read_bytes()] == []
    metrics = httpx.get(
        f"{keyed.url}/metrics", headers={"x-api-key": secrets["observe"]}, timeout=60
    )
    text = metrics.text + keyed.ray_metrics()
    assert metrics.is_success and not [word for word in words if word.decode() in text]


def test_times_do_not_tell_what_another_tenant_has_sent(keyed, secrets):
    """Who compares the times of two prompts finds the own cached one, and guesses at another tenant's."""
    words, rounds = random.Random(0), 24
    seen_is_faster = own_is_faster = 0
    with httpx.Client(timeout=60) as client:

        def ask(key: str, prompt: str) -> tuple[float, int]:
            """Return seconds and cached tokens."""
            body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}
            headers = {"authorization": f"Bearer {secrets[key]}"}
            began = time.perf_counter()
            answer = client.post(f"{keyed.url}/v1/completions", json=body, headers=headers)
            took_s = time.perf_counter() - began
            usage = answer.raise_for_status().json()["usage"]
            assert usage["prompt_tokens"] > 1000
            return took_s, usage["prompt_tokens_details"]["cached_tokens"]

        for turn in range(rounds):
            sent, unsent = (
                " ".join("".join(words.choices(string.ascii_lowercase, k=4)) for _ in range(500))
                for _ in range(2)
            )
            assert ask("generate", sent)[1] == 0
            pair = [sent, unsent] if turn % 2 else [unsent, sent]
            took = {prompt: ask("other tenant", prompt) for prompt in pair}
            assert [cached for _, cached in took.values()] == [0, 0]
            seen_is_faster += took[sent][0] < took[unsent][0]
            own_s, cached = ask("generate", sent)
            assert cached > 900
            own_is_faster += own_s < took[unsent][0]
    print(f"of {rounds} pairs: own prompt faster {own_is_faster}, the other's {seen_is_faster}")
    assert own_is_faster >= rounds - 4
    # A fair coin is outside of these bounds in 3 of 10,000 runs.
    assert 4 <= seen_is_faster <= rounds - 4


# --------------------------------------------------------------------------------------------------
# TLS
# --------------------------------------------------------------------------------------------------


class TlsClient:
    """Calls a cluster through its TLS ports."""

    def __init__(self, cluster: Cluster, authority: Authority, key: str):
        args = cluster.config["applications"][0]["args"]["tls"]
        self.ports: list[int] = [args["http_port"], args["grpc_port"]]
        self.url = f"https://127.0.0.1:{self.ports[0]}"
        self.context = ssl.create_default_context(cadata=authority.certificate.decode())
        self._credentials = grpc.ssl_channel_credentials(authority.certificate)
        self._key = key

    def channel(self) -> grpc.Channel:
        options = [("grpc.enable_retries", 0)]
        return grpc.secure_channel(f"127.0.0.1:{self.ports[1]}", self._credentials, options)

    def is_served(self) -> bool:
        headers = {"authorization": f"Bearer {self._key}"}
        with contextlib.suppress(httpx.TransportError):
            url = f"{self.url}/v1/models"
            return httpx.get(url, headers=headers, verify=self.context, timeout=30).is_success
        return False

    def serials(self) -> list[int]:
        """Serial numbers of the certificates that new connections get."""
        pems = [ssl.get_server_certificate(("127.0.0.1", port)) for port in self.ports]
        return [x509.load_pem_x509_certificate(pem.encode()).serial_number for pem in pems]

    def stream_http(self, num_tokens: int) -> int:
        """Stream an answer; return the number of its tokens."""
        client = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self._key,
            max_retries=0,
            http_client=httpx.Client(verify=self.context, timeout=60),
        )
        with client:
            chunks = client.completions.create(
                model="embedded",
                prompt="The harbour",
                max_tokens=num_tokens,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            *_, last = chunks
        return last.usage.completion_tokens

    def stream_grpc(self, num_tokens: int) -> int:
        """See `stream_http`."""
        asked = generation_pb2.GenerateRequest(prompt="The harbour", ignore_eos=True)
        asked.sampling.max_tokens = num_tokens
        metadata = [("x-api-key", self._key)]
        with self.channel() as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            stream = stub.Generate(asked, metadata=metadata, timeout=60)
            return sum(len(response.token_ids) for response in stream)


@pytest.fixture
def tls(keyed, secrets, mounted) -> TlsClient:
    return TlsClient(keyed, mounted.authority, secrets["generate"])


def test_over_tls_a_key_is_needed_as_without(keyed, secrets, tls):
    method = generation_pb2.DESCRIPTOR.services_by_name["Generation"].methods_by_name["Tokenize"]
    for headers, granted in callers(secrets):
        url = f"{tls.url}/v1/models"
        status = httpx.get(url, headers=headers, verify=tls.context, timeout=60).status_code
        assert status == (401 if granted is None else 200)
        with tls.channel() as channel:
            code = status_of(channel, method, headers)
        assert (code is grpc.StatusCode.UNAUTHENTICATED) == (granted is None)
    printed = keyed.output.read_text()
    assert f"TLS: HTTPS on port {tls.ports[0]}, gRPC on port {tls.ports[1]}" in printed


def test_a_replaced_secret_applies_to_new_connections_and_cuts_no_stream(tls, mounted):
    answers: list[int] = []
    calls = [tls.stream_http, tls.stream_grpc] * 3
    threads = [threading.Thread(target=lambda c=call: answers.append(c(1000))) for call in calls]
    for thread in threads:
        thread.start()
    issued = mounted.authority.issue("renewed")
    mounted.replace(issued)
    wait_until(lambda: tls.serials() == [issued.serial] * 2, 30, "new connections get it")
    running = sum(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()
    print(f"{running} of {len(threads)} streams ran while the certificate changed")
    assert running and answers == [1000] * len(threads)


def test_a_listener_that_dies_is_replaced(keyed, tls):
    (pid,) = (pid for pid, c in processes(keyed).items() if c.startswith("ray::TlsListener"))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not tls.is_served(), 10, "its HAProxy ends with it")
    took_s = wait_until(tls.is_served, 60, "another one listens")
    print(f"served again after {took_s:.1f} s")
    assert tls.stream_grpc(8) == 8


# --------------------------------------------------------------------------------------------------
# Panels of tenants
# --------------------------------------------------------------------------------------------------


def test_every_metric_of_a_panel_of_tenants_is_scraped(keyed, secrets):
    headers = {"x-api-key": secrets["admin"]}
    text = httpx.get(f"{keyed.url}/metrics", headers=headers, timeout=60).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    asked = [one for one in expressions() if concerns_tenants(one)]
    assert len(asked) >= 3
    assert [problem for one in asked for problem in problems(one, series_of(samples))] == []
    limits = [s.value for s in samples if s.name == "quire_tenant_quota_tokens"]
    assert sum(limits) == 10_000_000  # the shares of both routers
