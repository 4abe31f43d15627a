"""Sampling of one token per row, without sorting the vocabulary.

For a row of logits x, in this order (as vLLM documents it)::

    y = x / temperature                                       temperature 0: greedy, the argmax of x
    min-p    keep y >= max y + log(min-p)
    top-k    keep the k largest
    top-p    keep the smallest set of the largest whose share of sum(exp y) reaches p, at least one
    token = argmax over the kept ids of y + Gumbel noise      a sample from their softmax

Equal values are kept and chosen in the order of their ids. Masks, bias and penalties are applied earlier, by
`quire.kernels.sampling.logit_edits`, to copies of the rows that have any.

There are four kernels. The three of `quire.kernels.sampling.row_survey` choose the token of greedy rows and of rows
without top-k, top-p and min-p. The fourth samples the other rows from their lists of candidates. All four always run,
on grids that follow from shapes alone, so CUDA graphs can capture them.

Search. The kept set is { id : (y, -id) >= (t, -last tie) }. The threshold t is found by bisection on integers of the
same order as the values. Each pass over the list counts, for PIVOTS thresholds between the bounds, the values at or
above each (or adds up their mass) and narrows the bounds to where k (or p) is reached. This takes at most 14 passes for
all 2^32 values, fewer if only one value is left between the bounds. Masses are float32 sums in a fixed order: rounding
never makes a sum of more terms smaller, so the search is well defined and independent of the batch. If a share is
within about 1e-6 of p, rounding decides.

Layout. logits [rows, vocab], bfloat16, float16 or float32, not changed. A row's token depends on the row's own logits
and parameters only.

Bytes per row: vocab itemsize once for greedy rows and rows without top-k, top-p and min-p, at most twice for others,
four times if their lists are incomplete. Instructions: those of the survey; then one pass over the list of candidates
for each search pass and one to sample the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.argument_checks import FLOATS, check_bounds, check_matrix, check_vector
from quire.kernels.sampling.row_survey import (
    DEFAULT_CONFIG,
    MAX_VOCAB,
    UNALIGNED,
    Rows,
    SamplingConfig,
    Workspace,
    survey_rows,
)
from quire.kernels.sampling.sampling_tile import (
    LIMITS,
    MINUS_INF_KEY,
    best_of,
    find_candidates,
    gumbel_noise,
    key_value,
    likelihood,
    limits_of,
    load_candidates,
    order_key,
    scaled,
)
from quire.kernels.tuning import device_arch, launch_options

NO_TOKEN = -1
ALL_TIES = tl.constexpr(1 << 30)
# Programs of `_sample_kernel` that fit one SM: 256 rows run at the same time on 132 SMs.
RESIDENT = 2


@triton.jit
def _search(
    by_mass, target_count, target_mass, bottom, highest,
    ids_ptr, values_ptr, logits_ptr, edited_ptr, source, stride_logits, temperature, count, listed,
    VOCAB: tl.constexpr, TILE: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Find the highest threshold at which the values above `bottom` (a key, exclusive) reach a number or a mass.

    Returns (threshold key, number of ids with exactly this value that belong to the set). The threshold is `bottom` if
    all values above it together do not reach the target.
    """
    low = bottom.to(tl.int64)
    high = order_key(highest).to(tl.int64) + 1
    num_low = tl.full([], VOCAB + 1, tl.int32)
    num_high = tl.full([], 0, tl.int32)
    mass_high = tl.full([], 0.0, tl.float32)
    step = tl.arange(0, PIVOTS).to(tl.int64) + 1
    exact = tl.full([], 0, tl.int32)
    while (high - low > 1) & (exact == 0):
        pivot = low + (high - low) * step // (PIVOTS + 1)
        pivot_key = pivot.to(tl.int32)[:, None]
        counts = tl.zeros([PIVOTS, TILE], tl.int32)
        masses = tl.zeros([PIVOTS, TILE], tl.float32)
        for start in range(0, count, TILE):
            _, y = load_candidates(
                ids_ptr, values_ptr, logits_ptr, edited_ptr, source, stride_logits, temperature, start, count, listed,
                VOCAB, TILE,
            )  # fmt: skip
            key = order_key(y)[None, :]
            above = (key >= pivot_key) & (key > bottom)
            counts += above.to(tl.int32)
            masses += tl.where(above, likelihood(y, highest)[None, :], 0.0)
        num, mass = tl.sum(counts, 1), tl.sum(masses, 1)
        met = tl.where(by_mass, mass - target_mass, (num - target_count).to(tl.float32)) >= 0.0
        mass_high = tl.maximum(mass_high, tl.max(tl.where(met, 0.0, mass), 0))
        num_low = tl.minimum(num_low, tl.min(tl.where(met, num, VOCAB + 1), 0))
        num_high = tl.maximum(num_high, tl.max(tl.where(met, 0, num), 0))
        next_low = tl.maximum(low, tl.max(tl.where(met, pivot, low), 0))
        high = tl.minimum(high, tl.min(tl.where(met, high, pivot), 0))
        low = next_low
        # Stop early if one value is left between the bounds, or exactly k values are at or above the lower bound.
        exact = (num_low - num_high <= 1).to(tl.int32)
        exact |= tl.where(by_mass, 0, (num_low == target_count).to(tl.int32))
    threshold = low.to(tl.int32)
    missing = tl.ceil((target_mass - mass_high) / likelihood(key_value(threshold), highest))
    # Rounding may make `missing` 0 or less; the largest value is always kept.
    least = tl.where(num_high == 0, 1.0, 0.0)
    missing = tl.maximum(least, tl.minimum(missing, ALL_TIES * 1.0)).to(tl.int32)
    missing = tl.where(by_mass, missing, target_count - num_high)
    return threshold, tl.where(exact != 0, ALL_TIES, missing)


@triton.jit
def _kept_mass(
    threshold, ties, highest,
    ids_ptr, values_ptr, logits_ptr, edited_ptr, source, stride_logits, temperature, count, listed,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum of exp(y - highest) over the values above the threshold and the first `ties` equal to it."""
    mass = tl.zeros([TILE], tl.float32)
    equal = tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE):
        _, y = load_candidates(
            ids_ptr, values_ptr, logits_ptr, edited_ptr, source, stride_logits, temperature, start, count, listed,
                VOCAB, TILE,
        )  # fmt: skip
        key = order_key(y)
        mass += tl.where(key > threshold, likelihood(y, highest), 0.0)
        equal += (key == threshold).to(tl.int32)
    num_ties = tl.minimum(tl.sum(equal, 0), ties)
    tie_mass = num_ties.to(tl.float32) * likelihood(key_value(threshold), highest)
    return tl.sum(mass, 0) + tie_mass


@triton.jit
def _sample_kept(
    threshold, ties, key_low, key_high,
    ids_ptr, values_ptr, logits_ptr, edited_ptr, source, stride_logits, temperature, count, listed,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sample from the kept ids (those above the threshold and the first `ties` equal to it): the best value + noise."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.zeros([TILE], tl.int32)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, count, TILE):
        token, y = load_candidates(
            ids_ptr, values_ptr, logits_ptr, edited_ptr, source, stride_logits, temperature, start, count, listed,
                VOCAB, TILE,
        )  # fmt: skip
        key = order_key(y)
        equal = (key == threshold).to(tl.int32)
        rank = seen + tl.cumsum(equal, 0)
        seen += tl.sum(equal, 0)
        kept = (key > threshold) | ((equal != 0) & (rank <= ties))
        score = tl.where(kept, y + gumbel_noise(token, key_low, key_high), float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        best_id = tl.where(better, token, best_id)
    return best_of(best, best_id, VOCAB)


@triton.jit(do_not_specialize_on_alignment=("tokens_ptr", *UNALIGNED))
def _sample_kernel(
    tokens_ptr, ids_ptr, values_ptr, stats_ptr, marks_ptr, logits_ptr, edited_ptr,
    limits_ptr, noise_ptr, stride_logits,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, CHUNKS: tl.constexpr,
    PART_SLOTS: tl.constexpr, TILE: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Sample one row that has top-k, top-p or min-p; other rows are done."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, reach, limits_k, truncates = limits_of(limits_ptr, None, row, VOCAB)
    marks_ptr += row * (2 * PARTS + 4) + PARTS
    if truncates & (tl.load(marks_ptr + PARTS + 1) >= 0):
        ids_ptr += row * 2 * PARTS * PART_SLOTS
        values_ptr += row * 2 * PARTS * PART_SLOTS
        stats_ptr += row * (PARTS * CHUNKS + 2 * PARTS + 3) + PARTS * CHUNKS + 2 * PARTS
        source = tl.load(marks_ptr + PARTS + 3).to(tl.int64)
        highest = scaled(tl.load(stats_ptr), temperature)
        total = tl.load(stats_ptr + 1)
        lowest = highest + reach
        count, listed = find_candidates(
            ids_ptr, values_ptr, marks_ptr, tl.load(marks_ptr + PARTS + 2), tl.load(stats_ptr + 2),
            logits_ptr, edited_ptr, source, stride_logits,
            temperature, tl.where(limits_k, top_k, 0), top_p * total, lowest, highest,
            VOCAB, PARTS, PADDED, PART_SLOTS, TILE,
        )  # fmt: skip
        ids_ptr += PARTS * PART_SLOTS
        values_ptr += PARTS * PART_SLOTS
        threshold = tl.full([], MINUS_INF_KEY, tl.int32)
        ties = tl.full([], 0, tl.int32)
        if reach > float("-inf"):
            threshold = tl.maximum(threshold, order_key(lowest) - 1)
        # Top-k, then top-p: a loop, so that the compiled code has the search once.
        for step in range(2):
            by_mass = step == 1
            if tl.where(by_mass, top_p < 1.0, limits_k):
                bottom = threshold
                if by_mass & (limits_k | (reach > float("-inf"))):
                    total = _kept_mass(
                        threshold, ties, highest,
                        ids_ptr, values_ptr, logits_ptr, edited_ptr, source, stride_logits, temperature, count, listed,
                        VOCAB, TILE,
                    )  # fmt: skip
                threshold, found = _search(
                    by_mass, top_k, top_p * total, bottom, highest,
                    ids_ptr, values_ptr, logits_ptr, edited_ptr, source, stride_logits, temperature, count, listed,
                    VOCAB, TILE, PIVOTS,
                )  # fmt: skip
                ties = tl.where(threshold == bottom, tl.minimum(ties, found), found)
        key_low = tl.load(noise_ptr + row * 2).to(tl.uint32, bitcast=True)
        key_high = tl.load(noise_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
        token = _sample_kept(
            threshold, ties, key_low, key_high,
            ids_ptr, values_ptr, logits_ptr, edited_ptr, source, stride_logits, temperature, count, listed,
            VOCAB, TILE,
        )  # fmt: skip
        tl.store(tokens_ptr + row, token.to(tl.int64))


def sample_tokens(
    logits: torch.Tensor,
    limits: torch.Tensor,
    noise_keys: torch.Tensor,
    *,
    edited: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
    config: SamplingConfig = DEFAULT_CONFIG,
) -> torch.Tensor:
    """Choose one token for each row.

    Parameters
    ----------
    logits
        [rows, vocab] bfloat16, float16 or float32.
    limits
        [rows, NUM_LIMITS] int32, contiguous, words of `sampling_tile.LIMITS`: temperature float32, 0 is greedy; top-k
        int32, 0 or the vocabulary size and above is off; top-p float32 in (0, 1], 1 is off; min-p float32 in [0, 1], 0
        is off.
    noise_keys
        [rows] int64, the bits of `quire.kernels.sampling.noise.noise_keys`.
    edited, source
        `edited` [any, vocab] float32 has rows that replace rows of the logits. `source` [rows] int32 selects: s >= 0 is
        row s of the logits, -1 - s row s of the edited ones. Both or neither.
    workspace
        Memory for at least these rows, this vocabulary and `config`; None allocates it.
    out
        [rows] int64; None allocates it.
    config
        Shape of the kernels.

    Returns
    -------
    `out`: token ids; `NO_TOKEN` if every logit of a row is -inf or NaN.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device is not supported; the message has the bound.
    """
    device = logits.device
    check_matrix("logits", logits, (None, None), FLOATS, device)
    rows, vocab = logits.shape
    check_bounds("vocab", vocab, 1, MAX_VOCAB)
    check_matrix("limits", limits, (rows, len(LIMITS)), (torch.int32,), device)
    if not limits.is_contiguous():
        raise ValueError(f"limits: must be contiguous, got strides {limits.stride()}")
    check_vector("noise_keys", noise_keys, rows, (torch.int64,), device)
    if (edited is None) != (source is None):
        raise ValueError("edited, source: must be given together, got one")
    if edited is not None:
        check_matrix("edited", edited, (None, vocab), (torch.float32,), device)
        check_vector("source", source, rows, (torch.int32,), device)
    out = torch.empty(rows, dtype=torch.int64, device=device) if out is None else out
    check_vector("out", out, rows, (torch.int64,), device)
    if not rows:
        return out
    work = Workspace.allocate(rows, vocab, device, config) if workspace is None else workspace
    work.check(rows, vocab, device, config)
    parts = config.num_parts(vocab)
    given = Rows(logits, edited, source, limits, noise_keys)
    survey_rows(given, work, config, out)
    # The survey has copied `source` into the workspace, so one variant of this kernel serves with and without edits.
    # fmt: off
    _sample_kernel[(rows,)](
        out, work.ids, work.values, work.stats, work.marks, logits, work.values if edited is None else edited,
        limits, noise_keys.view(torch.int32), logits.stride(0),
        VOCAB=vocab, PARTS=parts, PADDED=triton.next_power_of_2(parts), CHUNKS=config.part_chunks,
        PART_SLOTS=config.part_slots, TILE=config.tile, PIVOTS=config.pivots,
        **launch_options(device_arch(device), config.num_warps, 1, RESIDENT),
    )
    # fmt: on
    return out
