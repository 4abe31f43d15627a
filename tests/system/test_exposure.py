"""What a running cluster listens on, and what those who reach it cannot take from others."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import grpc
import httpx
import pytest
from live import processes, wait_until

from quire.cluster.local.ports import listeners
from quire.cluster.local.process_session import session_pids
from quire.protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.system
LOOPBACK = ("127.0.0.1", "::1")


def test_everything_listens_on_the_loopback(cluster):
    found = listeners(session_pids(os.getsid(cluster.pids("Router")[0])))
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
