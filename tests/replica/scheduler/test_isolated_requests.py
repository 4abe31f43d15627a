"""A suspect runs alone, the others wait a few steps for it, and all get the tokens that they would have had."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from small_config import small_config

from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import ISOLATED_TOKENS, Submit
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepResult
from quire.replica.scheduler.scheduler import Scheduler


class Steps:
    """A scheduler whose model says at each position a token that depends on the position alone."""

    def __init__(self, **config: object):
        self.scheduler = Scheduler(small_config(**config))
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.rows: list[set[str]] = []  # who was in each step
        self.ended: dict[str, str] = {}

    def add(self, key: str, num_prompt: int, max_tokens: int, **fields: object) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        prompt = np.arange(10, 10 + num_prompt)
        assert self.scheduler.add(Request(key, prompt, params, **fields)) is None

    def run_one(self) -> bool:
        plan = self.scheduler.plan(0.0)
        if plan is None:
            return False
        names = self.scheduler.rows.keys[self.scheduler.steps.newest.rows].tolist()
        assert len(names) == plan.num_rows == len(self.scheduler.stream_ids_in_flight)
        self.rows.append(set(names))
        result = StepResult(plan.sampling.position % 900 + 10, 0.001)
        for delta in self.scheduler.commit(plan, result, 0.0):
            self.tokens[delta.key] += delta.token_ids
            if delta.finish_reason is not None:
                self.ended[delta.key] = delta.finish_reason
        self.scheduler.check()
        return True

    def run(self) -> None:
        for _ in range(5000):
            if not self.run_one():
                return
        raise AssertionError("it never comes to rest")


def test_a_suspect_has_steps_of_its_own_until_it_has_come_through():
    steps = Steps()
    steps.add("one", 20, 40)
    steps.add("two", 20, 40)
    for _ in range(3):
        steps.run_one()
    # Two steps of prompt: 100 tokens, 64 at a time.
    steps.add("suspect", 100, 30, alone=True, num_emitted=7)
    began = len(steps.rows)
    steps.run()
    with_suspect = [names for names in steps.rows[began:] if "suspect" in names]
    num_alone = 1 + ISOLATED_TOKENS
    assert with_suspect[:num_alone] == [{"suspect"}] * num_alone
    assert steps.rows[began : began + num_alone] == with_suspect[:num_alone]
    assert {"one", "two", "suspect"} in with_suspect[num_alone:]
    assert {key: len(ids) for key, ids in steps.tokens.items()} == {
        "one": 40,
        "two": 40,
        "suspect": 23,
    }
    steps.scheduler.check_idle()


def test_suspects_are_tried_one_after_the_other():
    steps = Steps()
    for key in "abc":
        steps.add(key, 20, 30, alone=True)
    steps.run()
    alone = [names for names in steps.rows if len(names) == 1][: 3 * ISOLATED_TOKENS]
    assert alone == [{key} for key in "abc" for _ in range(ISOLATED_TOKENS)]
    assert all(len(steps.tokens[key]) == 30 for key in "abc")


def test_a_suspect_that_leaves_or_fails_makes_room_for_the_others():
    steps = Steps()
    steps.add("one", 20, 10)
    for key in ("waits", "aborted", "fails"):
        steps.add(key, 20, 30, alone=True)
    assert steps.scheduler.load().num_waiting == 4
    steps.scheduler.abort("waits")
    steps.run_one()
    assert steps.rows[-1] == {"aborted"}
    steps.scheduler.abort("aborted")
    plan = steps.scheduler.plan(0.0)
    assert steps.scheduler.rows.keys[steps.scheduler.steps.newest.rows].tolist() == ["fails"]
    assert [d.key for d in steps.scheduler.fail_step(plan, ValueError())] == ["fails"]
    steps.run()
    assert steps.ended == {"one": "length"}
    steps.scheduler.check_idle()


def test_a_suspect_gets_room_from_those_who_are_paused():
    steps = Steps(num_blocks=16)
    steps.add("paused", 100, 20, credit_tokens=4)
    steps.run()
    steps.add("suspect", 60, 20, alone=True)
    steps.run()
    assert steps.ended == {"suspect": "length"}
    steps.scheduler.grant("paused", 100)
    steps.run()
    assert len(steps.tokens["paused"]) == 20


def test_suspicion_travels_with_the_submit():
    submit = Submit("r", 1, "label", np.arange(3, dtype=np.int32), SamplingParams(), alone=True)
    assert Submit.decode(submit.encode()).alone


@settings(max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 40), st.booleans()), min_size=1, max_size=8
    ),
    num_blocks=st.sampled_from([16, 24, 64]),
    num_host_blocks=st.sampled_from([0, 24]),
    pauses=st.lists(st.integers(0, 60), max_size=4),
)
def test_everybody_gets_all_tokens_whoever_is_suspected(
    requests, num_blocks, num_host_blocks, pauses
):
    steps = Steps(num_blocks=num_blocks, num_host_blocks=num_host_blocks, max_model_len=120)
    for i, (num_prompt, max_tokens, alone) in enumerate(requests):
        steps.add(f"r{i}", num_prompt, max_tokens, alone=alone)
        for _ in range(i):
            steps.run_one()
    for number in pauses:
        steps.scheduler.pause(f"r{number % len(requests)}")
        steps.run_one()
        steps.run_one()
    for i in range(len(requests)):
        steps.scheduler.resume(f"r{i}")
    steps.run()
    for i, (num_prompt, max_tokens, _) in enumerate(requests):
        first = num_prompt
        assert steps.tokens[f"r{i}"] == [p % 900 + 10 for p in range(first, first + max_tokens)]
    steps.scheduler.check_idle()
