"""Steps as work on fixed addresses: what a graph can hold.

```
 every row decodes   rows ─▶ last_token[rows] ──────┐
 mixed               token_ids, -1 - r: of row r ───┴─▶ model ─▶ logits ─▶ draw by columns[rows] ─▶ sampled, last_token
                     blocks[rows], slots, lengths ──────┘           │
                                                                    FORWARD ends here: masks, penalties and log-probs
                                                                    need the host
```

Nothing here looks at the host's state of a step, only at the device's memory, at how many rows and tokens there are and
at how much of the block tables is gathered.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.replica.device.device import Device
from quire.replica.runner.device_table import DeviceTable
from quire.replica.runner.forward import Forward
from quire.replica.runner.step_inputs import DecodeInputs, MixedInputs
from quire.replica.runner.step_outputs import StepOutputs

FixedInputs = DecodeInputs | MixedInputs


class FixedStep:
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
        self._cu_q = device.empty((max_rows + 1,), torch.int32)  # where one token a row begins
        self._cu_q.copy_(torch.arange(max_rows + 1, dtype=torch.int32))

    def buffers(self) -> dict[str, torch.Tensor]:
        """What it owns, by name."""
        own = {"sampled tokens": self.sampled, "the rows' places": self._cu_q}
        return own if self.logits is None else {**own, "logits": self.logits}

    def reserve_logits(self) -> None:
        """Allocate what graphs that end at the logits share."""
        if self.logits is None:
            self.logits = self._device.empty(self._logits_shape, self._logits_dtype)

    def whole(self, inputs: FixedInputs, num_blocks: int | None = None) -> None:
        """To the tokens: `sampled`, and the rows' last tokens.

        Parameters
        ----------
        num_blocks
            Of each row's table that a mixed step gathers; None: all.
        """
        logits = self.compute_logits(inputs, num_blocks)
        rows = sampling_rows(inputs)
        tokens = self._table.choose(logits, rows, inputs.noise_keys)
        self.sampled[: len(tokens)].copy_(tokens)
        self._outputs.remember(tokens, rows)

    def to_logits(self, inputs: FixedInputs, num_blocks: int | None = None) -> None:
        """To the logits: the first rows of `logits`."""
        assert self.logits is not None
        logits = self.compute_logits(inputs, num_blocks)
        self.logits[: len(logits)].copy_(logits)

    def compute_logits(self, inputs: FixedInputs, num_blocks: int | None = None) -> torch.Tensor:
        """[n, vocab] in the model's type."""
        if isinstance(inputs, DecodeInputs):
            return self._forward.logits(self._decode(inputs))
        return self._forward.logits(self._mixed(inputs, num_blocks)[inputs.token_index])

    def _decode(self, inputs: DecodeInputs) -> torch.Tensor:
        """[n, hidden size]."""
        n = len(inputs.rows)
        return self._forward.hidden(
            self._outputs.last_token.index_select(0, inputs.rows),
            inputs.positions,
            self._cu_q[: n + 1],
            inputs.kv_len,
            self._table.tables(inputs.rows, self._table.blocks.shape[2]),
            inputs.slots,
            np.ones(n, np.int64),
        )

    def _mixed(self, inputs: MixedInputs, num_blocks: int | None) -> torch.Tensor:
        """[T, hidden size]."""
        num_rows, num_tokens = len(inputs.rows), len(inputs.positions)
        # A graph serves whatever rows there are: it has attention's kernel for rows of one token and the one for
        # longer rows, and each finds its own rows on the device.
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
        )


def sampling_rows(inputs: FixedInputs) -> torch.Tensor:
    """[n] int64, the rows of the request table that get the tokens."""
    return inputs.rows if isinstance(inputs, DecodeInputs) else inputs.sample_rows
