"""The rows of a step, as the kernels of recurrent layers read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """Rows of a step with their slots. Row i has the tokens [cu_q[i], cu_q[i + 1]).

    ```
     tokens     [ row 0 ][ row 1 .............. ][ row 2 ]
     states       slot     slot    ^ snapshot      slot        a row without earlier tokens begins with zeros
    ```
    """

    cu_q: torch.Tensor  # [n + 1] int32
    slots: torch.Tensor  # [n] int64
    kv_len: torch.Tensor  # [n] int32, tokens of a row with those of this step
    # Snapshots: row, number of its tokens in this step before the snapshot, slot; sorted. [k, 3] int64
    saves: torch.Tensor
    # [n + 1] int64, the saves of row i are [first_save[i], first_save[i + 1]); not read if there are none.
    first_save: torch.Tensor
    # Whether the host knows that each row has one token.
    is_decode: bool

    @classmethod
    def of(
        cls,
        slots: np.ndarray,
        num_query: np.ndarray,
        kv_len: np.ndarray,
        saves: np.ndarray,
        device: torch.device | str = "cpu",
    ) -> RecurrentRows:
        """Build the rows of a step from arrays of the host.

        Parameters
        ----------
        slots, num_query, kv_len
            [n] slot, number of tokens in this step, and number of tokens with this step, of each row.
        saves
            [k, 3] snapshots, in any order.
        """
        saves = saves[np.lexsort((saves[:, 1], saves[:, 0]))]
        first = np.searchsorted(saves[:, 0], np.arange(len(slots) + 1))
        cu_q = np.concatenate([[0], np.cumsum(num_query)])

        def put(array: np.ndarray, dtype: type) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device)

        return cls(
            put(cu_q, np.int32),
            put(slots, np.int64),
            put(kv_len, np.int32),
            put(saves, np.int64),
            put(first, np.int64),
            is_decode=bool((num_query == 1).all()),
        )

    @property
    def num_rows(self) -> int:
        """Number of rows, with padding."""
        return len(self.slots)
