"""The engine and its offline front on tiny checkpoints: order, streams, refusals, threads, the end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.protos.errors import ContextLengthExceeded, EngineError, InvalidRequest, Unavailable
from quire.protos.sampling_params import SamplingParams
from quire.replica import Engine, EngineArgs
from quire.replica import offline as offline_module
from quire.replica.core.request import Request
from quire.replica.engine import MAX_FAILED_STEPS

VOCAB_SIZE = 173
# The cache's backing spends nearly all of its time where torch takes the interpreter's lock back.
BUSY_ENGINE = """
import sys
from quire.replica import Engine
from quire.protos.sampling_params import SamplingParams

engine = Engine(model=sys.argv[1], device="cpu", num_blocks=64, block_size=16, max_model_len=256)
pool, prefault = engine._runner.pool, engine._runner.steps.prefault
prefault.back_next = lambda num_bytes: [pool.data[1:2] for _ in range(1000)]
for _ in range(2):  # no pool that was backed at once
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2), progress=False)
thread = prefault._thread
if sys.argv[2] == "closed":
    assert thread.is_alive()
    engine.close()
    assert not thread.is_alive() and not engine.is_alive()
"""
LIMITS = dict(
    device="cpu",
    num_blocks=64,
    block_size=16,
    max_batch_tokens=64,
    max_model_len=256,
    num_threads=1,
)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def prompt(seed: int, length: int = 20) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


def assert_idle(engine: Engine) -> None:
    """Nothing is alive and nothing leaked."""
    deadline_s = time.monotonic() + 10
    while engine.load().num_running + engine.load().num_waiting and time.monotonic() < deadline_s:
        time.sleep(0.01)
    engine.check()
    state = engine.snapshot()
    assert state["blocks"]["in_use"] == 0
    assert state["waiting"] == []
    assert engine._offline._sinks == {}
    assert engine._offline._slots._value == engine.config.max_waiting_requests


@pytest.fixture(scope="module")
def llama(zoo: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine(model=str(zoo("llama")), **LIMITS) as engine:
        yield engine


@pytest.fixture
def engine(llama: Engine) -> Iterator[Engine]:
    yield llama
    assert_idle(llama)


@pytest.fixture
def small(zoo: Callable[[str], Path]) -> Iterator[Engine]:
    """A queue of three."""
    with Engine(model=str(zoo("llama")), **LIMITS, max_waiting_requests=3) as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture(scope="module")
def embedded() -> Iterator[Engine]:
    with Engine(model="embedded", **LIMITS) as engine:
        yield engine
        assert_idle(engine)


def test_outputs_come_in_the_order_of_the_prompts(engine):
    prompts = [prompt(i, length=5 + 7 * i) for i in range(6)]
    params = [SamplingParams(max_tokens=14 - 2 * i, temperature=0.0) for i in range(6)]
    outputs = engine.generate(prompts, params)
    assert [o.prompt_token_ids for o in outputs] == prompts
    for alone, output in zip(prompts, outputs, strict=True):
        (again,) = engine.generate([alone], output.params)
        assert again.token_ids == output.token_ids
    assert all(len(o.token_ids) <= p.max_tokens for o, p in zip(outputs, params, strict=True))
    assert engine.generate([]) == []


def test_a_repeated_prompt_is_found_in_the_cache(engine):
    ids = prompt(100, length=48)
    first, second = (engine.generate([ids], GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_stream_is_the_same_answer_in_pieces(engine, temperature):
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=5, ignore_eos=True)
    (whole,) = engine.generate([prompt(1)], params)
    pieces = list(engine.stream(prompt(1), params))
    assert [t for piece in pieces for t in piece.token_ids] == whole.token_ids
    assert len(pieces) == len(whole.token_ids)
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + [whole.finish_reason]


def test_stop_token_ids_end_a_request(engine):
    (free,) = engine.generate([prompt(2)], GREEDY)
    stop = free.token_ids[5]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    (output,) = engine.generate([prompt(2)], params)
    assert output.finish_reason == "stop"
    assert output.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_closing_a_stream_early_aborts_and_frees(engine):
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    stream = engine.stream(prompt(3), params)
    for _ in range(3):
        next(stream)
    assert engine.load().num_running == 1
    stream.close()
    assert_idle(engine)
    assert engine.load().num_decode_tokens == 0


def test_an_untouched_stream_submits_nothing(engine):
    num_steps = engine.load().num_steps
    engine.stream(prompt(3), GREEDY).close()
    assert engine.load().num_steps == num_steps


def test_more_prompts_than_the_queue_takes(small):
    prompts = [prompt(i, length=4) for i in range(20)]
    outputs = small.generate(prompts, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert all(len(o.token_ids) == 3 for o in outputs)


def test_threads_share_an_engine_whose_queue_is_shorter_than_their_lists(small):
    """Together they have more prompts than the queue takes: none is refused, each gets its own answers."""
    lists = [[prompt(100 * t + i, length=6) for i in range(10)] for t in range(3)]
    params = SamplingParams(max_tokens=4, temperature=0.7, seed=3, ignore_eos=True)
    results: dict[int, list[list[int]]] = {}

    def work(t: int) -> None:
        if t == 2:  # one of them streams
            results[t] = [
                [i for piece in small.stream(ids, params) for i in piece.token_ids]
                for ids in lists[t]
            ]
        else:
            results[t] = [o.token_ids for o in small.generate(lists[t], params)]

    threads = [threading.Thread(target=work, args=(t,)) for t in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert_idle(small)
    for t, prompts in enumerate(lists):
        assert results[t] == [small.generate([ids], params)[0].token_ids for ids in prompts]


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (
            [1, VOCAB_SIZE],
            InvalidRequest,
            r"prompts\[1\]: prompt must be token ids in \[0, 173\), got 173",
        ),
        ([-1], InvalidRequest, r"prompts\[1\]: .*got -1"),
        ([], InvalidRequest, r"prompts\[1\]: .*at least 1 token"),
        ([1.7, 2.0], InvalidRequest, r"prompts\[1\]: .*must be integers, got float64"),
        ([[1, 2], [3]], InvalidRequest, r"prompts\[1\]: .*flat list"),
        ([1 << 40], InvalidRequest, r"prompts\[1\]: .*got 1099511627776"),
        (list(range(3, 170)) * 2, ContextLengthExceeded, r"prompts\[1\]: .*334 tokens"),
        ("text", ValueError, "no tokenizer.json"),
    ],
    ids=["above", "below", "empty", "floats", "ragged", "wide", "long", "text"],
)
def test_a_bad_prompt_is_named_before_anything_runs(engine, bad, error, match):
    num_steps = engine.load().num_steps
    with pytest.raises(error, match=match):
        engine.generate([prompt(4), bad, prompt(5)], GREEDY)
    with pytest.raises(error):
        engine.stream(bad, GREEDY)
    assert_idle(engine)
    assert engine.load().num_steps == num_steps
    assert len(engine.generate([prompt(4)], GREEDY)[0].token_ids) == 12


def test_misuse_is_refused(engine):
    with pytest.raises(TypeError, match="list of prompts, got a string"):
        engine.generate("A quire is")
    with pytest.raises(ValueError, match="2 for 1 prompts"):
        engine.generate([prompt(1)], [GREEDY, GREEDY])
    with pytest.raises(InvalidRequest, match="max_tokens"):
        engine.generate([prompt(1)], SamplingParams(max_tokens=0))
    with pytest.raises(TypeError, match="not both"):
        Engine(EngineArgs(), model="embedded")


def test_seeds_reproduce_and_differ(engine):
    ids = prompt(6)

    def sample(seed: int) -> list[int]:
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=seed, ignore_eos=True)
        (output,) = engine.generate([ids], params)
        assert output.params.seed == seed or seed == 0
        return output.token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    unseeded = engine.generate(
        [ids, ids], SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
    )
    assert unseeded[0].params.seed != unseeded[1].params.seed
    assert sample(unseeded[0].params.seed) == unseeded[0].token_ids


def test_no_progress_bar_unless_on_a_terminal(engine, capsys, monkeypatch):
    params = SamplingParams(max_tokens=1, temperature=0.0)
    engine.generate([prompt(i, 4) for i in range(9)], params)
    assert capsys.readouterr().err == ""
    engine.generate([prompt(1, 4)], params, progress=True)
    assert "1/1" in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    engine.generate([prompt(i, 4) for i in range(9)], params)
    assert "9/9" in capsys.readouterr().err
    engine.generate([prompt(i, 4) for i in range(9)], params, progress=False)
    engine.generate([prompt(i, 4) for i in range(8)], params)
    assert capsys.readouterr().err == ""


def test_hello_says_what_was_loaded(engine):
    hello = engine.hello("replica-1")
    assert (hello.replica, hello.epoch) == ("replica-1", engine.epoch)
    assert (hello.vocab_size, hello.max_model_len) == (VOCAB_SIZE, 256)
    assert hello.max_cache_tokens == 64 * 16
    assert {"imports", "checkpoint", "load", "warm_up"} <= hello.startup_s.keys()


def test_close_ends_what_runs_and_refuses_what_comes(zoo):
    engine = Engine(model=str(zoo("llama")), **LIMITS)
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    outputs, errors = [], []
    began = threading.Event()

    def generate() -> None:
        outputs.extend(engine.generate([prompt(1), prompt(2)], params))

    def stream() -> None:
        try:
            for _ in engine.stream(prompt(3), params):
                began.set()
            engine.generate([prompt(4)], params)
        except Unavailable as error:
            errors.append(error)

    threads = [threading.Thread(target=target) for target in (generate, stream)]
    for thread in threads:
        thread.start()
    assert began.wait(30)
    engine.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert [o.finish_reason for o in outputs] == ["abort", "abort"]
    assert len(errors) == 1
    engine.abort(0)  # nothing is alive any more: no error
    with pytest.raises(EngineError, match="loop has ended"):
        engine.check_health()
    engine.close()


def test_a_dead_loop_does_not_leave_callers_waiting(zoo, monkeypatch):
    monkeypatch.setattr(offline_module, "_LIVENESS_PERIOD_S", 0.05)
    with Engine(model=str(zoo("llama")), **LIMITS) as engine:
        scheduler = engine._loop._scheduler

        def broken(*_: object) -> None:
            raise AssertionError("records disagree")

        monkeypatch.setattr(scheduler, "commit", broken)
        monkeypatch.setattr(scheduler, "abort_all", broken)
        with pytest.raises(EngineError, match="loop has ended"):
            engine.generate([prompt(1)], GREEDY)


def test_a_device_that_fails_every_step_is_unhealthy(zoo, monkeypatch):
    with Engine(model=str(zoo("llama")), **LIMITS) as engine:

        def broken(_: object) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        engine.check_health()
        with monkeypatch.context() as patch:
            patch.setattr(engine._loop._runner, "launch", broken)
            for _ in range(MAX_FAILED_STEPS):
                engine.check_health()
                with pytest.raises(EngineError, match="failed in step"):
                    engine.generate([prompt(1)], GREEDY)
            with pytest.raises(EngineError, match=f"last {MAX_FAILED_STEPS} steps failed"):
                engine.check_health()
        engine.generate([prompt(1)], GREEDY)
        engine.check_health()
        assert_idle(engine)


def test_a_shell_gets_all_output_and_the_offline_front_is_off(zoo):
    deltas, ended = [], threading.Event()

    def on_output(output) -> None:
        deltas.extend(output.deltas)
        if deltas and deltas[-1].finish_reason is not None:
            ended.set()

    with Engine(model=str(zoo("llama")), **LIMITS, on_output=on_output) as engine:
        with pytest.raises(InvalidRequest, match="max_tokens"):
            engine.submit(Request("bad", prompt(1), SamplingParams(max_tokens=0)))
        engine.submit(Request("good", prompt(1), GREEDY))
        assert ended.wait(30)
        with pytest.raises(RuntimeError, match="on_output"):
            engine.generate([prompt(1)])
    assert [d.key for d in deltas] == ["good"] * 12
    assert [d.index for d in deltas] == list(range(12))
    assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 25])
def test_the_pieces_of_text_are_the_text(embedded, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    (whole,) = embedded.generate(["A quire is"], params)
    assert whole.text
    pieces = [piece.text for piece in embedded.stream("A quire is", params)]
    assert "".join(pieces) == whole.text


def test_a_text_cut_within_a_character_ends_as_the_whole_decode_does(embedded):
    tokenizer = embedded._offline._tokenizer
    ids = tokenizer.encode("a 語 b 🐦").ids
    assert tokenizer.decode(ids[:-1]).endswith("\ufffd")
    for end in range(1, len(ids) + 1):
        text = offline_module._TextStream(tokenizer)
        pieces = [text.feed([i], last=n == end - 1) for n, i in enumerate(ids[:end])]
        assert "".join(pieces) == tokenizer.decode(ids[:end])
        assert not any("\ufffd" in piece for piece in pieces[:-1])


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_process_ends_well_while_its_engine_is_busy(zoo, how):
    command = [sys.executable, "-c", BUSY_ENGINE, str(zoo("llama")), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
