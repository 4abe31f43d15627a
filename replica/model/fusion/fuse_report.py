"""What the fuse pass reports, and how far a fused form may be from the module it replaces."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.replica.model.fp8 import CODES

# Root mean square of the difference over that of the unfused result. A wrong formula is off by tenths; rounding in
# between, which the fused form leaves out, by one in 2^9 a step in bfloat16.
MAX_DEVIATION = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01, CODES: 0.05}


@dataclass(slots=True)
class FuseReport:
    """What was fused: modules by kind, and why others were not."""

    fused: Counter[str] = field(default_factory=Counter)
    dropped: list[str] = field(default_factory=list)  # name: reason
    chains: list[int] = field(default_factory=list)  # lengths; see `chains`
    # Mean and largest over the products: root mean square of the difference over that of the result.
    int8_deviation: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        state: dict[str, Any] = {"fused": dict(self.fused), "dropped": list(self.dropped)}
        if self.chains:
            state["chains"] = list(self.chains)
        if self.int8_deviation is not None:
            state["int8_deviation"] = dict(zip(("mean", "max"), self.int8_deviation, strict=True))
        return state

    def __str__(self) -> str:
        parts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.fused.items()))
        text = f"fused: {parts or 'nothing'}"
        if self.chains:
            text += f"\nlayers that run together: {', '.join(map(str, self.chains))}"
        if self.int8_deviation is not None:
            mean, most = self.int8_deviation
            text += f"\nint8 products deviate by {mean:.2%} on average, {most:.2%} at most"
        return text + "".join(f"\nnot fused: {reason}" for reason in self.dropped)


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of what is expected."""
    difference = (found - expected).pow(2).mean().sqrt()
    return (difference / expected.pow(2).mean().sqrt().clamp_min(1e-30)).item()


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype and elements."""
    return one.dtype == other.dtype and torch.equal(one, other)
