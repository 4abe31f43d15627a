"""Copies between device and node pool that end after their step: until then no other engine gets their slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from small_config import small_config

from quire.protos.errors import EngineError
from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Phase, Request
from quire.replica.core.step_plan import CopiesDone, StepPlan, StepResult
from quire.replica.node_pool.node_pool import NodePool, open_node_pool
from quire.replica.node_pool.pool_layout import PoolLayout
from quire.replica.scheduler.scheduler import Scheduler

NUM_SLOTS = 16
CONFIG = small_config(num_blocks=8, num_host_blocks=NUM_SLOTS)


class Node:
    """An engine's scheduler, and another engine of the node that takes every slot that it gets."""

    def __init__(self, folder: Path, **changes: object):
        self._folder = folder
        self._rival = self._join()
        config = dataclasses.replace(CONFIG, **changes)
        self.scheduler = Scheduler(config, node_pool=self._join())

    def _join(self) -> NodePool:
        return open_node_pool("node", PoolLayout(NUM_SLOTS, 64), folder=self._folder)

    def close(self) -> None:
        self.scheduler.memory.host.pool_blocks.pool.close()
        self._rival.check()
        self._rival.close()

    def rival_gets(self) -> set[int]:
        """The slots that it can have now. It gives them back, so that they are free."""
        self.scheduler.memory.host.begin_plan()  # nothing stays pinned
        got: set[int] = set()
        while (slots := self._rival.claim(1)) is not None:
            got.update(slots)
        self._rival.release(sorted(got))
        self.scheduler.check()
        return got

    def submit(self, key: str, prompt: range, max_tokens: int = 40) -> Request:
        request = Request(key, list(prompt), SamplingParams(max_tokens=max_tokens))
        assert self.scheduler.add(request) is None
        return request

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan(0.0)
        assert plan is not None
        return plan

    def commit(self, plan: StepPlan, copies: CopiesDone) -> None:
        tokens = np.full(len(plan.sampling.token_index), 7)
        self.scheduler.commit(plan, StepResult(tokens, 0.01, copies=copies), 0.0)
        self.scheduler.check()

    def until(self, is_so: Callable[[], bool]) -> StepPlan:
        """Steps until something is so; copies end with their step. Returns the plan that made it so."""
        while True:
            plan = self.plan()
            if is_so():
                return plan
            self.commit(plan, CopiesDone())

    def offload_one(self) -> tuple[Request, StepPlan]:
        """A request that is preempted, and the plan with the copies of its blocks."""
        first, *_ = [self.submit(k, range(100 * i, 100 * i + 15)) for i, k in enumerate("abc", 1)]
        return first, self.until(lambda: first.phase is Phase.OFFLOADED)


@pytest.fixture
def node(tmp_path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def unsaved(plan: StepPlan) -> CopiesDone:
    """As of an engine whose saves have not ended."""
    return CopiesDone(restored_step=plan.step, saved=(), are_all=False)


def test_a_slot_that_is_read_after_its_step_is_not_for_others(node):
    offloaded, plan = node.offload_one()
    node.commit(plan, CopiesDone())
    plan = node.until(lambda: offloaded.phase is not Phase.OFFLOADED)
    read = set(plan.restores[:, 0].tolist())
    node.commit(plan, CopiesDone(restored_step=plan.step - 1, saved=(), are_all=False))
    assert read and not read & node.rival_gets()
    node.scheduler.note_copies(CopiesDone(restored_step=plan.step, saved=(), are_all=False))
    assert read <= node.rival_gets()


def test_a_slot_that_is_written_after_its_step_is_not_for_others(node):
    """The client has left meanwhile, and the cache was cleared."""
    offloaded, plan = node.offload_one()
    written = set(plan.saves[:, 1].tolist())
    node.commit(plan, unsaved(plan))
    node.scheduler.abort(offloaded.key)
    node.scheduler.clear_cache()
    assert written and not written & node.rival_gets()
    node.scheduler.note_copies(CopiesDone(restored_step=plan.step, saved=tuple(written)))
    assert written <= node.rival_gets()


def test_a_slot_that_a_failed_step_may_write_waits_for_all_copies(node):
    _, plan = node.offload_one()
    written = set(plan.saves[:, 1].tolist())
    node.scheduler.fail_step(plan, EngineError("the device is gone"))
    node.scheduler.abort_all()
    assert not written & node.rival_gets()
    node.scheduler.note_copies(unsaved(plan))
    assert not written & node.rival_gets()
    node.scheduler.note_copies(CopiesDone(saved=()))
    assert written <= node.rival_gets()


def test_copies_that_a_wrong_result_tells_of_have_ended(node):
    """Its tokens are refused, and the step fails."""
    _, plan = node.offload_one()
    written = tuple(plan.saves[:, 1].tolist())
    node.commit(plan, unsaved(plan))
    later = node.plan()
    tokens = np.full(len(later.sampling.token_index), CONFIG.vocab_size)
    copies = CopiesDone(restored_step=later.step, saved=written)
    node.scheduler.commit(later, StepResult(tokens, 0.01, copies=copies), 0.0)
    node.scheduler.abort_all()
    assert set(written) <= node.rival_gets()
