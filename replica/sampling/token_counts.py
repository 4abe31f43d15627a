"""Counts of each token in rows with penalties, kept on the device and updated in every step.

One int32 for each (row, token id)::

    bit 30: the prompt contains it      bits 0-29: how often the output contains it

So "occurred at all" is `!= 0`, and counting a token is one addition. The table grows to the highest row that has used
penalties. Nothing is allocated before the first one; then each row takes 4 * vocab bytes, and on the CPU only written
pages take memory.
"""

from __future__ import annotations

import torch

_IN_PROMPT = 1 << 30


class TokenCounts:
    """Owns the counts of all rows of an engine. Its methods are part of a step's queued work.

    Parameters
    ----------
    vocab_size
        Number of columns of the logits.
    device
        Device of the logits.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu"):
        self.table = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # [rows, vocab]

    def write(
        self, num_rows: int, rows: torch.Tensor, prompts: torch.Tensor, outputs: torch.Tensor
    ) -> None:
        """Overwrite the counts of rows that sample for the first time with their histories.

        Parameters
        ----------
        num_rows
            Greater than the highest row.
        rows, prompts, outputs
            Fields of `HistoryArrays`.
        """
        self._grow(num_rows)
        self.table.index_fill_(0, rows, 0)
        flat = self.table.view(-1)
        flat.index_fill_(0, prompts, _IN_PROMPT)
        flat.index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count sampled tokens [P] int64 of unique rows [P] int64."""
        # A row without a token ends in this step, so its count does not matter.
        at = rows * self.table.shape[1] + tokens.clamp(min=0)
        self.table.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        repetition: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> torch.Tensor:
        """Apply three penalties, [P] float32 each, to logits [P, vocab] float32 of rows [P], as vLLM documents them.

        Repetition: for tokens in prompt or output, positive logits are divided by the penalty, others multiplied.
        Frequency: subtracts the penalty times the count in the output. Presence: subtracts the penalty if that count is
        not 0.
        """
        state = self.table[rows]  # [P, vocab]
        factor = repetition[:, None]
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where((state != 0) & (factor != 1.0), repeated, logits)
        count = state & (_IN_PROMPT - 1)
        logits -= frequency[:, None] * count
        logits -= presence[:, None] * (count > 0)
        return logits

    def _grow(self, num_rows: int) -> None:
        have, vocab_size = self.table.shape
        if num_rows > have:
            grown = self.table.new_zeros(max(num_rows, 2 * have), vocab_size)
            grown[:have] = self.table
            self.table = grown
