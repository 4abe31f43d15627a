"""Linear layers with weights and activations in 8 bits: FP8 (`quire.kernels.rows.fp8_linear`) or int8 (`int8_linear`).

A bfloat16 checkpoint is quantised while it is read, one tensor at a time, so the device never holds the whole bfloat16
model. An FP8 checkpoint contains codes (E4M3 values) and scales. From an FP8 checkpoint, the layers that it stores in
FP8 become FP8 layers. From other checkpoints, all linear layers do if their shapes fit the GPU's matrix units, except
the output head. Layers are in int8 only if the checkpoint stores them so. Stacked experts are not linear layers and
keep the model's dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Self

import torch
from torch import nn

from quire.kernels.rows import fp8_linear, int8_linear

CODES = torch.float8_e4m3fn
_ROWS = (
    1024  # rows of a weight quantised at a time, which bounds the memory of the float32 temporary
)


class CodedLinear(nn.Module, ABC):
    """y = x W^T + bias. W is codes of 8 bits with one scale per output.

    Parameters
    ----------
    in_features, out_features
        Multiples of `fp8_linear.MULTIPLE`.
    bias
        [out_features] bfloat16.
    bound
        Activations are clamped to [-bound, bound]; None: no clamping.
    device
        Device of the uninitialised weights.
    """

    codes: torch.dtype  # of the weights

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: nn.Parameter | None = None,
        *,
        bound: float | None = None,
        device: torch.device | str = "meta",
    ):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.bound = bound
        # True only for comparisons: activations are not quantised, and the product is float32.
        self.is_exact = False
        self.weight = _constant(
            torch.empty(out_features, in_features, dtype=self.codes, device=device)
        )
        self.weight_scale = _constant(torch.empty(out_features, 1, device=device))
        self.bias = bias

    @classmethod
    def joined(cls, parts: Sequence[Self], bias: torch.Tensor | None) -> Self:
        """Merge layers with the same input. Results do not change, because each output has its own scale.

        Raises
        ------
        ValueError
            The layers have different bounds.
        """
        bounds = {part.bound for part in parts}
        if len(bounds) > 1:
            raise ValueError(
                f"activations are clamped to different bounds: {sorted(map(str, bounds))}"
            )
        layer = cls(parts[0].in_features, 0, bias, bound=parts[0].bound)
        layer.weight = _constant(join_rows([part.weight.detach() for part in parts]))
        layer.weight_scale = _constant(torch.cat([part.weight_scale.detach() for part in parts]))
        layer.out_features = len(layer.weight)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] bfloat16 to [..., out_features]."""
        if self.is_exact:
            out = (x.float() @ self.weight.float().t()) * self.weight_scale.t()
            return (out if self.bias is None else out + self.bias).to(x.dtype)
        out = self.product(x.reshape(-1, self.in_features))
        return out.view(*x.shape[:-1], self.out_features)

    @abstractmethod
    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] bfloat16 to [rows, out_features]; quantises x with one scale per row."""


class Fp8Linear(CodedLinear):
    """A linear layer with weights and activations in E4M3."""

    codes = CODES

    @classmethod
    def of(cls, linear: nn.Linear) -> Fp8Linear:
        """Create an FP8 layer by quantising a linear layer."""
        weight = linear.weight.detach()
        layer = cls(linear.in_features, linear.out_features, linear.bias, device=weight.device)
        quantise_into(weight, layer.weight, layer.weight_scale)
        return layer

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See `CodedLinear.product`."""
        codes, scales = fp8_linear.quantise_rows(x, self.bound)
        return fp8_linear.scaled_product(codes, scales, self.weight, self.weight_scale, self.bias)


class Int8Linear(CodedLinear):
    """A linear layer with weights and activations in int8."""

    codes = torch.int8

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See `CodedLinear.product`."""
        codes, scales = int8_linear.quantise_rows(x)
        return int8_linear.scaled_product(codes, scales, self.weight, self.weight_scale, self.bias)


def _constant(x: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate matrices [n, k] by rows: a view if they are adjacent in memory, else a copy."""
    first, address = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if (
            not part.is_contiguous()
            or part.untyped_storage().data_ptr() != storage
            or part.data_ptr() != address
        ):
            if part.dtype == CODES:  # as bytes, because some devices cannot concatenate float8
                return torch.cat([x.view(torch.uint8) for x in parts]).view(CODES)
            return torch.cat(list(parts))
        address += part.nbytes
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())


def quantise_into(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise weight [n, k] of any float dtype into codes [n, k] float8_e4m3fn and scales [n, 1] float32."""
    for begin in range(0, len(weight), _ROWS):
        rows = slice(begin, begin + _ROWS)
        found, own_scales = fp8_linear.quantise_rows(weight[rows])
        codes[rows].copy_(found)
        scales[rows].copy_(own_scales)


def fitting_layers(model: nn.Module, *, with_head: bool = False) -> list[str]:
    """Names of linear layers that can be in 8 bits.

    The output head is excluded unless `with_head`, because its error affects logits directly.
    """
    head = None if with_head else model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and fp8_linear.supports(module.in_features, module.out_features)
    ]


def put_empty(
    model: nn.Module, names: Collection[str], kind: type[CodedLinear], bound: float | None
) -> None:
    """Replace linear layers of a model on the meta device by layers of a kind, without memory."""
    for name in names:
        linear = model.get_submodule(name)
        layer = kind(linear.in_features, linear.out_features, linear.bias, bound=bound)
        model.set_submodule(name, layer)


def put_quantised(model: nn.Module) -> None:
    """Replace the linear layers of a loaded model by quantised ones, one at a time."""
    for name in fitting_layers(model):
        model.set_submodule(name, Fp8Linear.of(model.get_submodule(name)))
