"""Packed products: correct, with the same bits for any rows and threads, and bad arguments never reach C."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.cpu import cpu_linear, native_library, weight_panels
from quire.kernels.cpu.cpu_attention import has_native
from quire.kernels.cpu.cpu_linear import PackedWeight, packed_linear

pytestmark = pytest.mark.skipif(not has_native(), reason="installed without a C compiler")

DTYPES = [torch.float32, torch.bfloat16]
# Relative to the largest |output|: sums of up to 3072 products in float32, and bfloat16's rounding of the result.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
SHAPES = [(173, 64), (64, 2), (1, 34), (300, 1026), (128, 3072)]  # columns, depth


def isas() -> tuple[str, ...]:
    return native_library.load().isas


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def deviation(out, expected):
    return ((out.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("isa", native_library.ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns, depth", SHAPES)
def test_equals_the_product_in_double_precision(isa, dtype, columns, depth):
    if isa not in isas():
        pytest.skip("not this processor's")
    w, x = normal(columns, depth, dtype=dtype), normal(45, depth, dtype=dtype, seed=1)
    bias, residual = normal(columns, dtype=dtype, seed=2), normal(45, columns, dtype=dtype, seed=3)
    weight = PackedWeight.pack([w])
    expected = x.double() @ w.double().t()
    assert deviation(packed_linear(x, weight, isa=isa), expected) < TOLERANCES[dtype]
    out = packed_linear(x, weight, bias=weight.pad_bias(bias), residual=residual, isa=isa)
    expected += bias.double() + residual.double()
    assert deviation(out, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("isa", native_library.ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_same_bits_alone_and_among_others(isa, dtype):
    if isa not in isas():
        pytest.skip("not this processor's")
    weight = PackedWeight.pack([normal(173, 514, dtype=dtype)])
    x = normal(300, 514, dtype=dtype, seed=1)
    expected = packed_linear(x, weight, isa=isa)
    alone = torch.cat([packed_linear(x[i : i + 1], weight, isa=isa) for i in range(0, 300, 9)])
    assert torch.equal(alone, expected[::9])
    for count in (*range(2, 26), 31, 32, 33, 127, 128, 129, 131, 255, 257):
        start = 300 - count
        assert torch.equal(packed_linear(x[start:], weight, isa=isa), expected[start:]), count


@pytest.mark.parametrize("isa", native_library.ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [2, 200, 258, 2560, 8192, 8450, 16386])
def test_few_rows_have_the_same_bits_at_any_depth(isa, dtype, depth):
    """One and two rows may read parts of the depth in parallel, up to 8192 elements of bfloat16 at a time."""
    if isa not in isas():
        pytest.skip("not this processor's")
    weight = PackedWeight.pack([normal(70, depth, dtype=dtype)])
    x, residual = normal(7, depth, dtype=dtype, seed=1), normal(7, 70, dtype=dtype, seed=2)
    expected = packed_linear(x, weight, residual=residual, isa=isa)
    for rows in (1, 2, 3):
        found = packed_linear(x[:rows], weight, residual=residual[:rows], isa=isa)
        assert torch.equal(found, expected[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype):
    weight = PackedWeight.pack([normal(700, 300, dtype=dtype)])
    x = normal(140, 300, dtype=dtype, seed=1)
    before = torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outputs.append(packed_linear(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_float32_has_the_same_bits_on_avx2_and_avx512():
    if "avx512" not in isas():
        pytest.skip("needs a processor with both")
    weight = PackedWeight.pack([normal(173, 1030)])
    x = normal(37, 1030, seed=1)
    assert torch.equal(packed_linear(x, weight, isa="avx2"), packed_linear(x, weight, isa="avx512"))


def test_neighbours_cannot_reach_a_row_and_padding_reaches_nothing():
    weight = PackedWeight.pack([normal(70, 300)])
    x = torch.full((40, 300), float("nan"))
    x[13] = normal(300, seed=1)
    out = torch.full((40, 80), 7.0)
    packed_linear(x, weight, out=out[:, :70])
    assert torch.equal(out[13, :70], packed_linear(x[13:14], weight)[0])
    assert (out[:, 70:] == 7.0).all()


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    depth=st.integers(1, 40).map(lambda n: 2 * n),
    dtype=st.sampled_from(DTYPES),
)
def test_merged_parts_multiply_as_they_do_apart_and_come_back_unchanged(sizes, depth, dtype):
    parts = [normal(n, depth, dtype=dtype, seed=i) for i, n in enumerate(sizes)]
    merged = PackedWeight.pack(iter(parts), sum(sizes))
    x = normal(5, depth, dtype=dtype, seed=9)
    apart = [packed_linear(x, PackedWeight.pack([part])) for part in parts]
    assert torch.equal(packed_linear(x, merged), torch.cat(apart, dim=1))
    assert torch.equal(merged.unpack(), torch.cat(parts))


@pytest.mark.parametrize("isa", native_library.ISAS)
@pytest.mark.parametrize(
    "columns, depth, is_given",
    [(173, 64, False), (64, 4, False), (300, 1028, False), (128, 3072, False), (130, 576, True)],
)
def test_int8_multiplies_with_exactly_the_weights_it_stands_for(isa, columns, depth, is_given):
    """Those that `unpack` returns: rounded, a group of inputs at a time, or codes that a checkpoint stores."""
    if isa not in isas():
        pytest.skip("not this processor's")
    w, x = normal(columns, depth), normal(45, depth, dtype=torch.bfloat16, seed=1)
    w = (w * torch.logspace(-3, 3, columns)[:, None]).bfloat16().float()
    group = depth if is_given else 64
    groups = torch.nn.functional.pad(w, (0, -depth % group)).unflatten(1, (-1, group))
    scales = groups.abs().amax(dim=2) / 127.0
    codes = (groups / scales[..., None]).round().flatten(1)[:, :depth]
    values = codes * scales.repeat_interleave(group, 1)[:, :depth]
    if is_given:
        weight = PackedWeight.from_codes(codes.to(torch.int8), scales[:, 0])
    else:
        weight = PackedWeight.pack([w.bfloat16()], int8=True)
    meant = weight.unpack()
    # A value between two bfloat16 numbers has the larger one here, and the even one in torch: one in 65,536.
    assert ((meant != values.bfloat16()).sum() <= 1e-4 * w.numel()).item()
    torch.testing.assert_close(meant.float(), values, rtol=2**-8, atol=0.0)
    bias, residual = normal(columns, seed=2), normal(45, columns, dtype=torch.bfloat16, seed=3)
    more = dict(bias=weight.pad_bias(bias), residual=residual, isa=isa)
    out = packed_linear(x, weight, **more)
    assert torch.equal(out, packed_linear(x, PackedWeight.pack([meant]), **more))
    assert torch.equal(
        packed_linear(x[7:8], weight, isa=isa), packed_linear(x, weight, isa=isa)[7:8]
    )


def test_int8_of_merged_parts_and_of_zeros():
    parts = [normal(n, 32, dtype=torch.bfloat16, seed=n) for n in (70, 5)]
    parts[1][2] = 0.0
    merged = PackedWeight.pack(iter(parts), 75, int8=True)
    x = normal(5, 32, dtype=torch.bfloat16, seed=9)
    apart = [packed_linear(x, PackedWeight.pack([part], int8=True)) for part in parts]
    assert torch.equal(packed_linear(x, merged), torch.cat(apart, dim=1))
    assert (packed_linear(x, merged)[:, 72] == 0.0).all()
    assert merged.num_bytes < 0.8 * PackedWeight.pack(iter(parts), 75).num_bytes


def test_int8_costs_less_than_a_hundredth_of_a_product():
    """The largest of 64 Gaussian weights is 2.4; rounding to 1/127 of it is 0.55 % of the product's spread."""
    w, x = normal(512, 1024), normal(64, 1024, dtype=torch.bfloat16, seed=1)
    expected = x.double() @ w.double().t()
    out = packed_linear(x, PackedWeight.pack([w.bfloat16()], int8=True)).double()
    error = ((out - expected).pow(2).mean() / expected.pow(2).mean()).sqrt()
    assert 0.004 < error < 0.007


def test_rows_are_looked_up_as_an_embedding_does():
    w = normal(173, 66, dtype=torch.bfloat16)
    weight = PackedWeight.pack([w])
    ids = torch.tensor([[0, 172, 64], [63, 65, 1]])
    assert torch.equal(weight.rows(ids), torch.nn.functional.embedding(ids, w))
    with pytest.raises(IndexError, match="between 0 and 172, got 3 to 173"):
        weight.rows(torch.tensor([3, 173]))


def test_strided_weights_inputs_outputs_and_a_residual_in_place():
    w = normal(96, 200)[:, :128]
    weight = PackedWeight.pack([w])
    x = normal(9, 256, seed=1)[:, 64:192]
    expected = packed_linear(x.contiguous(), PackedWeight.pack([w.contiguous()]))
    assert torch.equal(packed_linear(x, weight), expected)
    stream = normal(9, 100, seed=2)
    before = stream.clone()
    packed_linear(x, weight, residual=stream[:, :96], out=stream[:, :96])
    assert torch.equal(stream[:, :96], expected + before[:, :96])


def test_no_rows_give_no_rows():
    weight = PackedWeight.pack([normal(10, 4)])
    assert packed_linear(torch.empty(0, 4), weight).shape == (0, 10)


def test_arguments_that_do_not_fit_are_refused_by_name():
    weight = PackedWeight.pack([normal(10, 4)])
    with pytest.raises(ValueError, match=r"^x: must be \[3, 4\]"):
        packed_linear(torch.empty(3, 5), weight)
    with pytest.raises(ValueError, match=r"^x: .*float32"):
        packed_linear(torch.empty(3, 4, dtype=torch.bfloat16), weight)
    with pytest.raises(ValueError, match=r"^out: must be \[3, 10\]"):
        packed_linear(torch.empty(3, 4), weight, out=torch.empty(3, 9))
    with pytest.raises(ValueError, match=r"^residual: "):
        packed_linear(torch.empty(3, 4), weight, residual=torch.empty(10, 3).t())
    with pytest.raises(ValueError, match=r"^bias: "):
        packed_linear(torch.empty(3, 4), weight, bias=torch.zeros(10))
    with pytest.raises(ValueError, match=r"^weight: .*even number"):
        PackedWeight.pack([torch.zeros(4, 3, dtype=torch.bfloat16)])
    with pytest.raises(ValueError, match=r"^int8: .*got torch.float32 and 4"):
        PackedWeight.pack([torch.zeros(4, 4)], int8=True)
    with pytest.raises(ValueError, match=r"^int8: .*got torch.bfloat16 and 6"):
        PackedWeight.pack([torch.zeros(4, 6, dtype=torch.bfloat16)], int8=True)
    with pytest.raises(ValueError, match=r"^parts: .*got 9"):
        PackedWeight.pack([torch.zeros(9, 4)], 10)
    with pytest.raises(ValueError, match=r"^parts: .*got more"):
        PackedWeight.pack([torch.zeros(9, 4)] * 2, 10)
    with pytest.raises(ValueError, match=r"^parts: must be \[columns, 4\]"):
        PackedWeight.pack([torch.zeros(5, 4), torch.zeros(5, 6)], 10)


def test_structures_have_the_size_that_c_gives_them():
    functions = native_library.load().functions
    assert ctypes.sizeof(cpu_linear.LinearCall) == functions.quire_linear_bytes()
    assert ctypes.sizeof(weight_panels.PackCall) == functions.quire_pack_bytes()


def four_bits(columns, depth, groups):
    """words, scales and zeros of a random weight, and the weight in float64."""
    generator = torch.Generator().manual_seed(columns)
    numbers = torch.randint(0, 16, (columns, depth), generator=generator)
    scales = (torch.rand(columns, groups, generator=generator) / 100).half()
    zeros = torch.randint(0, 16, (columns, groups), generator=generator)
    words = (numbers.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(2)
    per_input = depth // groups
    weight = (numbers - zeros.repeat_interleave(per_input, 1)).double()
    weight *= scales.double().repeat_interleave(per_input, 1)
    return words.to(torch.int32), scales, zeros.to(torch.uint8), weight


@pytest.mark.parametrize("isa", native_library.ISAS)
@pytest.mark.parametrize(
    "columns, depth, groups", [(130, 128, 4), (200, 256, 4), (64, 384, 3), (100, 1000, 1)]
)
def test_weights_of_four_bits_are_multiplied_without_rounding_them(isa, columns, depth, groups):
    if isa not in isas():
        pytest.skip("not this processor's")
    words, scales, zeros, w = four_bits(columns, depth, groups)
    weight = PackedWeight.of_numbers(words, scales, zeros)
    assert torch.equal(weight.unpack(), w.bfloat16())
    ids = torch.tensor([[columns - 1, 0]])
    assert torch.equal(weight.rows(ids), w.bfloat16()[ids])
    x = normal(131, depth, dtype=torch.bfloat16)
    bias, residual = normal(columns), normal(131, columns, dtype=torch.bfloat16, seed=3)
    padded = weight.pad_bias(bias)
    found = packed_linear(x, weight, bias=padded, residual=residual, isa=isa)
    expected = x.double() @ w.t() + bias.double() + residual.double()
    assert deviation(found, expected) < TOLERANCES[torch.bfloat16]
    for rows in (1, 2, 3, 7, 13, 40):
        some = packed_linear(x[:rows], weight, bias=padded, residual=residual[:rows], isa=isa)
        assert torch.equal(some, found[:rows]), rows


def test_groups_of_other_sizes_are_refused():
    words, scales, zeros, _ = four_bits(64, 96, 2)  # 48 input features share a scale
    with pytest.raises(ValueError, match=r"groups must have .32, 64, 128. or all of 96 input"):
        PackedWeight.of_numbers(words, scales, zeros)
