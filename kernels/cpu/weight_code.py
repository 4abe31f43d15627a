"""Lossless code for the bfloat16 weights of a packed linear layer: 12 bits for each weight.

The time of a decode step with few rows is the time to read the weights. The upper 8 of a weight's 16 bits (sign and
most of the exponent) nearly always have one of 16 values, in trained and in random weights, so 4 bits can encode them
(`native/linear_code.h` has the layout). The GEMM decodes weights in registers; every bit of its result is the same as
without the code.

Bytes: 192 instead of 256 for 128 weights (a step of a panel). A step in which a weight's upper byte has no code is
stored uncoded, which takes 128 bytes more. With normally distributed weights this is one step in a hundred.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

from quire.kernels.cpu import native_library
from quire.kernels.cpu.weight_panels import PANEL_COLUMNS, pack_rows
from quire.kernels.huge_pages import ask_for_huge_pages

# The same constants as in native/linear_code.h.
_STEP_WEIGHTS = 128
_STEP_BYTES = 192
_TABLE_BYTES = 16
# The code is used if it takes at most this share of the uncoded bytes.
_MOST = 0.9


class CodeArrays(ctypes.Structure):
    """`struct weight_code` of native/linear_code.h."""

    _fields_ = [
        ("tables", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("apart", ctypes.c_void_p),
        ("high", ctypes.c_void_p),
    ]


class CodeCall(ctypes.Structure):
    """`struct code_call` of native/linear_code.c."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("first_panel", ctypes.c_int64),
        ("panels", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("tables", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("coded", ctypes.c_void_p),
        ("apart", ctypes.c_void_p),
        ("high", ctypes.c_void_p),
        ("used", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("joined", ctypes.c_int64),
        ("next_panel", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class WeightCode:
    """The tables that decode the upper bytes of a coded weight, and the upper bytes of uncoded steps."""

    tables: torch.Tensor  # [panels, 16] uint8, the upper byte for each 4-bit code
    first: torch.Tensor  # [panels] int64, index of a panel's first entry in `apart` and `high`
    apart: torch.Tensor  # [entries] int32, the panel's uncoded steps in order, then -1
    high: torch.Tensor  # [entries, 128] uint8, upper bytes of these steps; undefined for a -1
    arrays: CodeArrays = field(compare=False, repr=False)  # addresses of the tensors above

    @classmethod
    def of(
        cls, tables: torch.Tensor, first: torch.Tensor, apart: torch.Tensor, high: torch.Tensor
    ) -> WeightCode:
        """Make the code with the addresses of its tensors."""
        tensors = (tables, first, apart, high)
        return cls(*tensors, CodeArrays(*(tensor.data_ptr() for tensor in tensors)))

    @property
    def num_bytes(self) -> int:
        """Bytes of these tensors, without the coded panels."""
        return sum(t.nbytes for t in (self.tables, self.first, self.apart, self.high))


class Coder:
    """Codes a weight that arrives in parts. It works panel by panel, so a panel stays in the L2 cache.

    The result is `coded`, the panels [panels, steps, 48] int32, and `code`, their tables.

    Parameters
    ----------
    columns
        Columns of all parts together.
    depth
        Input features, an even number.
    """

    def __init__(self, columns: int, depth: int):
        self._columns, self._steps = columns, depth // 2
        panels = -(-columns // PANEL_COLUMNS)
        self.coded = torch.empty(panels, self._steps, _STEP_BYTES // 4, dtype=torch.int32)
        ask_for_huge_pages(self.coded)
        # These arrays are large enough for the case that no step can be coded; pages that are not written take no
        # memory.
        entries = panels * (self._steps + 1)
        self.code = WeightCode.of(
            torch.empty(panels, _TABLE_BYTES, dtype=torch.uint8),
            torch.empty(panels, dtype=torch.int64),
            torch.empty(entries, dtype=torch.int32),
            torch.empty(entries, _STEP_WEIGHTS, dtype=torch.uint8),
        )
        self._used = 0  # entries of `apart` and `high` in use
        # The last, incomplete panel, with one word for each step as scratch memory of its coding.
        self._edge = torch.zeros(1, self._steps, PANEL_COLUMNS + 1, dtype=torch.int32)
        self._scratch: torch.Tensor | None = None
        self._done = 0  # columns that were added so far

    def add(self, rows: torch.Tensor) -> None:
        """Code the next columns: `rows` [columns, depth], rows contiguous and 4-byte aligned."""
        at_edge = self._done % PANEL_COLUMNS
        head = min(PANEL_COLUMNS - at_edge, len(rows)) if at_edge else 0
        whole = (len(rows) - head) // PANEL_COLUMNS * PANEL_COLUMNS
        self._add_to_edge(rows[:head])
        if whole:
            threads = torch.get_num_threads()
            if self._scratch is None or len(self._scratch) < threads:
                self._scratch = torch.empty(threads, *self._edge.shape[1:], dtype=torch.int32)
            self._run(rows[head : head + whole], self._scratch, threads)
        self._add_to_edge(rows[head + whole :])

    def finish(self) -> bool:
        """Complete `coded` and `code` after the last columns; return whether coding saves at least 10% of the bytes."""
        if self._done % PANEL_COLUMNS:
            self._run(None, self._edge, 1)
        table_bytes = self._used * (_STEP_WEIGHTS + 4) + len(self.coded) * (_TABLE_BYTES + 8)
        uncoded = self.coded.nbytes // _STEP_BYTES * 2 * _STEP_WEIGHTS
        if self.coded.nbytes + table_bytes > _MOST * uncoded:
            return False
        code, used = self.code, self._used
        self.code = WeightCode.of(
            code.tables, code.first, code.apart[:used].clone(), code.high[:used].clone()
        )
        return True

    def _add_to_edge(self, rows: torch.Tensor) -> None:
        if not len(rows):
            return
        column = self._done % PANEL_COLUMNS
        if not column:
            self._edge.zero_()
        panel = self._edge.view(-1)[: self._steps * PANEL_COLUMNS]
        pack_rows(panel.view(1, self._steps, PANEL_COLUMNS), rows, column, False)
        self._done += len(rows)
        if self._done % PANEL_COLUMNS == 0:
            self._done -= PANEL_COLUMNS
            self._run(None, self._edge, 1)

    def _run(self, rows: torch.Tensor | None, scratch: torch.Tensor, threads: int) -> None:
        """Code whole panels of `rows`, or the last, incomplete panel if `rows` is None."""
        library = native_library.installed()
        panels = 1 if rows is None else len(rows) // PANEL_COLUMNS
        code = self.code.arrays
        call = CodeCall(
            rows=None if rows is None else rows.data_ptr(),
            row_stride=0 if rows is None else rows.stride(0) * rows.element_size(),
            first_panel=self._done // PANEL_COLUMNS,
            panels=panels,
            steps=self._steps,
            tables=code.tables,
            first=code.first,
            coded=self.coded.data_ptr(),
            apart=code.apart,
            high=code.high,
            used=self._used,
            scratch=scratch.data_ptr(),
        )
        library.functions.quire_code_panels(ctypes.byref(call), library.parallel, threads)
        self._used = call.used
        self._done += panels * PANEL_COLUMNS
