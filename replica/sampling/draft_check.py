"""Which samples of a step with drafts count, on the device. `Drafts` in `step_plan.py` explains the arrays.

Here `token_ids` and `offset` are [S] int64, and `drawn` [S] int64 are the sampled tokens.
"""

from __future__ import annotations

import torch


def counting(drawn: torch.Tensor, token_ids: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """[S] bool, as `Drafts.counting`."""
    is_wrong = (offset > 0) & (token_ids != drawn.roll(1))
    num_wrong = is_wrong.cumsum(0)
    first = torch.arange(len(offset), device=offset.device) - offset
    return num_wrong == num_wrong[first]


def newest_rows(
    drawn: torch.Tensor,
    token_ids: torch.Tensor,
    offset: torch.Tensor,
    rows: torch.Tensor,
    padding_row: int,
) -> torch.Tensor:
    """Rows [S] int64 in which to keep the drawn tokens: the padding row, but for the last sample of a row to count."""
    counts = counting(drawn, token_ids, offset)
    is_last = counts & ~(counts.roll(-1) & (offset.roll(-1) > 0))
    return torch.where(is_last, rows, padding_row)
