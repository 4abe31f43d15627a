"""Clients that read slowly, or not at all, cost the server little and others nothing; real sockets."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator

import grpc
import pytest
from live import CHANGE_TIMEOUT_S, SIZE, Cluster, wait_until, write_bars
from patient_channel import PatientChannel

from quire.cluster.bench.results.report import Bar
from quire.protos import generation_pb2, generation_pb2_grpc

NUM_ROUNDS = {"ci": 1, "long": 50}[SIZE]
pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.timeout(300 if SIZE == "ci" else 7200),
]
NUM_STALLED = 50
MAX_BYTES_EACH = 1 << 20
NUM_BESIDE = 5  # calls of others, over either API, while all are stalled
NUM_TOKENS = 1500
# Two kilobytes a token and four choices, so that the kernel's buffers are full before the answer ends.
BODY = {
    "model": "embedded",
    "messages": [{"role": "user", "content": "Tell me of the harbour."}],
    "max_tokens": NUM_TOKENS,
    "n": 4,
    "temperature": 0.8,
    "seed": 11,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
    "return_token_ids": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def credit(cluster: Cluster) -> Iterator[None]:
    """Little credit and a patient server; afterwards what was before."""
    with_router_settings(cluster, stream_credit_tokens=16, slow_client_timeout_s=600.0)
    yield
    cluster.deploy(cluster.config)
    wait_until(
        lambda: status(cluster) == "RUNNING", CHANGE_TIMEOUT_S, "the configuration is as before"
    )


def status(cluster: Cluster) -> str:
    return cluster.serve_status()["applications"]["quire"]["status"]


def with_router_settings(cluster: Cluster, **user_config: object) -> None:
    config = json.loads(json.dumps(cluster.config))
    deployments = [{"name": "Router", "user_config": user_config}]
    config["applications"][0]["deployments"] = deployments
    before = router_pids(cluster)
    cluster.deploy(config)
    time.sleep(1.0)  # until Serve has begun with it
    wait_until(
        lambda: status(cluster) == "RUNNING", CHANGE_TIMEOUT_S, "the routers have other settings"
    )
    assert router_pids(cluster) == before


def router_pids(cluster: Cluster) -> list[int]:
    details = cluster.serve_status()["applications"]["quire"]["deployments"]["Router"]
    return sorted(r["pid"] for r in details["replicas"] if r["state"] == "RUNNING")


def resident_bytes(pids: list[int]) -> int:
    pages = 0
    for pid in pids:
        with open(f"/proc/{pid}/statm") as file:
            pages += int(file.read().split()[1])
    return pages * 4096


def open_stream(cluster: Cluster, seed: int) -> socket.socket:
    """Send a request whose answer nobody reads yet."""
    data = json.dumps({**BODY, "seed": seed}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", cluster.http_port))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    )
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
    return connection


def read_events(connection: socket.socket) -> list[dict | str]:
    """All events of an answer."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    assert response.status == 200, response.read()
    events: list[dict | str] = []
    for line in response:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
            if events[-1] == "[DONE]" or "error" in events[-1]:
                return events
    return events


def num_tokens(events: list[dict | str]) -> int:
    chunks = [e for e in events if isinstance(e, dict) and e.get("choices")]
    return sum(len(c["choices"][0].get("token_ids") or []) for c in chunks)


def wait_until_nothing_moves(cluster: Cluster, num_running: int) -> None:
    seen: list[int] = []

    def is_still() -> bool:
        loads = cluster.loads()
        seen.append(sum(load.num_steps for load in loads))
        running = sum(load.num_running for load in loads)
        time.sleep(0.5)
        return running == num_running and len(seen) > 3 and seen[-1] == seen[-4]

    wait_until(is_still, 300, f"{num_running} requests run and none makes a step")


def grpc_request() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        prompt="A quire is",
        logprobs=20,
        ignore_eos=True,
        sampling=generation_pb2.SamplingOptions(max_tokens=NUM_TOKENS, temperature=0.8, seed=3),
    )


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> list[int]:
    """Token ids of the answer to it."""
    with cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        token_ids = [i for response in stub.Generate(grpc_request()) for i in response.token_ids]
    assert len(token_ids) == NUM_TOKENS
    return token_ids


def slow_channel(cluster: Cluster) -> PatientChannel:
    """Of a client that takes no more than 64 KB ahead of its reader; not shared with another."""
    options = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 65536),
    ]
    return PatientChannel(f"127.0.0.1:{cluster.grpc_port}", *options)


def stall_fifty(cluster: Cluster, whole: list[int]) -> tuple[float, float]:
    """Bytes of the routers' memory for each reader that stalls, and the longest time of a call beside them in seconds.

    `whole` is the answer to `grpc_request` when it is read. Most of them over gRPC: over HTTP the kernel takes three
    megabytes for each socket before anybody waits.
    """
    with_router_settings(cluster, stream_credit_tokens=16, slow_client_timeout_s=600.0)
    pids = router_pids(cluster)
    before = resident_bytes(pids)
    channels = [slow_channel(cluster) for _ in range(NUM_STALLED - 2)]
    stubs = map(generation_pb2_grpc.GenerationStub, channels)
    calls = [stub.Generate(grpc_request()) for stub in stubs]
    connections = [open_stream(cluster, 11 + i) for i in range(2)]
    try:
        read = [list(next(call).token_ids) for call in calls]
        wait_until_nothing_moves(cluster, NUM_STALLED - 2 + 2 * BODY["n"])
        each = (resident_bytes(pids) - before) / NUM_STALLED
        beside_s = max(ask_beside_them(cluster) for _ in range(NUM_BESIDE))
        # One of them reads on, and misses nothing.
        assert read[0] + [i for response in calls[0] for i in response.token_ids] == whole
        # The server loses its patience with the others.
        with_router_settings(cluster, stream_credit_tokens=16, slow_client_timeout_s=2.0)
        wait_until(
            lambda: sum(load.num_running for load in cluster.loads()) == 0, 30, "they have ended"
        )
        with pytest.raises(grpc.RpcError) as error:
            for response in calls[1]:
                read[1] += response.token_ids
        assert error.value.code() == grpc.StatusCode.ABORTED
        assert "slow_client_timeout_s" in error.value.details()
        assert read[1] == whole[: len(read[1])] and len(read[1]) < NUM_TOKENS
        late = read_events(connections[0])
        assert late[-1]["error"]["code"] == "slow_client", late[-1]
        assert 0 < num_tokens(late) < 4 * NUM_TOKENS
        return each, beside_s
    finally:
        for connection in connections:
            connection.close()
        for channel in channels:
            channel.close()


def ask_beside_them(cluster: Cluster) -> float:
    """Seconds of the slower of two calls, over HTTP and over gRPC on a connection of its own."""
    began_s = time.monotonic()
    answer = cluster.openai(timeout=30).completions.create(
        model="embedded", prompt="A quire is", max_tokens=20, temperature=0
    )
    assert answer.usage.completion_tokens > 0
    http_s, began_s = time.monotonic() - began_s, time.monotonic()
    with cluster.channel() as channel:
        request = generation_pb2.GenerateRequest(prompt="A quire is")
        request.sampling.max_tokens = 20
        stream = generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=30)
        assert sum(len(response.token_ids) for response in stream) > 0
    return max(http_s, time.monotonic() - began_s)


def test_fifty_readers_that_stall(cluster, credit, whole):
    rounds: list[tuple[float, float]] = []
    began_s = time.monotonic()
    try:
        for _ in range(NUM_ROUNDS):
            rounds.append(stall_fifty(cluster, whole))
    finally:
        kib = [each / 1024 for each, _ in rounds]
        worst = round(max((s for _, s in rounds), default=0.0), 2)
        details = {"readers": NUM_STALLED, "beside_s": worst, "each_round": list(map(round, kib))}
        seconds = {"seconds": round(time.monotonic() - began_s)}
        bars = [
            Bar(
                "chaos/stalled_readers",
                max(kib, default=None),
                "KiB each",
                MAX_BYTES_EACH / 1024,
                details=details,
            ),
            Bar(
                "chaos/stalled_rounds",
                len(rounds),
                "rounds",
                NUM_ROUNDS,
                at_most=False,
                details=seconds,
            ),
        ]
        write_bars("chaos_readers.json", bars)
    assert bars[0].holds


def test_a_reader_that_stalls_and_goes_on(cluster, credit, whole):
    with_router_settings(cluster, stream_credit_tokens=16, slow_client_timeout_s=600.0)
    with slow_channel(cluster) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(grpc_request())
        first = next(call)
        wait_until_nothing_moves(cluster, 1)
        rest = [i for response in call for i in response.token_ids]
        assert [*first.token_ids, *rest] == whole
