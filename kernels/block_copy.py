"""Copies of whole KV blocks: copy-on-write, and gather and scatter for the host tier.

For each pair (s, t): block t of `target` becomes the bytes of block s of `source`. With a staging buffer as the
target this gathers scattered blocks into one contiguous run, with it as the source it scatters them back::

    pool    [ b0 ][ b1 ][ b2 ][ b3 ] ...        gather   pairs (3, 0), (0, 1)
    staging [ b3 ][ b0 ]                        scatter  pairs (0, 3), (1, 0)

All pairs are copied at the same time: a block that is a target must occur in no other pair.

Layout. [blocks, ...] with contiguous blocks at any stride, so one layer's part of each block can be copied too.
Moved as 64-bit words, 16 bytes a thread and load. Offsets are 64-bit.

Bytes: 2 block bytes a pair. No arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.checks import check_bounds, check_device
from quire.kernels.row_checks import check_dtype, check_matrix

BLOCK_WORDS = 2048  # 16 KiB a program
NUM_WARPS = 8
ALIGNMENT_BYTES = 16


@triton.jit(
    do_not_specialize=["num_targets", "num_sources"],
    do_not_specialize_on_alignment=["pairs_ptr"],
)
def _copy_blocks_kernel(
    target_ptr, source_ptr, pairs_ptr, stride_target, stride_source, stride_pair, num_targets, num_sources,
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK words of one pair; strides in units of two words, which keeps 16-byte accesses."""
    pair_ptr = pairs_ptr + tl.program_id(0).to(tl.int64) * stride_pair
    source = tl.load(pair_ptr).to(tl.int64)
    target = tl.load(pair_ptr + 1).to(tl.int64)
    # Ids come from the device's memory: one outside its tensor copies nothing.
    known = (source >= 0) & (source < num_sources) & (target >= 0) & (target < num_targets)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = word < tl.where(known, WORDS, 0)
    x = tl.load(source_ptr + source * stride_source * 2 + word, mask=held, other=0)
    tl.store(target_ptr + target * stride_target * 2 + word, x, mask=held)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy whole blocks.

    Parameters
    ----------
    source, target
        [blocks, ...] of one dtype and the same block shape, blocks contiguous; block bytes, strides and addresses
        multiples of 16. May be the same tensor.
    pairs
        [pairs, 2] int32 or int64, (block of `source`, block of `target`). Pairs with an id outside its tensor
        are skipped: such as (-1, -1), the padding of a captured graph. A block that is a target occurs in no
        other pair.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device that does not fit, with its bound.
    """
    if source.dim() < 2 or source.shape[1:] != target.shape[1:]:
        raise ValueError(
            f"target: must be [blocks, ...] with blocks as in source, {list(source.shape[1:])}, "
            f"got {list(target.shape)}"
        )
    check_dtype("target", target, (source.dtype,))
    check_device("target", target, source.device)
    check_matrix("pairs", pairs, (None, 2), (torch.int32, torch.int64), source.device)
    source, target = _words("source", source), _words("target", target)
    words = source.shape[1]
    check_bounds("block bytes", words * 8, ALIGNMENT_BYTES, 65535 * BLOCK_WORDS * 8)
    if len(pairs):
        # fmt: off
        _copy_blocks_kernel[(len(pairs), triton.cdiv(words, BLOCK_WORDS))](
            target, source, pairs, target.stride(0) // 2, source.stride(0) // 2, pairs.stride(0),
            len(target), len(source), WORDS=words, BLOCK=BLOCK_WORDS, num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
        # fmt: on


def _words(name: str, x: torch.Tensor) -> torch.Tensor:
    """[blocks, words] int64 view of the same memory."""
    size = x[0].numel() * x.itemsize if len(x) else 0
    expected = 1
    for length, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if length != 1 and stride != expected:
            raise ValueError(f"{name}: blocks must be contiguous, got strides {x.stride()}")
        expected *= length
    stride_bytes = x.stride(0) * x.itemsize
    for what, value in (
        ("block", size),
        ("stride", stride_bytes),
        ("address", x.data_ptr()),
    ):
        if value % ALIGNMENT_BYTES:
            raise ValueError(
                f"{name}: {what} must be a multiple of {ALIGNMENT_BYTES} bytes, got {value}"
            )
    flat = x.as_strided((len(x), size // x.itemsize), (x.stride(0), 1))
    return flat.view(torch.int64)
