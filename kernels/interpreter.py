"""Repair of Triton's interpreter, which runs the kernels on CPU tensors where there is no GPU.

NumPy has no bfloat16, so the interpreter keeps such tensors as uint16; its dot product then multiplies the
bit patterns as integers (Triton 3.6 to 3.9). Float32 operands give what the matrix units compute: exact products
of the bfloat16 values, added in float32.
"""

from __future__ import annotations

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder


def repair_bfloat16_dot() -> None:
    """Make `tl.dot` of the interpreter right for bfloat16; call once, before the first kernel runs."""
    create_dot = InterpreterBuilder.create_dot
    if getattr(create_dot, "widens_bfloat16", False):
        return

    def widened(self, x):
        return self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def create_dot_widened(self, a, b, d, input_precision, max_num_imprecise_acc):
        return create_dot(
            self, widened(self, a), widened(self, b), d, input_precision, max_num_imprecise_acc
        )

    create_dot_widened.widens_bfloat16 = True
    InterpreterBuilder.create_dot = create_dot_widened
