"""Fused parts on the CPU, computed by the compiled library; weights of matrix products are packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quire.kernels.cpu import cpu_linear, cpu_row_ops
from quire.kernels.cpu.cpu_call_sequence import NormPart, ProductPart
from quire.kernels.cpu.cpu_linear import PackedWeight, packed_linear
from quire.replica.model.attention import Tables
from quire.replica.model.cpu_step_context import CpuStepContext
from quire.replica.model.fusion.fused_parts import (
    AnyLinear,
    FusedAttention,
    FusedMLP,
    FusedNorm,
    NormWeight,
    Product,
    joined_w4,
    merged_bias,
)
from quire.replica.model.layers.fp8 import CodedLinear, Fp8Linear, Int8Linear, join_rows
from quire.replica.model.layers.w4 import W4Linear
from quire.replica.model.packed_cache import Packer


class PackedProduct(Product):
    """`Product` with weights packed in the order in which the compiled library reads them."""

    def __init__(self, parts: Sequence[nn.Linear | CodedLinear], packer: Packer):
        nn.Module.__init__(self)
        self.in_features = parts[0].weight.shape[1]
        self.out_features = sum(len(part.weight) for part in parts)
        self.coded = None
        if isinstance(parts[0], Int8Linear):
            weights = [part.weight.detach() for part in parts]
            scales = torch.cat([part.weight_scale.detach()[:, 0] for part in parts])
            self.packed = PackedWeight.from_codes(join_rows(weights), scales)
        else:
            self.packed = packer.pack(parts)
        bias = merged_bias(parts)
        self.bias = None if bias is None else self.packed.pad_bias(bias)

    def quantize(self) -> bool:
        """Convert bfloat16 weights to int8; return False if dtype or shape does not allow it."""
        is_coded = self.packed.scales is not None
        if is_coded or self.packed.dtype != torch.bfloat16 or self.in_features % 4:
            return False
        self.packed = PackedWeight.pack([self.packed.unpack()], int8=True)
        return True

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the weight [out_features, in_features], for code that reads it instead of calling the layer."""
        return self.packed.unpack()

    def part(self) -> ProductPart:
        """Return weight and bias as an argument of the compiled library."""
        return ProductPart(self.packed, self.bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in_features], residual and result [..., out_features]."""
        shape = (*x.shape[:-1], self.out_features)
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        if residual is not None:
            residual = residual.reshape(-1, self.out_features)
        return packed_linear(rows, self.packed, bias=self.bias, residual=residual).view(shape)


class PackedW4Product(PackedProduct):
    """`PackedProduct` of layers in 4 bits, whose inputs are in order."""

    def __init__(self, layer: W4Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.coded = None
        self.packed = PackedWeight.of_numbers(layer.words, layer.scales, layer.zeros)
        self.bias = None if layer.bias is None else self.packed.pad_bias(layer.bias)

    def quantize(self) -> bool:
        """Return False: the weights are smaller than int8."""
        return False


class SortedW4Product(Product):
    """Layers in 4 bits that sort their inputs; not a part of a layer that runs as one call."""

    def __init__(self, layer: W4Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.coded = self.bias = None
        self.register_buffer("order", layer.order)
        self.product = PackedW4Product(layer)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in_features], residual and result [..., out_features]."""
        return self.product(x.index_select(-1, self.order), residual)


def cpu_product(parts: Sequence[AnyLinear], packer: Packer) -> Product:
    """Create a product with packed weights if the compiled library supports them, else a `Product` (FP8, float16)."""
    if any(isinstance(part, W4Linear) for part in parts):
        layer = joined_w4(parts)
        can_pack = cpu_linear.supports(layer.in_features, torch.bfloat16, layer.words.device)
        if layer.dtype != torch.bfloat16 or not can_pack:
            return Product(parts)
        return PackedW4Product(layer) if layer.order is None else SortedW4Product(layer)
    first = parts[0].weight
    kinds = {type(part) for part in parts}
    if Fp8Linear in kinds or (Int8Linear in kinds and len(kinds) > 1):
        return Product(parts)
    dtype = torch.bfloat16 if Int8Linear in kinds else first.dtype
    if not cpu_linear.supports(first.shape[1], dtype, first.device):
        return Product(parts)
    return PackedProduct(parts, packer)


class PackedEmbedding(nn.Module):
    """An embedding that reads the packed weight of the output head."""

    def __init__(self, packed: PackedWeight):
        super().__init__()
        self.packed = packed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] int64 to [..., hidden]."""
        return self.packed.rows(ids)


def cpu_norm_weight(weight: torch.Tensor, eps: float, plus_one: bool) -> NormWeight:
    """Convert a module's weight [columns]: add the 1 if `plus_one`, and pad."""
    scale = weight.float() + 1.0 if plus_one else weight
    return NormWeight(cpu_row_ops.pad_weight(scale), eps, plus_one, weight.dtype)


def norm_part(norm: NormWeight) -> NormPart:
    """Convert a norm's weight and epsilon to an argument of the compiled library."""
    return NormPart(norm.weight, norm.eps)


class CpuNorm(FusedNorm):
    """`FusedNorm` on the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., columns] to the same."""
        rows = x.reshape(-1, x.shape[-1])
        return cpu_row_ops.rms_norm(rows, self.weight.weight, self.weight.eps).view(x.shape)


class CpuMLP(FusedMLP):
    """`FusedMLP` on the CPU."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `FusedMLP.gate`."""
        return cpu_row_ops.gated(gate_up, gelu=self.activation == "gelu_tanh")


class CpuAttention(FusedAttention):
    """`FusedAttention` on the CPU."""

    def write(self, qkv: torch.Tensor, tables: Tables, step: CpuStepContext) -> torch.Tensor:
        """See `FusedAttention.write`."""
        facts = self.facts
        cos, sin = (table.reshape(len(qkv), -1) for table in tables)
        norms = {}
        if self.norms is not None:
            q_norm, k_norm = self.norms
            norms = dict(q_norm=q_norm.weight, k_norm=k_norm.weight, eps=q_norm.eps)
        rows = step.write_rows(step.pool.group_of(facts.layer))
        return cpu_row_ops.rotate_and_write(
            qkv, facts.num_heads, *step.pool.pages(facts.layer), rows, cos, sin, **norms
        )
