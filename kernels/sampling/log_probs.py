"""Log-probabilities of the model's own distribution: of one given token per row, and the n largest of the row.

    log p(i) = x_i - log sum_j e^x_j        x: the logits before bias, penalties, mask and temperature

The n largest are found without a sort. `quire.kernels.sampling.row_survey` lists at least n ids; then each of n rounds
takes the next one in the order (value falling, id rising).

Layout. logits [any, vocab], rows contiguous; out [rows, 1 + 2 width] float32: of the token, then `width` values and
`width` ids (int32 bits).

Bytes per row: at most 2 vocab itemsize, the second time from the L2 cache if the rows of the running programs fit it.
Instructions: 15 for each element, and n passes over the list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.argument_checks import FLOATS, check_bounds, check_matrix, check_vector
from quire.kernels.sampling.row_survey import (
    DEFAULT_CONFIG,
    MAX_VOCAB,
    Rows,
    SamplingConfig,
    Workspace,
    survey_rows,
)
from quire.kernels.sampling.sampling_tile import (
    find_candidates,
    key_value,
    load_candidates,
    order_key,
)
from quire.kernels.tuning import device_arch, launch_options

MAX_TOP = 128
RESIDENT = 2  # programs that fit one SM


@triton.jit(
    do_not_specialize=("num_columns",),
    do_not_specialize_on_alignment=("scores_ptr", "tokens_ptr", "num_top_ptr"),
)
def _log_probs_kernel(
    scores_ptr, ids_ptr, values_ptr, stats_ptr, marks_ptr, logits_ptr, tokens_ptr, num_top_ptr,
    stride_logits, num_columns,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, CHUNKS: tl.constexpr,
    PART_SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one row."""
    row = tl.program_id(0).to(tl.int64)
    ids_ptr += row * 2 * PARTS * PART_SLOTS
    values_ptr += row * 2 * PARTS * PART_SLOTS
    stats_ptr += row * (PARTS * CHUNKS + 2 * PARTS + 3) + PARTS * CHUNKS + 2 * PARTS
    marks_ptr += row * (2 * PARTS + 4) + PARTS
    scores_ptr += row * num_columns
    source = tl.load(marks_ptr + PARTS + 3).to(tl.int64)
    highest = tl.load(stats_ptr)
    log_sum = highest + tl.log(tl.load(stats_ptr + 1))
    token = tl.load(tokens_ptr + source)
    known = (token >= 0) & (token < VOCAB)
    x = tl.load(logits_ptr + source * stride_logits + tl.where(known, token, 0)).to(tl.float32)
    tl.store(scores_ptr, tl.where(known, x - log_sum, float("-inf")))
    num_top = tl.load(num_top_ptr + row)
    count, listed = find_candidates(
        ids_ptr, values_ptr, marks_ptr, tl.load(marks_ptr + PARTS + 2), 0.0,
        logits_ptr, None, source, stride_logits, 1.0, num_top, 0.0, float("-inf"), highest,
        VOCAB, PARTS, PADDED, PART_SLOTS, TILE,
    )  # fmt: skip
    ids_ptr += PARTS * PART_SLOTS
    values_ptr += PARTS * PART_SLOTS
    width = num_columns // 2
    # Above the key of every finite value.
    last_key = tl.full([], 2147483647, tl.int32)
    last_id = tl.full([], -1, tl.int32)
    for rank in range(num_top):
        best_key = tl.full([TILE], -2147483648, tl.int32)
        best_id = tl.full([TILE], VOCAB, tl.int32)
        for start in range(0, count, TILE):
            ids, y = load_candidates(
                ids_ptr, values_ptr, logits_ptr, None, source, stride_logits, 1.0, start, count, listed,
                VOCAB, TILE,
            )  # fmt: skip
            key = order_key(y)
            after = (key < last_key) | ((key == last_key) & (ids > last_id))
            better = after & (y > float("-inf")) & (key > best_key)
            best_key = tl.where(better, key, best_key)
            best_id = tl.where(better, ids, best_id)
        last_key = tl.max(best_key, 0)
        last_id = tl.min(tl.where(best_key == last_key, best_id, VOCAB), 0)
        found = last_id < VOCAB
        value = tl.where(found, key_value(last_key) - log_sum, float("-inf"))
        best = tl.where(found, last_id, -1).to(tl.float32, bitcast=True)
        tl.store(scores_ptr + 1 + rank, value)
        tl.store(scores_ptr + 1 + width + rank, best)


class Scores(NamedTuple):
    """Log-probabilities of some rows."""

    chosen: torch.Tensor  # [rows] float32, of the given token
    top: torch.Tensor  # [rows, width] float32, falling; undefined beyond the row's `num_top`
    top_ids: torch.Tensor  # [rows, width] int32; for equal values the ids rise

    @classmethod
    def of(cls, packed: torch.Tensor) -> Scores:
        """Make views of the packed result [rows, 1 + 2 width] float32, which stores the ids as int32 bits."""
        width = packed.shape[1] // 2
        return cls(packed[:, 0], packed[:, 1 : 1 + width], packed[:, 1 + width :].view(torch.int32))


def log_probs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    num_top: torch.Tensor,
    *,
    source: torch.Tensor | None = None,
    out: torch.Tensor,
    workspace: Workspace | None = None,
    config: SamplingConfig = DEFAULT_CONFIG,
) -> Scores:
    """Compute the log-probability of one token per row, and the largest ones of the row.

    Parameters
    ----------
    logits
        [any, vocab] bfloat16, float16 or float32.
    tokens
        [any] int64, one token for each row of the logits; an id outside the vocabulary (no token) gives -inf.
    num_top
        [rows] int32, 0 to the width of `out`. If fewer ids are above -inf, the rest has value -inf and id -1.
    source
        [rows] int32, rows of the logits and of `tokens`; None: row i.
    out
        [rows, 1 + 2 width] float32, contiguous, width at most `MAX_TOP`.
    workspace, config
        Memory between the kernels for these rows and this vocabulary (None allocates it), and the kernels' shape.

    Returns
    -------
    Views of `out`.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device is not supported; the message has the bound.
    """
    device = logits.device
    check_matrix("logits", logits, (None, None), FLOATS, device)
    vocab, rows = logits.shape[1], len(num_top)
    check_bounds("vocab", vocab, 1, MAX_VOCAB)
    check_vector("tokens", tokens, len(logits), (torch.int64,), device)
    check_vector("num_top", num_top, rows, (torch.int32,), device)
    check_vector("source", num_top if source is None else source, rows, (torch.int32,), device)
    check_matrix("out", out, (rows, None), (torch.float32,), device)
    check_bounds("out: width", out.shape[1] // 2, 0, MAX_TOP)
    if not out.is_contiguous() or out.shape[1] % 2 == 0:
        raise ValueError(
            f"out: must be contiguous with 1 + 2 width columns, got {list(out.shape)}, strides {out.stride()}"
        )
    if rows:
        work = Workspace.allocate(rows, vocab, device, config) if workspace is None else workspace
        work.check(rows, vocab, device, config)
        survey_rows(Rows(logits, None, source, top_k=num_top), work, config)
        parts = config.num_parts(vocab)
        # fmt: off
        _log_probs_kernel[(rows,)](
            out, work.ids, work.values, work.stats, work.marks, logits, tokens, num_top,
            logits.stride(0), out.shape[1],
            VOCAB=vocab, PARTS=parts, PADDED=triton.next_power_of_2(parts), CHUNKS=config.part_chunks,
            PART_SLOTS=config.part_slots, TILE=config.tile,
            **launch_options(device_arch(device), config.num_warps, 1, RESIDENT),
        )
        # fmt: on
    return Scores.of(out)
