"""Shapes of the arguments of short convolutions and state scans, on every device."""

from __future__ import annotations

import torch

from quire.kernels.argument_checks import (
    FLOATS,
    check_bounds,
    check_device,
    check_dtype,
    check_shape,
    check_vector,
)
from quire.kernels.recurrence.recurrent_rows import RecurrentRows

MAX_TAPS = 8  # of native/recurrence.h, as the next one
MAX_KEY_DIM = 256


def check_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: RecurrentRows,
) -> None:
    """Raise ValueError unless a convolution's arguments fit together.

    Parameters
    ----------
    x
        [T, channels].
    weight, bias
        [taps, channels] and [channels] float32, contiguous.
    states
        [slots, taps, channels], the last inputs, oldest first; contiguous but for the slots.
    """
    taps, channels = weight.shape
    check_bounds("taps", taps, 1, MAX_TAPS)
    check_shape("x", x, (len(x), channels))
    check_dtype("x", x, FLOATS)
    check_shape("states", states, (len(states), taps, channels))
    check_dtype("states", states, FLOATS)
    _check_slots(states)
    check_vector("weight", weight.view(-1), None, (torch.float32,), x.device)
    if bias is not None:
        check_vector("bias", bias, channels, (torch.float32,), x.device)
    _check_rows(rows, x.device)


def check_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    rows: RecurrentRows,
) -> None:
    """Raise ValueError unless a scan's arguments fit together.

    Parameters
    ----------
    q, k
        [T, key heads, key_dim]; each serves heads / key heads consecutive heads of v.
    v
        [T, heads, value_dim].
    log_decay, beta
        [T, heads] float32.
    states
        [slots, heads, key_dim, value_dim] float32; contiguous but for the slots.
    """
    tokens, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[1:]
    check_bounds("key_dim", key_dim, 1, MAX_KEY_DIM)
    check_shape("q", q, (tokens, key_heads, key_dim))
    check_shape("v", v, (tokens, heads, value_dim))
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, x, FLOATS)
        check_device(name, x, v.device)
    if heads % key_heads:
        raise ValueError(f"heads: must be a multiple of the {key_heads} key heads, got {heads}")
    for name, gate in (("log_decay", log_decay), ("beta", beta)):
        if gate is not None:
            check_shape(name, gate, (tokens, heads))
            check_dtype(name, gate, (torch.float32,))
            check_device(name, gate, v.device)
    check_shape("states", states, (len(states), heads, key_dim, value_dim))
    check_dtype("states", states, (torch.float32,))
    _check_slots(states)
    _check_rows(rows, v.device)


def _check_slots(states: torch.Tensor) -> None:
    if not states[0].is_contiguous():
        raise ValueError(f"states: a slot must be contiguous, got strides {states.stride()}")


def _check_rows(rows: RecurrentRows, device: torch.device) -> None:
    check_device("rows.slots", rows.slots, device)
    check_shape("rows.cu_q", rows.cu_q, (rows.num_rows + 1,))
    check_shape("rows.kv_len", rows.kv_len, (rows.num_rows,))
