"""Recurrent layers in plain torch, token by token, written for clarity. Tests compare the kernels with them."""

from __future__ import annotations

import torch
from torch.nn import functional

from quire.kernels.recurrence.recurrent_rows import RecurrentRows


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: RecurrentRows,
    silu: bool,
) -> torch.Tensor:
    """Causal depthwise convolution of each row: y[t] = act(bias + sum_j weight[j] x[t - taps + 1 + j]).

    Parameters
    ----------
    x
        [T, channels].
    weight, bias
        [taps, channels], [channels].
    states
        [slots, taps, channels] last inputs, oldest first; changed in place.

    Returns
    -------
    [T, channels] in the dtype of x.
    """
    out = torch.empty_like(x)
    for row, begin, end, state, saves in _each_row(rows, states):
        for t in range(begin, end):
            state = torch.cat([state[1:], x[t][None].to(state.dtype)])
            y = (weight.to(x.dtype) * state.to(x.dtype)).sum(0)
            y = y if bias is None else y + bias.to(x.dtype)
            out[t] = functional.silu(y) if silu else y
            _keep(states, saves, t + 1 - begin, state)
        states[rows.slots[row]] = state
    return out


def state_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    rows: RecurrentRows,
) -> torch.Tensor:
    """A linear recurrence for each head: S_t = a_t S_(t-1) + k_t u_t^T, o_t = S_t^T q_t, a_t = exp(log_decay).

    The recurrences of the field are cases of it:

    | | a | k, q | u | source |
    |---|---|---|---|---|
    | gated delta rule | exp(g) | normalised, q / sqrt(key_dim) | beta (v - a S^T k) | arXiv 2412.06464, equation 10 |
    | Mamba-2 (SSD) | exp(dt A) | B, C of the head's group | dt x | arXiv 2405.21060, section 2 |
    | lightning attention | exp(-slope) | k, q | v | arXiv 2401.04658, equation 3 |

    Parameters
    ----------
    q, k
        [T, key heads, key_dim]; each serves heads / key heads consecutive heads.
    v
        [T, heads, value_dim].
    log_decay, beta
        [T, heads]; without beta, u = v.
    states
        [slots, heads, key_dim, value_dim]; changed in place.

    Returns
    -------
    [T, heads, value_dim].
    """
    group = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    out = torch.empty_like(v)
    for row, begin, end, state, saves in _each_row(rows, states):
        for t in range(begin, end):
            state = state * log_decay[t].exp()[:, None, None]
            u = v[t]
            if beta is not None:
                u = beta[t][:, None] * (u - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t][:, :, None] * u[:, None, :]
            out[t] = torch.einsum("hkv,hk->hv", state, q[t])
            _keep(states, saves, t + 1 - begin, state)
        states[rows.slots[row]] = state
    return out


def _each_row(rows: RecurrentRows, states: torch.Tensor):
    """Yield index, first token, end, state and snapshots [k, 3] of each row that has tokens."""
    for row in range(rows.num_rows):
        begin, end = rows.cu_q[row : row + 2].tolist()
        if begin == end:
            continue
        state = states[rows.slots[row]].clone()
        if int(rows.kv_len[row]) == end - begin:
            state.zero_()
        saves = rows.saves[int(rows.first_save[row]) : int(rows.first_save[row + 1])]
        yield row, begin, end, state, saves


def _keep(states: torch.Tensor, saves: torch.Tensor, num_tokens: int, state: torch.Tensor) -> None:
    for _, count, slot in saves.tolist():
        if count == num_tokens:
            states[slot] = state
