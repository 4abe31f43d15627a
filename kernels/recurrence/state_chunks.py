"""State scan by products of chunks, for rows with many tokens: the same recurrence as `state_scan.py`.

With G_i the product of a chunk's decays up to token i, S the state before the chunk, and A, P [C, C]:

    P_ij = (G_i / G_j) (q_i k_j)          for j <= i
    A_ij = beta_i (G_i / G_j) (k_i k_j)   for j < i
    (I + A) U = beta (V - G K S)          with beta; else U = V
    O = G Q S + P U
    S = G_C S + (K G_C / G)^T U

(arXiv 2412.06464, section 3.3; arXiv 2405.21060, section 6). The unit triangular system is solved from its first row to
its last one. A program has some columns of a row's state in registers and takes the row's chunks in order; a chunk
ends where a snapshot is taken. The order of additions depends on where a row's steps begin, so `deterministic` does not
use this kernel. Products are those of TF32, which has more digits than bfloat16: models in float32
do not use it either. Grid: rows, heads, blocks of columns.

Bytes per row and head: 8 KEY VALUE, whatever its number of tokens. Flops a token: 4 KEY VALUE + 2 C (KEY + VALUE), with
beta 6 KEY VALUE + 2 C (2 KEY + 2 VALUE) where a block has all columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels import tuning
from quire.kernels.argument_checks import check_bounds
from quire.kernels.recurrence.recurrence_checks import check_scan
from quire.kernels.recurrence.recurrent_rows import RecurrentRows
from quire.kernels.recurrence.state_scan import inner_contiguous, state_scan

CHUNK = 16  # tokens
# Larger states do not fit into registers beside a chunk; on these architectures no state does.
MAX_KEY_DIM = 128
SMALL_ARCHS = ("sm_80", "gfx942")
COLUMNS = 32  # of a program
NUM_WARPS = 8


@triton.jit
def _solve(a, b, CHUNK: tl.constexpr):
    """Solve (I + a) x = b for a strictly lower triangular a [CHUNK, CHUNK] and b [CHUNK, columns]."""
    token = tl.arange(0, CHUNK)
    x = b
    for i in range(1, CHUNK):
        row = tl.sum(tl.where((token == i)[:, None], a, 0.0), axis=0)
        found = tl.sum(row[:, None] * x, axis=0)
        x = x - tl.where((token == i)[:, None], found[None, :], 0.0)
    return x


@triton.jit
def _chunk_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, log_decay_ptr, beta_ptr, states_ptr, cu_q_ptr, slots_ptr,
    kv_len_ptr, saves_ptr, first_save_ptr,
    stride_q, stride_k, stride_v, stride_slot, heads, group,
    KEY: tl.constexpr, VALUE: tl.constexpr, SAVES: tl.constexpr,
    BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Scan the tokens of one row and head in a block of columns."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    key = tl.arange(0, BLOCK_K)
    token = tl.arange(0, CHUNK)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(cu_q_ptr + row)
    count = tl.load(cu_q_ptr + row + 1) - begin
    if count > 0:
        # A row without earlier tokens has no rows of the slot's state.
        kept = tl.where(tl.load(kv_len_ptr + row) == count, 0, KEY)
        held = (key < KEY)[:, None] & (column < VALUE)[None, :]
        places = (head * KEY + key)[:, None] * VALUE + column[None, :]
        state_ptr = states_ptr + tl.load(slots_ptr + row) * stride_slot
        state = tl.load(state_ptr + places, mask=held & (key < kept)[:, None], other=0.0)
        save = tl.zeros([], tl.int64)
        last_save = tl.zeros([], tl.int64)
        if SAVES:
            save += tl.load(first_save_ptr + row)
            last_save += tl.load(first_save_ptr + row + 1)
        done = count * 0
        while done < count:
            size = tl.minimum(CHUNK, count - done)
            if SAVES:
                next_save = tl.load(saves_ptr + 3 * save + 1, mask=save < last_save, other=1 << 30)
                size = tl.minimum(size, next_save.to(tl.int32) - done)
            at = (begin + done + token).to(tl.int64)
            inside = token < size
            of_key = head // group * KEY + key
            held_key = inside[:, None] & (key < KEY)[None, :]
            logs = tl.load(log_decay_ptr + at * heads + head, mask=inside, other=0.0)
            logs = tl.cumsum(logs, axis=0)
            whole = tl.sum(tl.where(token == CHUNK - 1, logs, 0.0), axis=0)
            passed = tl.exp(logs)[:, None]
            between = logs[:, None] - logs[None, :]
            between = tl.exp(tl.where(token[:, None] >= token[None, :], between, float("-inf")))
            # [KEY, CHUNK]. A chunk's keys are loaded again in the other order: both would not fit into registers.
            keys = tl.load(
                k_ptr + at[None, :] * stride_k + of_key[:, None],
                mask=inside[None, :] & (key < KEY)[:, None], other=0.0,
            ).to(tl.float32)  # fmt: skip
            q = tl.load(
                q_ptr + at[:, None] * stride_q + of_key[None, :], mask=held_key, other=0.0
            ).to(tl.float32)
            scores = tl.dot(q, keys, input_precision="tf32") * between
            out = passed * tl.dot(q, state, input_precision="tf32")
            held_value = inside[:, None] & (column < VALUE)[None, :]
            u = tl.load(
                v_ptr + at[:, None] * stride_v + head * VALUE + column[None, :],
                mask=held_value, other=0.0,
            ).to(tl.float32)  # fmt: skip
            if beta_ptr is not None:
                beta = tl.load(beta_ptr + at * heads + head, mask=inside, other=0.0)[:, None]
                k = tl.load(
                    k_ptr + at[:, None] * stride_k + of_key[None, :], mask=held_key, other=0.0
                ).to(tl.float32)
                u = beta * (u - passed * tl.dot(k, state, input_precision="tf32"))
                products = tl.dot(k, keys, input_precision="tf32") * between * beta
                products = tl.where(token[:, None] > token[None, :], products, 0.0)
                u = _solve(products, u, CHUNK)
            out = tl.dot(scores, u, out, input_precision="tf32")
            tl.store(
                out_ptr + (at[:, None] * heads + head) * VALUE + column[None, :], out,
                mask=held_value,
            )  # fmt: skip
            keys = keys * tl.exp(whole - logs)[None, :]
            state = tl.dot(keys, u, state * tl.exp(whole), input_precision="tf32")
            done += size
            if SAVES:
                while (
                    tl.load(saves_ptr + 3 * save + 1, mask=save < last_save, other=1 << 30) == done
                ):
                    target_ptr = states_ptr + tl.load(saves_ptr + 3 * save + 2) * stride_slot
                    tl.store(target_ptr + places, state, mask=held)
                    save += 1
        tl.store(state_ptr + places, state, mask=held)


def chunk_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    rows: RecurrentRows,
) -> torch.Tensor:
    """Scan each head's tokens in chunks; arguments and result as for `state_scan.state_scan`.

    Raises
    ------
    ValueError
        Arguments do not fit together, or keys have more than `MAX_KEY_DIM` elements.
    """
    check_scan(q, k, v, log_decay, beta, states, rows)
    check_bounds("key_dim", k.shape[2], 1, MAX_KEY_DIM)
    q, k, v = (inner_contiguous(x) for x in (q, k, v))
    heads, value_dim = v.shape[1:]
    key_heads, key_dim = k.shape[1:]
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    _chunk_kernel[(rows.num_rows, heads, triton.cdiv(value_dim, COLUMNS))](
        out, q, k, v, log_decay.contiguous(), None if beta is None else beta.contiguous(), states,
        rows.cu_q, rows.slots, rows.kv_len, rows.saves, rows.first_save,
        q.stride(0), k.stride(0), v.stride(0), states.stride(0), heads, heads // key_heads,
        KEY=key_dim, VALUE=value_dim, SAVES=len(rows.saves) > 0,
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)), COLUMNS=COLUMNS, CHUNK=CHUNK,
        num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def scan_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    rows: RecurrentRows,
) -> torch.Tensor:
    """Scan by tokens if each row has one or chunks do not fit, else by chunks; see `state_scan.state_scan`."""
    fits = k.shape[2] <= MAX_KEY_DIM and tuning.device_arch(v.device) not in SMALL_ARCHS
    scan = chunk_scan if fits and not rows.is_decode else state_scan
    return scan(q, k, v, log_decay, beta, states, rows)
