"""Log-probs of the model's own distribution: the largest n of a row, and the chosen token's.

    log p(i) = x_i - log sum_j e^x_j        x: the logits before bias, penalties, mask and temperature

`top_log_probs` runs before the logits are edited, `chosen_log_probs` after sampling; it finds the raw logit of
an edited id in what `quire.kernels.logit_edits.edit_logits` returned.

The largest n come without a sort: the histogram of the first pass leaves a short list (`quire.kernels.sampling_tile`),
from which n rounds each take the largest that comes after the last in the order (value, falling; id, rising).

Bytes a row: 2 vocab itemsize (n = 0: 1), the second time from the L2 cache if it holds the rows that run. Flops: 30 an
element, and n list_len.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.checks import check_bounds
from quire.kernels.row_checks import FLOATS, check_matrix, check_vector
from quire.kernels.sampling import DEFAULT_CONFIG, MAX_VOCAB, SamplingConfig
from quire.kernels.sampling_tile import (
    gather_candidates,
    key_value,
    last_bin,
    load_candidates,
    order_key,
    survey,
)

MAX_TOP = 128


@triton.jit
def _top_kernel(
    values_ptr, ids_ptr, log_sum_ptr, logits_ptr, list_ptr, stride_logits,
    NUM_TOP: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    row_offset = row * stride_logits
    list_ptr += row * MAX_CANDIDATES
    no_key = tl.full([], 0, tl.uint32)
    highest, total, _, counts = survey(
        logits_ptr, row_offset, None, 0, 1.0, False, no_key, no_key, NUM_TOP > 0, VOCAB, TILE
    )
    log_sum = highest + tl.log(total)
    tl.store(log_sum_ptr + row, log_sum)
    if NUM_TOP > 0:
        cut = last_bin(tl.cumsum(counts, 0, reverse=True) >= NUM_TOP)
        count, listed = gather_candidates(
            list_ptr, logits_ptr, row_offset, None, 0, counts, cut, VOCAB, TILE, MAX_CANDIDATES
        )
        last_key = tl.full([], 2147483647, tl.int32)  # above that of every finite value
        last_id = tl.full([], -1, tl.int32)
        for rank in range(NUM_TOP):
            best_key = tl.full([TILE], -2147483648, tl.int32)
            best_id = tl.full([TILE], VOCAB, tl.int32)
            for start in range(0, count, TILE):
                token, y = load_candidates(
                    list_ptr, logits_ptr, row_offset, None, 0, 1.0, start, count, listed, TILE
                )
                key = order_key(y)
                after = (key < last_key) | ((key == last_key) & (token > last_id))
                better = after & (y > float("-inf")) & (key > best_key)
                best_key = tl.where(better, key, best_key)
                best_id = tl.where(better, token, best_id)
            last_key = tl.max(best_key, 0)
            last_id = tl.min(tl.where(best_key == last_key, best_id, VOCAB), 0)
            found = last_id < VOCAB
            value = tl.where(found, key_value(last_key) - log_sum, float("-inf"))
            tl.store(values_ptr + row * NUM_TOP + rank, value)
            tl.store(ids_ptr + row * NUM_TOP + rank, tl.where(found, last_id, -1))


@triton.jit
def _chosen_kernel(
    out_ptr, logits_ptr, tokens_ptr, log_sum_ptr, starts_ptr, ids_ptr, before_ptr, stride_logits,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens_ptr + row)
    known = (token >= 0) & (token < VOCAB)
    x = tl.load(logits_ptr + row * stride_logits + tl.where(known, token, 0)).to(tl.float32)
    if starts_ptr is not None:
        end = tl.load(starts_ptr + row + 1)
        for start in range(tl.load(starts_ptr + row), end, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            edited = tl.load(ids_ptr + entry, mask=entry < end, other=-1) == token
            before = tl.load(before_ptr + entry, mask=(entry < end) & edited, other=0.0)
            # Each id is listed once: the sum is that one value.
            x = tl.where(tl.sum(edited.to(tl.int32), 0) > 0, tl.sum(before.to(tl.float32), 0), x)
    value = tl.where(known, x - tl.load(log_sum_ptr + row), float("-inf"))
    tl.store(out_ptr + row, value)


def top_log_probs(
    logits: torch.Tensor, num_top: int, *, config: SamplingConfig = DEFAULT_CONFIG
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Largest log-probs of each row.

    Parameters
    ----------
    logits
        [rows, vocab] bfloat16, float16 or float32.
    num_top
        0 to `MAX_TOP`.

    Returns
    -------
    ([rows, num_top] float32 log-probs, falling; [rows, num_top] int32 ids, equal values by rising id; [rows] float32
    log of the sum of exponentials). A row with fewer ids above -inf ends in -inf and id -1.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device that does not fit, with its bound.
    """
    check_matrix("logits", logits, (None, None), FLOATS, logits.device)
    rows, vocab = logits.shape
    check_bounds("vocab", vocab, 1, MAX_VOCAB)
    check_bounds("num_top", num_top, 0, MAX_TOP)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    values, ids = empty(rows, num_top), empty(rows, num_top, dtype=torch.int32)
    log_sum, candidates = empty(rows), empty(rows, config.max_candidates, dtype=torch.int32)
    if rows:
        # fmt: off
        _top_kernel[(rows,)](
            values, ids, log_sum, logits, candidates, logits.stride(0),
            NUM_TOP=num_top, VOCAB=vocab, TILE=config.tile, MAX_CANDIDATES=config.max_candidates,
            num_warps=config.num_warps, enable_fp_fusion=False,
        )
        # fmt: on
    return values, ids, log_sum


def chosen_log_probs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    edits: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Log-prob of one token a row under the distribution before the edits.

    Parameters
    ----------
    logits
        [rows, vocab], edited or not.
    tokens
        [rows] int64; ids outside the vocabulary (no token) give -inf.
    log_sum
        [rows] float32 of `top_log_probs`.
    edits
        (starts, ids, before) of `quire.kernels.logit_edits.edit_logits`, or None where nothing was edited.

    Returns
    -------
    [rows] float32.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device that does not fit, with its bound.
    """
    device = logits.device
    check_matrix("logits", logits, (None, None), FLOATS, device)
    rows, vocab = logits.shape
    check_bounds("vocab", vocab, 1, MAX_VOCAB)
    check_vector("tokens", tokens, rows, (torch.int64,), device)
    check_vector("log_sum", log_sum, rows, (torch.float32,), device)
    starts, ids, before = edits or (None, None, None)
    if edits is not None:
        check_vector("starts", starts, rows + 1, (torch.int32,), device)
        check_vector("ids", ids, None, (torch.int32,), device)
        check_vector("before", before, len(ids), (logits.dtype,), device)
    out = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        # fmt: off
        _chosen_kernel[(rows,)](
            out, logits, tokens, log_sum, starts, ids, before, logits.stride(0),
            VOCAB=vocab, BLOCK=256, num_warps=4, enable_fp_fusion=False,
        )
        # fmt: on
    return out
