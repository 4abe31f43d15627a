"""How fast this engine is, as measured: what the router's cost function prices work with, and what bounds a chunk.

Attention makes a prefill token dearer the further back its keys reach, so the time of a chunk is fitted as

    seconds = a * tokens + b * keys        keys: summed over the tokens, those before and at each

On one core of a CPU a token of the embedded model costs 0.16 to 0.25 ms at the start of a prompt and 0.5 to 0.65 ms
behind 4000 others; one number for both would be wrong by three. Where no layer sees further than a window, `b`
comes out near 0.
"""

from __future__ import annotations

import math


class StepSpeed:
    """Seconds of a decode step and of a prefill token.

    `decode_step_s` averages the steps that only decode. What a step with prefill takes beyond that is the
    cost of its prefill tokens. All averages are exponential. 0 = not yet known.
    """

    WEIGHT = 0.1  # forgotten in a step by the averages
    # And by the prefill's in so much time without one: what ran beside it then is gone.
    HORIZON_S = 10.0
    # But it keeps so many tokens' worth of what it knew when the first step after a pause is slower. What runs beside a
    # prompt makes it slow and nothing makes it fast, so a fast one is proof and a slow one is a hint. Each replica of
    # an idle cluster has such a first step, and a router sends no second one to who seems slow.
    KEPT_TOKENS = 1000.0
    FIT_WEIGHT = 0.05  # and by the fit, which needs steps at different positions
    # A token at the start of a prompt costs at least this share of the average one: noise may make `a` vanish.
    _MIN_SHARE = 0.25
    _MIN_SPREAD = 1e-3  # of tokens to keys, below which the steps do not tell `a` from `b`

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self._steps_since_decode = 0  # steps with prefill since one without
        self._prefill_s = 0.0
        self._prefill_tokens = 0.0
        self._prefill_end_s = -math.inf  # of the last step with prefill
        # Sums of products for the fit: tokens * tokens, tokens * keys, keys * keys, and each times seconds.
        self._tt = self._tk = self._kk = self._ts = self._ks = 0.0
        self._per_token_s = 0.0  # a
        self._per_key_s = 0.0  # b

    @property
    def prefill_s_per_token(self) -> float:
        """The average token's, wherever it stands in its prompt."""
        return self._prefill_s / self._prefill_tokens if self._prefill_tokens else 0.0

    def prefill_s(self, start: int, num_tokens: int) -> float:
        """Seconds of the prefill tokens at positions from `start` on; 0 while the speed is not known."""
        num_keys = num_tokens * start + num_tokens * (num_tokens + 1) / 2
        return self._per_token_s * num_tokens + self._per_key_s * num_keys

    def tokens_within(self, seconds: float, start: int) -> int:
        """How many prefill tokens at positions from `start` on take at most `seconds`; 0 while not known."""
        if self._per_token_s <= 0 or seconds <= 0:
            return 0
        # b/2 n^2 + (a + b (start + 1/2)) n = seconds, in the form that is exact for b = 0.
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
        """Take in one step.

        Parameters
        ----------
        num_prefill_keys
            Keys up to each prefill token, summed over them.
        end_s
            When it ended, on a monotonic clock.
        """
        if num_prefill_tokens == 0:
            # After many steps with prefill the old average says little about the rows that decode now.
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
        if prefill_s > num_prefill_tokens * self.prefill_s_per_token > 0:
            keep = max(keep, min(1.0, self.KEPT_TOKENS / self._prefill_tokens))
        keep *= 1 - self.WEIGHT
        fit_keep = 1 - self.FIT_WEIGHT
        # Beside decodes only a part of the step is known to be the prompt's.
        if not num_decode_rows and self._prefill_tokens:
            odds = self._odds(num_prefill_tokens, num_prefill_keys, prefill_s)
            keep = min(keep, odds * num_prefill_tokens / self._prefill_tokens)
            fit_keep = min(fit_keep, odds * num_prefill_tokens**2 / self._tt)
        self._prefill_s = keep * self._prefill_s + prefill_s
        self._prefill_tokens = keep * self._prefill_tokens + num_prefill_tokens
        self._fit(num_prefill_tokens, num_prefill_keys, prefill_s, fit_keep)

    def _odds(self, tokens: int, keys: int, seconds: float) -> float:
        """What is known against a step that took less than half of what it foretells; otherwise infinite.

        At r times that half what is known counts r, and the step 1 - r. So the first prompts of a replica that
        shared its core with the first ones of all others are forgotten with the first one that it has for itself;
        what a neighbour's steps take or give from one to the next is no such accident.
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
        # Given b, the best a.
        per_token_s = (self._ts - self._per_key_s * self._tk) / self._tt
        least_s = self._MIN_SHARE * self.prefill_s_per_token
        if per_token_s < least_s:
            per_token_s = least_s
            if self._kk:
                self._per_key_s = max(0.0, (self._ks - per_token_s * self._tk) / self._kk)
        self._per_token_s = per_token_s
