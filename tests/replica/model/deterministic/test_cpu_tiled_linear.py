"""Batch-invariant products: the same bits for every number of rows and every place of a row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.replica.model.deterministic.cpu_activations import ElementwiseSiLU, ElementwiseTanhGELU
from quire.replica.model.deterministic.cpu_tiled_linear import (
    TiledLinear,
    make_deterministic,
)
from quire.replica.model.deterministic.cpu_tiles import TILE_ROWS, tiled_linear

SHAPES = [(64, 96), (77, 173), (384, 128), (1024, 300)]


def converted(in_features: int, out_features: int, bias: bool = False) -> TiledLinear:
    torch.manual_seed(in_features)
    model = nn.Sequential(nn.Linear(in_features, out_features, bias=bias)).requires_grad_(False)
    make_deterministic(model)
    assert isinstance(model[0], TiledLinear)
    return model[0]


@pytest.mark.parametrize("in_features, out_features", SHAPES)
def test_rows_have_the_same_bits_for_every_row_count(threads, in_features, out_features):
    layer = converted(in_features, out_features, bias=True)
    x = torch.randn(520, in_features)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(0, 520, 40)])
    expected = layer(x)
    assert torch.equal(expected[::40], alone)
    counts = [*range(1, 18), 31, 33, 63, 64, 65, 129, 200, 255, 256, 257, 511]
    for count in counts:
        assert torch.equal(layer(x[:count]), expected[:count]), count
        assert torch.equal(layer(x[520 - count :]), expected[520 - count :]), count


def test_neighbours_cannot_reach_a_row():
    layer = converted(77, 173)
    x = torch.full((40, 77), float("nan"))
    x[13] = torch.randn(77)
    assert torch.equal(layer(x)[13], layer(x[13:14])[0])


def test_equals_the_plain_product():
    layer = converted(128, 96, bias=True)
    x = torch.randn(2, 33, 128)
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), plain, atol=1e-5, rtol=1e-5)


def test_no_rows_give_no_rows():
    assert converted(64, 96)(torch.empty(1, 0, 64)).shape == (1, 0, 96)


def test_unaligned_input_gives_the_same_bits():
    layer = converted(77, 50)
    x = torch.randn(21, 77)
    assert torch.equal(layer(x[1:]), layer(x[1:].clone()))


def test_a_larger_tile_is_used_only_where_it_agrees(monkeypatch):
    """A library whose 64-row kernel adds in another order must be kept to 16-row tiles."""
    honest = torch.mm

    def other_order(weight, x):
        if x.shape[1] != 64:
            return honest(weight, x)
        cut = 37  # not at half of K: MKL itself adds the two halves last
        return honest(weight[:, cut:], x[cut:]) + honest(weight[:, :cut], x[:cut])

    monkeypatch.setattr(torch, "mm", other_order)
    layer = converted(200, 300)
    assert 64 not in layer.tile_rows and TILE_ROWS[0] in layer.tile_rows
    x = torch.randn(100, 200)
    assert torch.equal(layer(x)[:1], layer(x[:1]))


def test_a_library_whose_rows_depend_on_their_place_is_refused(monkeypatch):
    honest = torch.mm

    def by_place(weight, x):
        out = honest(weight, x)
        out[:, -1] *= 1.0001
        return out

    monkeypatch.setattr(torch, "mm", by_place)
    with pytest.raises(ValueError, match="deterministic: true cannot hold here"):
        make_deterministic(nn.Sequential(nn.Linear(8, 8)).requires_grad_(False))


def test_tied_weights_stay_one_tensor():
    model = nn.ModuleDict(dict(embed=nn.Embedding(50, 16), head=nn.Linear(16, 50, bias=False)))
    model["head"].weight = model["embed"].weight
    model.requires_grad_(False)
    make_deterministic(model)
    assert model["head"].weight is model["embed"].weight
    out = tiled_linear(torch.randn(3, 16), model["embed"].weight, TILE_ROWS)
    assert out.shape == (3, 50)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="needs float32 on the CPU"):
        make_deterministic(nn.Linear(8, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "module, reference",
    [
        (ElementwiseSiLU(), nn.functional.silu),
        (ElementwiseTanhGELU(), lambda x: nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_activations_do_not_depend_on_an_elements_place(threads, module, reference):
    x = torch.randn(40_003) * 4
    expected = module(x)
    torch.testing.assert_close(expected, reference(x), atol=1e-6, rtol=1e-5)
    for start, end in [(0, 1), (1, 78), (3, 34), (5, 40_003), (0, 9_999)]:
        assert torch.equal(module(x[start:end]), expected[start:end])
    assert module(torch.tensor([-200.0, 200.0])).tolist() == [-0.0, 200.0]


@pytest.mark.parametrize("operation", ["rms", "cos", "rotate"])
def test_the_other_operations_of_a_block_are_invariant(threads, operation):
    x = torch.randn(1, 300, 77)

    def apply(x):
        if operation == "rms":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        if operation == "cos":
            return torch.cos(x * 100)
        return x * torch.cos(x) + x.flip(-1) * torch.sin(x)

    expected = apply(x)
    for start, end in [(0, 1), (7, 8), (3, 20), (1, 300), (299, 300)]:
        assert torch.equal(apply(x[:, start:end]), expected[:, start:end])
