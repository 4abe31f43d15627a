"""How often each token has occurred in the rows that ask for penalties: kept on the device, one step at a time.

One int32 for each (row, token id)::

    bit 30: the prompt contains it      bits 0-29: how often the output contains it

so that "occurred at all" is `!= 0` and a token costs one addition. The table covers the rows that have asked so
far: nothing is allocated before the first one does, then 4 * vocab bytes a row, of which the CPU backs only the
pages that are written.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.replica.plan import Penalties

_IN_PROMPT = 1 << 30


class TokenCounts:
    """The counts of all rows of one engine.

    Parameters
    ----------
    vocab_size
        Columns of the logits.
    device
        Where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu"):
        self._table = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def begin(self, penalties: Penalties) -> None:
        """Take in the history of rows that sample for the first time, whoever had these rows before."""
        if not penalties.begun:
            return
        self._grow(1 + max(row for row, _, _ in penalties.begun))
        vocab_size, device = self._table.shape[1], self._table.device
        for row, prompt_ids, output_ids in penalties.begun:
            counts = np.bincount(output_ids, minlength=vocab_size).astype(np.int32)
            counts[prompt_ids] |= _IN_PROMPT
            self._table[row] = torch.from_numpy(counts).to(device)

    def add(self, penalties: Penalties, tokens: torch.Tensor) -> None:
        """Count what was sampled: tokens [S] int64, none of them negative where a row goes on."""
        device = self._table.device
        index = torch.from_numpy(penalties.index).to(device)
        rows = torch.from_numpy(penalties.row).to(device)
        # A row without a token ends in this step: where its count goes is of no consequence.
        self._table[rows, tokens[index].clamp_(min=0)] += 1

    def apply(self, logits: torch.Tensor, penalties: Penalties) -> None:
        """Change `logits` [S, vocab] float32 in place, as vLLM documents the three penalties.

        Repetition: of tokens in prompt or output, logits above 0 are divided and others multiplied. Frequency:
        minus the penalty times the count in the output. Presence: minus the penalty where that count is not 0.
        """
        index = torch.from_numpy(penalties.index).to(logits.device)
        state = self._table[torch.from_numpy(penalties.row).to(logits.device)]  # [P, vocab]
        repetition, presence, frequency = (
            torch.from_numpy(x).to(logits.device)[:, None]
            for x in (penalties.repetition, penalties.presence, penalties.frequency)
        )
        rows = logits[index]
        rows = torch.where(
            (state != 0) & (repetition != 1.0),
            torch.where(rows > 0, rows / repetition, rows * repetition),
            rows,
        )
        count = state & (_IN_PROMPT - 1)
        rows -= frequency * count
        rows -= presence * (count > 0)
        logits[index] = rows

    def _grow(self, num_rows: int) -> None:
        have, vocab_size = self._table.shape
        if num_rows > have:
            grown = self._table.new_zeros(max(num_rows, 2 * have), vocab_size)
            grown[:have] = self._table
            self._table = grown
