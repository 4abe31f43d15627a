"""The application with a device whose steps take 20 ms and compute nothing, to measure everything else.

Scheduler, cache, loop, actor, frames, routers and proxies are the product's; only the runner is replaced. Its steps
follow each other without gaps, as on a GPU with a fast host, and their tokens repeat `TEXT`. `import_path:
tests.perf.cluster.paced_replica:build` takes the arguments of `quire.cluster.app:build`.

With another `Pace`, prefill and copies take time as well::

    offload            [ saves ][ restores .............. ]      one copy after the other
    compute   step N ]─────┴▸[ N + 1 overwrites saved  ]──┴▸[ N + 2 reads what was restored ]
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from ray.serve import Application

from quire.cluster.app import application
from quire.cluster.config.app_config import AppConfig
from quire.replica.checkpoint.checkpoint import resolve_checkpoint
from quire.replica.core.step_plan import CopiesDone, StepPlan, StepResult
from quire.replica.engine import Engine
from quire.replica.loop import StepRunner
from quire.replica.serving.actor import Replica
from quire.router.text.tokenizer import TextTokenizer

STEP_S = 0.02
# Each token ends with a whole character, so each token is an event.
TEXT = "A quire is a gathering of pages, and many voices that sing the same words at one time. "


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of the device.

    Attributes
    ----------
    step_s
        A step without prefill, and the least time of any step.
    prefill_token_s
        Each prefill token of a step, in addition to `step_s`.
    copied_block_s
        A block that is copied to or from the host tier.
    """

    step_s: float = STEP_S
    prefill_token_s: float = 0.0
    copied_block_s: float = 0.0


class _Launched(NamedTuple):
    plan: StepPlan
    started_s: float  # at which the device begins the step
    ends_s: float


class _Restore(NamedTuple):
    step: int
    num_blocks: int
    seconds: float
    ends_s: float


class PacedCopies:
    """The device's copies between the tiers: one after the other, while steps run.

    Parameters
    ----------
    block_size
        Tokens of a block.
    """

    def __init__(self, block_size: int, block_s: float):
        self._block_size = block_size
        self._block_s = block_s
        self._free_s = 0.0  # end of the last copy
        # Device block to the end of its save, which may be over.
        self._saved_s: dict[int, float] = {}
        self._restoring: deque[_Restore] = deque()
        self._newest_step = 0

    def launch(self, plan: StepPlan, now_s: float) -> float:
        """Queue the copies of a step; returns when those that the step waits for have ended."""
        self._newest_step = plan.step
        free_s = max(self._free_s, now_s)
        ready_s = now_s
        if len(plan.saves) or self._saved_s:
            written = plan.written_blocks(self._block_size)
            saved = plan.saves[:, 0]
            is_first = np.isin(saved, written)
            for block in (*saved[is_first].tolist(), *saved[~is_first].tolist()):
                free_s += self._block_s
                self._saved_s[block] = free_s
            for block in written.tolist():
                ready_s = max(ready_s, self._saved_s.pop(block, 0.0))
        if len(plan.restores):
            seconds = len(plan.restores) * self._block_s
            free_s += seconds
            self._restoring.append(_Restore(plan.step, len(plan.restores), seconds, free_s))
        if plan.uses_restores and self._restoring:
            ready_s = max(ready_s, self._restoring[-1].ends_s)
        self._free_s = free_s
        return ready_s

    def take_done(self, now_s: float) -> CopiesDone:
        """Return the restores that have ended. Saves count as ended with their step."""
        ended = []
        while self._restoring and self._restoring[0].ends_s <= now_s:
            restore = self._restoring.popleft()
            ended.append((restore.num_blocks, restore.seconds))
        restored_step = self._restoring[0].step - 1 if self._restoring else self._newest_step
        return CopiesDone(tuple(ended), restored_step, are_all=not self._restoring)


class PacedRunner:
    """A `StepRunner` whose steps take the times of a `Pace`.

    Parameters
    ----------
    text_ids
        [n] tokens that the answers repeat.
    block_size
        Tokens of a block.
    clock
        Monotonic seconds.
    """

    num_compiles = 0

    def __init__(
        self,
        text_ids: np.ndarray,
        block_size: int,
        pace: Pace,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._text_ids = text_ids.astype(np.int64)
        self._pace = pace
        self._clock = clock
        self._copies = PacedCopies(block_size, pace.copied_block_s)
        self._free_s = 0.0  # when the device has finished all launched steps

    def launch(self, plan: StepPlan) -> _Launched:
        now_s = self._clock()
        started_s = max(self._copies.launch(plan, now_s), self._free_s)
        num_prefill_tokens = plan.num_tokens - plan.num_decode_rows
        step_s = self._pace.step_s + num_prefill_tokens * self._pace.prefill_token_s
        self._free_s = started_s + step_s
        return _Launched(plan, started_s, self._free_s)

    def collect(self, in_flight: _Launched) -> StepResult:
        time.sleep(max(0.0, in_flight.ends_s - self._clock()))
        return self.result(in_flight)

    def result(self, in_flight: _Launched) -> StepResult:
        """The result of a step that has ended."""
        positions = in_flight.plan.sampling.position
        tokens = self._text_ids[positions % len(self._text_ids)]
        copies = self._copies.take_done(self._clock())
        return StepResult(tokens, in_flight.ends_s - in_flight.started_s, copies=copies)

    def take_copies(self) -> CopiesDone:
        return self._copies.take_done(self._clock())

    def use_idle(self) -> bool:
        return False

    def close(self) -> None:
        """See `StepRunner.close`; there are no threads to end."""

    def telemetry(self) -> dict[str, object]:
        return {}


class PacedEngine(Engine):
    """An engine with the paced device. The model is loaded but not used."""

    pace = Pace()

    def _equip(self, runner: StepRunner) -> tuple[StepRunner, Callable[[], float]]:
        tokenizer = TextTokenizer.load(resolve_checkpoint("embedded", None, weights=False))
        text_ids = tokenizer.encode(TEXT, add_special_tokens=False)
        return PacedRunner(text_ids, self.config.block_size, self.pace), time.monotonic


class PacedReplica(Replica):
    """A replica with a paced engine."""

    engine_class = PacedEngine


def build(args: dict[str, Any]) -> Application:
    """The application of `quire.cluster.app` with paced replicas."""
    return application(AppConfig.from_args(args), PacedReplica)
