"""A stream lasts on after a change of the routers, longer than Ray's default lets HAProxy's old process keep it.

Real Ray. `CHAOS_SIZE=long` only (`make chaos`), because it takes four minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from chaos_load import until_changed
from live import SIZE, Cluster, start_cluster, write_bars
from test_rolling_update import pids, with_deployments

from quire.cluster.bench.results.report import Bar
from quire.protos import generation_pb2, generation_pb2_grpc

RAY_DEFAULT_S = 120.0
# Of a step with the streams, and tokens of each.
STEP_MS, NUM_TOKENS = 1000, 200

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.skipif(SIZE == "ci", reason="a stream of 200 s"),
]


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    def change(config: dict) -> None:
        config["applications"][0]["args"]["engine"] = {"fault_injection": True}

    yield from start_cluster(tmp_path, change)


def test_streams_outlive_a_change_of_the_routers(cluster: Cluster) -> None:
    begun = [threading.Event(), threading.Event()]

    def over_http() -> tuple[int, float]:
        ids: list[int] = []
        answer = cluster.openai(timeout=600).completions.create(
            model="embedded",
            prompt="The harbour",
            max_tokens=NUM_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            extra_headers={"x-request-id": f"fault:slow:{STEP_MS}@0"},
        )
        for chunk in answer:
            ids += getattr(chunk.choices[0], "token_ids", None) or []
            begun[0].set()
        return len(ids), time.monotonic()

    def over_grpc() -> tuple[int, float]:
        number = 0
        request = generation_pb2.GenerateRequest(
            prompt="The mill",
            sampling=generation_pb2.SamplingOptions(max_tokens=NUM_TOKENS),
            ignore_eos=True,
            request_id=f"fault:slow:{STEP_MS}@0",
        )
        with cluster.channel() as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            for message in stub.Generate(request, timeout=600):
                number += len(message.token_ids)
                begun[1].set()
        return number, time.monotonic()

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read) for read in (over_http, over_grpc)]
        assert all(event.wait(60) for event in begun)
        cluster.deploy(with_deployments(cluster.config, Router={"num_replicas": 3}))
        until_changed(lambda: len(pids(cluster, "Router")) == 3, "three routers run")
        changed_s = time.monotonic()
        answers = [reader.result() for reader in readers]
    lasted_s = min(end_s - changed_s for _, end_s in answers)
    details = {"streams": len(answers), "tokens": NUM_TOKENS}
    bar = Bar(
        "chaos/stream_after_change_s",
        lasted_s,
        "s of a stream after the list of routers has changed",
        RAY_DEFAULT_S,
        at_most=False,
        details=details,
    )
    write_bars("chaos_long_streams.json", [bar])
    assert [number for number, _ in answers] == [NUM_TOKENS, NUM_TOKENS]
    assert lasted_s > RAY_DEFAULT_S + 10
