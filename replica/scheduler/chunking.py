"""How much prefill a step may hold, so that whoever decodes gets the next token in time.

```
 all but prefill_first     | decode + prefill | decode + prefill | decode
                            └ max_prefill_ms ┘
 prefill_first             | prefill | prefill | decode + prefill | decode
                            └──── max_prefill_ms, together ──────┘
```

With `max_prefill_ms` the time between two tokens of a row is at most a decode step and `max_prefill_ms`, as far as
the measured speed (`StepSpeed`) foretells the next step, however long the prompts are that others send. Without,
it is that of a step of `max_batch_tokens`; under `prefill_first` that of the steps that compute all started prompts,
since no new one starts before the decoding rows have had their turn.

While nobody decodes a chunk is bounded by `max_batch_tokens` alone.
"""

from __future__ import annotations

import math

from quire.replica.config import EngineConfig
from quire.replica.scheduler.order import POLICIES
from quire.replica.scheduler.speed import StepSpeed

# A step takes this much prefill if there is any, were it ever so slow: a prompt always ends. Also the first chunk
# while no speed is known, which then is.
MIN_CHUNK_TOKENS = 16
# After as many steps in a row that were short of time, one goes without prefill: the time of decoding alone may have
# grown since it was measured last, and what it has grown by is taken for the cost of the prefill tokens.
_MAX_CUT_STEPS = 32


class StepBudget:
    """What is left for prefill in the step being planned.

    Parameters
    ----------
    speed
        What a chunk costs.
    tokens
        Prefill tokens that fit beside the decoding rows.
    seconds
        That they may take; infinite when nobody waits for them.
    block_size
        A chunk that is cut short ends with a block: the bound in seconds is an estimate, and what the cut
        leaves goes to the next prefill.
    """

    def __init__(self, speed: StepSpeed, tokens: int, seconds: float, block_size: int):
        self._speed = speed
        self._block_size = block_size
        self.tokens = tokens
        self.seconds = seconds
        self.num_tokens = 0  # granted
        self.num_keys = 0  # that they read, see `StepSpeed`
        self.cut = False  # seconds were short of what a prefill could have had

    @property
    def is_spent(self) -> bool:
        """Whether no other prefill can start in this step."""
        if self.tokens <= 0 or not self.num_tokens or self.seconds == math.inf:
            return self.tokens <= 0
        return self._speed.tokens_within(self.seconds, 0) < MIN_CHUNK_TOKENS

    def grant(self, start: int, missing: int) -> int:
        """How many of a prefill's `missing` tokens, at positions from `start` on, this step may compute."""
        count = min(missing, self.tokens)
        if self.seconds == math.inf or count <= 0:
            return max(0, count)
        within = self._speed.tokens_within(self.seconds, start)
        if within >= count:
            return count
        self.cut = True
        whole = (start + within) // self._block_size * self._block_size - start
        within = whole if whole > 0 else within
        if within < MIN_CHUNK_TOKENS:
            within = 0 if self.num_tokens else MIN_CHUNK_TOKENS
        return min(count, within)

    def spend(self, start: int, count: int) -> None:
        """So many tokens from `start` on are in the step."""
        self.tokens -= count
        self.seconds -= self._speed.prefill_s(start, count)
        self.num_tokens += count
        self.num_keys += count * start + count * (count + 1) // 2


class Chunking:
    """The prefill budget of each step.

    Parameters
    ----------
    config
        `scheduler`, `max_batch_tokens`, `max_prefill_ms`.
    speed
        As measured up to now.
    """

    def __init__(self, config: EngineConfig, speed: StepSpeed):
        self._speed = speed
        self._block_size = config.block_size
        self._max_batch_tokens = config.max_batch_tokens
        self.prefill_first = POLICIES[config.scheduler].prefill_first
        self.reconfigure(config)
        self._waited_s = 0.0  # since the decoding rows were in a step, if they were left out
        self._num_cut = 0  # steps in a row that were short of time

    def reconfigure(self, config: EngineConfig) -> None:
        """Take on another `max_prefill_ms`."""
        max_ms = config.max_prefill_ms
        self._max_prefill_s = math.inf if max_ms is None else max_ms / 1000

    def leaves_out_decodes(self, num_decodes: int, start: int, missing: int) -> bool:
        """Whether the scheduler, being `prefill_first`, gives the next step to the prefills alone.

        It does when the step does not hold both the decoding rows, which go together, and the rest of the
        started prompts, and `max_prefill_ms` lets the prefills have more than what is left beside the rows.

        Parameters
        ----------
        num_decodes
            Rows that decode.
        start
            Where the first of the running prefills stands.
        missing
            Tokens that the running prefills have still to compute.
        """
        beside = self._max_batch_tokens - num_decodes
        if not num_decodes or missing <= beside:
            return False
        if self._max_prefill_s == math.inf:
            return True
        return self._speed.tokens_within(self._max_prefill_s - self._waited_s, start) > beside

    def budget(self, num_decodes: int, *, left_out: bool = False) -> StepBudget:
        """The prefill budget of a step.

        Parameters
        ----------
        num_decodes
            Rows that decode in it.
        left_out
            Others decode, but not in this step.
        """
        tokens, seconds = self._max_batch_tokens - num_decodes, math.inf
        if num_decodes or left_out:
            seconds = self._max_prefill_s - self._waited_s
            if self._num_cut >= _MAX_CUT_STEPS and num_decodes:
                tokens = 0
        return StepBudget(self._speed, tokens, seconds, self._block_size)

    def observe(
        self, budget: StepBudget, num_decodes: int, duration_s: float, left_out: bool, now_s: float
    ) -> None:
        """A step with this budget has run, until now."""
        self._speed.observe(
            budget.num_tokens, num_decodes, duration_s, budget.num_keys, end_s=now_s
        )
        self._waited_s = self._waited_s + duration_s if left_out else 0.0
        if num_decodes:
            self._num_cut = self._num_cut + 1 if budget.cut else 0
