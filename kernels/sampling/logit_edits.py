"""Masks, bias and penalties of the rows that have any, before `quire.kernels.sampling.sampling_kernel`: float32 copies
of those rows.

For each id with logit x, bias b (-inf suppresses it), and c occurrences in the output::

    x = -inf                                           if the row's mask excludes it
    x = x + b                                          if it is listed
    x = x / r if x > 0 else x * r                      if it occurs in prompt or output: repetition r
    x = x - f c - p                    if c > 0        frequency f, presence p

The order is vLLM's. The logits stay as they are: log-probs are of the model's own distribution.

```
 logits [S, vocab]  ─── row rows[e], mask, counts ───▶  edited [E, vocab]        all ids
                    └── the same and the bias ───────▶  edited[e, ids[i]]        the listed ids, over it
```

Bytes a row: vocab (itemsize + 4), with penalties 4 vocab more, with a mask vocab / 8; 16 a listed id. Flops: 8 an
element.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.argument_checks import FLOATS, check_bounds, check_matrix, check_vector
from quire.kernels.sampling.row_survey import MAX_VOCAB

BLOCK = 2048
LIST_BLOCK = 256
NUM_WARPS = 4
IN_PROMPT = 1 << 30
_COUNT_BITS = tl.constexpr(IN_PROMPT - 1)


class Edits(NamedTuple):
    """What E rows ask for, all on one device. Every part may be empty, and then no row refers to it."""

    rows: torch.Tensor  # [E] int32, of the logits
    masks: (
        torch.Tensor
    )  # [M, ceil(vocab / 32)] int32, bit i % 32 of word i // 32 set: id i is allowed
    mask_rows: torch.Tensor  # [E] int32, of `masks`; -1: all ids are allowed
    starts: torch.Tensor  # [E + 1] int32: row e's list is [starts[e], starts[e + 1])
    ids: torch.Tensor  # [n] int32, each once in its row
    bias: torch.Tensor  # [n] float32
    count_rows: torch.Tensor  # [E] int32, of `counts`; -1: no penalties
    repetition: torch.Tensor  # [E] float32, above 0; 1 for off
    presence: torch.Tensor  # [E] float32
    frequency: torch.Tensor  # [E] float32
    # [R, vocab] int32, how often the output has each id; bit 30: the prompt has it
    counts: torch.Tensor


# Single numbers and short lists are loaded from them: how they are aligned is of no use.
_UNALIGNED = (
    "rows_ptr masks_ptr mask_rows_ptr starts_ptr ids_ptr bias_ptr counts_ptr count_rows_ptr "
    "repetition_ptr presence_ptr frequency_ptr"
).split()


@triton.jit
def _masked(
    logits_ptr, masks_ptr, mask_rows_ptr, rows_ptr, edit, stride_logits, stride_masks, token, held,
    VOCAB: tl.constexpr,
):  # fmt: skip
    """Logits of ids of a row, -inf where its mask excludes them."""
    row = tl.load(rows_ptr + edit).to(tl.int64)
    x = tl.load(logits_ptr + row * stride_logits + token, mask=held, other=0.0).to(tl.float32)
    mask_row = tl.load(mask_rows_ptr + edit).to(tl.int64)
    has_mask = held & (token < tl.where(mask_row >= 0, VOCAB, 0))
    word = tl.load(masks_ptr + mask_row * stride_masks + token // 32, mask=has_mask, other=-1)
    return tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))


@triton.jit
def _penalised(
    x, counts_ptr, count_rows_ptr, repetition_ptr, presence_ptr, frequency_ptr, edit, token, held,
    VOCAB: tl.constexpr,
):  # fmt: skip
    """Logits after the penalties of their row."""
    count_row = tl.load(count_rows_ptr + edit).to(tl.int64)
    repetition = tl.load(repetition_ptr + edit)
    counted = held & (token < tl.where(count_row >= 0, VOCAB, 0))
    state = tl.load(counts_ptr + count_row * VOCAB + token, mask=counted, other=0)
    repeated = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    x = tl.where(state != 0, repeated, x)
    count = state & _COUNT_BITS
    lower = x - tl.load(frequency_ptr + edit) * count.to(tl.float32) - tl.load(presence_ptr + edit)
    return tl.where(count > 0, lower, x)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _edit_kernel(
    edited_ptr, logits_ptr, rows_ptr, masks_ptr, mask_rows_ptr,
    counts_ptr, count_rows_ptr, repetition_ptr, presence_ptr, frequency_ptr, stride_logits, stride_masks,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of ids of one row."""
    edit = (tl.program_id(0) // BLOCKS).to(tl.int64)
    token = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    held = token < VOCAB
    x = _masked(
        logits_ptr, masks_ptr, mask_rows_ptr, rows_ptr, edit, stride_logits, stride_masks, token, held, VOCAB
    )  # fmt: skip
    x = _penalised(
        x, counts_ptr, count_rows_ptr, repetition_ptr, presence_ptr, frequency_ptr, edit, token, held, VOCAB
    )  # fmt: skip
    tl.store(edited_ptr + edit * VOCAB + token, x, mask=held)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _edit_listed_kernel(
    edited_ptr, logits_ptr, rows_ptr, masks_ptr, mask_rows_ptr, starts_ptr, ids_ptr, bias_ptr,
    counts_ptr, count_rows_ptr, repetition_ptr, presence_ptr, frequency_ptr, stride_logits, stride_masks,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's list."""
    edit = tl.program_id(0).to(tl.int64)
    end = tl.load(starts_ptr + edit + 1)
    for start in range(tl.load(starts_ptr + edit), end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        token = tl.load(ids_ptr + entry, mask=entry < end, other=-1)
        held = (token >= 0) & (token < VOCAB)
        x = _masked(
            logits_ptr, masks_ptr, mask_rows_ptr, rows_ptr, edit, stride_logits, stride_masks, token, held, VOCAB
        )  # fmt: skip
        x += tl.load(bias_ptr + entry, mask=held, other=0.0)
        x = _penalised(
            x, counts_ptr, count_rows_ptr, repetition_ptr, presence_ptr, frequency_ptr, edit, token, held, VOCAB
        )  # fmt: skip
        tl.store(edited_ptr + edit * VOCAB + token, x, mask=held)


def edit_logits(logits: torch.Tensor, edits: Edits) -> torch.Tensor:
    """Apply masks, bias and penalties.

    Parameters
    ----------
    logits
        [rows, vocab] bfloat16, float16 or float32; not changed.
    edits
        Ids outside the vocabulary are skipped.

    Returns
    -------
    [E, vocab] float32.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device that does not fit, with its bound.
    """
    device = logits.device
    check_matrix("logits", logits, (None, None), FLOATS, device)
    vocab = logits.shape[1]
    check_bounds("vocab", vocab, 1, MAX_VOCAB)
    _check(edits, vocab, device)
    count = len(edits.rows)
    edited = torch.empty(count, vocab, dtype=torch.float32, device=device)
    blocks = triton.cdiv(vocab, BLOCK)
    masks = (edits.masks, edits.mask_rows)
    penalties = (
        *(edits.counts, edits.count_rows),
        *(edits.repetition, edits.presence, edits.frequency),
    )
    strides = (logits.stride(0), triton.cdiv(vocab, 32))
    options = dict(num_warps=NUM_WARPS, enable_fp_fusion=False)
    if count:
        # fmt: off
        _edit_kernel[(count * blocks,)](
            edited, logits, edits.rows, *masks, *penalties, *strides, VOCAB=vocab, BLOCKS=blocks, BLOCK=BLOCK, **options
        )
        # fmt: on
    if count and len(edits.ids):
        lists = (edits.starts, edits.ids, edits.bias)
        # fmt: off
        _edit_listed_kernel[(count,)](
            edited, logits, edits.rows, *masks, *lists, *penalties, *strides, VOCAB=vocab, BLOCK=LIST_BLOCK, **options
        )
        # fmt: on
    return edited


def _check(edits: Edits, vocab: int, device: torch.device) -> None:
    count, num_listed = len(edits.rows), len(edits.ids)
    for name, length, dtype in (
        ("rows", count, torch.int32),
        ("mask_rows", count, torch.int32),
        ("starts", count + 1, torch.int32),
        ("ids", num_listed, torch.int32),
        ("bias", num_listed, torch.float32),
        ("count_rows", count, torch.int32),
        ("repetition", count, torch.float32),
        ("presence", count, torch.float32),
        ("frequency", count, torch.float32),
    ):
        check_vector(name, getattr(edits, name), length, (dtype,), device)
    for name, x, width in (
        ("masks", edits.masks, triton.cdiv(vocab, 32)),
        ("counts", edits.counts, vocab),
    ):
        check_matrix(name, x, (None, width), (torch.int32,), device)
        if not x.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, got strides {x.stride()}")
