"""Survey of rows of logits, the first stage of sampling: largest value, sum of exponentials, best id, candidates.

Several programs share each row::

    row        [ part 0: chunk chunk chunk chunk ][ part 1: chunk ...  ] ...      read once
    survey     max of each chunk; sum, best score and id of each part             one program per part
    combine    max, sum, best id of the row; a cut                                one program per row
    gather     ids at or above the cut: one list per part     read again          one program per part

    sum = sum_j e^((x_j - max) / temperature)      score = x / temperature + noise, or x for greedy rows

The cut is a threshold on the logits: ids at or above it become candidates, the ids that the row may choose. It is
nearly always low enough. The chunks' maxima are a sample of the row's largest values.
With top-k, the cut is the highest value at or above which k maxima lie (and so at least k ids). With top-p, it is the
highest value at which the maxima alone have a share p of the sum. If no such value is high enough, the cut is chosen
so that evenly spread candidates fill a quarter of the lists. With min-p it is at least min-p's bound. The kernel that
reads the lists checks that they are complete (`quire.kernels.sampling.sampling_tile.find_candidates`).

Parts without a value at or above the cut are not read again, nor are rows that need no candidates.

The parts depend on the vocabulary size alone, and all results are combined in a fixed order: a row's result does not
depend on the batch.

Layout. logits [any, vocab], rows contiguous; the results of all kernels are in a `Workspace`.

Bytes per row: vocab itemsize in the survey, at most the same in the gather kernel (from the L2 cache if the rows of the
running programs fit it). Instructions per element: 15 in the survey, 75 with noise; 15 in the gather kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.argument_checks import check_matrix
from quire.kernels.sampling.sampling_tile import (
    FLOAT_MAX,
    LOG2E,
    MASS_MARGIN,
    MINUS_INF_KEY,
    STAGES,
    gumbel_noise,
    limits_of,
    load_logits,
    order_key,
    row_source,
)
from quire.kernels.tuning import device_arch, launch_options

MAX_VOCAB = 1 << 20
_NEVER_KEY = tl.constexpr(2147483647)  # above the key of every value
COMBINE_WARPS = 4
# Programs that fit one SM. With 3 programs of the gather kernel some versions of ptxas spill 8 bytes.
SURVEY_RESIDENT, GATHER_RESIDENT = 4, 2


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Shape of the kernels; sizes are powers of two. `chunk`, `part_chunks` and `tile` fix the order of additions."""

    chunk: int = 256  # ids for which the survey stores one maximum
    part_chunks: int = 8  # chunks of one program, loaded at the same time
    part_slots: int = 128  # capacity of a part's list of candidates
    tile: int = 1024  # ids of one iteration of the loops over a list or a row
    # Thresholds tried in one search pass. 8 need too many registers for `sampling_kernel.RESIDENT` programs per SM.
    pivots: int = 4
    num_warps: int = 8

    @property
    def gather_tile(self) -> int:
        """Ids of one iteration of the gather kernel."""
        return min(self.tile, self.chunk * self.part_chunks)

    def num_parts(self, vocab: int) -> int:
        """Number of parts, and of survey programs, of a row."""
        return triton.cdiv(vocab, self.chunk * self.part_chunks)


DEFAULT_CONFIG = SamplingConfig()


_DTYPES = (torch.float32, torch.int32, torch.int32, torch.float32)


class Workspace(NamedTuple):
    """Memory between the kernels of one call, for rows with C chunks, P parts and L slots."""

    # [rows, C + 2 P + 3] float32: each chunk's maximum | each part's sum | each part's best score |
    # the row's largest value, its sum, the mass that its candidates must reach
    stats: torch.Tensor
    # [rows, 2 P + 4] int32: each part's best id | each part's number of candidates |
    # the row's cut (as `order_key`), best id, number of candidates that it must have, source
    marks: torch.Tensor
    ids: torch.Tensor  # [rows, 2 L] int32: lists of the parts | one joined list
    values: torch.Tensor  # [rows, 2 L] float32: logits of `ids` | divided by the temperature

    @classmethod
    def allocate(
        cls, rows: int, vocab: int, device: torch.device, config: SamplingConfig = DEFAULT_CONFIG
    ) -> Workspace:
        """Allocate uninitialised memory."""
        shapes = zip(cls._widths(vocab, config), _DTYPES, strict=True)
        return cls(*(torch.empty(rows, n, dtype=dtype, device=device) for n, dtype in shapes))

    @staticmethod
    def _widths(vocab: int, config: SamplingConfig) -> tuple[int, ...]:
        parts = config.num_parts(vocab)
        slots = parts * config.part_slots
        return parts * (config.part_chunks + 2) + 3, 2 * parts + 4, 2 * slots, 2 * slots

    def check(self, rows: int, vocab: int, device: torch.device, config: SamplingConfig) -> None:
        """Raise ValueError unless there is room for `rows` rows of this vocabulary."""
        for name, x, width, dtype in zip(
            self._fields, self, self._widths(vocab, config), _DTYPES, strict=True
        ):
            check_matrix(f"workspace.{name}", x, (None, width), (dtype,), device)
            if len(x) < rows or not x.is_contiguous():
                raise ValueError(
                    f"workspace.{name}: must be contiguous of at least {rows} rows, got {list(x.shape)}"
                )


class Rows(NamedTuple):
    """Rows of logits, and either their limits and noise keys, or the number of largest values to list."""

    logits: torch.Tensor  # [any, vocab]
    edited: torch.Tensor | None  # [any, vocab] float32
    # [rows] int32: s >= 0 is row s of the logits, s < 0 row -1 - s of the edited ones; None: row i of the logits
    source: torch.Tensor | None
    limits: torch.Tensor | None = None  # [rows, NUM_LIMITS] int32, words of `sampling_tile.LIMITS`
    noise_keys: torch.Tensor | None = None  # [rows] int64
    top_k: torch.Tensor | None = None  # [rows] int32


# The kernels load scalars from these pointers. Specialising on their alignment would only compile more variants.
UNALIGNED = ("source_ptr", "limits_ptr", "top_k_ptr", "noise_ptr")


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _survey_kernel(
    stats_ptr, marks_ptr, logits_ptr, edited_ptr, source_ptr,
    limits_ptr, top_k_ptr, noise_ptr, stride_logits,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Survey one part of one row."""
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    stats_ptr += row * (PARTS * CHUNKS + 2 * PARTS + 3)
    marks_ptr += row * (2 * PARTS + 4)
    temperature, _, _, _, _, truncates = limits_of(limits_ptr, top_k_ptr, row, VOCAB)
    chunk = part * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    source = row_source(source_ptr, row)
    x = load_logits(logits_ptr, edited_ptr, source, stride_logits, token, token < VOCAB, VOCAB)
    maxima = tl.max(x, 1)
    highest = tl.max(maxima, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.sum(tl.exp2((x - shift) * exponent_scale(temperature)), 1), 0)
    score = x
    if noise_ptr is not None:
        if (temperature > 0.0) & (truncates == 0):
            key_low = tl.load(noise_ptr + row * 2).to(tl.uint32, bitcast=True)
            key_high = tl.load(noise_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
            score = quotient(x, temperature) + gumbel_noise(token, key_low, key_high)
    best = tl.max(tl.max(score, 1), 0)
    best_id = tl.min(tl.min(tl.where(score == best, token, VOCAB), 1), 0)
    tl.store(stats_ptr + chunk, maxima)
    tl.store(stats_ptr + PARTS * CHUNKS + part, total)
    tl.store(stats_ptr + PARTS * CHUNKS + PARTS + part, best)
    tl.store(marks_ptr + part, best_id)
    if part == 0:
        tl.store(marks_ptr + 2 * PARTS + 3, source.to(tl.int32))


@triton.jit
def quotient(x, temperature):
    """x / temperature with a fifth of the instructions of `scaled`; the last bit may differ from it."""
    y = x * tl.minimum(tl.div_rn(1.0, temperature), FLOAT_MAX)
    return tl.where(x == float("-inf"), x, tl.maximum(y, -FLOAT_MAX))


@triton.jit
def exponent_scale(temperature):
    """Factor f such that exp2(f d) is the ratio of the probabilities of two logits that differ by d."""
    return tl.minimum(tl.div_rn(LOG2E, tl.where(temperature > 0.0, temperature, 1.0)), FLOAT_MAX)


@triton.jit(do_not_specialize_on_alignment=("tokens_ptr", *UNALIGNED))
def _combine_kernel(
    tokens_ptr, stats_ptr, marks_ptr, limits_ptr, top_k_ptr,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, CHUNKS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one row and choose the cut.

    With FULL maxima at or above the cut, about a quarter of the lists' slots are used. PADDED is the next power of two
    of PARTS.
    """
    row = tl.program_id(0).to(tl.int64)
    stats_ptr += row * (PARTS * CHUNKS + 2 * PARTS + 3)
    marks_ptr += row * (2 * PARTS + 4)
    temperature, top_k, top_p, reach, limits_k, truncates = limits_of(
        limits_ptr, top_k_ptr, row, VOCAB
    )
    part = tl.arange(0, PADDED)
    held = part < PARTS
    chunk = part[:, None] * CHUNKS + tl.arange(0, CHUNKS)[None, :]
    maxima = tl.load(stats_ptr + chunk, mask=held[:, None], other=float("-inf"))
    totals = tl.load(stats_ptr + PARTS * CHUNKS + part, mask=held, other=0.0)
    scores = tl.load(stats_ptr + PARTS * CHUNKS + PARTS + part, mask=held, other=float("-inf"))
    ids = tl.load(marks_ptr + part, mask=held, other=VOCAB)
    part_highest = tl.max(maxima, 1)
    highest = tl.max(part_highest, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    scale = exponent_scale(temperature)
    total = tl.sum(totals * tl.exp2((part_highest - shift) * scale), 0)
    best = tl.max(scores, 0)
    token = tl.min(tl.where(scores == best, ids, VOCAB), 0)
    token = tl.where(best == float("-inf"), -1, token)

    cut = tl.full([], _NEVER_KEY, tl.int32)
    enough_count = tl.full([], 0, tl.int32)
    enough_mass = tl.full([], 0.0, tl.float32)
    if truncates & (token >= 0):
        by_mass = (top_p < 1.0) & (limits_k == 0) & (reach == float("-inf"))
        cut = tl.full([], MINUS_INF_KEY, tl.int32)
        if limits_k | by_mass:
            count = tl.minimum(tl.where(limits_k, top_k, FULL), FULL)
            mass = tl.where(by_mass, top_p * total * MASS_MARGIN, float("inf"))
            cut = _cut_key(maxima, highest, scale, count, mass)
        is_open = cut == MINUS_INF_KEY  # all ids become candidates
        enough_count = tl.where(limits_k & (is_open == 0), top_k, 0)
        enough_mass = tl.where(by_mass & (is_open == 0), top_p * total, 0.0)
        if reach > float("-inf"):
            scaled_reach = temperature * reach
            # Lower the bound by more than the rounding errors of this line and of the division by the temperature.
            lowest = highest + scaled_reach - (tl.abs(highest) + tl.abs(scaled_reach)) * 1e-6
            least = order_key(tl.maximum(lowest, -FLOAT_MAX))
            # Above this bound min-p removes all other ids, so that fewer candidates than k are enough.
            enough_count = tl.where(least >= cut, 0, enough_count)
            cut = tl.maximum(cut, least)
    stats_ptr += PARTS * CHUNKS + 2 * PARTS
    tl.store(stats_ptr, highest)
    tl.store(stats_ptr + 1, total)
    tl.store(stats_ptr + 2, enough_mass)
    marks_ptr += 2 * PARTS
    tl.store(marks_ptr, cut)
    tl.store(marks_ptr + 1, token)
    tl.store(marks_ptr + 2, enough_count)
    if tokens_ptr is not None:
        tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def _cut_key(maxima, highest, scale, count, mass):
    """Return a key slightly below the highest value at or above which `count` maxima, or maxima of mass `mass`, lie.

    Returns the key of -inf if there is no such value. The search uses the upper 16 bits of keys (the precision of
    bfloat16).
    """
    low = tl.full([], MINUS_INF_KEY, tl.int32) >> 16
    high = (order_key(highest) >> 16) + 1
    keys = order_key(maxima) >> 16
    weights = tl.exp2((maxima - highest) * scale)
    floor = low
    while high - low > 1:
        middle = (low + high) >> 1
        above = keys >= middle
        num = tl.sum(tl.sum(above.to(tl.int32), 1), 0)
        held = tl.sum(tl.sum(tl.where(above, weights, 0.0), 1), 0)
        reached = (num >= count) | (held >= mass)
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    # Go one step lower: two different logits may be equal after the division by the temperature.
    return tl.where(low - 1 <= floor, MINUS_INF_KEY, (low - 1) << 16)


@triton.jit
def _gather_kernel(
    ids_ptr, values_ptr, stats_ptr, marks_ptr, logits_ptr, edited_ptr, stride_logits,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    PART_SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """List the candidates of one part of one row."""
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    stats_ptr += row * (PARTS * CHUNKS + 2 * PARTS + 3)
    marks_ptr += row * (2 * PARTS + 4)
    cut = tl.load(marks_ptr + 2 * PARTS)
    highest = tl.max(tl.load(stats_ptr + part * CHUNKS + tl.arange(0, CHUNKS)), 0)
    count = tl.full([], 0, tl.int32)
    ids_ptr += (row * 2 * PARTS + part) * PART_SLOTS
    values_ptr += (row * 2 * PARTS + part) * PART_SLOTS
    source = tl.load(marks_ptr + 2 * PARTS + 3).to(tl.int64)
    begin = part * CHUNKS * CHUNK
    has_any = (order_key(highest) >= cut) & (highest > float("-inf"))
    end = tl.where(has_any, begin + CHUNKS * CHUNK, begin)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        x = load_logits(logits_ptr, edited_ptr, source, stride_logits, token, token < VOCAB, VOCAB)
        chosen = ((order_key(x) >= cut) & (x > float("-inf"))).to(tl.int32)
        place = count + tl.cumsum(chosen, 0) - 1
        fits = (chosen != 0) & (place < PART_SLOTS)
        tl.store(ids_ptr + place, token, mask=fits)
        tl.store(values_ptr + place, x, mask=fits)
        count += tl.sum(chosen, 0)
    tl.store(marks_ptr + PARTS + part, count)


def survey_rows(
    rows: Rows, work: Workspace, config: SamplingConfig, tokens: torch.Tensor | None = None
) -> None:
    """Run the survey, combine and gather kernels for `rows` and store their results in `work`.

    The caller has checked all arguments.

    Parameters
    ----------
    tokens
        [rows] int64, output: the id with the best score of each row, -1 if all values are -inf. For greedy rows and for
        rows without top-k, top-p and min-p this is the sampled token.
    """
    limits = (rows.limits, rows.top_k)
    count = max(len(given) for given in limits if given is not None)
    vocab = rows.logits.shape[1]
    parts, chunks = config.num_parts(vocab), config.part_chunks
    shape = dict(VOCAB=vocab, PARTS=parts, CHUNKS=chunks)
    arch = device_arch(rows.logits.device)

    def options(resident: int) -> dict[str, int | bool]:
        return launch_options(arch, config.num_warps, 1, resident)

    noise = None if rows.noise_keys is None else rows.noise_keys.view(torch.int32)
    stride = rows.logits.stride(0)
    _survey_kernel[(count * parts,)](
        work.stats, work.marks, rows.logits, rows.edited, rows.source, *limits, noise, stride,
        CHUNK=config.chunk, **shape, **options(SURVEY_RESIDENT),
    )  # fmt: skip
    _combine_kernel[(count,)](
        tokens, work.stats, work.marks, *limits,
        PADDED=triton.next_power_of_2(parts), FULL=full_chunks(vocab, config), **shape,
        **launch_options(arch, COMBINE_WARPS),
    )  # fmt: skip
    _gather_kernel[(count * parts,)](
        work.ids, work.values, work.stats, work.marks, rows.logits, rows.edited, stride,
        CHUNK=config.chunk, PART_SLOTS=config.part_slots, TILE=config.gather_tile, **shape,
        **options(GATHER_RESIDENT),
    )  # fmt: skip


def full_chunks(vocab: int, config: SamplingConfig) -> int:
    """Number of chunk maxima at or above a cut that fills a quarter of the slots with evenly spread candidates.

    If n candidates are spread over c chunks, an expected share of 1 - e^(-n / c) of the chunks has at least one.
    """
    chunks = triton.cdiv(vocab, config.chunk)
    wanted = config.num_parts(vocab) * config.part_slots / 4
    return max(1, min(chunks, round(chunks * -math.expm1(-wanted / chunks))))
