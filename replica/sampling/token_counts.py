"""Counts of each token in requests with penalties, kept on the device and updated in every step.

The table has one int32 for each row (a request's slot in the request table) and token id::

    bit 30: the prompt contains it      bits 0-29: how often the output contains it

So a token has occurred if its entry is not 0, and counting a token is one addition. Nothing is allocated before the
first request with penalties. Then the table grows, at least to double its size, to contain the highest row that has
used penalties. Each row takes 4 * vocab bytes; on the CPU device, only pages that were written take memory.
"""

from __future__ import annotations

import torch

_IN_PROMPT = 1 << 30


class TokenCounts:
    """Owns the counts of all rows of an engine.

    Its methods are part of a step's queued work: device operations on the step's stream, which never make the host
    wait.

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
        """Reset the counts of rows that are about to sample for the first time, and fill them from prompt and output.

        Parameters
        ----------
        num_rows
            Greater than the highest row; the table grows to at least this number.
        rows
            [B] int64, rows to reset.
        prompts, outputs
            [n] and [m] int64: the tokens of prompts and outputs, as flat indices row * vocab + token id.
        """
        self._grow(num_rows)
        self.table.index_fill_(0, rows, 0)
        flat = self.table.view(-1)
        flat.index_fill_(0, prompts, _IN_PROMPT)
        flat.index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))

    def add(
        self, rows: torch.Tensor, tokens: torch.Tensor, is_counting: torch.Tensor | None = None
    ) -> None:
        """Count sampled tokens [P] int64 of rows with penalties; `is_counting` [P] bool leaves out rejected ones."""
        # A negative token means that the row's constraints allow no token, so its request ends in this step. Counting
        # it as token 0 is harmless.
        at = rows * self.table.shape[1] + tokens.clamp(min=0)
        weight = torch.ones_like(at) if is_counting is None else is_counting
        self.table.view(-1).index_add_(0, at, weight.to(torch.int32))

    def ahead(self, rows: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """The counts of rows [P] int64 once further tokens follow: [P, vocab] int32.

        `ahead` is [k, 2] int64, (index in [0, P), token).
        """
        counts = self.table[rows]
        if not len(ahead):
            return counts
        at = ahead[:, 0] * counts.shape[1] + ahead[:, 1]
        counts.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))
        return counts

    def apply(
        self,
        logits: torch.Tensor,
        counts: torch.Tensor,
        repetition: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> torch.Tensor:
        """Apply three penalties as vLLM documents them. P is the number of rows with penalties in this step.

        Repetition: for tokens in prompt or output, positive logits are divided by the penalty, others multiplied by it.
        Frequency: the penalty times the token's count in the output is subtracted. Presence: the penalty is subtracted
        if this count is not 0.

        Parameters
        ----------
        logits
            [P, vocab] float32; not changed.
        counts
            [P, vocab] int32, the result of `ahead`.
        repetition, presence, frequency
            [P] float32.

        Returns
        -------
        [P, vocab] float32.
        """
        factor = repetition[:, None]
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where((counts != 0) & (factor != 1.0), repeated, logits)
        count = counts & (_IN_PROMPT - 1)
        logits -= frequency[:, None] * count
        logits -= presence[:, None] * (count > 0)
        return logits

    def _grow(self, num_rows: int) -> None:
        have, vocab_size = self.table.shape
        if num_rows > have:
            grown = self.table.new_zeros(max(num_rows, 2 * have), vocab_size)
            grown[:have] = self.table
            self.table = grown
