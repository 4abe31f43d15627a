"""A client that goes away frees its blocks within a second, wherever its request is."""

from __future__ import annotations

import json
import random
import socket
import time

import grpc
import pytest
from live import Cluster, wait_until

from quire.protos import generation_pb2

pytestmark = pytest.mark.system
LONG = {"model": "embedded", "max_tokens": 3000, "ignore_eos": True, "seed": 1}


def open_http(cluster: Cluster, body: dict) -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", cluster.http_port), timeout=30)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
    return connection


def num_running(cluster: Cluster) -> int:
    return sum(load.num_running + load.num_waiting for load in cluster.loads())


def wait_at_rest(cluster: Cluster) -> float:
    def at_rest() -> bool:
        return all(
            load.num_running + load.num_waiting == 0
            and tier.blocks_free + tier.blocks_cached == tier.blocks_total
            for load in cluster.loads()
            for tier in load.cache.tiers
        )

    return wait_until(at_rest, 10, "free + cached = total")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_http_client_killed(cluster, stream):
    connection = open_http(cluster, {**LONG, "prompt": "The harbour", "stream": stream})
    if stream:
        while b"data:" not in connection.recv(4096):
            pass
    wait_until(lambda: num_running(cluster) == 1, 10, "the request runs")
    connection.close()
    assert wait_at_rest(cluster) <= 1.0


def test_grpc_client_killed(cluster, generation):
    call = generation.Generate(
        generation_pb2.GenerateRequest(
            prompt="The harbour",
            ignore_eos=True,
            sampling=generation_pb2.SamplingOptions(max_tokens=3000),
        )
    )
    next(call)
    wait_until(lambda: num_running(cluster) == 1, 10, "the request runs")
    call.cancel()
    assert wait_at_rest(cluster) <= 1.0


def test_grpc_deadline(cluster, generation):
    call = generation.Generate(
        generation_pb2.GenerateRequest(
            prompt="The harbour",
            ignore_eos=True,
            sampling=generation_pb2.SamplingOptions(max_tokens=3000),
        ),
        timeout=1.0,
    )
    with pytest.raises(grpc.RpcError) as error:
        for _ in call:
            pass
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert wait_at_rest(cluster) <= 1.0


def test_storm_of_clients_that_leave_at_random_points(cluster, generation):
    rng = random.Random(7)
    for _ in range(3):
        connections = [
            open_http(cluster, {**LONG, "prompt": f"Story {rng.random()}", "stream": True})
            for _ in range(20)
        ]
        calls = [
            generation.Generate(
                generation_pb2.GenerateRequest(
                    prompt=f"Story {rng.random()}",
                    ignore_eos=True,
                    sampling=generation_pb2.SamplingOptions(max_tokens=3000),
                )
            )
            for _ in range(20)
        ]
        for leaver in rng.sample([*connections, *calls], 40):
            time.sleep(rng.uniform(0, 0.05))
            leaver.close() if isinstance(leaver, socket.socket) else leaver.cancel()
        # Serve's own queues delay the last ones: two busy cores, forty prefills.
        assert wait_at_rest(cluster) <= 5.0
