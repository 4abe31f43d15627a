"""bfloat16 weights of a packed product in 12 bits each, without loss.

A decode step of few rows takes as long as its weights take to be read. Of a trained, or a random, weight's 16 bits the
upper 8, its sign and most of its exponent, are nearly always one of 16 values: a number of 4 bits stands for each
(`native/linear_code.h` has the layout). The product decodes them in registers; every bit of its result is as without.

Bytes: 192 for 128 weights instead of 256, and 128 more where one of them has another value, which is one in a hundred
of such 128 where weights are normally distributed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

from quire.kernels.cpu import native_library
from quire.kernels.cpu.weight_panels import PANEL_COLUMNS, pack_rows
from quire.kernels.huge_pages import ask_for_huge_pages

_STEP_WEIGHTS = 128  # this and the next two of native/linear_code.h
_STEP_BYTES = 192
_TABLE_BYTES = 16
_MOST = 0.9  # of the bytes that it replaces: with more, decoding is not worth it


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
    """What the numbers of a coded weight stand for, and what has none."""

    tables: torch.Tensor  # [panels, 16] uint8
    first: torch.Tensor  # [panels] int64: where a panel's entries of the next two begin
    apart: torch.Tensor  # [entries] int32: a panel's steps that are written out, in order, then -1
    high: torch.Tensor  # [entries, 128] uint8: their high bytes; nothing beside a -1
    arrays: CodeArrays = field(compare=False, repr=False)  # addresses of these

    @classmethod
    def of(
        cls, tables: torch.Tensor, first: torch.Tensor, apart: torch.Tensor, high: torch.Tensor
    ) -> WeightCode:
        """With the addresses."""
        tensors = (tables, first, apart, high)
        return cls(*tensors, CodeArrays(*(tensor.data_ptr() for tensor in tensors)))

    @property
    def num_bytes(self) -> int:
        """Beside the coded panels."""
        return sum(t.nbytes for t in (self.tables, self.first, self.apart, self.high))


class Coder:
    """Codes a weight that comes in parts, panel by panel from the second-level cache.

    `coded` are its panels, [panels, steps, 48] int32, `code` what belongs to them.

    Parameters
    ----------
    columns
        Of all parts.
    depth
        Elements of bfloat16, an even number.
    """

    def __init__(self, columns: int, depth: int):
        self._columns, self._steps = columns, depth // 2
        panels = -(-columns // PANEL_COLUMNS)
        self.coded = torch.empty(panels, self._steps, _STEP_BYTES // 4, dtype=torch.int32)
        ask_for_huge_pages(self.coded)
        # Room for all steps; what is not written takes no memory.
        entries = panels * (self._steps + 1)
        self.code = WeightCode.of(
            torch.empty(panels, _TABLE_BYTES, dtype=torch.uint8),
            torch.empty(panels, dtype=torch.int64),
            torch.empty(entries, dtype=torch.int32),
            torch.empty(entries, _STEP_WEIGHTS, dtype=torch.uint8),
        )
        self._used = 0  # entries
        # A panel of which some columns are there, and beside it what coding it takes.
        self._edge = torch.zeros(1, self._steps, PANEL_COLUMNS + 1, dtype=torch.int32)
        self._scratch: torch.Tensor | None = None
        self._done = 0  # columns

    def add(self, rows: torch.Tensor) -> None:
        """The next columns: [columns, depth], rows contiguous and 4-byte aligned."""
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
        """After the last columns: `coded` and `code` are complete. Returns whether a tenth of the bytes is saved."""
        if self._done % PANEL_COLUMNS:
            self._run(None, self._edge, 1)
        beside = self._used * (_STEP_WEIGHTS + 4) + len(self.coded) * (_TABLE_BYTES + 8)
        uncoded = self.coded.nbytes // _STEP_BYTES * 2 * _STEP_WEIGHTS
        if self.coded.nbytes + beside > _MOST * uncoded:
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
        """Code whole panels, of the edge where rows is None."""
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
