"""How fast this engine is, as measured: what the router's cost function prices work with."""

from __future__ import annotations


class StepSpeed:
    """Seconds of a decode step and of a prefill token.

    `decode_step_s` averages the steps that only decode. What a step with prefill takes beyond that is the
    cost of its prefill tokens; their seconds and their number are averaged apart, so that a long chunk counts
    for more than a short one. Both averages are exponential and forget `WEIGHT` a step. 0 = not yet known.
    """

    WEIGHT = 0.1

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self._prefill_s = 0.0
        self._prefill_tokens = 0.0

    @property
    def prefill_s_per_token(self) -> float:
        return self._prefill_s / self._prefill_tokens if self._prefill_tokens else 0.0

    def observe(self, num_prefill_tokens: int, num_decode_rows: int, duration_s: float) -> None:
        """Take in one step."""
        if num_prefill_tokens == 0:
            weight = self.WEIGHT if self.decode_step_s else 1.0
            self.decode_step_s += weight * (duration_s - self.decode_step_s)
            return
        decode_s = self.decode_step_s if num_decode_rows else 0.0
        keep = 1 - self.WEIGHT
        self._prefill_s = keep * self._prefill_s + max(0.0, duration_s - decode_s)
        self._prefill_tokens = keep * self._prefill_tokens + num_prefill_tokens
