"""Repairs of the interpreter: bfloat16 is rounded as on GPUs and in torch, and scalars convert to Python numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime import interpreter

from tests.kernels.compile.interpreter import kernel_device, repair_interpreter, to_bfloat16

DEVICE = kernel_device()


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_rounding_is_torchs(bits):
    x = torch.from_numpy(np.array(bits, np.uint32).view(np.float32))
    got = torch.from_numpy(to_bfloat16(x.numpy()).view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(got, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@triton.jit
def _product_kernel(out_ptr, x_ptr, steps, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    at = lane[:, None] * SIZE + lane[None, :]
    x = tl.load(x_ptr + at)
    acc = tl.zeros([SIZE, SIZE], tl.float32)
    for _ in range(steps):  # a device scalar as a loop bound
        acc = tl.dot(x, x, acc)
    tl.store(out_ptr + at, acc.to(tl.bfloat16))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_bfloat16_products_are_of_the_values(steps):
    repair_interpreter()  # a second call changes nothing
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-4, 5, (16, 16), generator=generator).bfloat16().to(DEVICE)
    out = torch.empty_like(x)
    _product_kernel[(1,)](out, x, steps, SIZE=16)
    # Integers below 2^24: every sum is exact, so only the last rounding remains.
    assert torch.equal(out, (steps * (x.float() @ x.float())).bfloat16())


@triton.jit
def _double(x):
    return x + x


@triton.jit
def _quadruple_kernel(out_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + at, _double(_double(at)) + tl.max(at * 0, 0))


@pytest.mark.skipif(DEVICE != "cpu", reason="the kernels are not interpreted")
def test_the_language_is_patched_once_a_kernel(monkeypatch):
    """Not at each call of a function in it; and when the kernel ends, the language is Triton's own."""
    out = torch.empty(5 * 4, dtype=torch.int32)
    _quadruple_kernel[(5,)](
        out, SIZE=4
    )  # functions of Triton's library are patched for good at their first call
    patched = []
    patch = interpreter._patch_builtin
    count = lambda place, *rest: (patched.append(place), patch(place, *rest))  # noqa: E731
    monkeypatch.setattr(interpreter, "_patch_builtin", count)
    for launches in (1, 2):
        out.zero_()
        _quadruple_kernel[(5,)](out, SIZE=4)
        assert out.tolist() == [4 * i for i in range(20)]
        assert patched.count(tl) == launches and patched.count(tl.core) == 0
        assert tl.core.is_builtin(tl.load)


@triton.jit
def _outer_kernel(out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    product = (row + 1) * column + tl.program_id(0)
    tl.store(out_ptr + row * COLUMNS + column, product, mask=(row > 0) & (column < COLUMNS - 1))


def test_shapes_that_are_kept_still_broadcast_and_are_still_checked():
    out = torch.full((4, 8), -1, dtype=torch.int32, device=DEVICE)
    _outer_kernel[(1,)](out, ROWS=4, COLUMNS=8)
    expected = torch.arange(1, 5)[:, None] * torch.arange(8)
    expected[0], expected[:, -1] = -1, -1
    assert torch.equal(out.cpu().long(), expected)
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.int32, [4, 3])
    assert tl.block_type(tl.int32, [4, 8]) != tl.block_type(tl.int32, [8, 4])
    assert str(tl.block_type(tl.int32, [4, 8])) == "<['4', '8'], int32>"
