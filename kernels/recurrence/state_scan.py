"""State scan: the recurrence of a head, one token after the other, with its state in a slot.

    S = a S + k u^T,   out = S^T q;   u = v,  or with beta  u = beta (v - a S^T k);   a = exp(log_decay)

This is the gated delta rule, Mamba-2 and lightning attention (`tests/kernels/recurrence_reference.py`). A program has
some columns of the state of a row and head in registers, from the slot and back to it. Arithmetic is float32 in one
order, so a token's bits depend neither on the batch nor on how its row is divided into steps. Grid: rows, heads,
blocks of columns.

It computes steps in which rows have one token, and under `deterministic` all others too. For long rows
`state_chunks.py` has products of chunks.

Layout. q, k [T, key heads, KEY], v [T, heads, VALUE], any stride between tokens; states [slots, heads, KEY, VALUE]
float32, any stride between slots.

Bytes per row and head: 8 KEY VALUE, whatever its number of tokens. Flops: 5 KEY VALUE a token, 7 with beta.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.recurrence.recurrence_checks import check_scan
from quire.kernels.recurrence.recurrent_rows import RecurrentRows

COLUMNS = 32  # of a program
NUM_WARPS = 4


@triton.jit
def _scan_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, log_decay_ptr, beta_ptr, states_ptr, cu_q_ptr, slots_ptr,
    kv_len_ptr, saves_ptr, first_save_ptr,
    stride_q, stride_k, stride_v, stride_slot, heads, group,
    KEY: tl.constexpr, VALUE: tl.constexpr, SAVES: tl.constexpr,
    BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scan the tokens of one row and head in a block of columns."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    key = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(cu_q_ptr + row)
    end = tl.load(cu_q_ptr + row + 1)
    if end > begin:
        # A row without earlier tokens has no rows of the slot's state.
        kept = tl.where(tl.load(kv_len_ptr + row) == end - begin, 0, KEY)
        held = (key < KEY)[:, None] & (column < VALUE)[None, :]
        places = (head * KEY + key)[:, None] * VALUE + column[None, :]
        state_ptr = states_ptr + tl.load(slots_ptr + row) * stride_slot
        state = tl.load(state_ptr + places, mask=held & (key < kept)[:, None], other=0.0)
        first_save = 0
        last_save = 0
        if SAVES:
            first_save = tl.load(first_save_ptr + row).to(tl.int32)
            last_save = tl.load(first_save_ptr + row + 1).to(tl.int32)
        first = begin.to(tl.int64)
        for i in range(end - begin):
            token = first + i
            of_key = head // group * KEY + key
            k = tl.load(k_ptr + token * stride_k + of_key, mask=key < KEY, other=0.0)
            q = tl.load(q_ptr + token * stride_q + of_key, mask=key < KEY, other=0.0)
            u = tl.load(
                v_ptr + token * stride_v + head * VALUE + column, mask=column < VALUE, other=0.0
            ).to(tl.float32)
            k = k.to(tl.float32)[:, None]
            state = state * tl.exp(tl.load(log_decay_ptr + token * heads + head))
            if beta_ptr is not None:
                u = (u - tl.sum(state * k, axis=0)) * tl.load(beta_ptr + token * heads + head)
            state = state + k * u[None, :]
            out = tl.sum(state * q.to(tl.float32)[:, None], axis=0)
            tl.store(out_ptr + (token * heads + head) * VALUE + column, out, mask=column < VALUE)
            if SAVES:
                for save in range(first_save, last_save):
                    if tl.load(saves_ptr + 3 * save + 1) == i + 1:
                        target_ptr = states_ptr + tl.load(saves_ptr + 3 * save + 2) * stride_slot
                        tl.store(target_ptr + places, state, mask=held)
        tl.store(state_ptr + places, state, mask=held)


def state_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    rows: RecurrentRows,
) -> torch.Tensor:
    """Scan each head's tokens; see `check_scan` for shapes.

    Returns
    -------
    [T, heads, VALUE] float32; undefined for tokens of no row.
    """
    check_scan(q, k, v, log_decay, beta, states, rows)
    q, k, v = (inner_contiguous(x) for x in (q, k, v))
    heads, value_dim = v.shape[1:]
    key_heads, key_dim = k.shape[1:]
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    _scan_kernel[(rows.num_rows, heads, triton.cdiv(value_dim, COLUMNS))](
        out, q, k, v, log_decay.contiguous(), None if beta is None else beta.contiguous(), states,
        rows.cu_q, rows.slots, rows.kv_len, rows.saves, rows.first_save,
        q.stride(0), k.stride(0), v.stride(0), states.stride(0), heads, heads // key_heads,
        KEY=key_dim, VALUE=value_dim, SAVES=len(rows.saves) > 0,
        BLOCK_K=triton.next_power_of_2(key_dim), COLUMNS=COLUMNS,
        num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def inner_contiguous(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, size] with contiguous heads and any stride between tokens."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
