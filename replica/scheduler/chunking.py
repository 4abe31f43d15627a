"""The prefill budget of a step, which bounds the time between two tokens of a decoding row.

```
 all but prefill_first     | decode + prefill | decode + prefill | decode
                            └ max_prefill_ms ┘
 prefill_first             | prefill | prefill | decode + prefill | decode
                            └──── max_prefill_ms, together ──────┘
```

With `max_prefill_ms`, the time between two tokens of a row is at most a decode step plus `max_prefill_ms`, for prompts
of any length, as far as the measured speed (`StepSpeed`) predicts the next step. Without it, that time is the duration
of a step with `max_batch_tokens` tokens. Under `prefill_first` it is the duration of all steps that compute the started
prompts, because no new prompt starts before the decoding rows have had a step.

While no row decodes, only `max_batch_tokens` bounds a chunk.
"""

from __future__ import annotations

import math

from quire.replica.config import EngineConfig
from quire.replica.scheduler.order import POLICIES
from quire.replica.scheduler.speed import StepSpeed

# A step computes at least this much prefill, even if it is slow, so that every prompt ends. Also the size of the first
# chunk, from which the speed is measured.
MIN_CHUNK_TOKENS = 16
# After this many steps in a row in which prefill was cut for lack of time, one step has no prefill, to measure the time
# of decoding alone. Without this measurement, a growth of that time would be counted as cost of the prefill tokens.
_MAX_CUT_STEPS = 32


class StepBudget:
    """The rest of the prefill budget in the step being planned.

    Parameters
    ----------
    speed
        Estimates the duration of chunks.
    tokens
        Number of prefill tokens that fit into the step in addition to the decoding rows.
    seconds
        Time for these tokens; infinite if no decoding row waits.
    block_size
        Tokens of a KV block. A chunk that is cut because of the time ends at the end of a block; the time left goes to
        the next prefill.
    """

    def __init__(self, speed: StepSpeed, tokens: int, seconds: float, block_size: int):
        self._speed = speed
        self._block_size = block_size
        self.tokens = tokens
        self.seconds = seconds
        # Prefill tokens granted in this step, and the number of keys that they read (for each token, those up to it).
        self.num_tokens = 0
        self.num_keys = 0
        # Whether some prefill got fewer tokens because of the time.
        self.cut = False

    @property
    def is_spent(self) -> bool:
        """Whether no other prefill can start in this step."""
        if self.tokens <= 0 or not self.num_tokens or self.seconds == math.inf:
            return self.tokens <= 0
        return self._speed.tokens_within(self.seconds, 0) < MIN_CHUNK_TOKENS

    def grant(self, start: int, missing: int) -> int:
        """Number of a prefill's `missing` tokens, from position `start`, that this step may compute."""
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
        """Subtract the cost of `count` tokens from position `start`, which are now part of the step."""
        self.tokens -= count
        self.seconds -= self._speed.prefill_s(start, count)
        self.num_tokens += count
        self.num_keys += count * start + count * (count + 1) // 2


class Chunking:
    """The prefill budget of each step.

    Parameters
    ----------
    config
        Its fields `scheduler`, `max_batch_tokens`, `max_prefill_ms` and `block_size` are used.
    speed
        The measured speed; `observe` updates it.
    """

    def __init__(self, config: EngineConfig, speed: StepSpeed):
        self._speed = speed
        self._block_size = config.block_size
        self._max_batch_tokens = config.max_batch_tokens
        self.prefill_first = POLICIES[config.scheduler].prefill_first
        self.reconfigure(config)
        # Total duration of the steps that have left out the decoding rows since the last step with them.
        self._waited_s = 0.0
        # Number of steps in a row in which prefill was cut for lack of time.
        self._num_cut = 0

    def reconfigure(self, config: EngineConfig) -> None:
        """Apply another `max_prefill_ms`."""
        max_ms = config.max_prefill_ms
        self._max_prefill_s = math.inf if max_ms is None else max_ms / 1000

    def leaves_out_decodes(self, num_decodes: int, start: int, missing: int) -> bool:
        """Whether the next step under `prefill_first` contains prefills only.

        It does if the step cannot hold all decoding rows and the rest of the started prompts, and if `max_prefill_ms`
        allows more prefill tokens than would fit into the step together with the decoding rows.

        Parameters
        ----------
        num_decodes
            Number of decoding rows.
        start
            Position of the next token of the first running prefill.
        missing
            Number of tokens that the running prefills still have to compute.
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
            Number of rows that decode in this step.
        left_out
            Whether decoding rows are left out of this step.
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
        """Measure a step with this budget, which has ended at `now_s`."""
        self._speed.observe(
            budget.num_tokens, num_decodes, duration_s, budget.num_keys, end_s=now_s
        )
        self._waited_s = self._waited_s + duration_s if left_out else 0.0
        if num_decodes:
            self._num_cut = self._num_cut + 1 if budget.cut else 0
