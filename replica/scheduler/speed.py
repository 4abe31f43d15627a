"""The measured speeds of this engine: of its steps, and of copies from the host tier (host memory).

The router's cost function uses the speed of steps, which also bounds prefill chunks.

Attention makes later tokens of a prompt slower, so the time of a chunk is fitted as

    seconds = a * tokens + b * keys        keys: for each token the number of keys up to it, summed

On one core of a CPU a token of the embedded model takes 0.16 to 0.25 ms at the start of a prompt, and 0.5 to 0.65 ms
after 4,000 tokens. A single number would be wrong by a factor of three. If no layer sees further than a window, the fit
gives `b` near 0.

The scheduler chooses between copying blocks back from the host tier and computing them again:

```
 seconds    copy back   ___....----      linear in the number of blocks, at the speed of the fastest recent copy
            compute     ____........     attention makes later tokens slower: `StepSpeed.prefill_s`
```

A copy that had to wait for other copies does not show the bandwidth, so the fastest of the last few copies counts. A
choice to compute yields no new measurement of a copy. So each such choice lowers the estimated time of a copy a little,
until a copy is tried again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

# Copies that are remembered, and the least number of them that tells the speed.
_NUM_MEASURED = 8
_LEAST_MEASURED = 4
# Each choice to compute multiplies the estimated time of a copy by this factor.
_DOUBT = 0.9


# A step of no tokens takes at most as long as this many prefill tokens: on a GPU about 300, on a CPU 10 to 100. This
# bound, and that of the tokens measured, are for a measurement that other work on the machine has disturbed.
_MAX_OVERHEAD_TOKENS = 1024.0


def overhead_tokens(seconds: Mapping[int, float]) -> float:
    """Return how many prefill tokens take as long as a step takes besides its tokens.

    Parameters
    ----------
    seconds
        Of a step with one token, and of a step with one prompt of more tokens, by the tokens. With fewer entries the
        result is 0.
    """
    if len(seconds) < 2:
        return 0.0
    (few, few_s), *_, (many, many_s) = sorted(seconds.items())
    # Other work on the machine has disturbed the measurement.
    if many_s <= few_s:
        return 0.0
    # seconds = a * (tokens + overhead)
    overhead = (many * few_s - few * many_s) / (many_s - few_s)
    return min(max(0.0, overhead), many, _MAX_OVERHEAD_TOKENS)


class StepSpeed:
    """Seconds of a decode step and of a prefill token.

    `decode_step_s` averages the steps without prefill. The additional time of a step with prefill is the cost of its
    prefill tokens. All averages are exponential; 0 means that the value is not known yet.

    Parameters
    ----------
    overhead_tokens
        A step without decodes counts as this many tokens more than it has. Otherwise a prompt of 8 tokens, which takes
        as long as a step of a GPU takes at least, would make a prompt of 80,000 seem to take minutes.
    """

    # Share of the averages that one step replaces.
    WEIGHT = 0.1
    # Time without prefill after which the prefill average has lost most of its weight, because the load on the machine
    # may have changed.
    HORIZON_S = 10.0
    # When the first prefill after a pause is slower than the average, the average keeps the weight of this many tokens.
    # Other load on the machine can only make a step slower, so a fast step proves a speed and a slow step only hints at
    # one. Each replica of an idle cluster has such a first step, and a router avoids a replica that seems slow.
    KEPT_TOKENS = 1000.0
    # Share of the fit's sums that one step replaces. It is below `WEIGHT`, because the fit needs steps at different
    # positions.
    FIT_WEIGHT = 0.05
    # A token at the start of a prompt costs at least this share of the average token: otherwise noise could make `a` 0.
    _MIN_SHARE = 0.25
    # Relative spread of tokens and keys below which the steps cannot separate `a` from `b`.
    _MIN_SPREAD = 1e-3

    def __init__(self, overhead_tokens: float = 0.0) -> None:
        self.overhead_tokens = overhead_tokens
        self.decode_step_s = 0.0
        # Of the warm-up: a step of one token, and a token of its largest prompt. They count while nothing is measured.
        self._warm_step_s = self._warm_token_s = 0.0
        # Number of steps with both decodes and prefill since the last step without prefill.
        self._steps_since_decode = 0
        self._prefill_s = 0.0
        self._prefill_tokens = 0.0
        # End of the last step with prefill.
        self._prefill_end_s = -math.inf
        # Weighted sums for the fit: tokens * tokens, tokens * keys, keys * keys, tokens * seconds, keys * seconds.
        self._tt = self._tk = self._kk = self._ts = self._ks = 0.0
        # The fitted a and b.
        self._per_token_s = 0.0
        self._per_key_s = 0.0

    def begin_with(self, warm_step_s: Mapping[int, float]) -> None:
        """Take in the seconds of the warm-up's steps of one prompt, by their tokens (`DeviceSteps.run_largest`)."""
        self.overhead_tokens = overhead_tokens(warm_step_s)
        if warm_step_s:
            most = max(warm_step_s)
            self._warm_step_s = warm_step_s[min(warm_step_s)]
            self._warm_token_s = warm_step_s[most] / most

    def predicted_step_s(self, num_prefill_tokens: int) -> float:
        """Seconds of a step with so many prefill tokens, and with decodes; 0 if nothing was ever measured."""
        decode_s = self.decode_step_s or self._warm_step_s
        return decode_s + num_prefill_tokens * (self.prefill_s_per_token or self._warm_token_s)

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds of an average prefill token."""
        return self._prefill_s / self._prefill_tokens if self._prefill_tokens else 0.0

    def prefill_s(self, start: int, num_tokens: int) -> float:
        """Seconds of `num_tokens` prefill tokens that begin at position `start`; 0 while the speed is not known."""
        num_keys = num_tokens * start + num_tokens * (num_tokens + 1) / 2
        return self._per_token_s * num_tokens + self._per_key_s * num_keys

    def tokens_within(self, seconds: float, start: int) -> int:
        """Number of prefill tokens from position `start` that take at most `seconds`; 0 while the speed is unknown."""
        if self._per_token_s <= 0 or seconds <= 0:
            return 0
        # Solve b/2 n^2 + (a + b (start + 1/2)) n = seconds for n, in the form that works for b = 0.
        first_s = self._per_token_s + self._per_key_s * (start + 0.5)
        root = math.sqrt(first_s * first_s + 2 * self._per_key_s * seconds)
        return int(2 * seconds / (first_s + root))

    def observe(
        self,
        num_prefill_tokens: int,
        num_decode_rows: int,
        duration_s: float,
        num_prefill_keys: int = 0,
        *,
        end_s: float = 0.0,
    ) -> None:
        """Measure one step.

        Parameters
        ----------
        num_prefill_keys
            For each prefill token the number of keys up to it, summed.
        end_s
            The end of the step on a monotonic clock.
        """
        if num_prefill_tokens == 0:
            # After many steps with prefill the average is old, so it gets less weight.
            keep = (1 - self.WEIGHT) ** (1 + self._steps_since_decode)
            keep = keep if self.decode_step_s else 0.0
            self.decode_step_s = keep * self.decode_step_s + (1 - keep) * duration_s
            self._steps_since_decode = 0
            return
        if num_decode_rows:
            self._steps_since_decode += 1
        decode_s = self.decode_step_s if num_decode_rows else 0.0
        prefill_s = max(0.0, duration_s - decode_s)
        pause_s = max(0.0, end_s - duration_s - self._prefill_end_s)
        self._prefill_end_s = end_s
        keep = math.exp(-pause_s / self.HORIZON_S)
        # The time of a decode step, subtracted above, contains the overhead.
        counted_tokens = num_prefill_tokens + (0.0 if num_decode_rows else self.overhead_tokens)
        if prefill_s > counted_tokens * self.prefill_s_per_token > 0:
            keep = max(keep, min(1.0, self.KEPT_TOKENS / self._prefill_tokens))
        keep *= 1 - self.WEIGHT
        fit_keep = 1 - self.FIT_WEIGHT
        # In a step with decodes, the time of the prefill is an estimate, so such a step does not prove a speed.
        if not num_decode_rows and self._prefill_tokens:
            odds = self._odds(num_prefill_tokens, num_prefill_keys, prefill_s)
            keep = min(keep, odds * counted_tokens / self._prefill_tokens)
            fit_keep = min(fit_keep, odds * num_prefill_tokens**2 / self._tt)
        self._prefill_s = keep * self._prefill_s + prefill_s
        self._prefill_tokens = keep * self._prefill_tokens + counted_tokens
        self._fit(num_prefill_tokens, num_prefill_keys, prefill_s, fit_keep)

    def _odds(self, tokens: int, keys: int, seconds: float) -> float:
        """The weight of the average relative to a step that took less than half of the estimate; otherwise infinite.

        If the step took r times that half, the average gets the weight r and the step 1 - r. A replica may compute its
        first prompts while it shares a core with other replicas that do the same. The first prompt that it computes
        alone is then far faster and replaces those measurements. Smaller differences replace nothing.
        """
        half_s = (self._per_token_s * tokens + self._per_key_s * keys) / 2
        return seconds / (half_s - seconds) if seconds < half_s else math.inf

    def _fit(self, tokens: int, keys: int, seconds: float, keep: float) -> None:
        self._tt = keep * self._tt + tokens * tokens
        self._tk = keep * self._tk + tokens * keys
        self._kk = keep * self._kk + keys * keys
        self._ts = keep * self._ts + tokens * seconds
        self._ks = keep * self._ks + keys * seconds
        spread = self._tt * self._kk - self._tk * self._tk
        if spread > self._MIN_SPREAD * self._tt * self._kk:
            self._per_key_s = max(0.0, (self._tt * self._ks - self._tk * self._ts) / spread)
        # The least-squares a for this b.
        per_token_s = (self._ts - self._per_key_s * self._tk) / self._tt
        least_s = self._MIN_SHARE * self.prefill_s_per_token
        if per_token_s < least_s:
            per_token_s = least_s
            if self._kk:
                self._per_key_s = max(0.0, (self._ks - per_token_s * self._tk) / self._kk)
        self._per_token_s = per_token_s


class CopySpeed:
    """Measure copies to the device, and choose between copying and computing.

    Parameters
    ----------
    speed
        The measured speed of prefill.
    always_copies
        Choose to copy regardless of the measurements.
    """

    def __init__(self, speed: StepSpeed, *, always_copies: bool = False):
        self._speed = speed
        self._always_copies = always_copies
        # Seconds per block of the last copies.
        self._measured: deque[float] = deque(maxlen=_NUM_MEASURED)
        # Number of choices to copy, and number of choices to compute.
        self.num_copied = 0
        self.num_computed = 0

    @property
    def block_s(self) -> float:
        """Seconds to copy a block; 0: not known yet."""
        return min(self._measured) if len(self._measured) >= _LEAST_MEASURED else 0.0

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Measure a copy of `num_blocks` blocks."""
        self._measured.append(seconds / num_blocks)

    def prefers_copy(self, num_blocks: int, start: int, num_tokens: int) -> bool:
        """Choose: true to copy the blocks back, false to compute them. True while a speed is not known.

        Parameters
        ----------
        num_blocks
            Number of blocks to copy.
        start, num_tokens
            The tokens to compute instead: `num_tokens` tokens from position `start`.
        """
        compute_s = self._speed.prefill_s(start, num_tokens)
        copies = self._always_copies or not compute_s or num_blocks * self.block_s <= compute_s
        if copies:
            self.num_copied += 1
        else:
            self.num_computed += 1
            self._measured = deque((s * _DOUBT for s in self._measured), _NUM_MEASURED)
        return copies
