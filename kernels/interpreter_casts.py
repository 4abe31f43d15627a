"""Second repair of Triton's interpreter: conversion to bfloat16 rounds to the nearest, ties to even, as GPUs do.

The interpreter (Triton 3.6 to 3.9) cuts the mantissa off, half a unit of bfloat16 too low on average: enough to
hide a missing or doubled rounding in a kernel, and to differ from torch in every sum of two rows.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def repair_bfloat16_casts() -> None:
    """Make `x.to(...)` of the interpreter right between float32 and bfloat16; call before the first kernel runs."""
    cast_impl = InterpreterBuilder.cast_impl
    if getattr(cast_impl, "rounds_bfloat16", False):
        return

    def cast_rounding(self, source, target):
        types = (source.dtype.scalar, target.scalar)
        if types == (tl.float32, tl.bfloat16):
            return TensorHandle(_to_bfloat16(source.data), target.scalar)
        if types == (tl.bfloat16, tl.float32):
            bits = source.data.astype(np.uint32) << np.uint32(16)
            return TensorHandle(bits.view(np.float32), target.scalar)
        return cast_impl(self, source, target)

    cast_rounding.rounds_bfloat16 = True
    InterpreterBuilder.cast_impl = cast_rounding


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Bits of float32 numbers rounded to bfloat16, as uint16."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)
