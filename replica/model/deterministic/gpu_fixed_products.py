"""`deterministic: true` on a GPU: matrix products in which the number of rows does not change a row's bits.

Matrix products use `kernels/rows/matmul_fixed.py`, mixtures of experts use `kernels/rows/experts_fixed.py`. They
replace the original modules after the fuse pass, so merged matrix products stay merged. In all other parts of a step,
the order of additions for a row does not depend on other rows:

| part | why |
|---|---|
| norms, head norms, RoPE, KV write, gated activations | this project's kernels: one program computes a whole row |
| attention | `PagedAttention(uniform=True)`: decoded and prefilled tokens use the same kernel and tiles of keys |
| FP8 cache | fixed scales; each number is converted separately |
| a router's softmax | torch uses one warp for a row of at most 1024 scores, for any number of rows |
| a router's choice | compares numbers within a row |
| activations, residuals, RoPE's angles in torch | elementwise, or a matrix product with inner dimension 1 |
| sampling | each row separately |

torch's norms are not batch-invariant: their reduction uses more threads per row when there are fewer rows. An unknown
module with parameters is therefore an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from quire.kernels.rows.experts_fixed import combine_experts, experts_product, plan_experts
from quire.kernels.rows.matmul_fixed import FixedProduct
from quire.replica.model.deterministic.stacked_experts import ExpertRouter, StackedExperts
from quire.replica.model.fusion.fused_parts import Product
from quire.replica.model.layers.fp8 import CodedLinear
from quire.replica.model.layers.latent_attention import HeadProducts, fix_rows
from quire.replica.model.layers.linear_parts import keep_parts
from quire.replica.model.layers.w4 import W4Linear


class FixedLinear(nn.Module):
    """A batch-invariant linear layer, possibly merged. Shares the parameters of the module that it replaces."""

    def __init__(self, source: nn.Linear | Product):
        super().__init__()
        self.weight = source.weight
        bias = source.bias
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.in_features = source.in_features
        self.out_features = source.out_features
        self.product = FixedProduct(self.weight.detach(), self.bias)
        keep_parts(self, [source])

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in_features], residual and result [..., out_features]."""
        out = self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        return out if residual is None else out + residual


def fixed_router(router: nn.Module, *, softmax_first: bool) -> ExpertRouter:
    """Return a batch-invariant router; `ExpertRouter` describes the arguments."""
    bias = getattr(router, "bias", None)
    product = FixedProduct(router.weight.detach(), None if bias is None else bias.detach())
    return ExpertRouter(router, product, softmax_first=softmax_first)


class FixedExperts(StackedExperts):
    """Batch-invariant experts."""

    def __init__(self, experts: nn.Module):
        super().__init__(experts)
        self._source = (experts,)  # a tuple does not register a child

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden], ids and weights [tokens, top_k] to [tokens, hidden]."""
        plan = plan_experts(ids, self.num_experts, x.dtype)
        options = dict(transposed=self.transposed)
        gate_up = experts_product(
            x, self.gate_up_proj, plan, bias=self.gate_up_proj_bias, **options
        )
        inner = self.gate(gate_up)
        pairs = experts_product(inner, self.down_proj, plan, bias=self.down_proj_bias, **options)
        return combine_experts(pairs, weights)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[pairs, 2 * inner], gates then ups, to [pairs, inner]; a pair is a token and one of its experts."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self._source[0].act_fn(gate) * up


class FixedGptOssExperts(FixedExperts):
    """gpt-oss: gates and ups interleaved and clamped."""

    transposed = True

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[pairs, 2 * inner], gate and up alternating, to [pairs, inner]."""
        return self._source[0]._apply_gate(gate_up)


# Keys are names of transformers' classes, so that the classes need not be imported.
_EXPERT_MODULES: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "Qwen3MoeTopKRouter": partial(fixed_router, softmax_first=True),
    "GptOssTopKRouter": partial(fixed_router, softmax_first=False),
    "Qwen3MoeExperts": FixedExperts,
    "GptOssExperts": FixedGptOssExperts,
}
_KNOWN = (FixedLinear, ExpertRouter, FixedExperts, HeadProducts, nn.Embedding)


def fix_products(model: nn.Module) -> None:
    """Replace a model's matrix products in place, after the fuse pass. A second call changes nothing.

    Raises
    ------
    ValueError
        The model has a module that is not batch-invariant; the message names it.
    """
    replacements: list[tuple[nn.Module, str, nn.Module]] = []
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            if isinstance(child, W4Linear) or (
                isinstance(child, Product) and isinstance(child.coded, W4Linear)
            ):
                where = f"{path}.{name}".lstrip(".")
                raise ValueError(
                    f"deterministic: true cannot hold: {where} is in 4 bits, whose products follow the number of rows; "
                    "set deterministic: false"
                )
            is_coded = isinstance(child, Product) and child.coded is not None
            if is_coded or isinstance(child, CodedLinear):
                where = f"{path}.{name}".lstrip(".")
                raise ValueError(
                    f"deterministic: true cannot hold: {where} is in 8 bits, whose products are the vendor's; set "
                    "deterministic: false or serve a checkpoint without 8-bit weights with weights: auto"
                )
            if type(child) in (nn.Linear, Product):
                replacements.append((parent, name, FixedLinear(child)))
            elif type(child).__name__ in _EXPERT_MODULES:
                replacements.append((parent, name, _EXPERT_MODULES[type(child).__name__](child)))
    for parent, name, module in replacements:
        setattr(parent, name, module)
    fix_rows(model)
    for name, module in model.named_modules():
        # Modules with a `layer_idx` are attentions. Their own parameters are sinks, which the attention kernels read.
        if isinstance(module, _KNOWN) or hasattr(module, "layer_idx"):
            continue
        if next(module.parameters(recurse=False), None) is not None:
            raise ValueError(
                f"deterministic: true cannot hold: {name} ({type(module).__name__}) runs as torch's own kernels, whose "
                "order of additions may follow the number of rows; set fuse: auto or deterministic: false"
            )


def warm_products(model: nn.Module, max_rows: int) -> None:
    """Run each kernel variant for up to `max_rows` tokens, so that none is compiled while serving."""
    done = set()
    for product in _products(model):
        for rows in product.distinct_rows(max_rows):
            key = (product.weight.shape, product.bias is None, product.form(rows))
            if key not in done:
                done.add(key)
                product(product.weight.new_zeros(rows, product.depth))


def _products(model: nn.Module) -> Iterator[FixedProduct]:
    for module in model.modules():
        product = getattr(module, "product", None)
        if isinstance(product, FixedProduct):
            yield product
