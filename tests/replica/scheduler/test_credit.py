"""Requests that may run only so far: they pause, keep what they have, and go on exactly."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_config import small_config

from quire.protos.errors import InvalidRequest
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import Submit
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepResult
from quire.replica.scheduler.scheduler import Scheduler

MANY = 1 << 20


class Steps:
    """A scheduler whose model says at each position a token that depends on the position alone."""

    def __init__(self, **config: object):
        self.scheduler = Scheduler(small_config(**config))
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, str] = {}

    def run_one(self) -> bool:
        """One step; False when there is none to run."""
        plan = self.scheduler.plan(0.0)
        if plan is None:
            return False
        result = StepResult(plan.sampling.position % 900 + 10, 0.001)
        for delta in self.scheduler.commit(plan, result, 0.0):
            assert delta.index == len(self.tokens[delta.key])
            self.tokens[delta.key] += delta.token_ids
            if delta.finish_reason is not None:
                self.ended[delta.key] = delta.finish_reason
        return True

    def run(self) -> None:
        for _ in range(10_000):
            if not self.run_one():
                return
        raise AssertionError("it never comes to rest")


def request(key: str, num_prompt: int, max_tokens: int, credit: int | None, **fields) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompt = np.arange(10, 10 + num_prompt)
    return Request(key, prompt, params, credit_tokens=credit, **fields)


def test_a_request_pauses_when_its_credit_is_spent_and_keeps_its_blocks():
    steps = Steps()
    steps.scheduler.add(request("slow", 20, 100, credit=10))
    steps.scheduler.add(request("fast", 20, 60, credit=None))
    steps.run()
    assert steps.ended == {"fast": "length"}
    assert len(steps.tokens["slow"]) == 10
    steps.scheduler.check()
    assert steps.scheduler.load().num_running == 1
    assert steps.scheduler.load().blocks_in_use > 0
    steps.scheduler.grant("slow", 10)  # no more than it has
    steps.scheduler.grant("nobody", 50)
    assert not steps.run_one()
    steps.scheduler.grant("slow", 25)
    steps.scheduler.grant("slow", 15)  # late: another message was faster
    steps.run()
    assert len(steps.tokens["slow"]) == 25
    steps.scheduler.grant("slow", MANY)
    steps.run()
    assert steps.ended["slow"] == "length" and len(steps.tokens["slow"]) == 100
    steps.scheduler.check_idle()


def test_credit_counts_from_what_an_earlier_attempt_has_emitted():
    steps = Steps()
    steps.tokens["moved"] = [0] * 6
    steps.scheduler.add(request("moved", 26, 40, credit=8, num_emitted=6))
    steps.run()
    assert len(steps.tokens["moved"]) == 14


def test_a_spent_request_can_be_aborted_and_its_end_needs_no_credit():
    steps = Steps()
    steps.scheduler.add(request("left", 20, 100, credit=5))
    steps.scheduler.add(request("whole", 20, 5, credit=5))
    steps.run()
    assert steps.ended == {"whole": "length"}
    assert steps.scheduler.abort("left").finish_reason == "abort"
    steps.scheduler.check_idle()


@pytest.mark.parametrize("credit", [0, -3])
def test_credit_has_a_bound(credit):
    delta = Scheduler(small_config()).add(request("x", 4, 4, credit=credit))
    assert (
        isinstance(delta.facts.error, InvalidRequest)
        and "credit_tokens" in delta.facts.error.message
    )


def test_credit_travels_with_the_submit():
    ids = np.arange(3, dtype=np.int32)
    submit = Submit("r", 1, "label", ids, SamplingParams(), credit_tokens=77)
    assert Submit.decode(submit.encode()).credit_tokens == 77


@settings(max_examples=60)
@given(
    data=st.data(),
    lengths=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 30)),
        min_size=1,
        max_size=8,
    ),
    num_blocks=st.sampled_from([16, 24, 64]),
    num_host_blocks=st.sampled_from([0, 24]),
)
def test_nobody_runs_beyond_its_credit_and_everybody_ends(
    data, lengths, num_blocks, num_host_blocks
):
    """Also where the cache is full: a paused request is the first to give way, and comes back."""
    steps = Steps(num_blocks=num_blocks, num_host_blocks=num_host_blocks, max_model_len=120)
    ends: dict[str, int] = {}
    for i, (num_prompt, max_tokens, credit) in enumerate(lengths):
        assert steps.scheduler.add(request(f"r{i}", num_prompt, max_tokens, credit)) is None
        ends[f"r{i}"] = credit
    for _ in range(data.draw(st.integers(0, 60))):
        steps.run_one()
        if data.draw(st.booleans()):
            key = data.draw(st.sampled_from(sorted(ends)))
            ends[key] += data.draw(st.integers(0, 20))
            steps.scheduler.grant(key, ends[key])
        steps.scheduler.check()
        assert all(len(steps.tokens[key]) <= end for key, end in ends.items())
    for key in ends:
        steps.scheduler.grant(key, MANY)
    steps.run()
    assert {k: len(t) for k, t in steps.tokens.items()} == {
        f"r{i}": max_tokens for i, (_, max_tokens, _) in enumerate(lengths)
    }
    assert set(steps.ended.values()) == {"length"}
    steps.scheduler.check_idle()
