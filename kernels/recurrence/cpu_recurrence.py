"""Recurrent layers on the CPU in C: a step's rows one token after the other, with states where they are.

    short_conv     out[t] = act(bias + sum_j weight[j] x[t - taps + 1 + j]), for each channel
    state_scan     S = a S + k u,  out = q S, for each head;  u = v,  or  u = beta (v - a k S);  a = exp(log_decay)

A row's first tokens read inputs and S from its slot; the slot then has those after the row's last token. One order of
additions: a token's bits depend neither on the step's other rows nor on how its row is divided into steps.

Bytes: a state is read once and written once for all tokens of a row in a step. Flops of a scan: 6 key_dim value_dim a
token and head, 8 with beta. A thread has 64 columns of a state in its first-level cache, so 512 tokens of a head of
128 x 128 take a tenth of the time of torch's products of chunks.
Needs the compiled library (`native/recurrence_tile.h`).
"""

from __future__ import annotations

import ctypes

import torch

from quire.kernels.cpu import native_library
from quire.kernels.recurrence.recurrence_checks import check_conv, check_scan
from quire.kernels.recurrence.recurrent_rows import RecurrentRows

_STATE_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Rows(ctypes.Structure):
    """`struct recurrent_rows` of native/recurrence.h."""

    _fields_ = [
        ("cu_q", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("fresh", ctypes.c_void_p),
        ("saves", ctypes.c_void_p),
        ("first_save", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
    ]


class _ConvCall(ctypes.Structure):
    """`struct conv_call` of native/recurrence.h."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("slot_stride", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("taps", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("silu", ctypes.c_int64),
        ("rows", _Rows),
        ("team", ctypes.c_void_p),
    ]


class _ScanCall(ctypes.Structure):
    """`struct scan_call` of native/recurrence.h."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("k_stride", ctypes.c_int64),
        ("v_stride", ctypes.c_int64),
        ("decay", ctypes.c_void_p),
        ("beta", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("slot_stride", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("key_heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("rows", _Rows),
        ("team", ctypes.c_void_p),
    ]


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: RecurrentRows,
    silu: bool,
) -> torch.Tensor:
    """Convolve each channel with its last inputs; see `check_conv` for shapes."""
    check_conv(x, weight, bias, states, rows)
    wide = _unit_stride(x.float())
    out = torch.empty(x.shape, dtype=torch.float32)
    fresh, first_save = _fresh(rows), _first_save(rows)
    call = _ConvCall(
        x=wide.data_ptr(),
        x_stride=wide.stride(0),
        out=out.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        states=states.data_ptr(),
        slot_stride=states.stride(0) * states.element_size(),
        channels=x.shape[1],
        taps=len(weight),
        dtype=_STATE_DTYPES[states.dtype],
        silu=silu,
        rows=_rows(rows, fresh, first_save),
    )
    _run("quire_conv", call)
    return out.to(x.dtype)


def state_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    rows: RecurrentRows,
) -> torch.Tensor:
    """Scan each head's tokens; see `check_scan` for shapes. Returns [T, heads, value_dim] float32."""
    check_scan(q, k, v, log_decay, beta, states, rows)
    wide = [_inner_contiguous(x.float()) for x in (q, k, v)]
    decay = log_decay.exp().contiguous()
    beta = None if beta is None else beta.contiguous()
    out = torch.empty(v.shape, dtype=torch.float32)
    fresh, first_save = _fresh(rows), _first_save(rows)
    call = _ScanCall(
        q=wide[0].data_ptr(),
        k=wide[1].data_ptr(),
        v=wide[2].data_ptr(),
        q_stride=wide[0].stride(0),
        k_stride=wide[1].stride(0),
        v_stride=wide[2].stride(0),
        decay=decay.data_ptr(),
        beta=None if beta is None else beta.data_ptr(),
        out=out.data_ptr(),
        states=states.data_ptr(),
        slot_stride=states.stride(0) * 4,
        heads=v.shape[1],
        key_heads=k.shape[1],
        key_dim=k.shape[2],
        value_dim=v.shape[2],
        rows=_rows(rows, fresh, first_save),
    )
    _run("quire_scan", call)
    return out


def _fresh(rows: RecurrentRows) -> torch.Tensor:
    return (rows.kv_len == rows.cu_q.diff()).view(torch.uint8)


def _first_save(rows: RecurrentRows) -> torch.Tensor:
    if len(rows.saves):
        return rows.first_save
    return torch.zeros(rows.num_rows + 1, dtype=torch.int64)


def _rows(rows: RecurrentRows, fresh: torch.Tensor, first_save: torch.Tensor) -> _Rows:
    return _Rows(
        rows.cu_q.data_ptr(),
        rows.slots.data_ptr(),
        fresh.data_ptr(),
        rows.saves.data_ptr(),
        first_save.data_ptr(),
        rows.num_rows,
    )


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _inner_contiguous(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, size] with contiguous heads and any stride between tokens."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _run(name: str, call: ctypes.Structure) -> None:
    library = native_library.installed()
    threads = torch.get_num_threads()
    function = getattr(library.functions, name)
    function(ctypes.byref(call), library.best_isa, library.parallel, threads)
