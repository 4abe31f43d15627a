"""Sums of hidden states that do not depend on how a prompt was divided into chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Float64 adds multiples of 2^-28 without rounding while the sum is below 2^25, so the order of the terms does not
# matter. The values themselves are rounded by at most 2^-29, which is below the rounding of float32 at 1/16.
SCALE = 2.0**28
# Hidden states to convert at a time; they take 8 bytes for each value.
_MAX_ROWS = 256


def sum_exactly(
    hidden: torch.Tensor, normed: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Sum rows of hidden states, [n, hidden size] in the model's dtype, to [hidden size] float64.

    Sums of consecutive parts add up to the same bits as the sum of all rows.

    Parameters
    ----------
    normed
        Applied to the rows first, at most `_MAX_ROWS` at a time.
    """
    total = torch.zeros(hidden.shape[1], dtype=torch.float64, device=hidden.device)
    for part in hidden.split(_MAX_ROWS):
        total += (normed(part).double() * SCALE).round_().sum(0)
    return total / SCALE
