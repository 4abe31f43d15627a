"""Row operations: correct in every dtype and instruction set, with the same bits for a row alone."""

from __future__ import annotations

import ctypes

import pytest
import torch

from quire.kernels.cpu import cpu_row_ops, native_library
from quire.kernels.cpu.cpu_attention import has_native
from quire.kernels.cpu.cpu_row_ops import gated, pad_weight, rms_norm, rotate_and_write

pytestmark = pytest.mark.skipif(not has_native(), reason="installed without a C compiler")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One rounding: half a unit in the last place of the largest result, and the errors of float32.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-8}
KINDS = ("generic", "avx2", "avx512")


@pytest.fixture(params=KINDS)
def isa(request):
    if request.param not in native_library.load().isas:
        pytest.skip("not this processor's")
    return request.param


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(out, expected):
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCES[out.dtype], error


def normed(x, weight, eps):
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 64, 88, 1024])
def test_rms_norm(isa, dtype, columns):
    x, weight = normal(50, columns + 3, dtype=dtype)[:, :columns], normal(columns, seed=1)
    out = rms_norm(x, pad_weight(weight), 1e-3, isa=isa)
    assert_close(out, normed(x, weight, 1e-3))
    assert torch.equal(out[7:8], rms_norm(x[7:8], pad_weight(weight), 1e-3, isa=isa))


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [3, 88, 3072])
def test_gated(isa, dtype, columns, gelu):
    x = normal(20, 2 * columns, dtype=dtype) * 4
    gate, up = x.double().chunk(2, dim=1)
    act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else gate * gate.sigmoid()
    out = gated(x, gelu=gelu, isa=isa)
    assert_close(out, act * up)
    assert torch.equal(out[9:10], gated(x[9:10], gelu=gelu, isa=isa))


def test_gated_is_finite_where_the_exponential_is_not(isa):
    gate = torch.tensor([[-3e38, -200.0, -88.0, 0.0, 200.0, 3e38]])
    out = gated(torch.cat([gate, torch.ones_like(gate)], dim=1), isa=isa)
    assert torch.equal(out[:, 3:], gate[:, 3:]) and (out[:, :3].abs() < 1e-30).sum() >= 2
    assert torch.isfinite(out).all()


def rotated(x, cos, sin):
    rotary = cos.shape[-1]
    x, rest = x[..., :rotary], x[..., rotary:]
    half = rotary // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return torch.cat([x * cos[:, None] + turned * sin[:, None], rest], dim=-1)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim, rotary", [(24, 24), (128, 128), (64, 20), (8, 2)])
def test_rotate_and_write(isa, dtype, head_dim, rotary, with_norm):
    tokens, heads, kv_heads = 11, 4, 2
    width = (heads + 2 * kv_heads) * head_dim
    qkv = normal(tokens, width + 8, dtype=dtype)[:, :width]
    cos, sin = (normal(tokens, rotary, dtype=dtype, seed=i) for i in (1, 2))
    q_norm, k_norm = (pad_weight(normal(head_dim, seed=i)) for i in (3, 4))
    k_pages, v_pages = (torch.full((60, head_dim), 7.0, dtype=dtype) for _ in range(2))
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(5))[: tokens * kv_heads]
    norms = dict(q_norm=q_norm, k_norm=k_norm, eps=1e-3) if with_norm else {}
    before = qkv.clone()
    out = rotate_and_write(qkv, heads, k_pages, v_pages, rows, cos, sin, isa=isa, **norms)

    assert torch.equal(qkv, before)
    q, k, v = qkv.reshape(tokens, -1, head_dim).double().split([heads, kv_heads, kv_heads], dim=1)
    if with_norm:
        q, k = normed(q, q_norm[:head_dim], 1e-3), normed(k, k_norm[:head_dim], 1e-3)
    cos, sin = cos.double(), sin.double()
    assert_close(out, rotated(q, cos, sin))
    assert_close(k_pages[rows], rotated(k, cos, sin).reshape(-1, head_dim))
    assert torch.equal(v_pages[rows].double(), v.reshape(-1, head_dim))
    others = torch.ones(60, dtype=torch.bool)
    others[rows] = False
    assert (k_pages[others] == 7.0).all() and (v_pages[others] == 7.0).all()


def test_many_rows_on_two_threads_have_the_bits_of_one():
    x = normal(300, 512)
    weight = pad_weight(normal(512, seed=1))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append((rms_norm(x, weight, 1e-6), gated(x)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_arguments_that_do_not_fit_are_refused_by_name():
    x, pages = normal(3, 64), torch.zeros(12, 8)
    rows, table = torch.arange(6), normal(3, 8)
    with pytest.raises(ValueError, match=r"^weight: must come from pad_weight"):
        rms_norm(x, torch.ones(60), 1e-6)
    with pytest.raises(ValueError, match=r"^x: must be a matrix"):
        rms_norm(x.double(), torch.ones(64), 1e-6)
    with pytest.raises(ValueError, match=r"^gate_up: "):
        gated(x[:, :63])
    with pytest.raises(ValueError, match=r"^qkv: must be"):
        rotate_and_write(x, 5, pages, pages, rows, table, table)
    with pytest.raises(ValueError, match=r"^rows: must be \[6\]"):
        rotate_and_write(x, 4, pages, pages, rows[:5], table, table)
    with pytest.raises(ValueError, match=r"^cos: .*got 7"):
        rotate_and_write(x, 4, pages, pages, rows, table[:, :7], table)
    with pytest.raises(ValueError, match=r"^q_norm, k_norm: "):
        rotate_and_write(x, 4, pages, pages, rows, table, table, q_norm=torch.ones(16))
    with pytest.raises(IndexError, match="2 are not between 0 and 11"):
        rotate_and_write(x, 4, pages, pages, torch.tensor([0, 1, 2, 12, 4, -1]), table, table)


def test_structures_have_the_size_that_c_gives_them():
    functions = native_library.load().functions
    for structure, name in (
        (cpu_row_ops.NormCall, "norm"),
        (cpu_row_ops.GatedCall, "gated"),
        (cpu_row_ops.RotateCall, "rotate"),
    ):
        assert ctypes.sizeof(structure) == getattr(functions, f"quire_{name}_bytes")()
