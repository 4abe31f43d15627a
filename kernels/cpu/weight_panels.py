"""Packs a weight into panels of 64 output features, which a GEMM reads front to back (`native/linear_unit.h`)."""

from __future__ import annotations

import ctypes

import torch

from quire.kernels.cpu import native_library

PANEL_COLUMNS = 64  # `PANEL_COLUMNS` of native/linear.h


class PackCall(ctypes.Structure):
    """`struct pack_call` of native/linear.c."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("in_strips", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("first_column", ctypes.c_int64),
        ("next_panel", ctypes.c_int64),
    ]


def pack_rows(packed: torch.Tensor, rows: torch.Tensor, first_column: int, in_strips: bool) -> None:
    """Write rows of a weight into its panels.

    Parameters
    ----------
    packed
        [panels, steps, 64] int32, all panels of the weight.
    rows
        [columns, depth], rows contiguous and 4-byte aligned, `steps` words of 32 bits each.
    first_column
        Index of the first of `rows` in the packed weight, where it becomes a column.
    in_strips
        Whether a panel is [4, steps, 16] words, the layout for AMX.
    """
    library = native_library.installed()
    call = PackCall(
        packed=packed.data_ptr(),
        in_strips=in_strips,
        rows=rows.data_ptr(),
        row_stride=rows.stride(0) * rows.element_size(),
        columns=len(rows),
        steps=packed.shape[1],
        first_column=first_column,
    )
    library.functions.quire_pack(ctypes.byref(call), library.parallel, torch.get_num_threads())
