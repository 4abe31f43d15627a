"""Repairs of the interpreter: bfloat16 is rounded as on GPUs and in torch, and scalars convert to Python numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

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
