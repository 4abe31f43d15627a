"""Steps on fixed addresses, padded to a fixed shape, in the form that CUDA graphs capture.

```
 every row decodes   rows ─▶ last_token[rows] ──────┐
 mixed               token_ids, -1 - r: of row r ───┴─▶ model ─▶ logits ─▶ sample, limits[rows] ─▶ sampled, last_token
                     blocks[rows], slots, lengths ──────┘           │
                                                                    FORWARD ends here: the host prepares masks,
                                                                    penalties and log-probs
```

The work depends only on device memory, on the numbers of rows and tokens, and on the width of the gathered block
tables. It reads no other state of the host.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.recurrence.recurrent_rows import RecurrentRows
from quire.replica.device.device import Device
from quire.replica.device.state_pool import StatePool
from quire.replica.model.layers.state_layers import StepCache
from quire.replica.runner.device_table import DeviceTable
from quire.replica.runner.forward import Forward
from quire.replica.runner.step_inputs import (
    DecodeInputs,
    FixedInputs,
    StepInputs,
    sampling_rows,
)
from quire.replica.runner.step_outputs import StepOutputs


class PaddedStep:
    """Owns the buffers that graphs write, except the KV pool and the last tokens.

    Parameters
    ----------
    max_rows
        Largest number of rows of a step, with padding.
    vocab_size
        Number of columns of the logits.
    logits_dtype
        The model's dtype.
    states
        Slots of a recurrent model; a row's slot has its number in the request table. None for other models.
    """

    def __init__(
        self,
        device: Device,
        forward: Forward,
        table: DeviceTable,
        outputs: StepOutputs,
        max_rows: int,
        vocab_size: int,
        logits_dtype: torch.dtype,
        states: StatePool | None = None,
    ):
        self._forward = forward
        self._table = table
        self._outputs = outputs
        self.sampled = device.empty((max_rows,), torch.int64)  # [max_rows]
        self._logits_shape = (max_rows, vocab_size)
        self._logits_dtype = logits_dtype
        self._device = device
        self._states = states
        self._no_saves = device.empty((0, 3), torch.int64)
        self.logits: torch.Tensor | None = None  # [max_rows, vocab], after `reserve_logits`
        self._cu_q = device.empty(
            (max_rows + 1,), torch.int32
        )  # `cu_q` of rows with one token each
        self._cu_q.copy_(torch.arange(max_rows + 1, dtype=torch.int32))

    def buffers(self) -> dict[str, torch.Tensor]:
        """This object's buffers, by name."""
        own = {"sampled tokens": self.sampled, "the rows' places": self._cu_q}
        return own if self.logits is None else {**own, "logits": self.logits}

    def reserve_logits(self) -> None:
        """Allocate the logits buffer shared by graphs that end at the logits."""
        if self.logits is None:
            self.logits = self._device.empty(self._logits_shape, self._logits_dtype)

    def whole(self, inputs: FixedInputs, num_blocks: int | None = None) -> None:
        """Run a whole step; write the sampled tokens to `sampled` and to the last tokens of the rows.

        Parameters
        ----------
        inputs
            Inputs at fixed addresses on the device, padded.
        num_blocks
            Width of the block tables that a mixed step gathers; None: all blocks of a row.
        """
        logits = self.compute_logits(inputs, num_blocks)
        rows = sampling_rows(inputs)
        tokens = self._table.choose(logits, rows, inputs.noise_keys)
        self.sampled[: len(tokens)].copy_(tokens)
        self._outputs.remember(tokens, rows)

    def to_logits(self, inputs: FixedInputs, num_blocks: int | None = None) -> None:
        """Run a step up to the logits and write them to the first rows of `logits`."""
        assert self.logits is not None
        logits = self.compute_logits(inputs, num_blocks)
        self.logits[: len(logits)].copy_(logits)

    def compute_logits(self, inputs: FixedInputs, num_blocks: int | None = None) -> torch.Tensor:
        """Compute logits [n, vocab] in the model's dtype."""
        if isinstance(inputs, DecodeInputs):
            return self._forward.logits(self._decode(inputs))
        return self._forward.logits(self._mixed(inputs, num_blocks)[inputs.token_index])

    def _decode(self, inputs: DecodeInputs) -> torch.Tensor:
        """Hidden states [n, hidden size] of a step in which every row decodes."""
        n = len(inputs.rows)
        return self._forward.hidden(
            self._outputs.last_token.index_select(0, inputs.rows),
            inputs.positions,
            self._cu_q[: n + 1],
            inputs.kv_len,
            self._table.tables(inputs.rows, self._table.blocks.shape[2]),
            inputs.slots,
            np.ones(n, np.int64),
            states=self._step_states(self._cu_q[: n + 1], inputs, is_decode=True),
            adapters=inputs.adapters,
        )

    def _mixed(self, inputs: StepInputs, num_blocks: int | None) -> torch.Tensor:
        """Hidden states [T, hidden size] of a mixed step."""
        num_rows, num_tokens = len(inputs.rows), len(inputs.positions)
        # One graph serves rows of any length, so it must contain both attention kernels: the one for rows of one token
        # and the one for longer rows. These made-up lengths make attention launch both; on the device, each kernel
        # finds the rows that it has to compute.
        num_query = np.zeros(num_rows, np.int64)
        num_query[:2] = 1, num_tokens - 1
        return self._forward.hidden(
            self._outputs.known(inputs.token_ids),
            inputs.positions,
            inputs.cu_q,
            inputs.kv_len,
            self._table.tables(inputs.rows, num_blocks or self._table.blocks.shape[2]),
            inputs.slots,
            num_query,
            states=self._step_states(inputs.cu_q, inputs, is_decode=False),
            adapters=inputs.adapters,
        )

    def _step_states(
        self, cu_q: torch.Tensor, inputs: FixedInputs, is_decode: bool
    ) -> StepCache | None:
        """Describe the slots of a step without snapshots."""
        if self._states is None:
            return None
        saves = self._no_saves
        rows = RecurrentRows(cu_q, inputs.rows, inputs.kv_len, saves, saves[:, 0], is_decode)
        return StepCache(self._states, rows)
