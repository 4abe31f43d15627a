"""A step in which every row decodes, as work on fixed addresses: what a graph can hold.

```
 rows ─▶ last_token[rows] ─▶ model ─▶ logits ─▶ draw by columns[rows] ─▶ sampled, last_token[rows]
      └▶ blocks[rows] ────────┘              │
 positions, kv_len, slots, noise keys ───────┘ FORWARD ends here: masks, penalties and log-probs need the host
```

Nothing here looks at the host's state of a step, only at the device's memory and at how many rows there are.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.replica.device import Device
from quire.replica.device_table import DeviceTable
from quire.replica.forward import Forward
from quire.replica.step_inputs import DecodeInputs
from quire.replica.step_outputs import StepOutputs


class DecodeStep:
    """Owns what graphs write, beside KV and last tokens.

    Parameters
    ----------
    max_rows
        Of a step, padding included.
    vocab_size
        Columns of the logits.
    logits_dtype
        The model's own.
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
    ):
        self._forward = forward
        self._table = table
        self._outputs = outputs
        self.sampled = device.empty((max_rows,), torch.int64)  # [max_rows]
        self._logits_shape = (max_rows, vocab_size)
        self._logits_dtype = logits_dtype
        self._device = device
        self.logits: torch.Tensor | None = None  # [max_rows, vocab], once a graph ends there
        self._cu_q = device.empty((max_rows + 1,), torch.int32)
        self._cu_q.copy_(torch.arange(max_rows + 1, dtype=torch.int32))

    def reserve_logits(self) -> None:
        """Allocate what graphs that end at the logits share."""
        if self.logits is None:
            self.logits = self._device.empty(self._logits_shape, self._logits_dtype)

    def whole(self, inputs: DecodeInputs) -> None:
        """To the tokens: `sampled`, and the rows' last tokens."""
        logits = self.compute_logits(inputs)
        tokens = self._table.choose(logits, inputs.rows, inputs.noise_keys)
        self.sampled[: len(tokens)].copy_(tokens)
        self._outputs.remember(tokens, inputs.rows)

    def to_logits(self, inputs: DecodeInputs) -> None:
        """To the logits: the first rows of `logits`."""
        self.logits[: len(inputs.rows)].copy_(self.compute_logits(inputs))

    def compute_logits(self, inputs: DecodeInputs) -> torch.Tensor:
        """[n, vocab] in the model's type."""
        n = len(inputs.rows)
        hidden = self._forward.hidden(
            self._outputs.last_token.index_select(0, inputs.rows),
            inputs.positions,
            self._cu_q[: n + 1],
            inputs.kv_len,
            self._table.tables(inputs.rows, self._table.blocks.shape[2]),
            inputs.slots,
            np.ones(n, np.int64),
        )
        return self._forward.logits(hidden)
