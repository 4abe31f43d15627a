"""Hostile clients of every kind on a running cluster: what they take from the small requests of others.

A neighbour sends small requests all the time. Each kind of hostile traffic has its phase. Then all small requests must
have been served, no process may have kept 100 MB, and none may have restarted. The 99th percentile of what small
requests take is at most `LATE_S` on a machine that nothing else uses, and elsewhere at most a multiple of what it is
without hostile traffic. The time in which the neighbour itself waits for a core does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest
from hostile_inputs import BODY, bodies, messages
from live import Cluster, wait_until
from memory import private_bytes
from patient_channel import aio_channel

from quire.cluster.bench.results.measures import percentile
from quire.cluster.bench.results.report import Bar, write
from quire.protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.system

LATE_S = 0.200  # of the 99th percentile of small requests
LATE_FACTOR = 5  # over the same without hostile traffic
GROWTH_BYTES = 100 << 20
CALM_S = 8.0
HALF_OPEN = 4200
WATCHERS, WATCHING_CONNECTIONS = 2000, 5
MESSAGE_OPTIONS = (("grpc.max_send_message_length", -1),)
SMALL = {"prompt": "The harbour", "max_tokens": 2}


@dataclass
class Neighbour:
    """A process that sends small requests, and the times of the phases."""

    process: subprocess.Popen
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)
    answers: list[tuple[str, float, float, str]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)  # for a core, from and until

    @contextlib.contextmanager
    def beside(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self.phases[name] = (began_s, time.monotonic())

    def end(self) -> None:
        output, _ = self.process.communicate("end\n", timeout=90)
        found = json.loads(output)
        self.answers = [tuple(answer) for answer in found["answers"]]
        self.waits = [tuple(wait) for wait in found["waits"]]

    def sent_in(self, name: str) -> list[tuple[str, float, float, str]]:
        """The requests that were sent during a phase."""
        began_s, ended_s = self.phases[name]
        return [answer for answer in self.answers if began_s <= answer[1] < ended_s]

    def seconds(self, name: str) -> list[float]:
        """What they took, without the time in which the machine had no core for this neighbour itself."""
        return [
            took_s - sum(overlap(at_s, at_s + took_s, *wait) for wait in self.waits)
            for _, at_s, took_s, _ in self.sent_in(name)
        ]


def overlap(began_s: float, ended_s: float, other_began_s: float, other_ended_s: float) -> float:
    """Seconds that two times have in common."""
    return max(0.0, min(ended_s, other_ended_s) - max(began_s, other_began_s))


@contextlib.contextmanager
def neighbour(cluster: Cluster) -> Iterator[Neighbour]:
    script = Path(__file__).with_name("neighbours.py")
    command = [sys.executable, str(script), str(cluster.http_port), str(cluster.grpc_port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Neighbour(process)
        finally:
            process.kill()


# -- Hostile traffic -------------------------------------------------------------------------------------


def grammars() -> list[dict]:
    """Each takes a compiler more time or memory than any grammar in use."""
    patterns = [
        {"json": {"allOf": [{"type": "string", "pattern": f".*a{i + j}.*"} for j in range(24)]}}
        for i in range(4)
    ]
    nested: dict = {"type": "integer"}
    for _ in range(60):
        nested = {"anyOf": [{"type": "array", "items": nested}, {"type": "object"}]}
    return [
        *patterns,
        {"json": nested},
        {"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 10**9}},
        {"json": {"enum": [f"{i:06}" * 8 for i in range(1000)]}},
        {"regex": "((a{1,500}b{1,500}){1,500}c?){1,500}"},
        {"regex": "(.*a){20}.{0,60000}"},
        {"grammar": "start: " + " | ".join(f"/.*{i}.*{i + 1}.*/" for i in range(300))},
        {"choice": ["x" * 200 + str(i) for i in range(1000)]},
    ]


def send_grammars(cluster: Cluster) -> None:
    def send(item: tuple[int, dict]) -> None:
        number, structured = item
        body = {**SMALL, "structured_outputs": structured, "cache_salt": f"a{number % 3}", "n": 2}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code in (200, 400, 408, 429), (structured, answer.text)

    with ThreadPoolExecutor(8) as pool:
        sent = pool.map(send, enumerate(grammars()))
        began_s = time.monotonic()
        body = {**SMALL, "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 9}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["text"] in ("yes", "no"), answer.text
        assert time.monotonic() - began_s < 5, "a grammar of another tenant"
        list(sent)


def send_bodies(cluster: Cluster, made: dict[str, tuple[str, bytes]]) -> None:
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=cluster.url, headers=headers, timeout=60) as client:
        for name, (path, body) in made.items():
            answer = client.post(path, content=body)
            assert answer.status_code in (400, 404, 413), (name, answer.text)
        compressed = client.post(
            "/v1/completions", content=b"x" * 100, headers={"content-encoding": "gzip"}
        )
        assert compressed.status_code == 415, compressed.text
        assert client.post("/v1/completions", content=b" " * (2 * BODY)).status_code == 413


def send_messages(cluster: Cluster, made: dict[str, bytes]) -> None:
    """Compressed, so that little is on the wire."""
    refused = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT}
    address = f"127.0.0.1:{cluster.grpc_port}"
    with grpc.insecure_channel(address, MESSAGE_OPTIONS, grpc.Compression.Gzip) as channel:
        generate = channel.unary_unary("/quire.v1.Generation/GenerateOnce")
        for name, message in made.items():
            with pytest.raises(grpc.RpcError) as caught:
                generate(message, timeout=60)
            assert caught.value.code() in refused, (name, caught.value)


def half_open_connections(cluster: Cluster) -> int:
    """Half of them send the beginning of a request. Returns their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    number = min(HALF_OPEN, hard - 500)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for i in range(number):
            connection = socket.create_connection(("127.0.0.1", cluster.http_port))
            stack.enter_context(connection)
            if i % 2:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-le")
        time.sleep(4)
    return number


def many_streams(cluster: Cluster) -> None:
    """Streams that last as long as the client likes, and streams that are given up at once."""

    async def watch(
        stub: control_pb2_grpc.ControlStub, ends: list[str], over: asyncio.Event
    ) -> None:
        call = stub.WatchCache(control_pb2.WatchCacheRequest())
        try:
            await call.read()
            await over.wait()
            ends.append("watched")
            call.cancel()
        except grpc.aio.AioRpcError as error:
            ends.append(error.code().name)

    async def give_up(stub: generation_pb2_grpc.GenerationStub) -> None:
        request = generation_pb2.GenerateRequest(prompt="The harbour", ignore_eos=True)
        call = stub.Generate(request)
        await asyncio.sleep(0.01)
        call.cancel()

    async def main() -> list[str]:
        address = f"127.0.0.1:{cluster.grpc_port}"
        ends: list[str] = []
        over = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(aio_channel(address))
                for _ in range(WATCHING_CONNECTIONS)
            ]
            stubs = [control_pb2_grpc.ControlStub(channel) for channel in channels]
            tasks = [
                asyncio.ensure_future(watch(stubs[i % len(stubs)], ends, over))
                for i in range(WATCHERS)
            ]
            await asyncio.sleep(3)
            generation = generation_pb2_grpc.GenerationStub(channels[0])
            await asyncio.gather(*(give_up(generation) for _ in range(300)))
            over.set()
            await asyncio.wait_for(asyncio.gather(*tasks), 30)
        return ends

    ends = asyncio.run(main())
    assert set(ends) == {"watched", "RESOURCE_EXHAUSTED"}, {end: ends.count(end) for end in ends}
    assert 64 <= ends.count("watched") <= 128, "two routers of 64"


def much_metadata(cluster: Cluster) -> None:
    """Of calls beside a stream on the same connection, and of HTTP requests."""
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        request = generation_pb2.GenerateRequest(prompt="The harbour", ignore_eos=True)
        request.sampling.max_tokens = 300
        stream = generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=60)
        next(stream)
        control = control_pb2_grpc.ControlStub(channel)
        for num_bytes in (17_000, 60_000) * 10:
            send_metadata(control, num_bytes)
        assert sum(len(part.token_ids) for part in stream) == 299
    # More than HAProxy's buffer ends the connection, which is the hostile client's own.
    for _ in range(10):
        with grpc.insecure_channel(
            f"127.0.0.1:{cluster.grpc_port}", [("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            send_metadata(control_pb2_grpc.ControlStub(channel), 100_000)
    for headers in ({"x-large": "a" * 70_000}, {f"x-{i}": "a" for i in range(200)}):
        for _ in range(10):
            answer = httpx.post(
                f"{cluster.url}/v1/completions", json=SMALL, headers=headers, timeout=60
            )
            assert answer.status_code in (200, 400, 431), answer.text


def send_metadata(stub: control_pb2_grpc.ControlStub, num_bytes: int) -> None:
    metadata = [("x-large", "a" * num_bytes)]
    with pytest.raises(grpc.RpcError):
        stub.GetLoads(control_pb2.GetLoadsRequest(), metadata=metadata, timeout=10)


def strange_headers(cluster: Cluster) -> None:
    """Values that are no text, and 300 methods that nobody knows."""
    names = (
        "x-request-id x-session-id serve_multiplexed_model_id x-request-timeout-seconds last-event-id accept "
        "content-type content-encoding transfer-encoding expect origin authorization traceparent host"
    ).split()
    raw = json.dumps(SMALL).encode()
    for name in names:
        for value in (b"\xe9", b"\xff\xfe", b"x" * 300, b"", b"\x7f", b"-1", b"nan"):
            head = b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\n"
            lines = {"host": b"x", "content-type": b"application/json", name: value}
            head += b"".join(b"%b: %b\r\n" % (n.encode(), v) for n, v in lines.items())
            status = status_of(cluster, head + b"content-length: %d\r\n\r\n" % len(raw) + raw)
            assert status < 500 or (name, status) == ("transfer-encoding", 501), (
                name,
                value,
                status,
            )
    for i in range(300):
        head = b"VERB%d / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % i
        assert status_of(cluster, head) == 501


def status_of(cluster: Cluster, request: bytes) -> int:
    with socket.create_connection(("127.0.0.1", cluster.http_port), timeout=30) as connection:
        connection.sendall(request)
        return int(connection.recv(4096).split(b" ", 2)[1])


def slow_clients(cluster: Cluster) -> None:
    """Some send a byte now and then, some read nothing of a long answer."""
    raw = json.dumps({**SMALL, "max_tokens": 600, "stream": True, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % len(raw)
    with contextlib.ExitStack() as stack:
        connections = []
        for i in range(100):
            connection = socket.socket()
            stack.enter_context(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", cluster.http_port))
            connection.sendall(head + raw if i < 20 else head[: len(head) if i % 2 else 40])
            connections.append(connection)
        for _ in range(20):
            time.sleep(0.25)
            for connection in connections[20:]:
                with contextlib.suppress(OSError):
                    connection.sendall(b"a")


def long_conversations(cluster: Cluster) -> None:
    """All that a chat template may be given."""
    turns = [{"role": "user", "content": "a"}] * 4096
    words = [{"role": "user", "content": "a b " * 200_000}]
    variables = {f"v{i}": list(range(7)) for i in range(32)}
    for i in range(4):
        for conversation in (turns, words):
            chat = {"messages": conversation, "max_tokens": 1, "chat_template_kwargs": variables}
            chat["cache_salt"] = f"a{i}"
            answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=chat, timeout=60)
            assert answer.status_code == 400, answer.text


# -- The test --------------------------------------------------------------------------------------------


def memory_of(cluster: Cluster) -> dict[str, int]:
    """Private bytes of each router and replica."""
    return {
        f"{deployment} {pid}": private_bytes(pid)
        for deployment in ("Router", "Replica")
        for pid in cluster.pids(deployment)
    }


def reset_peaks(cluster: Cluster) -> None:
    """Let `VmHWM` count from now on."""
    for pid in (*cluster.pids("Router"), *cluster.pids("Replica")):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def resident_bytes(pid: int, key: str) -> int:
    """`VmRSS`, or `VmHWM`: the most that it was."""
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(key)
    )
    return int(line.split()[1]) * 1024


def settled_memory(cluster: Cluster) -> dict[str, int]:
    """Once idle replicas have backed their caches."""
    last: dict[str, int] = {}

    def is_settled() -> bool:
        nonlocal last
        before, last = last, memory_of(cluster)
        time.sleep(2)
        return all(abs(last[name] - before.get(name, 0)) < 2 << 20 for name in last)

    wait_until(is_settled, 60, "memory is settled")
    return last


@pytest.mark.timeout(300)
def test_hostile_clients_take_little_from_others(cluster: Cluster) -> None:
    made_bodies, made_messages = bodies(), messages()
    kinds: dict[str, Callable[[], object]] = {
        "schemas": lambda: send_grammars(cluster),
        "bodies": lambda: send_bodies(cluster, made_bodies),
        "messages": lambda: send_messages(cluster, made_messages),
        "connections": lambda: half_open_connections(cluster),
        "streams": lambda: many_streams(cluster),
        "metadata": lambda: much_metadata(cluster),
        "headers": lambda: strange_headers(cluster),
        "slow": lambda: slow_clients(cluster),
        "conversations": lambda: long_conversations(cluster),
    }
    with ThreadPoolExecutor(8) as pool:  # both replicas and both routers have served something
        list(
            pool.map(
                lambda _: httpx.post(f"{cluster.url}/v1/completions", json=SMALL, timeout=60),
                range(32),
            )
        )
    before = settled_memory(cluster)
    reset_peaks(cluster)
    pids = [int(name.split()[1]) for name in before]
    resident = {pid: resident_bytes(pid, "VmRSS") for pid in pids}
    with neighbour(cluster) as small:
        time.sleep(2)  # its imports
        with small.beside("calm"):
            time.sleep(CALM_S)
        for name, send in kinds.items():
            with small.beside(name):
                send()
        print({name: round(b - a, 1) for name, (a, b) in small.phases.items()}, flush=True)
        with small.beside("after"):
            time.sleep(2)
        small.end()
    peaks_mb = [round((resident_bytes(pid, "VmHWM") - resident[pid]) / 1e6, 1) for pid in pids]
    after = settled_memory(cluster)
    assert after.keys() == before.keys(), "a process was replaced"
    grown = {name: after[name] - before[name] for name in before}
    seconds = {name: small.seconds(name) for name in small.phases}
    hostile = [took_s for name in kinds for took_s in seconds[name]]
    failed = [(kind, error) for kind, _, _, error in small.answers if error]
    calm_s, late_s = percentile(seconds["calm"], 99), percentile(hostile, 99)
    by_kind = {
        name: {
            "p50_ms": round(1000 * percentile(took, 50)),
            "p99_ms": round(1000 * percentile(took, 99)),
            "p99_with_the_neighbours_waits_ms": round(
                1000 * percentile([took_s for _, _, took_s, _ in small.sent_in(name)], 99)
            ),
            "num": len(took),
            "seconds": round(small.phases[name][1] - small.phases[name][0], 1),
        }
        for name, took in seconds.items()
    }
    bars = [
        Bar("chaos/hostile_neighbours_failed", len(failed), "requests", 0),
        Bar("chaos/hostile_neighbours_p99", 1000 * late_s, "ms", 1000 * LATE_S, details=by_kind),
        Bar(
            "chaos/hostile_memory_kept",
            max(grown.values()) / 1e6,
            "MB",
            GROWTH_BYTES / 1e6,
            details={
                "processes": [name.split()[0] for name in grown],
                "kept_mb": [round(kept / 1e6, 1) for kept in grown.values()],
                "peak_over_rest_mb": peaks_mb,
            },
        ),
        Bar("chaos/hostile_restarts", len(after.keys() - before.keys()), "processes", 0),
    ]  # fmt: skip
    for bar in bars:
        print(bar.to_json(), flush=True)
    if out := os.environ.get("HOSTILE_OUT"):
        command = f"HOSTILE_OUT={out} python -m pytest -s tests/system/test_hostile.py"
        write(Path(out), command, bars, show=False)
    assert failed == []
    assert all(seconds.values()), "no small request in a phase"
    assert late_s <= max(LATE_S, LATE_FACTOR * calm_s), by_kind
    assert max(grown.values()) < GROWTH_BYTES, grown
