"""How often each token has occurred in the rows that ask for penalties: kept on the device, one step at a time.

One int32 for each (row, token id)::

    bit 30: the prompt contains it      bits 0-29: how often the output contains it

so that "occurred at all" is `!= 0` and a token costs one addition. The table covers the rows that have asked so
far: nothing is allocated before the first one does, then 4 * vocab bytes a row, of which the CPU backs only the
pages that are written.
"""

from __future__ import annotations

import torch

_IN_PROMPT = 1 << 30


class TokenCounts:
    """The counts of all rows of one engine. Its methods are parts of a step's work.

    Parameters
    ----------
    vocab_size
        Columns of the logits.
    device
        Where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu"):
        self.table = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # [rows, vocab]

    def write(
        self, num_rows: int, rows: torch.Tensor, prompts: torch.Tensor, outputs: torch.Tensor
    ) -> None:
        """Take in the history of rows that sample for the first time, whatever these rows held before.

        Parameters
        ----------
        num_rows
            More than the last of the rows.
        rows, prompts, outputs
            As of `HistoryArrays`.
        """
        self._grow(num_rows)
        self.table.index_fill_(0, rows, 0)
        flat = self.table.view(-1)
        flat.index_fill_(0, prompts, _IN_PROMPT)
        flat.index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count what was sampled: rows [P] int64, each once, and tokens [P] int64."""
        # A row without a token ends in this step: where its count goes is of no consequence.
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
        """Logits [P, vocab] float32 of rows [P] with the three penalties, [P] float32 each, as vLLM documents them.

        Repetition: of tokens in prompt or output, logits above 0 are divided and others multiplied. Frequency:
        minus the penalty times the count in the output. Presence: minus the penalty where that count is not 0.
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
