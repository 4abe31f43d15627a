"""Latent attention: products of queries and outputs instead of products of all keys and values."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.kv_cache.groups import LayerKind
from quire.replica.model.layers.fp8 import Fp8Linear
from quire.replica.model.layers.latent_attention import HeadProducts, absorb_latents, fix_rows

HEADS, NOPE, ROPE, VALUE, RANK = 3, 6, 4, 5, 8


def products() -> HeadProducts:
    random = torch.Generator().manual_seed(4)
    return HeadProducts(torch.randn(HEADS * (NOPE + VALUE), RANK, generator=random), NOPE, VALUE)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_scores_and_outputs_are_those_of_expanded_keys_and_values():
    made, q, latent, rotated = (
        products(),
        normal(7, HEADS, NOPE + ROPE),
        normal(9, RANK),
        normal(9, ROPE),
    )
    expanded = torch.einsum("hnr,tr->thn", made.weight, latent)
    k_nope, v = expanded.split((NOPE, VALUE), dim=-1)
    keys = torch.cat((k_nope, rotated[:, None].expand(-1, HEADS, -1)), dim=-1)
    weights = torch.softmax(torch.einsum("qhd,khd->hqk", q, keys), dim=-1)
    own = torch.softmax(
        torch.einsum("qhd,kd->hqk", made.absorb_query(q), torch.cat((latent, rotated), -1)), dim=-1
    )
    torch.testing.assert_close(own, weights)
    out = made.expand_output(torch.einsum("hqk,kr->qhr", own, latent))
    torch.testing.assert_close(out, torch.einsum("hqk,khv->qhv", weights, v))


def test_with_fixed_rows_a_token_has_the_same_bits_in_each_batch():
    made, q = products(), normal(37, HEADS, NOPE + ROPE)
    plain = made.absorb_query(q)
    fix_rows(nn.ModuleList([made]))
    whole = made.absorb_query(q)
    torch.testing.assert_close(whole, plain)
    for start, count in ((0, 1), (5, 3), (30, 7), (2, 17)):
        part = made.absorb_query(q[start : start + count])
        assert torch.equal(part, whole[start : start + count])


def attention(layer: int, linear: nn.Module) -> nn.Module:
    module = nn.Module()
    module.layer_idx, module.qk_nope_head_dim, module.v_head_dim = layer, NOPE, VALUE
    module.kv_b_proj, module.expand_kv = linear, lambda latent, rotated: (latent, rotated)
    return module


def spec() -> ModelSpec:
    kind = LayerKind(head_dim=RANK + ROPE, value_dim=RANK, values_in_keys=True)
    names = {field.name: None for field in dataclasses.fields(ModelSpec)}
    names |= dict(path=Path("model"), architecture="Latent", num_heads=HEADS, kv_kinds={0: kind})
    return types.SimpleNamespace(**names)


def test_products_take_the_place_of_the_layer_also_in_fp8():
    linear = nn.Linear(32, HEADS * (NOPE + VALUE), bias=False)
    wide = spec()
    wide.kv_kinds = {0: LayerKind(head_dim=32 + ROPE, value_dim=32, values_in_keys=True)}
    for stored, error in ((linear, 0.0), (Fp8Linear.of(linear), 0.07)):
        module = attention(0, stored)
        absorb_latents(module, wide, torch.float32)
        assert module.kv_b_proj is None
        weight = module.head_products.weight.flatten(0, 1)
        torch.testing.assert_close(weight, linear.weight.detach(), rtol=error, atol=error / 50)
        latent, rotated = normal(1, 1, 4, 32), normal(1, 1, 4, ROPE)
        key, value = module.expand_kv(latent, rotated)
        assert torch.equal(key, torch.cat((latent, rotated), -1)) and value is latent


@pytest.mark.parametrize(
    "module, message",
    [
        (attention(0, nn.Linear(RANK, 7)), r"layer 0: kv_b_proj is \[7, 8\]"),
        (attention(1, nn.Linear(RANK, 7)), "layer 0 of Latent has no kv_b_proj and expand_kv"),
    ],
)
def test_a_layer_without_the_parts_is_refused(module, message):
    with pytest.raises(CheckpointError, match=message):
        absorb_latents(module, spec(), torch.float32)
