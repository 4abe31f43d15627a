"""Sampling of whatever the rows of a step ask for, by kernels on a device that queues its work.

```
 host      arrays ──▶ pinned staging                                   nothing waits for the device
 compute              └─ copy ▸ histories ▸ edited rows ▸ draw ▸ counts ▸ log-probs
```

The logits stay as they are, in the model's type: rows with masks, bias or penalties are drawn from float32 copies of
theirs (`quire.kernels.sampling.logit_edits`), all others from the logits themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.replica.core.step_plan import NO_TOKEN, SamplingBatch
from quire.replica.device.device import Device
from quire.replica.device.staging import Staged, Staging
from quire.replica.runner.device_table import DrawColumns
from quire.replica.sampling.sampling_arrays import EditArrays, SamplingArrays
from quire.replica.sampling.step_sampler import Masks
from quire.replica.sampling.token_counts import TokenCounts


@dataclass(frozen=True, slots=True)
class StagedSampling:
    """What a step's rows ask for, on its way."""

    arrays: Staged
    num_rows: int  # more than the last row of the request table whose history is among it
    has_columns: bool  # they are among it, and not in the request table


class DeviceSampler:
    """Owns the token counts of penalties, and the staging.

    Parameters
    ----------
    vocab_size
        Columns of the logits.
    """

    def __init__(self, device: Device, vocab_size: int):
        self._vocab_size = vocab_size
        self._staging = Staging(device)
        self._counts = TokenCounts(vocab_size, device.torch_device)

    def stage(self, batch: SamplingBatch, masks: Masks, *, has_columns: bool) -> StagedSampling:
        """Write down for the device what the rows ask for; `queued` must follow.

        Parameters
        ----------
        masks
            Of the batch's grammars.
        has_columns
            Whether the request table has the rows' columns; else those of the batch are sent.
        """
        filled = None if masks is None else masks.result()
        edits = EditArrays.of(batch, filled, self._vocab_size)
        other = SamplingArrays.of(batch, edits, self._vocab_size, has_columns=has_columns)
        staged = self._staging.write([(array, array.dtype.type) for array in (*edits, *other)])
        return StagedSampling(staged, 1 + int(other.begun.max(initial=-1)), not has_columns)

    def queued(self) -> None:
        """The work with what was staged last is queued."""
        self._staging.queued()

    def draw(
        self,
        logits: torch.Tensor,
        staged: StagedSampling,
        columns: DrawColumns | None,
        scores: torch.Tensor,
    ) -> torch.Tensor:
        """Part of a step's work: choose one token a row.

        Parameters
        ----------
        logits
            [S, vocab] of any type.
        columns
            Of the rows; None if they were staged.
        scores
            [max rows, 1 + 2 width] float32, gets the log-probs of the rows that ask for them, from the first on.

        Returns
        -------
        [S] int64; `NO_TOKEN` where a row's constraints leave none.
        """
        from quire.kernels.sampling.log_probs import log_probs
        from quire.kernels.sampling.logit_edits import Edits, edit_logits
        from quire.kernels.sampling.sampling_kernel import sample_tokens

        views = staged.arrays.copy()
        edits = EditArrays(*views[: len(EditArrays._fields)])
        other = SamplingArrays(*views[len(edits) :])
        if staged.num_rows:
            self._counts.write(staged.num_rows, other.begun, other.prompts, other.outputs)
        edited = source = None
        if len(edits.rows):
            edited = edit_logits(logits, Edits(**edits._asdict(), counts=self._counts.table))
            source = other.source
        if staged.has_columns:
            columns = DrawColumns(*other[-len(DrawColumns._fields) :])
        assert columns is not None
        tokens = sample_tokens(logits, *columns, edited=edited, source=source)
        if len(other.constrained):
            found = tokens.index_select(0, other.constrained)
            tokens.index_copy_(0, other.constrained, found.masked_fill(found < 0, NO_TOKEN))
        if len(other.counted):
            self._counts.add(other.counted_rows, tokens.index_select(0, other.counted))
        if (count := len(other.scored)) > 0:
            log_probs(logits, tokens, other.num_top, source=other.scored, out=scores[:count])
        return tokens
