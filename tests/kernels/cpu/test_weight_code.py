"""Coded weights: all 2^16 bit patterns are restored, and products have the same bits as with uncoded weights."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from quire.kernels.cpu import cpu_linear, native_library, weight_code
from quire.kernels.cpu.cpu_attention import has_native
from quire.kernels.cpu.cpu_linear import PackedWeight, packed_linear

pytestmark = pytest.mark.skipif(not has_native(), reason="installed without a C compiler")

ROWS = (1, 2, 3, 5, 6, 7, 8, 12, 13, 16, 23, 24, 25, 33, 128, 131)


@pytest.fixture(autouse=True)
def without_strips(monkeypatch):
    """Weights for AMX are not coded; on such processors these tests use the other instruction sets."""
    monkeypatch.setattr(cpu_linear, "_in_strips", lambda dtype: False)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def with_outliers(columns, depth, share, seed=0):
    """Normal weights, of which a share has random bit patterns of finite numbers."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (columns, depth), generator=generator).to(torch.int16)
    anything = torch.nan_to_num(bits.view(torch.bfloat16), 0.0, 1e30, -1e30)
    chosen = torch.rand(columns, depth, generator=generator) < share
    return torch.where(chosen, anything, normal(columns, depth, seed=seed))


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_normal_weights_take_less_than_77_percent():
    w = normal(1024, 1024) * 0.02
    coded, plain = PackedWeight.pack([w]), PackedWeight.pack([w], coded=False)
    assert coded.code is not None and plain.code is None
    assert coded.num_bytes < 0.77 * plain.num_bytes
    assert same_bits(coded.unpack(), w)
    # The 16 most frequent of 256 high bytes cover all but 2^-13 of the weights.
    panels, steps = plain.data.shape[:2]
    assert panels < len(coded.code.high) < panels * (1 + 0.02 * steps)


def test_weights_of_all_bit_patterns_stay_as_they_are():
    w = torch.arange(2**16).to(torch.int16).view(torch.bfloat16).view(256, 256)
    packed = PackedWeight.pack([w])
    assert packed.code is None
    assert same_bits(packed.unpack(), w)


def scattered(values, panels, seed=0):
    """Zeros, and in each step of each panel one of the values somewhere: [64 panels, 2 steps]."""
    generator = torch.Generator().manual_seed(seed)
    steps = len(values) // panels
    w = torch.zeros(64 * panels, 2 * steps, dtype=torch.bfloat16)
    for panel, of_panel in enumerate(values.split(steps)):
        column = torch.randint(0, 64, (steps,), generator=generator) + 64 * panel
        depth = 2 * torch.arange(steps) + torch.randint(0, 2, (steps,), generator=generator)
        w[column, depth] = of_panel
    return w


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_every_bit_pattern_comes_back_by_its_number_or_from_beside_the_panels(is_shuffled):
    patterns = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    if is_shuffled:
        patterns = patterns[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    w = scattered(patterns, 32)
    if is_shuffled:  # otherwise stored uncoded, because nearly all steps are apart
        w = torch.cat([w, torch.zeros(64 * 300, w.shape[1], dtype=torch.bfloat16)])
    packed = PackedWeight.pack([w])
    assert packed.code is not None
    apart = len(packed.code.high) - len(w) // 64
    # With weights in order a panel has 8 high bytes; all that were sampled have a number.
    assert apart > 50_000 if is_shuffled else apart < 16 * 32
    assert same_bits(packed.unpack(), w)


def test_what_is_not_worth_it_is_decoded_again_in_pieces():
    w = scattered(
        torch.arange(2**16).to(torch.int16).view(torch.bfloat16)[torch.randperm(2**16)], 32
    )
    w = torch.cat([w[:1500], w[:77]])
    packed = PackedWeight.pack(iter(w.split([100, 1000, 477])), 1577)
    assert packed.code is None and len(packed.data) == 25
    assert same_bits(packed.unpack(), w)


@pytest.mark.parametrize("isa", native_library.ISAS)
@pytest.mark.parametrize("share", [0, 0.001, 0.002])
@pytest.mark.parametrize("columns, depth", [(173, 514), (64, 12), (1, 34), (70, 3072), (300, 256)])
def test_products_have_the_bits_of_those_that_are_not_coded(isa, share, columns, depth):
    if isa not in native_library.load().isas:
        pytest.skip("not this processor's")
    w = with_outliers(columns, depth, share)
    coded, plain = PackedWeight.pack([w]), PackedWeight.pack([w], coded=False)
    assert coded.code is not None or depth < 100  # too few steps for the size of the tables
    for rows in ROWS:
        x = normal(rows, depth, seed=1)
        bias = coded.pad_bias(normal(columns, seed=2))
        residual = normal(rows, columns, seed=3)
        out = packed_linear(x, coded, bias=bias, residual=residual, isa=isa)
        expected = packed_linear(x, plain, bias=bias, residual=residual, isa=isa)
        assert same_bits(out, expected), rows


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    depth=st.integers(1, 300).map(lambda n: 2 * n),
    values=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=60),
    frequent=st.integers(0, 20),
    rows=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)
def test_whatever_the_weights_are_they_come_back_and_multiply_alike(
    sizes, depth, values, frequent, rows, seed
):
    generator = torch.Generator().manual_seed(seed)
    # Rare values are few enough for the weight to be coded, and more than there are numbers.
    weight = torch.where(torch.arange(len(values)) < frequent, 1.0, 1e-3)
    drawn = torch.multinomial(weight, sum(sizes) * depth, replacement=True, generator=generator)
    w = torch.tensor(values, dtype=torch.int16)[drawn].view(torch.bfloat16)
    w = w.view(sum(sizes), depth)
    coded = PackedWeight.pack(iter(w.split(sizes)), sum(sizes))
    plain = PackedWeight.pack([w], coded=False)
    event(
        f"coded: {coded.code is not None}, apart: {coded.code is not None and len(coded.code.high) > len(coded.data)}"
    )
    assert same_bits(coded.unpack(), w)
    ids = torch.randint(0, sum(sizes), (7,), generator=generator)
    assert same_bits(coded.rows(ids), w[ids])
    x = torch.randn(rows, depth, generator=generator).bfloat16()
    out, expected = packed_linear(x, coded), packed_linear(x, plain)
    assert same_bits(out, expected)


@pytest.mark.parametrize("columns", [1000, 70])
def test_threads_code_and_multiply_alike(columns):
    w = with_outliers(columns, 600, 0.001)
    x = normal(3, 600, seed=1)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            packed = PackedWeight.pack([w])
            found.append(
                (packed.data, packed.code.tables, packed.unpack(), packed_linear(x, packed))
            )
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_other_weights_are_not_coded():
    assert PackedWeight.pack([torch.randn(70, 64)]).code is None
    assert PackedWeight.pack([normal(70, 64)], int8=True).code is None


def test_a_tenth_must_be_saved():
    """A step that is apart takes 320 bytes instead of 192: with more than about 30% of them a weight is not coded."""
    for share, is_coded in ((0.25, True), (0.35, False)):
        w = torch.tensor([4.0**i for i in range(16)]).bfloat16().repeat(64, 125)
        steps = math.floor(1000 * share)
        chosen = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:steps]
        w[0, 2 * chosen] = torch.tensor([-(4.0 ** (i % 60)) for i in range(steps)]).bfloat16()
        packed = PackedWeight.pack([w])
        assert (packed.code is not None) == is_coded, share
        if is_coded:
            assert len(packed.code.high) == steps + 1


def test_the_structures_are_those_of_the_library():
    functions = native_library.load().functions
    assert ctypes.sizeof(weight_code.CodeCall) == functions.quire_code_bytes()
