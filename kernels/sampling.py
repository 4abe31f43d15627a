"""Sampling of one token a row without sorting the vocabulary.

For a row of logits x, in this order (as vLLM documents it)::

    y = x / temperature                                       temperature 0: greedy, the argmax of x
    min-p    keep y >= max y + log(min_p)
    top-k    keep the k largest
    top-p    keep the smallest set of the largest whose share of sum(exp y) reaches p, at least one
    token = argmax over the kept of y + Gumbel noise          a draw from their softmax

Equal values are kept and chosen in the order of their ids, exactly. Masked ids (packed bit mask) do not exist.
Bias and penalties are applied before, to the few ids that have any: `quire.kernels.logit_edits`.

Search. What is kept is { (y, -id) >= (t, -last tie) }. The threshold t is found among integers of the same order as
the values: a pass counts, for PIVOTS thresholds between the bounds, the values at or above each (or their mass),
and the bounds close in on the one where k (or p) is reached, at most 14 passes for all 2^32 values, fewer where
one value is left between the bounds. Masses are float32 sums in a fixed order: rounding never makes a sum of
more terms smaller, so the search is well defined and independent of the batch. A share within about 1e-6 of p may
fall to either side.

Layout. logits [rows, vocab], bfloat16, float16 or float32, not changed; one program a row, so that a row's token
depends on its own logits and columns only.

Bytes a row: vocab itemsize once for greedy rows and those that truncate nothing, twice otherwise (the second time
from the L2 cache if it holds the rows that run), vocab / 8 each time with a mask. The searches read a list of at most
MAX_CANDIDATES ids; see `quire.kernels.sampling_tile` for rows where that is too short.
Flops: about 30 an element in the first pass, 60 with noise; 3 in the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.checks import check_bounds
from quire.kernels.row_checks import FLOATS, check_matrix, check_vector
from quire.kernels.sampling_tile import (
    BINS,
    BINS_PER_UNIT,
    MINUS_INF_KEY,
    best_of,
    gather_candidates,
    gumbel_noise,
    key_value,
    last_bin,
    likelihood,
    load_candidates,
    order_key,
    scaled,
    survey,
)
from quire.kernels.tuning import device_arch, launch_options

MAX_VOCAB = 1 << 24
NO_TOKEN = -1
ALL_TIES = tl.constexpr(1 << 30)
# The histogram's sums are in another order than the survey's: its estimate of a mass gives this much way.
MASS_MARGIN = tl.constexpr(1.0001)
# Of min-p, so that its logarithm is finite: a normal float32, since Triton 3.6 takes smaller numbers for float64.
LEAST_SHARE = tl.constexpr(1.2e-38)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Shape of the kernels. `tile` fixes the order of additions; the others change no result."""

    tile: int = 1024  # ids of one step, a power of two
    max_candidates: int = 4096
    pivots: int = (
        4  # thresholds of a search pass, a power of two; 8 take too many registers for `RESIDENT`
    )
    num_warps: int = 8


DEFAULT_CONFIG = SamplingConfig()
RESIDENT = 2  # programs that fit a multiprocessor: 256 rows run at the same time on 132 of them
NUM_STAGES = 3


@triton.jit
def _search(
    target, bottom, highest, list_ptr, logits_ptr, row_offset, mask_ptr, mask_offset, temperature, count, listed,
    BY_MASS: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Threshold at which the values above `bottom` (a key, exclusive) reach `target`, a number or a mass.

    Returns (threshold key, how many of the ids that equal it belong to the set). A threshold that is `bottom`: all
    above it do not reach the target.
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
                list_ptr, logits_ptr, row_offset, mask_ptr, mask_offset, temperature, start, count, listed, TILE
            )  # fmt: skip
            key = order_key(y)[None, :]
            above = (key >= pivot_key) & (key > bottom)
            counts += above.to(tl.int32)
            if BY_MASS:
                masses += tl.where(above, likelihood(y, highest)[None, :], 0.0)
        num = tl.sum(counts, 1)
        if BY_MASS:
            mass = tl.sum(masses, 1)
            met = mass >= target
            mass_high = tl.maximum(mass_high, tl.max(tl.where(met, 0.0, mass), 0))
        else:
            met = num >= target
        num_low = tl.minimum(num_low, tl.min(tl.where(met, num, VOCAB + 1), 0))
        num_high = tl.maximum(num_high, tl.max(tl.where(met, 0, num), 0))
        next_low = tl.maximum(low, tl.max(tl.where(met, pivot, low), 0))
        high = tl.minimum(high, tl.min(tl.where(met, high, pivot), 0))
        low = next_low
        # One value between the bounds, or just as many as asked for: the lower bound separates as well.
        exact = (num_low - num_high <= 1).to(tl.int32)
        if not BY_MASS:
            exact = exact | (num_low == target).to(tl.int32)
    threshold = low.to(tl.int32)
    if BY_MASS:
        missing = tl.ceil((target - mass_high) / likelihood(key_value(threshold), highest))
        # Rounding may leave nothing missing; the largest value is always kept.
        least = tl.where(num_high == 0, 1.0, 0.0)
        missing = tl.maximum(least, tl.minimum(missing, ALL_TIES * 1.0)).to(tl.int32)
    else:
        missing = target - num_high
    return threshold, tl.where(exact != 0, ALL_TIES, missing)


@triton.jit
def _kept_mass(
    threshold, ties, highest, list_ptr, logits_ptr, row_offset, mask_ptr, mask_offset, temperature, count, listed,
    TILE: tl.constexpr,
):  # fmt: skip
    """Sum of exp(y - highest) over the values above the threshold and the first `ties` equal to it."""
    mass = tl.zeros([TILE], tl.float32)
    equal = tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE):
        _, y = load_candidates(
            list_ptr, logits_ptr, row_offset, mask_ptr, mask_offset, temperature, start, count, listed, TILE
        )  # fmt: skip
        key = order_key(y)
        mass += tl.where(key > threshold, likelihood(y, highest), 0.0)
        equal += (key == threshold).to(tl.int32)
    num_ties = tl.minimum(tl.sum(equal, 0), ties)
    tie_mass = num_ties.to(tl.float32) * likelihood(key_value(threshold), highest)
    return tl.sum(mass, 0) + tie_mass


@triton.jit
def _draw_kept(
    threshold, ties, key_low, key_high,
    list_ptr, logits_ptr, row_offset, mask_ptr, mask_offset, temperature, count, listed,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Best id of value + noise above the threshold and among the first `ties` equal to it."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.zeros([TILE], tl.int32)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, count, TILE):
        token, y = load_candidates(
            list_ptr, logits_ptr, row_offset, mask_ptr, mask_offset, temperature, start, count, listed, TILE
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


# The columns are rows of one table: where they begin depends on its width.
@triton.jit(
    do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"]
)
def _sample_kernel(
    tokens_ptr, logits_ptr, mask_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, noise_ptr, list_ptr,
    stride_logits, stride_mask,
    VOCAB: tl.constexpr, TILE: tl.constexpr, MAX_CANDIDATES: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    row_offset = row * stride_logits
    mask_offset = row * stride_mask
    list_ptr += row * MAX_CANDIDATES
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    key_low = tl.load(noise_ptr + row * 2).to(tl.uint32, bitcast=True)
    key_high = tl.load(noise_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
    draws = temperature > 0.0
    limits_k = (top_k > 0) & (top_k < VOCAB)
    truncates = draws & (limits_k | (top_p < 1.0) | (min_p > 0.0))
    highest, total, token, counts = survey(
        logits_ptr, row_offset, mask_ptr, mask_offset, temperature, draws, key_low, key_high, truncates, VOCAB, TILE
    )  # fmt: skip
    if truncates & (token >= 0):
        lowest = highest + tl.log(tl.maximum(min_p, LEAST_SHARE))
        lowest = tl.where(min_p > 0.0, lowest, float("-inf"))
        cut = tl.full([], 0, tl.int32)
        if limits_k | (min_p > 0.0):
            if limits_k:
                cut = last_bin(tl.cumsum(counts, 0, reverse=True) >= top_k)
            # A bin of slack for the rounding of the product.
            cut = tl.maximum(cut, value_bin_below(lowest * temperature))
        else:
            edge = (tl.arange(0, BINS) - BINS // 2).to(tl.float32) / BINS_PER_UNIT
            least = likelihood(tl.minimum(scaled(edge, temperature), highest), highest)
            reached = tl.cumsum(counts.to(tl.float32) * least, 0, reverse=True)
            cut = last_bin(reached >= top_p * total * MASS_MARGIN)
        count, listed = gather_candidates(
            list_ptr, logits_ptr, row_offset, mask_ptr, mask_offset, counts, cut, VOCAB, TILE, MAX_CANDIDATES
        )  # fmt: skip
        threshold = tl.full([], MINUS_INF_KEY, tl.int32)
        ties = tl.full([], 0, tl.int32)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, order_key(lowest + 0.0) - 1)
        bottom = threshold
        if limits_k:
            threshold, ties = _search(
                top_k, bottom, highest, list_ptr, logits_ptr, row_offset, mask_ptr, mask_offset, temperature,
                count, listed, False, VOCAB, TILE, PIVOTS,
            )  # fmt: skip
            ties = tl.where(threshold == bottom, 0, ties)
        if top_p < 1.0:
            if limits_k | (min_p > 0.0):
                total = _kept_mass(
                    threshold, ties, highest, list_ptr, logits_ptr, row_offset, mask_ptr, mask_offset, temperature,
                    count, listed, TILE,
                )  # fmt: skip
            bottom = threshold
            threshold, ties_p = _search(
                top_p * total, bottom, highest, list_ptr, logits_ptr, row_offset, mask_ptr, mask_offset, temperature,
                count, listed, True, VOCAB, TILE, PIVOTS,
            )  # fmt: skip
            ties = tl.where(threshold == bottom, tl.minimum(ties, ties_p), ties_p)
        token = _draw_kept(
            threshold, ties, key_low, key_high, list_ptr, logits_ptr, row_offset, mask_ptr, mask_offset, temperature,
            count, listed, VOCAB, TILE,
        )  # fmt: skip
    tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def value_bin_below(x):
    """The bin before that of a scalar logit, at least 0; -inf gives 0."""
    scaled_up = tl.minimum(tl.maximum(x * BINS_PER_UNIT, -(BINS // 2) * 1.0), BINS // 2 - 1.0)
    return tl.maximum(tl.floor(scaled_up).to(tl.int32) + BINS // 2 - 1, 0)


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    noise_keys: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    candidates: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: SamplingConfig = DEFAULT_CONFIG,
) -> torch.Tensor:
    """Choose one token a row.

    Parameters
    ----------
    logits
        [rows, vocab] bfloat16, float16 or float32, with bias and penalties applied.
    temperature, top_p, min_p
        [rows] float32: temperature 0 for greedy; top_p in (0, 1], 1 for off; min_p in [0, 1], 0 for off.
    top_k
        [rows] int32, 0 (or the vocabulary or more) for off.
    noise_keys
        [rows] int64, the bits of `quire.kernels.noise.noise_keys`.
    mask
        [rows, ceil(vocab / 32)] int32, bit i % 32 of word i // 32 set: id i is allowed. None: all are.
    candidates
        [rows, config.max_candidates] int32 to work in; allocated where None.
    out
        [rows] int64; allocated where None.

    Returns
    -------
    `out`: token ids; `NO_TOKEN` where every logit of a row is masked, -inf or NaN.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device that does not fit, with its bound.
    """
    device = logits.device
    check_matrix("logits", logits, (None, None), FLOATS, device)
    rows, vocab = logits.shape
    check_bounds("vocab", vocab, 1, MAX_VOCAB)
    for name, x, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("noise_keys", noise_keys, torch.int64),
    ):
        check_vector(name, x, rows, (dtype,), device)
    if mask is not None:
        check_matrix("mask", mask, (rows, triton.cdiv(vocab, 32)), (torch.int32,), device)
    if candidates is None:
        candidates = torch.empty(rows, config.max_candidates, dtype=torch.int32, device=device)
    check_vector(
        "candidates", candidates.view(-1), rows * config.max_candidates, (torch.int32,), device
    )
    out = torch.empty(rows, dtype=torch.int64, device=device) if out is None else out
    check_vector("out", out, rows, (torch.int64,), device)
    if rows:
        # fmt: off
        _sample_kernel[(rows,)](
            out, logits, mask, temperature, top_k, top_p, min_p, noise_keys.view(torch.int32), candidates,
            logits.stride(0), 0 if mask is None else mask.stride(0),
            VOCAB=vocab, TILE=config.tile, MAX_CANDIDATES=config.max_candidates, PIVOTS=config.pivots,
            **launch_options(device_arch(device), config.num_warps, NUM_STAGES, RESIDENT),
        )
        # fmt: on
    return out
