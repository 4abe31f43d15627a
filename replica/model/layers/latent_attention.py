"""Multi-head latent attention: the cache holds a latent and a rotated key part of each token, not keys of each head.

A class of this kind makes the keys and values of all heads from a latent c of `rank` elements, with `kv_b_proj`
(W_K and W_V of each head), and gives each key the same rotated part r. Both products can move to the query and to the
output, because they are linear::

    q . k = q_nope . (W_K c) + q_rope . r = [W_K^T q_nope | q_rope] . [c | r]
    sum_j p_j (W_V c_j)                   = W_V (sum_j p_j c_j)

So attention runs with one KV head: its key is [c | r], and its value is c, the beginning of the key.

```
 hidden ─▶ class: norms, RoPE, scaling ─▶ query [H, nope + rope] ──▶ W_K^T ─▶ paged attention ─▶ W_V ─▶ class: o_proj
                                      └─▶ expand_kv(c, r) ─▶ [c | r], c ──────────▲
```

transformers' classes cache c and r too, and call `expand_kv(c, r)` for keys and values. The loader replaces this method
and takes `kv_b_proj` out of the module. All else stays the class's own; the proof compares the result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.model.layers.fp8 import CodedLinear
from quire.replica.model.layers.w4 import W4Linear

# Number of rows of every product under `deterministic`, so that a row has the same bits in each batch.
_TILE_ROWS = 16


class HeadProducts(nn.Module):
    """The products with W_K and W_V of each head. Owns the weight of the `kv_b_proj` that it replaces.

    Parameters
    ----------
    weight
        [heads * (nope + value), rank].
    nope_dim, value_dim
        Rows of W_K and of W_V in each head.
    """

    def __init__(self, weight: torch.Tensor, nope_dim: int, value_dim: int):
        super().__init__()
        by_head = weight.unflatten(0, (-1, nope_dim + value_dim))
        self.weight = nn.Parameter(by_head, requires_grad=False)
        self._nope_dim = nope_dim
        self.has_fixed_rows = False  # set under `deterministic`

    def absorb_query(self, q: torch.Tensor) -> torch.Tensor:
        """Move W_K to the query: [T, heads, nope + rope] to [T, heads, rank + rope]."""
        nope, rope = q.split((self._nope_dim, q.shape[-1] - self._nope_dim), dim=-1)
        latent = self._product(nope, self.weight[:, : self._nope_dim])
        return torch.cat((latent, rope), dim=-1)

    def expand_output(self, out: torch.Tensor) -> torch.Tensor:
        """Multiply by W_V: [T, heads, rank] to [T, heads, value]."""
        return self._product(out, self.weight[:, self._nope_dim :].transpose(1, 2))

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, heads, K] times weight [heads, K, N] by head: [T, heads, N] contiguous."""
        by_head = x.transpose(0, 1)
        if not self.has_fixed_rows:
            return torch.bmm(by_head, weight).transpose(0, 1).contiguous()
        num_tokens = len(x)
        padding = -num_tokens % _TILE_ROWS
        padded = nn.functional.pad(by_head, (0, 0, 0, padding))
        tiles = [torch.bmm(tile.contiguous(), weight) for tile in padded.split(_TILE_ROWS, dim=1)]
        return torch.cat(tiles, dim=1)[:, :num_tokens].transpose(0, 1).contiguous()


def absorb_latents(model: nn.Module, spec: ModelSpec, dtype: torch.dtype) -> None:
    """Make the model's attentions of latent layers pass latents on, in place.

    Parameters
    ----------
    dtype
        Dtype of the products' weights, also where the checkpoint has them in FP8.

    Raises
    ------
    CheckpointError
        A layer that `spec` says has latents does not have the parts from which they are made.
    """
    latent = {layer: kind for layer, kind in spec.kv_kinds.items() if kind.values_in_keys}
    for layer, module in _attentions(model):
        if layer not in latent:
            continue
        kind = latent[layer]
        weight = _dense_weight(module.kv_b_proj).to(dtype)
        nope, value = module.qk_nope_head_dim, module.v_head_dim
        num_heads = kind.num_heads or spec.num_heads
        if weight.shape != (num_heads * (nope + value), kind.value_size):
            raise CheckpointError(
                f"{spec.path}: layer {layer}: kv_b_proj is {list(weight.shape)}, expected "
                f"[{num_heads} heads * ({nope} + {value}), {kind.value_size}]"
            )
        module.head_products = HeadProducts(weight, nope, value)
        module.kv_b_proj = None
        module.expand_kv = keep_latent
        del latent[layer]
    if latent:
        raise CheckpointError(
            f"{spec.path}: layer {min(latent)} of {spec.architecture} has no kv_b_proj and expand_kv, from which "
            "latent attention is made"
        )


def keep_latent(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key [1, 1, T, rank + rope] and value [1, 1, T, rank]; the arguments are [1, 1, T, rank or rope]."""
    return torch.cat((latent, rotated), dim=-1), latent


def fix_rows(model: nn.Module) -> None:
    """Give each row of latent attention's products the same bits in every batch."""
    for module in model.modules():
        if isinstance(module, HeadProducts):
            module.has_fixed_rows = True


def _attentions(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if (
            isinstance(layer, int)
            and callable(getattr(module, "expand_kv", None))
            and isinstance(getattr(module, "kv_b_proj", None), nn.Module)
        ):
            yield layer, module


def _dense_weight(linear: nn.Module) -> torch.Tensor:
    """Return the weight of a linear layer, [out, in]; codes of 8 or 4 bits are decoded."""
    if isinstance(linear, CodedLinear):
        return linear.weight.data.float() * linear.weight_scale
    if isinstance(linear, W4Linear):
        device = linear.words.device
        return linear(torch.eye(linear.in_features, dtype=linear.dtype, device=device)).t()
    return linear.weight.data
