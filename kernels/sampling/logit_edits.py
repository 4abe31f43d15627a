"""Masks, bias and penalties, applied to float32 copies of the rows that have any, before sampling.

For each id with logit x, bias b (-inf suppresses the id) and c occurrences in the output::

    x = -inf                                           if the row's mask excludes the id
    x = x + b                                          if the row's list has the id
    x = x / r if x > 0 else x * r                      if the id occurs in prompt or output: repetition penalty r
    x = x - f c - p                                    if c > 0: frequency penalty f, presence penalty p

The order is vLLM's. The logits themselves are not changed, because log-probabilities refer to the model's own
distribution.

```
 logits [S, vocab]  ─── row rows[e], mask, counts ───▶  edited [E, vocab]        all ids
                    └── the same and the bias ───────▶  edited[e, ids[i]]        the listed ids, written again
```

Layout. logits [S, vocab], rows contiguous; edited [E, vocab] float32; `Edits` has the shapes of all other arrays.

Bytes per row: vocab (itemsize + 4), 4 vocab more with penalties, vocab / 8 more with a mask; 16 for each listed id.
Flops: 8 per element.
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
    """The edits of E rows, all on one device. `masks`, `ids`, `bias` and `counts` may be empty if no row uses them."""

    rows: torch.Tensor  # [E] int32, rows of the logits
    # [M, ceil(vocab / 32)] int32; bit i % 32 of word i // 32 is set if id i is allowed
    masks: torch.Tensor
    mask_rows: torch.Tensor  # [E] int32, rows of `masks`; -1: all ids are allowed
    # [E + 1] int32: row e's list is [starts[e], starts[e + 1]) of `ids` and `bias`
    starts: torch.Tensor
    ids: torch.Tensor  # [n] int32, each id at most once in a row's list
    bias: torch.Tensor  # [n] float32
    count_rows: torch.Tensor  # [E] int32, rows of `counts`; -1: no penalties
    repetition: torch.Tensor  # [E] float32 > 0; 1 is off
    presence: torch.Tensor  # [E] float32; 0 is off
    frequency: torch.Tensor  # [E] float32; 0 is off
    # [R, vocab] int32: occurrences of each id in the output; bit 30 if the prompt has the id
    counts: torch.Tensor


# The kernels load scalars and short lists from these pointers: specialising on alignment would not pay.
_UNALIGNED = (
    "rows_ptr masks_ptr mask_rows_ptr starts_ptr ids_ptr bias_ptr counts_ptr count_rows_ptr "
    "repetition_ptr presence_ptr frequency_ptr"
).split()


@triton.jit
def _masked(
    logits_ptr, masks_ptr, mask_rows_ptr, rows_ptr, edit, stride_logits, stride_masks, token, held,
    VOCAB: tl.constexpr,
):  # fmt: skip
    """Load logits of one row; -inf for ids that its mask excludes."""
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
    """Apply the row's penalties to its logits x."""
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
    """Write the edited logits of BLOCK ids of one row, without bias."""
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
    """Write the edited logits of the ids in one row's list again, now with their bias."""
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
    """Apply masks, bias and penalties to copies of the rows `edits.rows`.

    Parameters
    ----------
    logits
        [rows, vocab] bfloat16, float16 or float32; not changed.
    edits
        The edits of E rows. Listed ids outside the vocabulary are skipped.

    Returns
    -------
    [E, vocab] float32.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device is not supported; the message has the bound.
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
