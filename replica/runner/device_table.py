"""The request table on the device. It keeps the values that do not change between steps, so only changes are uploaded.

```
 blocks    [G, R + 1, max blocks]   row r: block table of its request, by layer group
 limits    [R + 1, NUM_LIMITS]      row r: temperature, top_k, ... (`core/sampling_record.py`)
           row R is the padding row: greedy, all blocks are the trash block
```

A row is a request's slot. The host's table is `rows.RowTable`; each plan contains the changes of that table since the
previous plan (`table_changes.py`). The last sampled tokens are another column; the device writes them itself, so they
are never uploaded, and `StepOutputs` owns that column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from quire.kernels.sampling.noise import keys_at, noise_bases
from quire.replica.core.sampling_record import NUM_LIMITS, limits_of, records
from quire.replica.core.step_plan import StepPlan
from quire.replica.core.table_changes import TableChanges
from quire.replica.device.device import Device

# Samples tokens [S] int64. Arguments: logits [S, vocab], limits [S, NUM_LIMITS] int32, noise keys [S] int64.
Sampler = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Differences(NamedTuple):
    """Table changes of one upload, on the host or on the device: k block entries and c rows."""

    at: np.ndarray | torch.Tensor  # [k] int64, unique positions in the flattened `blocks`
    blocks: np.ndarray | torch.Tensor  # [k] int32
    rows: np.ndarray | torch.Tensor  # [c] int64, unique
    limits: np.ndarray | torch.Tensor  # [c, NUM_LIMITS] int32


class DeviceTable:
    """Owns the device's copy of block tables and sampling limits.

    Parameters
    ----------
    device
        Holds the table.
    num_groups, num_rows, max_blocks
        Number of layer groups G, of requests R, and of blocks that a row may have in one group, as in `RowTable`.
    trash_block
        Id of the block that padding writes to.
    sample
        `ModelKernels.sample`.
    """

    def __init__(
        self,
        device: Device,
        num_groups: int,
        num_rows: int,
        max_blocks: int,
        trash_block: int,
        sample: Sampler,
    ):
        self.padding_row = num_rows
        self._sample = sample
        self.blocks = device.empty((num_groups, num_rows + 1, max_blocks), torch.int32)
        # Entries that are read before they are written must be valid: trash block, greedy.
        self.blocks.fill_(trash_block)
        self.limits = device.empty((num_rows + 1, NUM_LIMITS), torch.int32)
        for i, word in enumerate(limits_of(records(1, temperature=0.0))[0].tolist()):
            self.limits[:, i] = word
        self._noise_bases = np.zeros(num_rows + 1, np.uint64)  # [R + 1], on the host

    # -- on the host -------------------------------------------------------------------------------------

    def differences(self, changes: TableChanges) -> Differences:
        """Return the arrays to upload for a plan's changes."""
        at, blocks = changes.flat(self.blocks[0].numel())
        new = changes.sampling
        if len(new):
            self._noise_bases[changes.claimed] = noise_bases(new["seed"], new["choice"])
        return Differences(at, blocks, changes.claimed, limits_of(new))

    def noise_keys(self, rows: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return noise keys [n] int64 (bits of uint64) of rows [n] at token positions [n]."""
        return keys_at(self._noise_bases[rows], position).view(np.int64)

    def adopt(self, plan: StepPlan) -> StepPlan:
        """Give a plan without table rows the first rows of this table, with the changes that fill these rows."""
        tables = plan.block_tables.gather()
        num_groups, num_rows, width = tables.shape
        if num_rows > self.padding_row or width > self.blocks.shape[2]:
            raise ValueError(
                f"step {plan.step} has {num_rows} rows of {width} blocks, the bounds are {self.padding_row} and "
                f"{self.blocks.shape[2]}"
            )
        rows = np.arange(num_rows)
        at = (rows[:, None] * self.blocks.shape[2] + np.arange(width)).ravel()
        entries = tables.reshape(num_groups, -1).astype(np.int32)
        return plan._replace(rows=rows, changes=TableChanges(((0, at, entries),)))

    # -- a step's queued work: device operations on its stream -------------------------------------------

    def apply(self, new: Differences) -> None:
        """Write uploaded differences to the table."""
        if len(new.at):
            self.blocks.view(-1).index_copy_(0, new.at, new.blocks)
        if len(new.rows):
            self.limits.index_copy_(0, new.rows, new.limits)

    def tables(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """Gather block tables [G, n, width] int32 of rows [n] int64."""
        return self.blocks[:, :, :width].index_select(1, rows)

    def choose(
        self, logits: torch.Tensor, rows: torch.Tensor, noise_keys: torch.Tensor
    ) -> torch.Tensor:
        """Sample one token per row with the row's sampling options.

        Parameters
        ----------
        logits
            [S, vocab] of any dtype; may be overwritten.
        rows, noise_keys
            [S] int64.

        Returns
        -------
        [S] int64.
        """
        return self._sample(logits, self.limits.index_select(0, rows), noise_keys)
