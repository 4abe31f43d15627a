"""Each live request is in exactly one stage, and only the declared transitions happen."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from small_config import small_config

from quire.protos.sampling_params import SamplingParams
from quire.replica.config import SchedulerName
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepResult
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.scheduler.order import POLICIES
from quire.replica.scheduler.request_book import TRANSITIONS, RequestBook, Stage
from quire.replica.scheduler.scheduler import Scheduler


def submit(scheduler: Scheduler, key: str, num_prompt: int = 20, **fields: object) -> Request:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    request = Request(key, np.arange(10, 10 + num_prompt), params, **fields)
    assert scheduler.add(request) is None
    return request


def step(scheduler: Scheduler) -> None:
    plan = scheduler.plan(0.0)
    tokens = np.full(len(plan.sampling.token_index), 7)
    scheduler.commit(plan, StepResult(tokens, 0.01), 0.0)
    scheduler.check()


def test_a_request_passes_through_the_stages_of_its_life():
    scheduler = Scheduler(small_config(max_batch_tokens=16))
    stage = scheduler.book.stage
    parent = submit(scheduler, "parent")
    fork = submit(scheduler, "fork", fork_of="parent")
    alone = submit(scheduler, "alone", alone=True)
    assert [stage(r) for r in (parent, fork, alone)] == [
        Stage.WAITING,
        Stage.FORK,
        Stage.ISOLATED,
    ]
    scheduler.pause("alone")
    assert stage(alone) is Stage.PAUSED
    step(scheduler)  # 16 of the 20 tokens
    assert stage(parent) is Stage.PREFILLING
    step(scheduler)
    assert (stage(parent), stage(fork)) == (Stage.DECODING, Stage.WAITING)
    scheduler.book.preempt(parent)
    assert stage(parent) is Stage.RETURNING
    scheduler.pause("parent")
    assert stage(parent) is Stage.PAUSED
    scheduler.resume("parent")
    scheduler.resume("alone")
    assert (stage(parent), stage(alone)) == (Stage.RETURNING, Stage.WAITING)
    scheduler.check()
    assert len(scheduler.abort_all()) == 3
    scheduler.check_idle()


def test_transitions_that_are_not_declared_are_errors():
    for before in Stage:
        for after in set(Stage) - TRANSITIONS[before]:
            scheduler = Scheduler(small_config())
            request = submit(scheduler, "a")
            scheduler.book._stages["a"] = before
            with pytest.raises(ValueError, match=f"from {before} to {after}"):
                scheduler.book._move(request, after)


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage is not Stage.WAITING])
def test_a_request_that_is_not_where_its_stage_says_is_found(stage):
    scheduler = Scheduler(small_config())
    submit(scheduler, "a")
    scheduler.book.check()
    scheduler.book._stages["a"] = stage
    with pytest.raises(IntegrityError):
        scheduler.book.check()


def test_every_scheduler_that_can_be_configured_has_a_policy():
    assert tuple(POLICIES) == get_args(SchedulerName)
    for name in get_args(SchedulerName):
        assert isinstance(Scheduler(small_config(scheduler=name)).book, RequestBook)
