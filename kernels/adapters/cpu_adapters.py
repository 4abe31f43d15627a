"""Low-rank adapters on the CPU: `out += scale * (x down^T) up^T` for rows with different adapters, in one call into C.

```
 token    0  1  2  3  4  5  6  7  8          a piece is a run of tokens with one adapter
 slot     2  5  5  0  0  7  7  7  7          slot 0: no adapter
 pieces  [2][5 5]     [7 7 7 7 .. ]          at most 16 tokens each, so that threads share a long prompt
```

A product may merge linear layers with the same input (q, k and v). Each of these *parts* has an adapter of its own.
Needs the compiled library (`native/adapter_tile.h`), which has the arithmetic. A row's bits depend on that row and its
adapter alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from quire.kernels.cpu import native_library
from quire.kernels.cpu.cpu_row_ops import (
    DTYPE_NUMBERS,
    MAX_ADAPTER_PARTS,
    AdapterCall,
    AdapterDownCall,
    AdapterUpCall,
)

MAX_RANK = 64  # ADAPTER_RANK of native/adapter.h
_PANEL_COLUMNS = 64
_LANES = 16
_PIECE_TOKENS = 16


Call = TypeVar("Call", bound=AdapterCall)


class _Part(ctypes.Structure):
    """`struct adapter_part` of native/adapter.h."""

    _fields_ = [
        ("down", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]


class _Step(ctypes.Structure):
    """`struct adapter_step` of native/adapter.h."""

    _fields_ = [
        ("pieces", ctypes.c_void_p),
        ("num_pieces", ctypes.c_int64),
        ("inner", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter of one linear layer in the layout that the library reads."""

    down: torch.Tensor  # [rank, depth, padded to a multiple of 16]
    up: torch.Tensor  # [panels, rank, 64]
    scale: float

    @classmethod
    def pack(cls, down: torch.Tensor, up: torch.Tensor, scale: float) -> PackedAdapter:
        """Pack `down` [rank, depth] and `up` [columns, rank], of one dtype."""
        (rank, depth), columns = down.shape, len(up)
        padded = down.new_zeros(rank, -(-depth // _LANES) * _LANES)
        padded[:, :depth] = down
        panels = up.new_zeros(-(-columns // _PANEL_COLUMNS) * _PANEL_COLUMNS, rank)
        panels[:columns] = up
        panels = panels.view(-1, _PANEL_COLUMNS, rank).transpose(1, 2).contiguous()
        return cls(padded, panels, scale)

    @property
    def num_bytes(self) -> int:
        """Bytes of both matrices."""
        return self.down.nbytes + self.up.nbytes


class AdapterRows:
    """The adapters of a step's tokens. One object serves all steps, because prepared calls hold its address."""

    def __init__(self) -> None:
        self._step = _Step()
        self._pieces = np.empty((0, 3), np.int64)
        self._inner = np.empty(0, np.float32)

    @property
    def address(self) -> int:
        """Address of `struct adapter_step`."""
        return ctypes.addressof(self._step)

    def set(self, slots: np.ndarray) -> None:
        """Set the slot of each token of the next step, [tokens] integers; 0: no adapter."""
        self._pieces = pieces_of(slots)
        num_floats = len(slots) * MAX_ADAPTER_PARTS * MAX_RANK
        if num_floats > len(self._inner):
            self._inner = np.empty(num_floats, np.float32)
        self._step.pieces = self._pieces.ctypes.data
        self._step.num_pieces = len(self._pieces)
        self._step.inner = self._inner.ctypes.data


def pieces_of(slots: np.ndarray) -> np.ndarray:
    """Cut tokens into runs of one adapter: [tokens] slots to [n, 3] int64 (begin, end, slot), without slot 0."""
    begin = np.flatnonzero(np.diff(slots, prepend=-1))
    end = np.append(begin[1:], len(slots))
    own = slots[begin]
    begin, end, own = (column[own > 0] for column in (begin, end, own))
    count = -(-(end - begin) // _PIECE_TOKENS)
    if (count > 1).any():
        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        begin, end, own = (np.repeat(column, count) for column in (begin, end, own))
        begin = begin + number * _PIECE_TOKENS
        end = np.minimum(end, begin + _PIECE_TOKENS)
    return np.ascontiguousarray(np.stack([begin, end, own], axis=1), np.int64)


class ProductAdapters:
    """The adapters of one product, by slot.

    Parameters
    ----------
    depth
        Columns of the product's input.
    columns
        Columns of each linear layer that the product merges, at most three.
    num_slots
        Largest slot.
    dtype
        Of inputs, outputs and adapters.
    rows
        The adapters of the step's tokens.
    """

    def __init__(
        self,
        depth: int,
        columns: Sequence[int],
        num_slots: int,
        dtype: torch.dtype,
        rows: AdapterRows,
    ):
        if not 1 <= len(columns) <= MAX_ADAPTER_PARTS:
            raise ValueError(f"columns: must have 1 to {MAX_ADAPTER_PARTS} parts, got {columns}")
        self._depth, self._columns, self._dtype = depth, tuple(columns), dtype
        self._rows = rows
        self._parts = (_Part * ((num_slots + 1) * len(columns)))()
        # Keeps the tensors of the parts alive.
        self._packed: dict[int, tuple[PackedAdapter | None, ...]] = {}
        self._calls = (self.call(AdapterDownCall), self.call(AdapterUpCall))

    def call(self, kind: type[Call]) -> Call:
        """Return a call without addresses of input and output."""
        return kind(
            parts=ctypes.addressof(self._parts),
            step=self._rows.address,
            num_parts=len(self._columns),
            columns=(ctypes.c_int64 * MAX_ADAPTER_PARTS)(*self._columns),
            depth=self._depth,
            rank=MAX_RANK,
            dtype=DTYPE_NUMBERS[self._dtype],
        )

    def put(self, slot: int, parts: Sequence[PackedAdapter | None]) -> None:
        """Set the adapters of all parts in a slot; None: the part has no adapter. No call may run.

        Raises
        ------
        ValueError
            A shape or dtype does not match the product.
        """
        if len(parts) != len(self._columns):
            raise ValueError(f"parts: must be {len(self._columns)}, got {len(parts)}")
        for part, columns in zip(parts, self._columns, strict=True):
            if part is not None:
                self._check(part, columns)
        self._packed[slot] = tuple(parts)
        for q, part in enumerate(parts):
            entry = self._parts[slot * len(parts) + q]
            if part is None:
                entry.down, entry.up, entry.rank, entry.scale = None, None, 0, 0.0
            else:
                entry.down, entry.up = part.down.data_ptr(), part.up.data_ptr()
                entry.rank, entry.scale = len(part.down), part.scale

    def _check(self, part: PackedAdapter, columns: int) -> None:
        rank = len(part.down)
        down = (rank, -(-self._depth // _LANES) * _LANES)
        up = (-(-columns // _PANEL_COLUMNS), rank, _PANEL_COLUMNS)
        if not 1 <= rank <= MAX_RANK:
            raise ValueError(f"rank: must be 1 to {MAX_RANK}, got {rank}")
        if (tuple(part.down.shape), tuple(part.up.shape)) != (down, up):
            raise ValueError(
                f"adapter: must be {down} and {up}, got {tuple(part.down.shape)} and {tuple(part.up.shape)}"
            )
        if {part.down.dtype, part.up.dtype} != {self._dtype}:
            raise ValueError(f"adapter: must be {self._dtype}, got {part.down.dtype}")

    def add(self, x: torch.Tensor, out: torch.Tensor, *, isa: str | None = None) -> None:
        """Add the adapters of the step's tokens to a product's output, in place.

        Parameters
        ----------
        x
            [tokens, depth] in the dtype of the adapters, rows contiguous.
        out
            [tokens, sum of columns], rows contiguous.
        isa
            Instruction set, one of `native_library.ISAS`; None: the best of this processor.
        """
        if x.dtype != self._dtype or out.dtype != self._dtype:
            raise ValueError(f"x, out: must be {self._dtype}, got {x.dtype} and {out.dtype}")
        if x.stride(1) != 1 or out.stride(1) != 1 or x.shape[1] != self._depth:
            raise ValueError(f"x, out: rows must be contiguous, x [tokens, {self._depth}]")
        library = native_library.installed()
        for call, function in zip(
            self._calls, ("quire_adapter_down", "quire_adapter_up"), strict=True
        ):
            call.x, call.x_stride = x.data_ptr(), x.stride(0) * x.element_size()
            call.out, call.out_stride = out.data_ptr(), out.stride(0) * out.element_size()
            getattr(library.functions, function)(
                ctypes.byref(call), library.isa(isa), library.parallel, torch.get_num_threads()
            )
