"""The report of the fuse pass, and the bounds for differences between a fused module and the original."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.replica.model.layers.fp8 import CODES

# Upper bounds of `deviation` by dtype. A wrong formula deviates by tenths. A correct fused module omits some roundings;
# in bfloat16, each one contributes a deviation of 2^-9.
MAX_DEVIATION = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01, CODES: 0.05}


@dataclass(slots=True)
class FuseReport:
    """Numbers of fused modules by kind, and reasons why others were not fused."""

    fused: Counter[str] = field(default_factory=Counter)
    dropped: list[str] = field(default_factory=list)  # "name: reason"
    chains: list[int] = field(default_factory=list)  # layers per chain (`layer_chains.py`)
    # Mean and maximum of `deviation` over the matrix products with int8 weights.
    int8_deviation: tuple[float, float] | None = None

    def joined(self, other: FuseReport) -> FuseReport:
        """Add the modules of another report, and return this one."""
        self.fused += other.fused
        self.dropped += other.dropped
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
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
    """Return the root mean square of the difference, divided by the root mean square of `expected`."""
    difference = (found - expected).pow(2).mean().sqrt()
    return (difference / expected.pow(2).mean().sqrt().clamp_min(1e-30)).item()


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype and elements."""
    return one.dtype == other.dtype and torch.equal(one, other)
