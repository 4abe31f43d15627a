from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import pytest

from quire.protos.errors import EngineError
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import Frame, Submit, TokenDelta, TokenRecord
from quire.replica.serving.faults.faults import Fault, Faults, FaultyEngine, disturbed, parse

PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=2**64 - 3, ignore_eos=True)


def submit(label: str, num_emitted: int = 0, choice: int = 0) -> Submit:
    prompt_ids = np.array(PROMPT + [9] * num_emitted, np.int32)
    params = SamplingParams(seed=2**64 - 3, choice=choice)
    return Submit("router", 7, label, prompt_ids, params, num_emitted)


def test_a_label_asks_for_a_fault():
    assert parse(submit("fault:hang:2.5@9")) == Fault("hang", 2.5, 9, "router", 7, 2**64 - 3, 13)
    assert parse(submit("fault:clock:-60@0")).number == -60
    assert parse(submit("my-own-label")) is None


def test_a_fault_is_for_the_first_attempt_unless_it_follows_its_request():
    assert parse(submit("fault:kill@9", num_emitted=9)) is None
    assert parse(submit("fault:kill!@9", num_emitted=9)).position == 13
    assert parse(submit("fault:kill@9", choice=1)) is None


@pytest.mark.parametrize("label", ["fault:", "fault:kill", "fault:burn@3", "fault:kill@-1"])
def test_no_fault_by_that_name(label):
    with pytest.raises(ValueError, match="no fault"):
        parse(submit(label))


@pytest.fixture(scope="module")
def engine() -> Iterator[FaultyEngine]:
    with FaultyEngine(num_blocks=32, max_model_len=128, num_threads=1) as engine:
        yield engine
        engine.check()


def arm(engine: FaultyEngine, kind: str, number: float, index: int) -> None:
    position = len(PROMPT) + index
    engine.faults.arm(Fault(kind, number, index, "router", 7, PARAMS.seed, position))


@pytest.mark.parametrize("kind", ["fail", "oom"])
def test_a_step_fails_at_its_token_once_and_leaks_nothing(engine, kind):
    whole = engine.generate([PROMPT], PARAMS, progress=False)[0].token_ids
    arm(engine, kind, 0, 5)
    got: list[int] = []
    with pytest.raises(EngineError):
        for piece in engine.stream(PROMPT, PARAMS):
            got += piece.token_ids
    assert got == whole[:5]
    engine.check()
    assert engine.generate([PROMPT], PARAMS, progress=False)[0].token_ids == whole


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_clock_that_jumps_changes_no_token(engine, seconds):
    whole = engine.generate([PROMPT], PARAMS, progress=False)[0].token_ids
    arm(engine, "clock", seconds, 5)
    assert engine.generate([PROMPT], PARAMS, progress=False)[0].token_ids == whole
    assert abs(engine.faults.now_s() - time.monotonic() - engine.faults.clock_offset_s) < 1


def test_slow_is_for_all_tokens_from_then_on(engine):
    arm(engine, "slow", 20, 8)
    began_s = time.monotonic()
    engine.generate([PROMPT], PARAMS, progress=False)
    assert time.monotonic() - began_s >= 4 * 0.02
    engine.faults.waiting.clear()


def test_a_drag_and_a_leak_are_for_all_steps_from_then_on(engine):
    arm(engine, "drag", 20, 0)
    arm(engine, "leak", 3, 8)
    began_s = time.monotonic()
    engine.generate([PROMPT], PARAMS, progress=False)
    assert [len(lost) for lost in engine.faults.leaked] == [3 * 1024] * 4
    others = dataclasses.replace(PARAMS, seed=1)
    engine.generate([PROMPT], others, progress=False)
    assert time.monotonic() - began_s >= 24 * 0.02
    assert len(engine.faults.leaked) == 4 + 12
    engine.faults.drag_s = engine.faults.leak_bytes = 0
    engine.faults.waiting.clear()


def test_a_crawl_is_time_that_the_engine_knows_of(engine):
    arm(engine, "crawl", 50, 0)
    engine.generate([PROMPT], PARAMS, progress=False)
    others = dataclasses.replace(PARAMS, seed=1, max_tokens=50)
    engine.generate([PROMPT], others, progress=False)
    # What it knew before has a share of 0.9 to the number of steps: below a hundredth.
    assert engine.load().decode_step_s > 0.99 * 0.05
    engine.faults.crawl_s = 0.0
    engine.faults.waiting.clear()


def test_a_stretched_step_takes_a_multiple_of_its_time_and_the_engine_knows(engine):
    runner, asked = engine.faults, dataclasses.replace(PARAMS, seed=2, max_tokens=60)
    engine.generate([PROMPT], asked, progress=False)
    before_s = engine.load().decode_step_s
    runner.stretch = 20.0
    began_s = time.monotonic()
    engine.generate([PROMPT], dataclasses.replace(asked, seed=3), progress=False)
    took_s = time.monotonic() - began_s
    # The engine's average has a share of 0.9 to the number of steps of what it was.
    assert engine.load().decode_step_s > 4 * before_s
    assert took_s > 0.5 * 60 * engine.load().decode_step_s
    arm(engine, "stretch", 1.0, 3)
    engine.generate([PROMPT], PARAMS, progress=False)
    assert runner.stretch == 1.0
    engine.faults.waiting.clear()


def test_an_idle_engine_forgets_what_it_has_cached_and_says_so(engine):
    prompt = list(range(300, 370))
    whole = engine.generate([prompt], PARAMS, progress=False)[0].token_ids
    seq = engine.call(lambda scheduler: scheduler.events.seq).result()
    engine.faults.arm(Fault("forget", 0.3, 11, "router", 7, PARAMS.seed, len(prompt) + 11))
    assert engine.generate([prompt], PARAMS, progress=False)[0].token_ids == whole
    assert engine.load().blocks_cached > 0, "the fault comes when nothing runs"
    until_s = time.monotonic() + 10
    while engine.load().blocks_cached and time.monotonic() < until_s:
        time.sleep(0.01)
    assert engine.load().blocks_cached == 0
    last = engine.call(lambda scheduler: scheduler.events.since(seq)[-1]).result()
    assert last.cleared and not len(last.stored)
    engine.check()
    assert engine.generate([prompt], PARAMS, progress=False)[0].token_ids == whole


def test_a_frame_is_found_by_its_token():
    faults = Faults()
    faults.arm(parse(submit("fault:drop@9")))
    before = Frame("e", *Frame.pack([TokenDelta(7, 8, [1])]))
    it = Frame("e", *Frame.pack([TokenDelta(7, 9, [1, 2])]))
    assert faults.of_frame("router", before) is None
    assert faults.of_frame("other", it) is None
    assert faults.of_frame("router", it).kind == "drop"
    assert faults.of_frame("router", it) is None


def test_what_is_sent_instead_of_a_frame():
    def instead(kind, data=b"abc"):
        return disturbed(parse(submit(f"fault:{kind}@9")), data, b"x")

    assert instead("drop") == []
    assert instead("duplicate") == [b"abc", b"abc", b"x"]
    assert instead("delay:1") == [b"abc"]
    (flipped,) = instead("corrupt")
    assert flipped != b"abc" and len(flipped) == 3
    columns = TokenRecord(np.array([6, 7]), np.array([4, 9], np.int32), np.array([1, 2], np.int32))
    frame = Frame("e", *Frame.pack([TokenDelta(7, 9, [1]), TokenDelta(8, 9, [1, 2])], columns))
    (left,) = instead("lose", frame.encode())
    left = Frame.decode(left)
    assert [(delta.key, delta.token_ids) for delta in left.token_deltas()] == [
        (8, [1, 2]),
        (6, [1]),
    ]
    assert len(left.facts) == 1
