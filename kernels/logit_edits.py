"""Bias and penalties, applied to the few ids of a row that have any, before `quire.kernels.sampling`.

For each listed id with logit x, bias b, and c occurrences in the output (c < 0: in neither prompt nor output)::

    x = x + b                                          -inf suppresses the id
    x = x / r if x > 0 else x * r      if c >= 0       repetition r
    x = x - f c - p                    if c > 0        frequency f, presence p

The order is vLLM's. The bits of x before are kept: log-probs are of the model's own distribution.

Layout. The lists of all rows one after another, ids [entries] int32 each once in its row, row i's being
[starts[i], starts[i + 1]). In place on logits [rows, vocab].

Bytes: 16 + 2 itemsize an entry, and the touched sectors of the logits; independent of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.checks import check_bounds
from quire.kernels.row_checks import FLOATS, check_matrix, check_vector

BLOCK = 256


@triton.jit
def _edit_kernel(
    logits_ptr, before_ptr, starts_ptr, ids_ptr, output_count_ptr, bias_ptr,
    repetition_ptr, presence_ptr, frequency_ptr, stride_logits, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's list."""
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    end = tl.load(starts_ptr + row + 1)
    for start in range(tl.load(starts_ptr + row), end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        held = entry < end
        token = tl.load(ids_ptr + entry, mask=held, other=-1)
        held = held & (token >= 0) & (token < VOCAB)
        count = tl.load(output_count_ptr + entry, mask=held, other=-1)
        logit_ptr = logits_ptr + row * stride_logits + token
        before = tl.load(logit_ptr, mask=held, other=0.0)
        tl.store(before_ptr + entry, before, mask=held)
        x = before.to(tl.float32) + tl.load(bias_ptr + entry, mask=held, other=0.0)
        repeated = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where(count >= 0, repeated, x)
        x = tl.where(count > 0, x - frequency * count.to(tl.float32) - presence, x)
        tl.store(logit_ptr, x.to(logits_ptr.dtype.element_ty), mask=held)


def edit_logits(
    logits: torch.Tensor,
    starts: torch.Tensor,
    ids: torch.Tensor,
    output_count: torch.Tensor,
    bias: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Apply bias and penalties in place.

    Parameters
    ----------
    logits
        [rows, vocab] bfloat16, float16 or float32.
    starts
        [rows + 1] int32, non-decreasing from 0 to `entries`.
    ids
        [entries] int32, each once in its row; ids outside the vocabulary are skipped.
    output_count
        [entries] int32: occurrences in the output; 0 for an id of the prompt only, -1 for one with a bias only.
    bias
        [entries] float32.
    repetition, presence, frequency
        [rows] float32; repetition > 0, 1 for off; the others 0 for off.

    Returns
    -------
    [entries] in the dtype of logits: what stood there before (undefined for skipped ids).

    Raises
    ------
    ValueError
        A shape, dtype, stride or device that does not fit, with its bound.
    """
    device = logits.device
    check_matrix("logits", logits, (None, None), FLOATS, device)
    rows, vocab = logits.shape
    check_bounds("vocab", vocab, 1, 1 << 24)
    check_vector("starts", starts, rows + 1, (torch.int32,), device)
    check_vector("ids", ids, None, (torch.int32,), device)
    check_vector("output_count", output_count, len(ids), (torch.int32,), device)
    check_vector("bias", bias, len(ids), (torch.float32,), device)
    for name, x in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        check_vector(name, x, rows, (torch.float32,), device)
    before = torch.empty(len(ids), dtype=logits.dtype, device=device)
    if rows and len(ids):
        # fmt: off
        _edit_kernel[(rows,)](
            logits, before, starts, ids, output_count, bias, repetition, presence, frequency, logits.stride(0),
            VOCAB=vocab, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )
        # fmt: on
    return before
