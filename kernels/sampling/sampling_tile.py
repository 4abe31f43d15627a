"""Device functions of the kernels that read rows of logits: loads, the order of values, noise, lists of candidates.

Order. Values are compared as integers of the same order; equal values are ordered by their ids. -0 equals +0. NaN
counts as -inf and +inf as the largest finite number, so that every difference is a number.

Candidates. `quire.kernels.sampling.row_survey` writes, for each part of the vocabulary, a list of the ids that the row
may choose. `find_candidates` joins the lists if they are complete. If not (many equal logits, or a flat distribution
with top-p near 1), it reads the row twice more. First it counts the values in a histogram with bins of 1/8 over
[-64, 64), the first and last bin open, which gives a bin at or below the threshold. Then it lists the ids of that bin
and above. If these do not fit either, the whole row is the list: the result is the same, but each search pass reads the
row again.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The limits of a row in the order of its words, float32 or int32.
LIMITS = ("temperature", "top_k", "top_p", "min_p")
NUM_LIMITS = tl.constexpr(len(LIMITS))
LOG2E = tl.constexpr(1.4426950408889634)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
BINS = tl.constexpr(1024)
BINS_PER_UNIT = tl.constexpr(8.0)
MINUS_INF_KEY = tl.constexpr(-2139095041)  # `order_key` of -inf
# The histogram adds values in another order than the survey. This margin on a mass covers the difference in rounding.
MASS_MARGIN = tl.constexpr(1.0001)
# Least min-p, so that its logarithm is finite. A normal float32: Triton 3.6 makes smaller constants float64.
LEAST_SHARE = tl.constexpr(1.2e-38)
STAGES = tl.constexpr(4)  # pipelined loads in the loops over a row


@triton.jit
def row_source(source_ptr, row):
    """Source of row `row`: s >= 0 is row s of the logits, s < 0 is row -1 - s of the edited logits."""
    if source_ptr is None:
        source = row
    else:
        source = tl.load(source_ptr + row).to(tl.int64)
    return source


@triton.jit
def load_logits(logits_ptr, edited_ptr, source, stride_logits, token, held, VOCAB: tl.constexpr):
    """Load logits of `token` as float32; -inf where not held or NaN."""
    if edited_ptr is None:
        x = tl.load(logits_ptr + source * stride_logits + token, mask=held, other=float("-inf"))
        x = x.to(tl.float32)
    else:
        # Two masked loads instead of a branch, so that loops over a row are pipelined.
        bound = tl.where(source < 0, VOCAB, 0)
        in_edited, in_logits = held & (token < bound), held & (token >= bound)
        x = tl.load(edited_ptr + (-1 - source) * VOCAB + token, mask=in_edited, other=0.0)
        x += tl.load(logits_ptr + source * stride_logits + token, mask=in_logits, other=0.0).to(
            tl.float32
        )
        x = tl.where(held, x, float("-inf"))
    return tl.where(x == x, tl.minimum(x, FLOAT_MAX), float("-inf"))


@triton.jit
def scaled(x, temperature):
    """x / temperature, or x for greedy rows; finite unless x is -inf."""
    y = tl.div_rn(x, tl.zeros_like(x) + tl.where(temperature > 0.0, temperature, 1.0))
    y = tl.maximum(tl.minimum(y, FLOAT_MAX), -FLOAT_MAX) + 0.0
    return tl.where(x == float("-inf"), x, y)


@triton.jit
def order_key(y):
    """Map float32 to int32 of the same order."""
    bits = (y + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """Inverse of `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def likelihood(y, highest):
    """exp(y - highest)."""
    return tl.exp2((y - highest) * LOG2E)


@triton.jit
def limits_of(limits_ptr, top_k_ptr, row, VOCAB: tl.constexpr):
    """Load (temperature, top_k, top_p, reach, top-k is in effect, the row is sampled from a subset of its ids).

    `reach` is the logarithm of min-p, -inf without it: min-p keeps y >= max y + reach. Without `limits_ptr` the row is
    not sampled: the caller wants its `top_k` largest values.
    """
    reach = tl.full([], float("-inf"), tl.float32)
    if limits_ptr is None:
        temperature = tl.full([], 1.0, tl.float32)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.full([], 1.0, tl.float32)
        limits_k = (top_k > 0) & (top_k < VOCAB)
        truncates = top_k > 0
    else:
        limits_ptr += row * NUM_LIMITS
        temperature = tl.load(limits_ptr).to(tl.float32, bitcast=True)
        top_k = tl.load(limits_ptr + 1)
        top_p = tl.load(limits_ptr + 2).to(tl.float32, bitcast=True)
        min_p = tl.load(limits_ptr + 3).to(tl.float32, bitcast=True)
        limits_k = (top_k > 0) & (top_k < VOCAB)
        truncates = (temperature > 0.0) & (limits_k | (top_p < 1.0) | (min_p > 0.0))
        reach = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, LEAST_SHARE)), reach)
    return temperature, top_k, top_p, reach, limits_k, truncates


@triton.jit
def uniform_noise(token, key_low, key_high):
    """Return the uniform number u of `quire.kernels.sampling.noise`, with the same bits: token int32, keys uint32."""
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
    """Standard Gumbel noise for each id."""
    return -tl.log(-tl.log(uniform_noise(token, key_low, key_high)))


@triton.jit
def best_of(best, best_id, VOCAB: tl.constexpr):
    """Lowest id among the lanes with the largest score; -1 if all scores are -inf."""
    top = tl.max(best, 0)
    lowest = tl.min(tl.where(best == top, best_id, VOCAB), 0)
    return tl.where(top == float("-inf"), -1, lowest)


@triton.jit
def _join_parts(
    ids_ptr, values_ptr, counts_ptr, temperature,
    PARTS: tl.constexpr, PADDED: tl.constexpr, PART_SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Join the parts' candidates into one list with scaled logits: (number, 1 if every part's list is complete)."""
    LANES: tl.constexpr = TILE // PADDED if TILE > PADDED else 1
    part = tl.arange(0, PADDED)
    counts = tl.load(counts_ptr + part, mask=part < PARTS, other=0)
    longest = tl.max(counts, 0)
    count = tl.full([], 0, tl.int32)
    listed = (longest <= PART_SLOTS).to(tl.int32)
    if listed != 0:
        count = tl.sum(counts, 0)
        begin = (tl.cumsum(counts, 0) - counts)[:, None]
        for start in range(0, longest, LANES):
            place = start + tl.arange(0, LANES)[None, :]
            held = place < counts[:, None]
            slot = part[:, None] * PART_SLOTS + place
            token = tl.load(ids_ptr + slot, mask=held, other=0)
            x = tl.load(values_ptr + slot, mask=held, other=0.0)
            joined = PARTS * PART_SLOTS + begin + place
            tl.store(ids_ptr + joined, token, mask=held)
            tl.store(values_ptr + joined, scaled(x, temperature), mask=held)
        # Other threads of the program read the list.
        tl.debug_barrier()
    return count, listed


@triton.jit
def _list_mass(values_ptr, count, highest, TILE: tl.constexpr):
    """Sum of exp(y - highest) over a list."""
    mass = tl.zeros([TILE], tl.float32)
    for start in range(0, count, TILE):
        index = start + tl.arange(0, TILE)
        y = tl.load(values_ptr + index, mask=index < count, other=float("-inf"))
        mass += likelihood(y, highest)
    return tl.sum(mass, 0)


@triton.jit
def _histogram(
    logits_ptr, edited_ptr, source, stride_logits, VOCAB: tl.constexpr, TILE: tl.constexpr
):
    """Count a row's logits by bin: [BINS] int32. Ids beyond the vocabulary and -inf are counted in bin 0."""
    counts = tl.zeros([BINS], tl.int32)
    for start in tl.range(0, VOCAB, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        x = load_logits(logits_ptr, edited_ptr, source, stride_logits, token, token < VOCAB, VOCAB)
        counts += tl.histogram(_value_bin(x), BINS)
    return counts


@triton.jit
def _gather_bins(
    ids_ptr, values_ptr, logits_ptr, edited_ptr, source, stride_logits, temperature, counts, cut,
    VOCAB: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """List the ids in bin `cut` and above: (number of candidates, 1 if they fit the list)."""
    expected = tl.sum(tl.where(tl.arange(0, BINS) >= cut, counts, 0), 0)
    count = tl.full([], VOCAB, tl.int32)
    listed = (expected <= SLOTS).to(tl.int32)
    if listed != 0:
        count = tl.full([], 0, tl.int32)
        for start in tl.range(0, VOCAB, TILE, num_stages=STAGES):
            token = start + tl.arange(0, TILE)
            x = load_logits(
                logits_ptr, edited_ptr, source, stride_logits, token, token < VOCAB, VOCAB
            )
            chosen = ((x > float("-inf")) & (_value_bin(x) >= cut)).to(tl.int32)
            place = count + tl.cumsum(chosen, 0) - 1
            tl.store(ids_ptr + place, token, mask=chosen != 0)
            tl.store(values_ptr + place, scaled(x, temperature), mask=chosen != 0)
            count += tl.sum(chosen, 0)
        # Other threads of the program read the list.
        tl.debug_barrier()
    return count, listed


@triton.jit
def _value_bin(x):
    """Bin of a logit. Both the multiplication (by a power of two) and the floor are exact."""
    scaled_up = tl.minimum(tl.maximum(x * BINS_PER_UNIT, -(BINS // 2) * 1.0), BINS // 2 - 1.0)
    return tl.floor(scaled_up).to(tl.int32) + BINS // 2


@triton.jit
def _bin_below(x):
    """The bin below the bin of a scalar logit, at least 0; 0 for -inf."""
    return tl.maximum(_value_bin(x) - 1, 0)


@triton.jit
def _last_bin(reached):
    """Last bin in which `reached` [BINS] holds; 0 for none."""
    return tl.max(tl.where(reached, tl.arange(0, BINS), 0), 0)


@triton.jit
def load_candidates(
    ids_ptr, values_ptr, logits_ptr, edited_ptr, source, stride_logits, temperature, start, count, listed,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Load ids and scaled values of candidates [start, start + TILE) from the list or the row; -inf beyond the end."""
    index = start + tl.arange(0, TILE)
    held = index < count
    if listed != 0:
        token = tl.load(ids_ptr + index, mask=held, other=0)
        y = tl.load(values_ptr + index, mask=held, other=float("-inf"))
    else:
        token = index
        x = load_logits(logits_ptr, edited_ptr, source, stride_logits, index, held, VOCAB)
        y = scaled(x, temperature)
    return token, y


@triton.jit
def find_candidates(
    ids_ptr, values_ptr, counts_ptr, enough_count, enough_mass,
    logits_ptr, edited_ptr, source, stride_logits, temperature, top_k, target, lowest, highest,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, PART_SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Candidates of a row, in the order of their ids: (number, 1 if they are listed, 0 if they are the whole row).

    Parameters
    ----------
    ids_ptr, values_ptr
        [2, PARTS * PART_SLOTS]: the lists of the parts with their logits; then room for one list with scaled values.
    counts_ptr
        [PARTS] number of candidates of each part. If it is above PART_SLOTS, the part's list is incomplete.
    enough_count, enough_mass
        Number and mass that the parts' candidates must reach to be used; 0 for no bound.
    top_k, target, lowest
        Bounds for the histogram: a number of ids (0: none) and a least value `lowest` (-inf: none); without both, a
        mass `target`.
    """
    count, listed = _join_parts(
        ids_ptr, values_ptr, counts_ptr, temperature, PARTS, PADDED, PART_SLOTS, TILE
    )
    mass = tl.full([], 0.0, tl.float32)
    if (listed != 0) & (enough_mass > 0.0):
        mass = _list_mass(values_ptr + PARTS * PART_SLOTS, count, highest, TILE)
    if (listed == 0) | (count < enough_count) | (mass < enough_mass):
        counts = _histogram(logits_ptr, edited_ptr, source, stride_logits, VOCAB, TILE)
        cut = tl.full([], 0, tl.int32)
        if (top_k > 0) | (lowest > float("-inf")):
            if top_k > 0:
                cut = _last_bin(tl.cumsum(counts, 0, reverse=True) >= top_k)
            # `_bin_below` goes one bin lower, to cover the rounding of this multiplication.
            cut = tl.maximum(cut, _bin_below(lowest * temperature))
        else:
            edge = (tl.arange(0, BINS) - BINS // 2).to(tl.float32) / BINS_PER_UNIT
            least = likelihood(tl.minimum(scaled(edge, temperature), highest), highest)
            reached = tl.cumsum(counts.to(tl.float32) * least, 0, reverse=True)
            cut = _last_bin(reached >= target * MASS_MARGIN)
        count, listed = _gather_bins(
            ids_ptr + PARTS * PART_SLOTS, values_ptr + PARTS * PART_SLOTS, logits_ptr, edited_ptr, source,
            stride_logits, temperature, counts, cut, VOCAB, TILE, PARTS * PART_SLOTS,
        )  # fmt: skip
    return count, listed
