"""Passes over one row of logits that sampling and log-probs have in common.

A row of a large vocabulary does not fit into registers, and sorting it costs many passes. Here it is read twice:

1. *Survey*: the largest value, the sum of exponentials, the best score, and a histogram of the values in bins of
   1/8 over [-64, 64), open at both ends. From it follows a bin that certainly lies at or below the threshold.
2. *Gather*: the ids in that bin or above, in order, into a short list of at most MAX_CANDIDATES.

Everything after that works on the list, from the L1 cache. Where the list is too short for what is asked (a flat
distribution with top-p near 1), the same code takes the whole row as its list: right, but each search pass then
reads the row again, from the L2 cache at best.

Order. Values are compared as integers of the same order; equal values rank by their ids. -0 is +0. NaN counts
as -inf and +inf as the largest finite number, so that every difference is a number.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
BINS = tl.constexpr(1024)
BINS_PER_UNIT = tl.constexpr(8.0)
MINUS_INF_KEY = tl.constexpr(-2139095041)  # `order_key` of -inf


@triton.jit
def load_logits(
    logits_ptr, row_offset, mask_ptr, mask_offset, token, held
):  # fmt: skip
    """Logits of `token` float32; -inf where not held, masked out (bit 0 of the packed mask) or NaN."""
    x = tl.load(logits_ptr + row_offset + token, mask=held, other=float("-inf")).to(tl.float32)
    allowed = x == x
    if mask_ptr is not None:
        word = tl.load(mask_ptr + mask_offset + token // 32, mask=held, other=0)
        allowed = allowed & (((word >> (token % 32)) & 1) != 0)
    return tl.where(allowed, tl.minimum(x, FLOAT_MAX), float("-inf"))


@triton.jit
def scaled(x, temperature):
    """x / temperature, the divisor 1 for greedy rows; finite unless x is -inf."""
    y = tl.div_rn(x, tl.zeros_like(x) + tl.where(temperature > 0.0, temperature, 1.0))
    y = tl.maximum(tl.minimum(y, FLOAT_MAX), -FLOAT_MAX) + 0.0
    return tl.where(x == float("-inf"), x, y)


@triton.jit
def order_key(y):
    """float32 to int32 of the same order."""
    bits = y.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """Inverse of `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def value_bin(x):
    """Bin of a logit; the product is exact and so is the floor."""
    scaled_up = tl.minimum(tl.maximum(x * BINS_PER_UNIT, -(BINS // 2) * 1.0), BINS // 2 - 1.0)
    return tl.floor(scaled_up).to(tl.int32) + BINS // 2


@triton.jit
def likelihood(y, highest):
    """exp(y - highest)."""
    return tl.exp2((y - highest) * LOG2E)


@triton.jit
def uniform_noise(token, key_low, key_high):
    """u of `quire.kernels.noise`, bit for bit: token int32, keys uint32."""
    x = token.to(tl.uint32) * 0x9E3779B1 + key_low
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    x ^= key_high
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    return ((x >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def gumbel_noise(token, key_low, key_high):
    """Standard Gumbel noise of each id."""
    return -tl.log(-tl.log(uniform_noise(token, key_low, key_high)))


@triton.jit
def survey(
    logits_ptr, row_offset, mask_ptr, mask_offset, temperature, noisy, key_low, key_high, counted,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """First pass. `noisy`: the best score is of value + noise; `counted`: fill the histogram.

    Returns (largest value, sum of exp(value - largest), id of the best score or -1, [BINS] counts). Ids beyond the
    vocabulary and values of -inf are counted in bin 0.
    """
    lane = tl.arange(0, TILE)
    m = tl.full([TILE], float("-inf"), tl.float32)
    s = tl.zeros([TILE], tl.float32)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = lane
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, VOCAB, TILE):
        token = start + lane
        x = load_logits(logits_ptr, row_offset, mask_ptr, mask_offset, token, token < VOCAB)
        y = scaled(x, temperature)
        m_new = tl.maximum(m, y)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        s = tl.fma(s, likelihood(m, shift), likelihood(y, shift))
        m = m_new
        score = y
        if noisy:
            score = y + gumbel_noise(token, key_low, key_high)
        better = score > best
        best = tl.where(better, score, best)
        best_id = tl.where(better, token, best_id)
        if counted:
            counts += tl.histogram(value_bin(x), BINS)
    highest = tl.max(m, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(s * likelihood(m, shift), 0)
    return highest, total, best_of(best, best_id, VOCAB), counts


@triton.jit
def best_of(best, best_id, VOCAB: tl.constexpr):
    """Lowest id among the lanes with the largest score; -1 where all are -inf."""
    top = tl.max(best, 0)
    lowest = tl.min(tl.where(best == top, best_id, VOCAB), 0)
    return tl.where(top == float("-inf"), -1, lowest)


@triton.jit
def last_bin(reached):
    """Last bin in which `reached` [BINS] holds; 0 for none."""
    return tl.max(tl.where(reached, tl.arange(0, BINS), 0), 0)


@triton.jit
def gather_candidates(
    list_ptr, logits_ptr, row_offset, mask_ptr, mask_offset, counts, cut,
    VOCAB: tl.constexpr, TILE: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Second pass: ids in bin `cut` or above into the list. Returns (candidates, 1 if they are in the list)."""
    lane = tl.arange(0, TILE)
    expected = tl.sum(tl.where(tl.arange(0, BINS) >= cut, counts, 0), 0)
    count = tl.full([], VOCAB, tl.int32)
    listed = tl.full([], 0, tl.int32)
    if expected <= MAX_CANDIDATES:
        count = tl.full([], 0, tl.int32)
        listed = tl.full([], 1, tl.int32)
        for start in range(0, VOCAB, TILE):
            token = start + lane
            x = load_logits(logits_ptr, row_offset, mask_ptr, mask_offset, token, token < VOCAB)
            chosen = ((x > float("-inf")) & (value_bin(x) >= cut)).to(tl.int32)
            place = count + tl.cumsum(chosen, 0) - 1
            tl.store(list_ptr + place, token, mask=chosen != 0)
            count += tl.sum(chosen, 0)
        tl.debug_barrier()  # other threads of the program read the list
    return count, listed


@triton.jit
def load_candidates(
    list_ptr, logits_ptr, row_offset, mask_ptr, mask_offset, temperature, start, count, listed,
    TILE: tl.constexpr,
):  # fmt: skip
    """Ids and values of candidates [start, start + TILE); -inf beyond the last."""
    index = start + tl.arange(0, TILE)
    token = tl.load(list_ptr + index, mask=index < count * listed, other=0)
    token += index * (1 - listed)
    x = load_logits(logits_ptr, row_offset, mask_ptr, mask_offset, token, index < count)
    return token, scaled(x, temperature)
