"""The end of a model on the CPU: the last norm and the linear layer that computes logits (LM head), as one call into C.

Bytes and flops: those of `cpu_row_ops.rms_norm` and `cpu_linear.packed_linear`.
"""

from __future__ import annotations

import torch

from quire.kernels.cpu.cpu_call_sequence import (
    ROW_GAP,
    CallSequence,
    NormPart,
    ProductPart,
    Workspace,
    run_parts,
)
from quire.kernels.cpu.cpu_linear import LinearCall
from quire.kernels.cpu.cpu_row_ops import NormCall


class NormedProduct:
    """An RMS norm followed by a linear layer, as prepared calls: from a model's last hidden states to logits.

    The object keeps the weights alive, but not the inputs or results of a call.

    Raises
    ------
    ValueError
        The parts' shapes or dtypes do not match.
    """

    def __init__(self, norm: NormPart, product: ProductPart):
        # Keeps the weights alive, because the prepared calls hold only their addresses.
        self._parts = norm, product
        weight = product.weight
        self._depth, self._columns, self._dtype = weight.depth, weight.columns, weight.dtype
        self._norm = NormCall.of(norm.weight, weight.depth, weight.dtype, norm.eps)
        self._product = LinearCall.of(*product)
        self._sequence = CallSequence({"norm": self._norm, "lm_head": self._product})
        size = weight.dtype.itemsize
        self._normed_stride = (weight.depth + ROW_GAP) * size
        self._norm.out_stride = self._product.x_stride = self._normed_stride
        self._product.out_stride = weight.columns * size

    def __call__(
        self, x: torch.Tensor, workspace: Workspace, *, isa: str | None = None
    ) -> torch.Tensor:
        """Compute the norm and the logits.

        Parameters
        ----------
        x
            [rows, depth] in the weights' dtype, rows contiguous.
        workspace
            Memory for the normed rows. It may be the workspace of the model's layers, because they have finished.
        isa
            Instruction set, one of `native_library.ISAS`; None: the best of this processor.

        Returns
        -------
        [rows, columns] in the dtype of x.

        Raises
        ------
        ValueError
            A shape, dtype or stride is not supported.
        """
        if (
            x.dim() != 2
            or x.shape[1] != self._depth
            or x.dtype != self._dtype
            or x.stride(1) != 1
            or x.device.type != "cpu"
        ):
            raise ValueError(
                f"x: must be [rows, {self._depth}] {self._dtype} on the CPU, rows contiguous, got {list(x.shape)} "
                f"{x.dtype} on {x.device}, strides {x.stride()}"
            )
        rows = len(x)
        out = torch.empty(rows, self._columns, dtype=self._dtype)
        if not rows:
            return out
        norm, product = self._norm, self._product
        norm.x, norm.x_stride = x.data_ptr(), x.stride(0) * self._dtype.itemsize
        norm.out = product.x = workspace.reserve(rows * self._normed_stride)
        product.out = out.data_ptr()
        norm.rows = product.rows = rows
        seconds = run_parts(self._sequence, workspace, torch.get_num_threads(), isa)
        if workspace.on_times is not None:
            workspace.on_times(seconds)
        return out
