"""The data-plane benchmark: the paced device's times, parsing of arbitrarily cut streams, CPU time per token."""

from __future__ import annotations

import asyncio
import os
import random
import time

import numpy as np
import pytest

from quire.protos import generation_pb2 as pb
from quire.protos.sampling_params import SamplingParams
from quire.replica.core.step_plan import SamplingBatch, StepPlan
from quire.router.text.tokenizer import TextTokenizer
from tests.perf.cluster import data_plane, paced_replica
from tests.perf.cluster.data_plane import StreamRun, Window
from tests.perf.cluster.paced_replica import STEP_S, TEXT, Pace, PacedEngine, PacedRunner
from tests.perf.cluster.token_streams import StreamFailed, TokenStream, parse_grpc, parse_sse


def plan(positions: list[int]) -> StepPlan:
    fields = dict.fromkeys(StepPlan._fields[:9])
    columns = dict.fromkeys(SamplingBatch._fields[:3])
    sampling = SamplingBatch(**{**columns, "position": np.array(positions, np.int64)})
    one_each = {"num_decode_rows": len(positions), "token_ids": np.zeros(len(positions), np.int32)}
    return StepPlan(**{**fields, **one_each, "step": 1, "sampling": sampling})


def test_steps_follow_one_another_without_a_gap():
    runner = PacedRunner(np.array([7, 8, 9]), 32, Pace(step_s=0.05))
    began_s = time.perf_counter()
    first = runner.launch(plan([3, 4]))
    time.sleep(0.02)  # the host plans while the device runs
    second = runner.launch(plan([4, 5]))
    results = [runner.collect(step) for step in (first, second)]
    took_s = time.perf_counter() - began_s
    assert [result.token_ids.tolist() for result in results] == [[7, 8], [8, 9]]
    assert second.started_s == first.ends_s
    assert took_s >= 0.1
    third = runner.launch(plan([0]))  # the device was idle meanwhile
    assert third.started_s >= began_s + took_s


def test_the_paced_engine_says_its_text_one_token_a_step():
    with PacedEngine(model="embedded", num_blocks=64, num_threads=1) as engine:
        tokenizer = TextTokenizer.load(engine.checkpoint)
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        began_s = time.perf_counter()
        ids = [out.token_ids for out in engine.generate([[400] * 8, [401] * 8], params)]
        took_s = time.perf_counter() - began_s
        engine.check()
    assert took_s >= 60 * STEP_S
    assert ids[0] == ids[1]
    assert tokenizer.backend.decode(ids[0]) in 3 * TEXT
    # Every token is an event with its own text.
    text_ids = tokenizer.encode(TEXT, add_special_tokens=False).tolist()
    assert "".join(tokenizer.backend.decode([i]) for i in text_ids) == TEXT


def test_the_application_has_paced_replicas(monkeypatch):
    seen = []
    monkeypatch.setattr(paced_replica, "application", lambda *given: seen.append(given))
    (application,) = data_plane.serve_config(512)["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, name) == (paced_replica.__name__, "build")
    paced_replica.build(application["args"])
    ((config, replica_class),) = seen
    assert config.engine.max_running_requests == 512
    assert replica_class.engine_class is PacedEngine


EVENT = b'data: {"choices":[{"index":0,"text":"%s"}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*payloads: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in payloads)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_events_are_found_however_bytes_are_cut(size):
    events = [EVENT % text for text in (b"a", b"", b"bc", b"d")]
    events += [b": keep-alive\n\n", USAGE, b"data: [DONE]\n\n"]
    rng = random.Random(size)
    body = b"".join(events)
    cuts = sorted(rng.sample(range(1, len(body)), 9))  # chunks with arbitrary ends
    parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    data = HEAD + chunked(*parts) + b"0\r\n\r\n"
    pieces = [(float(i), data[i : i + size]) for i in range(0, len(data), size)]
    stream = parse_sse(-1.0, pieces)
    assert stream.num_tokens == len(stream.arrivals_s) == 3
    assert stream.arrivals_s == sorted(stream.arrivals_s)
    assert stream.ttft_s == stream.arrivals_s[0] + 1.0
    if size == 1:  # an event arrives with its last byte
        joined = HEAD + chunked(*parts)
        first = next(i for i in range(len(joined)) if parsed_tokens(joined[: i + 1]) == 1)
        assert stream.arrivals_s[0] == first


def parsed_tokens(data: bytes) -> int:
    """Texts of the complete events so far."""
    with pytest.raises(StreamFailed, match=r"ended after \d+ tokens") as error:
        parse_sse(0.0, [(0.0, data)])
    return int(str(error.value).split()[-2])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"HTTP/1.1 429 Too Many\r\n\r\nfull", "429 Too Many.*full"),
        (HEAD + chunked(b'data: {"error": {"message": "gone"}}\n\n'), "gone"),
        (HEAD + chunked(EVENT % b"a"), "ended after 1 tokens"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + EVENT % b"a", "not chunked"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(data, message):
    with pytest.raises(StreamFailed, match=message):
        parse_sse(0.0, [(0.0, data)])


def test_messages_of_a_call_are_tokens():
    last = pb.GenerateResponse(token_ids=[5, 6], usage=pb.Usage(completion_tokens=3))
    messages = [pb.GenerateResponse(token_ids=[4], text="a"), pb.GenerateResponse(text="b"), last]
    pieces = [(float(i), message.SerializeToString()) for i, message in enumerate(messages)]
    stream = parse_grpc(-0.5, pieces)
    assert (stream.arrivals_s, stream.num_tokens, stream.ttft_s) == ([0.0, 2.0, 2.0], 3, 0.5)
    assert list(stream.gaps_s) == [2.0, 0.0]


def test_cpu_time_is_of_the_tokens_in_the_window_and_less_what_idling_takes():
    streams = [TokenStream(0.0, [0.02 * (i + 1) for i in range(100)], 100) for _ in range(5)]
    window = Window(0.5, 1.5, {"router": 0.035, "replica": 0.01})
    run = StreamRun(100, 0.0, streams, window)
    assert run.num_in_window == 5 * 50
    assert run.us_per_token({"router": 0.01, "replica": 0.01}) == pytest.approx(
        {"router": 100.0, "replica": 0.0}
    )
    assert run.share_of_ideal == pytest.approx(1.0)
    assert max(run.gaps_s) == pytest.approx(0.02)
    found = {
        "runs": {("sse", 128): run, ("sse", 512): run},
        "idle": {"router": 0.01, "replica": 0.01},
        "lone_s": {"sse": [0.021] * 98 + [0.05, 0.06]},
    }
    bars = {bar.name: bar for bar in data_plane.bars_of(found)}
    assert {name: bar.holds for name, bar in bars.items()} == {
        "router/data_plane_sse_128_percent_of_ideal": True,
        "router/data_plane_sse_128_inter_token_p99": True,
        "router/data_plane_sse_128_replica_us_per_token": True,
        "router/data_plane_sse_128_router_us_per_token": False,
        "router/data_plane_sse_first_token_p99": False,
    }
    assert bars["router/data_plane_sse_128_router_us_per_token"].value == pytest.approx(100.0)


def test_streams_that_are_not_whole_end_the_run():
    class Short:
        async def read(self, prompt_ids, num_tokens):
            await asyncio.sleep(0)
            return TokenStream(0.0, [0.1] * (num_tokens - 1), num_tokens)

    class NoMeter:
        async def during(self, seconds):
            return Window(0.0, seconds, {})

    async def run():
        await data_plane.run_streams(Short(), NoMeter(), 2, 4, random.Random(1))

    with pytest.raises(RuntimeError, match="a stream of 4 tokens has 4, in 3 pieces"):
        asyncio.run(run())


def test_a_server_of_grpcio_alone_sends_what_was_asked_for_in_its_own_process():
    """A missing token, or several in one piece, ends the run with an error; its CPU time is at most the process'."""
    us = asyncio.run(data_plane.measure_alone(8, 60))
    assert 0 < us < 1e6 * STEP_S / 8 * os.cpu_count()
