"""The overhead benchmarks run full batches, whole frames and all streams."""

import asyncio

import pytest

from tests.perf.engine.host_overhead import GENERATED, QuireHost, TransformersHost
from tests.perf.router import bus_overhead


@pytest.mark.parametrize("waiting", [0, 5])
def test_every_step_of_the_stubbed_engine_decodes_all_rows(waiting):
    host = QuireHost(6, waiting)
    load = host.scheduler.load()
    assert (load.num_running, load.num_waiting, load.queued_prefill_tokens > 0) == (
        6,
        waiting,
        waiting > 0,
    )
    before = load.num_decode_tokens
    assert before >= 6 * (64 + GENERATED)
    times_ms = host.run(40)
    assert len(times_ms) == 40
    assert min(times_ms) > 0
    assert host.scheduler.load().num_decode_tokens == before + 6 * 40
    assert host.scheduler.events.seq > 0  # full blocks were reported
    host.scheduler.check()


def test_transformers_takes_its_fast_path():
    host = TransformersHost(3)
    assert min(host.run(2)) > 0
    assert len(host._batch.scheduler.active_requests) == 3


def test_every_stream_sends_something_in_every_step():
    router_us, replica_us = asyncio.run(bus_overhead.run(streams=5, steps=12))
    assert len(router_us) == len(replica_us) == 12
    assert min(router_us + replica_us) > 0
