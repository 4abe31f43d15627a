"""A step that failed may not have brought its differences: those of rows that are not in it are told again."""

from __future__ import annotations

import numpy as np
from small_config import small_config

from quire.protos.errors import EngineError
from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepResult
from quire.replica.scheduler.scheduler import Scheduler

BLOCK_SIZE = 8


class Device:
    """The tables that differences make."""

    def __init__(self, scheduler: Scheduler):
        tables = scheduler.rows.block_tables
        self.tables = np.full(tables.shape, -1, np.int32)

    def take(self, plan) -> None:
        places, blocks = plan.changes.flat(self.tables[0].size)
        self.tables.reshape(-1)[places] = blocks

    def check(self, plan) -> None:
        """The step's rows see what the plan says."""
        for i, row in enumerate(plan.rows.tolist()):
            end = -(-int(plan.kv_len[i]) // BLOCK_SIZE)
            seen = self.tables[:, row, :end].tolist()
            assert seen == plan.block_tables.gather()[:, i, :end].tolist(), f"row {row}"


def submit(scheduler: Scheduler, key: str, max_tokens: int = 40) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    assert scheduler.add(Request(key, list(range(10, 19)), params)) is None


def commit(scheduler: Scheduler, plan) -> None:
    tokens = np.full(len(plan.sampling.token_index), 7)
    scheduler.commit(plan, StepResult(tokens, 0.01), 0.0)


def test_a_block_that_was_exchanged_is_told_again_when_the_step_that_told_it_failed():
    """Two requests generate the same: the second's block gives way to the first's. The plan that tells it is of a step
    without that row, and fails."""
    scheduler = Scheduler(small_config(block_size=BLOCK_SIZE, num_blocks=32))
    device = Device(scheduler)
    for key in "ab":
        submit(scheduler, key)
    row = None
    while True:
        before = scheduler.rows.block_tables.copy()
        plan = scheduler.plan(0.0)
        device.take(plan)
        device.check(plan)
        row = scheduler.book.requests["b"].row
        exchanged = row >= 0 and (before[:, row] > 0) & (
            before[:, row] != scheduler.rows.block_tables[:, row]
        )
        commit(scheduler, plan)
        if np.any(exchanged):
            break
    scheduler.pause("b")
    lost = scheduler.plan(0.0)
    assert row not in lost.rows.tolist()
    width = scheduler.rows.block_tables.shape[2]
    told = lost.changes.flat(scheduler.rows.block_tables[0].size)[0] // width
    assert row in told.tolist(), "this plan brings what is lost"
    ended = scheduler.fail_step(lost, EngineError("the device is gone"))
    assert [delta.key for delta in ended] == ["a"]
    scheduler.resume("b")
    num_checked = 0
    while (plan := scheduler.plan(0.0)) is not None:
        device.take(plan)
        device.check(plan)
        num_checked += 1
        commit(scheduler, plan)
    assert num_checked > 8


def test_how_tokens_are_chosen_is_told_again_too():
    """Rows of a plan that was lost with all that it claimed."""
    scheduler = Scheduler(small_config(block_size=BLOCK_SIZE, num_blocks=32))
    submit(scheduler, "a")
    plan = scheduler.plan(0.0)
    row = scheduler.book.requests["a"].row
    commit(scheduler, plan)
    submit(scheduler, "b")
    scheduler.pause("a")
    lost = scheduler.plan(0.0)
    scheduler.fail_step(lost, EngineError("the device is gone"))
    scheduler.resume("a")
    plan = scheduler.plan(0.0)
    assert row in plan.changes.claimed.tolist()
