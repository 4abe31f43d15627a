"""Scatters the rows of one tensor to rows of another: a step's keys or values to their slots in the cache.

Bytes: each row is read and written once; no arithmetic. torch's `index_copy_` first copies a transposed source to
contiguous memory: for the keys and values of 512 tokens and 8 heads of 128 it takes four times as long.
"""

from __future__ import annotations

import ctypes

import torch

from quire.kernels.cpu import native_library


class _Call(ctypes.Structure):
    """`struct scatter_call` of native/scatter.c."""

    _fields_ = [
        ("to", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("next_token", ctypes.c_int64),
        ("outside", ctypes.c_int64),
    ]


def scatter_rows(target: torch.Tensor, rows: torch.Tensor, source: torch.Tensor) -> None:
    """Set target[rows[token * heads + head]] = source[token, head].

    On the CPU the compiled library does this if it is installed, otherwise torch.

    Parameters
    ----------
    target
        [num_rows, head_dim], contiguous.
    rows
        [tokens * heads] int64, contiguous, without duplicates.
    source
        [tokens, heads, head_dim] of the target's dtype, any strides.

    Raises
    ------
    ValueError
        A shape or dtype does not match.
    IndexError
        A row is outside the target.
    """
    tokens, heads, head_dim = source.shape
    if target.shape[1:] != (head_dim,) or rows.shape != (tokens * heads,):
        raise ValueError(
            f"rows must be [tokens * heads] and target [num_rows, head_dim] for source {tuple(source.shape)}, got "
            f"{tuple(rows.shape)} and {tuple(target.shape)}"
        )
    if target.dtype != source.dtype or rows.dtype != torch.int64:
        raise ValueError(
            f"target is {target.dtype}, source {source.dtype}: must be equal; "
            f"rows must be torch.int64, got {rows.dtype}"
        )
    library = native_library.load() if target.device.type == "cpu" else None
    if library is None or not (target.is_contiguous() and rows.is_contiguous()):
        target.index_copy_(0, rows, source.reshape(-1, head_dim))
        return
    if source.stride(2) != 1:
        source = source.contiguous()
    size = source.element_size()
    call = _Call(
        to=target.data_ptr(),
        source=source.data_ptr(),
        token_stride=source.stride(0) * size,
        head_stride=source.stride(1) * size,
        rows=rows.data_ptr(),
        num_rows=len(target),
        row_bytes=head_dim * size,
        tokens=tokens,
        heads=heads,
    )
    threads = torch.get_num_threads()
    library.functions.quire_scatter(ctypes.byref(call), library.parallel, threads)
    if call.outside:
        raise IndexError(f"rows: {call.outside} are not between 0 and {len(target) - 1}")
