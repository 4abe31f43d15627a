"""HAProxy itself with the configuration that Ray renders under `cluster.yaml`, in front of servers of the test."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import grpc
import httpx
import pytest
import ray
import ray.util
import yaml
from ray._private.authentication import authentication_utils
from ray.serve._private import default_impl, http_util, replica
from ray.serve._private.controller import ServeController
from ray.serve.config import gRPCOptions

from quire.cluster.local.ports import free_ports, listeners
from quire.cluster.local.process_session import session_pids
from quire.cluster.proxies import haproxy_template, ray_proxies
from quire.cluster.proxies.ray_settings import SERVE_DEFAULTS
from quire.protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

ROOT = Path(__file__).parents[3]
# What the file gives; the hook sets the others.
ENV_VARS = yaml.safe_load((ROOT / "cluster.yaml").read_text())["controller_options"]["runtime_env"][
    "env_vars"
]
REQUEST_TIMEOUT_S, CLIENT_TIMEOUT_S = 2, 3
PATIENCE_S = 40  # less than the client's time limit that Quire sets
H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
SERVER = ROOT / "tests/cluster/small_server.py"


@dataclass
class Proxy:
    """A running HAProxy and the addresses on which it listens."""

    http_port: int
    grpc_port: int
    stats_port: int
    metrics_port: int
    http_servers: list[int]  # ports
    grpc_servers: list[int]
    process: subprocess.Popen[bytes]
    servers: list[subprocess.Popen[bytes]]
    metrics: socket.socket  # takes what HAProxy reports of each request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def channel(self) -> grpc.Channel:
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}", options)


@dataclass(frozen=True)
class Rendered:
    """HAProxy's binary and the folder of each configuration, with what was asked for it."""

    binary: str
    asked: dict[str, dict]


@pytest.fixture(scope="session")
def rendered(tmp_path_factory) -> Rendered:
    """All configurations of this file: a process that loads Ray takes seconds."""
    asked = {}
    for name, host, num_servers in (
        ("one", "127.0.0.1", 1),
        ("two", "127.0.0.1", 2),
        ("none", "127.0.0.1", 0),
        ("pod", "0.0.0.0", 0),
    ):
        ports = free_ports(4 + 2 * num_servers)
        asked[name] = {
            "path": str(tmp_path_factory.mktemp(name) / "haproxy.cfg"),
            "host": host,
            "ports": ports[:4],
            "http_servers": ports[4 : 4 + num_servers],
            "grpc_servers": ports[4 + num_servers :],
        }
    timeouts = {
        ray_proxies.REQUEST_TIMEOUT_VARIABLE: str(REQUEST_TIMEOUT_S),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(CLIENT_TIMEOUT_S),
    }
    assert timeouts.keys() <= SERVE_DEFAULTS.keys()
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests/cluster/render_haproxy.py")],
        input=json.dumps(list(asked.values())),
        text=True,
        env=os.environ | ENV_VARS | timeouts,
        capture_output=True,
    )
    assert result.returncode == 0, result.stderr
    assert "without" not in result.stderr, result.stderr  # each change of the template fits
    return Rendered(result.stdout.strip(), asked)


@contextlib.contextmanager
def running(rendered: Rendered, name: str) -> Iterator[Proxy]:
    """HAProxy and the servers behind it."""
    asked = rendered.asked[name]
    path = Path(asked["path"])
    with contextlib.ExitStack() as stack:
        metrics = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        address = path.with_name("metrics.sock")
        address.unlink(missing_ok=True)
        metrics.bind(str(address))
        servers = []
        for pair in zip(asked["http_servers"], asked["grpc_servers"], strict=True):
            command = [sys.executable, str(SERVER), *map(str, pair)]
            servers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(end, servers[-1])
        for server in servers:
            assert server.stdout.readline() == b"ready\n"
        output = path.with_name("haproxy.log")
        with output.open("wb") as log:
            process = subprocess.Popen(
                [rendered.binary, "-db", "-f", path], stderr=log, start_new_session=True
            )
        stack.callback(end, process)
        ports = (*asked["ports"], asked["http_servers"], asked["grpc_servers"])
        proxy = Proxy(*ports, process, servers, metrics)
        deadline_s = time.monotonic() + 10
        while not listens(proxy.stats_port):
            assert process.poll() is None and time.monotonic() < deadline_s, output.read_text()
            time.sleep(0.05)
        yield proxy


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # a stopped one too
    process.wait()


@pytest.fixture(scope="module")
def proxy(rendered) -> Iterator[Proxy]:
    with running(rendered, "one") as proxy:
        yield proxy


@pytest.fixture(scope="module")
def without_routes(rendered) -> Iterator[Proxy]:
    with running(rendered, "none") as proxy:
        yield proxy


@pytest.fixture
def two_servers(rendered) -> Iterator[Proxy]:
    with running(rendered, "two") as proxy:
        yield proxy


# --------------------------------------------------------------------------------------------------
# Requests that never arrive
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
    ],
    ids=["nothing", "half a header", "half a body"],
)
def test_a_half_open_connection_is_closed(proxy, sent: bytes):
    with socket.create_connection(("127.0.0.1", proxy.http_port)) as client:
        client.sendall(sent)
        client.settimeout(REQUEST_TIMEOUT_S + 8)
        began_s = time.monotonic()
        answer = client.recv(4096)
        assert REQUEST_TIMEOUT_S / 2 < time.monotonic() - began_s < REQUEST_TIMEOUT_S + 5
        assert answer == b"" or answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "sent",
    [b"", b"PRI * HTTP/2.0\r\n", H2_PREFACE, H2_PREFACE + b"\0\0\x20\x01\x04\0\0\0\x01"],
    ids=["nothing", "half a preface", "no request", "half a header"],
)
def test_a_half_open_grpc_connection_is_closed(proxy, sent: bytes):
    with socket.create_connection(("127.0.0.1", proxy.grpc_port)) as client:
        client.sendall(sent)
        client.settimeout(REQUEST_TIMEOUT_S + 8)
        began_s = time.monotonic()
        while client.recv(4096):  # HAProxy's settings, and its farewell
            pass
        assert REQUEST_TIMEOUT_S / 2 < time.monotonic() - began_s < CLIENT_TIMEOUT_S + 5


def test_a_body_that_stops_after_its_beginning_ends(proxy):
    with socket.create_connection(("127.0.0.1", proxy.http_port)) as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n")
        client.sendall(bytes(150_000))  # more than HAProxy's buffer
        client.settimeout(PATIENCE_S)
        while client.recv(4096):
            pass


def test_a_client_that_waits_for_its_answer_is_not_cut_off(proxy):
    """The time limits are for what a client sends and reads."""
    with futures.ThreadPoolExecutor() as pool, proxy.channel() as channel:
        generate = generation_pb2_grpc.GenerationStub(channel).GenerateOnce
        slow = pool.submit(generate, generation_pb2.GenerateRequest(prompt="slow"), timeout=20)
        assert httpx.post(f"{proxy.url}/slow", json={}, timeout=20).status_code == 200
        assert slow.result().text


def test_a_grpc_call_without_its_message_ends(proxy):
    given_up = threading.Event()

    def never() -> Iterator[generation_pb2.GenerateRequest]:
        given_up.wait()
        yield from ()

    with proxy.channel() as channel:
        began_s = time.monotonic()
        method = channel.stream_unary("/quire.v1.Generation/GenerateOnce", lambda m: b"")
        half = method.future(never())
        assert half.exception(timeout=PATIENCE_S).code() != grpc.StatusCode.OK
        assert time.monotonic() - began_s > REQUEST_TIMEOUT_S / 2
        given_up.set()


def test_requests_are_served_beside_4200_half_open_connections(proxy):
    """Ray's own bound is 4096 connections, for as long as the clients like."""
    with contextlib.ExitStack() as stack:
        for _ in range(4200):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", proxy.http_port))
        assert httpx.get(f"{proxy.url}/who", timeout=30).status_code == 200
        with proxy.channel() as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            stub.GenerateOnce(generation_pb2.GenerateRequest(), timeout=30)


# --------------------------------------------------------------------------------------------------
# Large metadata
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [17_000, 60_000])
def test_a_call_with_much_metadata_leaves_the_others_of_its_connection_alone(proxy, num_bytes):
    with proxy.channel() as channel:
        watch = control_pb2_grpc.ControlStub(channel).WatchCache(
            control_pb2.WatchCacheRequest(), timeout=60
        )
        next(watch)
        generate = generation_pb2_grpc.GenerationStub(channel).GenerateOnce
        large = [("x-large", "a" * num_bytes)]
        with contextlib.suppress(grpc.RpcError):
            generate(generation_pb2.GenerateRequest(), metadata=large, timeout=10)
        for _ in range(3):  # messages sent since
            next(watch)
        watch.cancel()


# --------------------------------------------------------------------------------------------------
# No route, no router
# --------------------------------------------------------------------------------------------------


def assert_unavailable(proxy: Proxy) -> None:
    answer = httpx.post(f"{proxy.url}/v1/completions", json={}, timeout=10)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == str(haproxy_template.RETRY_AFTER_S)
    assert answer.json()["error"]["message"] == haproxy_template.UNAVAILABLE
    for metadata in ((), (("application", "quire"),)):
        with proxy.channel() as channel, pytest.raises(grpc.RpcError) as caught:
            stub = generation_pb2_grpc.GenerationStub(channel)
            stub.GenerateOnce(generation_pb2.GenerateRequest(), metadata=metadata, timeout=10)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_without_routes_the_answer_is_503_and_when_to_come_again(without_routes):
    assert_unavailable(without_routes)


def test_without_a_router_that_answers_it_is_the_same(two_servers):
    for server in two_servers.servers:
        server.kill()
        server.wait()
    deadline_s = time.monotonic() + 10
    while (
        httpx.get(f"{two_servers.url}/-/healthz", timeout=PATIENCE_S, verify=False).status_code
        == 200
    ):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert_unavailable(two_servers)


def statistics(proxy: Proxy, port: int) -> dict[str, str]:
    """HAProxy's statistics of the server at a port."""
    table = httpx.get(f"http://127.0.0.1:{proxy.stats_port}/stats;csv", timeout=20).text
    (row,) = [row for row in csv.DictReader(io.StringIO(table)) if row["svname"] == f"server{port}"]
    return row


def is_up(proxy: Proxy, port: int) -> bool:
    """Whether HAProxy sends requests to the server at a port."""
    return statistics(proxy, port)["status"].startswith("UP")


def stop(proxy: Proxy) -> float:
    """Stop the first server's process; return the seconds until HAProxy sends nothing to it."""
    ports = [ports[0] for ports in (proxy.http_servers, proxy.grpc_servers)]
    proxy.servers[0].send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    while any(is_up(proxy, port) for port in ports):
        assert time.monotonic() < began_s + PATIENCE_S
        time.sleep(0.05)
    return time.monotonic() - began_s


def resume(proxy: Proxy) -> None:
    ports = [ports[0] for ports in (proxy.http_servers, proxy.grpc_servers)]
    proxy.servers[0].send_signal(signal.SIGCONT)
    deadline_s = time.monotonic() + PATIENCE_S
    while not all(is_up(proxy, port) for port in ports):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_router_that_is_stopped_gets_no_request_after_3_s(two_servers):
    took_s = stop(two_servers)
    for _ in range(4):  # other work on the machine delays the checks
        if took_s <= 3:
            break
        resume(two_servers)
        took_s = min(took_s, stop(two_servers))
    assert took_s <= 3
    stopped_ports = [ports[0] for ports in (two_servers.http_servers, two_servers.grpc_servers)]
    sent = [statistics(two_servers, port)["stot"] for port in stopped_ports]
    alive = str(two_servers.servers[1].pid)
    with futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: answering_server(two_servers), range(24))) == {alive}
        assert set(pool.map(lambda _: grpc_answering_server(two_servers), range(6))) == {alive}
    assert [statistics(two_servers, port)["stot"] for port in stopped_ports] == sent


def answering_server(proxy: Proxy) -> str:
    """The process that answers a request over HTTP.

    Where the machine stands still for seconds, HAProxy finds no server, or no request in time: it answers so itself.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        answer = httpx.get(f"{proxy.url}/who", timeout=PATIENCE_S, verify=False)
        if answer.status_code == 200:
            return answer.text
        assert answer.status_code in (408, 503) and time.monotonic() < deadline_s, answer.text
        time.sleep(0.2)


def grpc_answering_server(proxy: Proxy) -> str:
    """`answering_server` over gRPC."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        with proxy.channel() as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            try:
                return stub.GenerateOnce(generation_pb2.GenerateRequest(), timeout=PATIENCE_S).text
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE, error
                assert time.monotonic() < deadline_s, error
        time.sleep(0.2)


# --------------------------------------------------------------------------------------------------
# What listens, what is counted
# --------------------------------------------------------------------------------------------------


def test_haproxy_has_no_known_hole(rendered):
    """Ray chooses the version. QUIC (CVE-2026-33555, fixed in 2.8.20) and FastCGI (CVE-2026-55203) are not in use."""
    told = subprocess.run([rendered.binary, "-vv"], capture_output=True, text=True).stdout
    version = re.search(r"HAProxy version (\d+)\.(\d+)\.(\d+)", told)
    assert tuple(map(int, version.groups())) >= (2, 8, 20)
    assert "-QUIC" in re.search(r"Feature list : (.*)", told)[1].split()
    for asked in rendered.asked.values():
        text = Path(asked["path"]).read_text()
        assert not re.search(r"quic[46]@|\bfcgi|proto fcgi", text)


def test_haproxy_listens_on_the_loopback_alone(proxy):
    ports = {proxy.http_port, proxy.grpc_port, proxy.stats_port, proxy.metrics_port}
    assert listeners(session_pids(os.getsid(proxy.process.pid))) == {
        ("127.0.0.1", port) for port in ports
    }


def test_streams_of_the_process_before_have_an_hour(rendered):
    """HAProxy starts a new process when the list of routers changes. Ray ends the old one after 120 s."""
    config = Path(rendered.asked["one"]["path"]).read_text()
    assert "hard-stop-after 3600s" in config


def test_in_a_pod_statistics_and_metrics_are_reachable(rendered):
    with running(rendered, "pod") as proxy:
        ports = {proxy.http_port, proxy.grpc_port, proxy.stats_port, proxy.metrics_port}
        assert listeners(session_pids(os.getsid(proxy.process.pid))) == {
            ("0.0.0.0", port) for port in ports
        }


def test_unknown_methods_are_one_label(proxy):
    proxy.metrics.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while proxy.metrics.recv(8192):
            pass
    with httpx.Client(timeout=PATIENCE_S) as client:
        for method in ("GET", "get", "BREW", *(f"VERB{i}" for i in range(30))):
            status = client.request(method, f"{proxy.url}/who").status_code
            assert status == (200 if method.upper() == "GET" else 501), method
    counted = set()
    deadline_s = time.monotonic() + 5
    while {"GET", "OTHER"} - counted and time.monotonic() < deadline_s:
        with contextlib.suppress(BlockingIOError):
            while True:
                line = proxy.metrics.recv(8192).decode()
                counted.add(line.partition(' method="')[2].partition('"')[0])
        time.sleep(0.1)
    assert counted == {"GET", "OTHER"}


def test_a_change_that_does_not_fit_is_named_and_leaves_the_text():
    text = "defaults\n    option log-health-checks\n"
    adapted, missed = haproxy_template.adapt(text, haproxy_template.Limits(3))
    assert "timeout http-request 3s" in adapted
    assert len(missed) == len(haproxy_template.changes(haproxy_template.Limits())) - 1


# --------------------------------------------------------------------------------------------------
# The process of a proxy
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("127.0.0.1", "127.0.0.1:7"),
        ("localhost", "127.0.0.1:7"),
        ("::1", "[::1]:7"),
        ("0.0.0.0", "[::]:7"),
        ("10.0.0.7", "[::]:7"),  # HAProxy reaches the routers of its node through the loopback
        (None, "[::]:7"),
    ],
)
def test_grpc_listens_on_the_loopback_if_http_does(host: str | None, bound: str):
    asked = []
    address = ray_proxies.GrpcAddress(
        lambda host: ":" in host, lambda server, address: asked.append(address)
    )
    if host is not None:  # where HTTP is off, nothing asks
        assert address.is_ipv6(host) == (":" in host)
    address.add_address(None, "[::]:7")
    assert asked == [bound]


@pytest.mark.parametrize(("most_files", "connections"), [(20_000, "7800"), (2**20, "8192")])
def test_connections_fit_the_limit_of_open_files(monkeypatch, most_files: int, connections: str):
    monkeypatch.setenv(ray_proxies.MAX_CONNECTIONS_VARIABLE, "8192")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, most_files))
    ray_proxies.fit_connections()
    assert os.environ[ray_proxies.MAX_CONNECTIONS_VARIABLE] == connections


@pytest.mark.parametrize(
    ("has_token", "address", "warns"),
    [
        (False, "10.0.0.7", True),
        (True, "10.0.0.7", False),
        (False, "127.0.0.1", False),
    ],
)
def test_a_cluster_without_token_that_others_reach_is_named(monkeypatch, has_token, address, warns):
    monkeypatch.setattr(authentication_utils, "is_token_auth_enabled", lambda: has_token)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    warning = ray_proxies.open_ports()
    assert (warning is not None) == warns
    if warning:
        assert "RAY_AUTH_MODE=token" in warning and address in warning and "unpickles" in warning


def test_calls_between_deployments_stay_on_a_node_without_others(monkeypatch):
    asked = []
    monkeypatch.setattr(replica, "add_port_to_grpc_server", lambda server, at: asked.append(at))
    monkeypatch.setattr(http_util, "is_ipv6", http_util.is_ipv6)
    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
    monkeypatch.setattr(replica, "start_grpc_server", replica.start_grpc_server)
    ray_proxies.bind_grpc()
    for address in ("127.0.0.1", "10.0.0.7"):
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda address=address: address)
        replica.add_port_to_grpc_server(None, "[::]:0")
    assert asked == ["127.0.0.1:0", "[::]:0"]


@pytest.mark.parametrize(
    ("functions", "reflects", "is_open"),
    [(["f"], True, True), (["f"], False, False), ([], True, False)],
)
def test_reflection_that_needs_no_key_is_named(monkeypatch, functions, reflects, is_open):
    options = gRPCOptions(grpc_servicer_functions=functions, enable_reflection=reflects)

    async def get_grpc_config() -> gRPCOptions:
        return options

    controller = SimpleNamespace(get_grpc_config=SimpleNamespace(remote=get_grpc_config))
    assert hasattr(ServeController, "get_grpc_config")
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: controller)
    problem = asyncio.run(ray_proxies.open_reflection())
    assert (problem is not None) == is_open
    if problem is not None:
        assert "grpc_options.enable_reflection must be false" in problem and "got true" in problem
    # An application may run without the controller's answer.
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: SimpleNamespace())
    assert "got no answer" in (asyncio.run(ray_proxies.open_reflection()) or "")
