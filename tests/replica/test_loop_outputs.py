import dataclasses
import queue

import numpy as np
import pytest

from quire.protos.errors import Unavailable
from quire.protos.sampling_params import SamplingParams
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.core.step_plan import CopiesDone, StepResult
from quire.replica.loop import EngineLoop
from quire.replica.scheduler.scheduler import Scheduler

CONFIG = EngineConfig(
    model_name="m",
    revision="r",
    device="cpu",
    dtype="float32",
    vocab_size=100,
    eos_token_ids=(2,),
    max_model_len=256,
    block_size=8,
    num_blocks=64,
    max_batch_tokens=128,
    max_running_requests=8,
    max_waiting_requests=8,
    safety_margin=0.0,
    scheduler="fifo",
    max_prefill_ms=None,
    resume_margin=0.0,
    prefix_caching=True,
    deterministic=True,
    num_threads=1,
)


class Runner:
    """Samples `token` for every row; fails where it is told to."""

    num_compiles = 3

    def __init__(self, fails_at=()):
        self.fails_at = fails_at

    def launch(self, plan):
        if plan.step in self.fails_at:
            raise RuntimeError("the device is gone")
        return plan

    def take_copies(self) -> CopiesDone:
        return CopiesDone()

    def use_idle(self) -> bool:
        return False

    def close(self) -> None:
        """It has no threads."""

    def collect(self, plan):
        return StepResult(np.full(len(plan.sampling.token_index), 7), 0.01)


class Engine:
    """A loop and everything that it has sent out."""

    def __init__(self, runner=None, **changes):
        self.outputs = queue.SimpleQueue()
        self.scheduler = Scheduler(dataclasses.replace(CONFIG, **changes))
        self.loop = EngineLoop(self.scheduler, runner or Runner(), self.outputs.put)

    def submit(self, *keys, max_tokens=3, prompt=(5, 6, 7)):
        def add(scheduler, key):
            params = SamplingParams(max_tokens=max_tokens)
            return scheduler.add(Request(key, list(prompt), params, source=1, stream_id=40))

        for key in keys:
            self.loop.post(lambda scheduler, key=key: add(scheduler, key))

    def outputs_until(self, num_ended):
        """Outputs until so many requests have ended."""
        outputs = []
        while num_ended:
            outputs.append(self.outputs.get(timeout=10))
            num_ended -= sum(d.finish_reason is not None for d in outputs[-1].deltas)
        return outputs


@pytest.fixture
def started():
    engines = []

    def start(engine):
        engines.append(engine)
        engine.loop.start()
        return engine

    yield start
    for engine in engines:
        engine.loop.close()


def test_each_step_is_one_output_and_tokens_between_first_and_last_are_columns(started):
    engine = Engine()
    engine.submit("a", "b", max_tokens=4)
    outputs = started(engine).outputs_until(2)
    assert [(len(o.deltas.whole), len(o.deltas.tokens)) for o in outputs] == [
        (2, 0),
        (0, 2),
        (0, 2),
        (2, 0),
    ]
    for i, output in enumerate(outputs):
        assert [(d.key, d.index, d.token_ids) for d in output.deltas] == [
            ("a", i, [7]),
            ("b", i, [7]),
        ]
    columns = outputs[1].deltas
    assert (columns.sources.tolist(), columns.tokens.stream_ids.tolist()) == ([1, 1], [40, 40])
    assert [o.load.num_compiles for o in outputs] == [3] * 4


def test_what_the_mailbox_ends_is_sent_before_the_step_that_follows(started):
    engine = Engine(max_waiting_requests=1)
    engine.submit("a", "refused", max_tokens=2)
    outputs = started(engine).outputs_until(2)
    first = [(d.key, d.finish_reason) for d in outputs[0].deltas]
    assert first == [("refused", "error"), ("a", None)]


def test_an_abort_alone_is_sent_although_there_is_no_step(started):
    engine = Engine()
    engine.submit("a", max_tokens=200)
    engine.loop.post(lambda scheduler: scheduler.abort("a"))
    (output,) = started(engine).outputs_until(1)
    assert [(d.key, d.finish_reason, d.token_ids) for d in output.deltas] == [("a", "abort", [])]
    assert len(output.deltas.tokens) == 0


def test_a_failed_step_ends_its_requests_and_the_loop_goes_on(started):
    engine = Engine(Runner(fails_at=(2,)))
    engine.submit("a")
    outputs = started(engine).outputs_until(1)
    (delta,) = outputs[-1].deltas
    assert delta.finish_reason == "error"
    assert "step 2 (RuntimeError)" in delta.facts.error.message
    engine.submit("b")
    assert [d.finish_reason for d in engine.outputs_until(1)[-1].deltas] == ["length"]


def test_all_blocks_are_told_before_the_loop_goes_to_sleep(started):
    """Hashes of generated blocks may wait for a few steps, but not for the next request."""
    engine = Engine()
    engine.submit("a", max_tokens=62)  # 3 of prompt: the last step computes the 64th token
    outputs = started(engine).outputs_until(1)
    assert [o.events for o in outputs] == [None] * 62
    told = engine.outputs.get(timeout=10).events.stored.tolist()
    assert len(told) == 1
    assert engine.loop.call(lambda scheduler: scheduler.events.held()).result() == set(told)
    assert engine.loop.call(lambda scheduler: scheduler.memory.prefix.num_unhashed).result() == 0


def test_closing_ends_what_is_alive():
    engine = Engine()
    engine.loop.start()
    engine.submit("a", max_tokens=200)
    assert engine.outputs.get(timeout=10) is not None
    engine.loop.close()
    outputs = []
    while not engine.outputs.empty():
        outputs.append(engine.outputs.get())
    last = list(outputs[-1].deltas)[-1]
    assert last.finish_reason in ("abort", "length")
    with pytest.raises(Unavailable, match="closed"):
        engine.submit("b")
