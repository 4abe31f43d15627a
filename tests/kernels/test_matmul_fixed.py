"""Fixed-tile product: right against the reference, and rows that know nothing of their batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.interpreter import kernel_device
from quire.kernels.matmul_fixed import MatmulConfig, matmul_config, matmul_fixed

DEVICE = kernel_device()
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# A tile of another shape than the tables', to cross its borders with small operands.
SMALL = MatmulConfig(16, 32, 16, 4, 2)


def operands(rows, columns, depth, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(n, depth, generator=generator) for n in (rows, columns))
    return x.to(dtype).to(DEVICE), (w * depth**-0.5).to(dtype).to(DEVICE)


@settings(max_examples=20)
@given(
    rows=st.integers(0, 40),
    columns=st.integers(1, 70),
    depth=st.sampled_from([1, 15, 16, 17, 64, 100]),
    dtype=st.sampled_from(FLOATS),
    bias=st.booleans(),
)
def test_product_is_the_reference(rows, columns, depth, dtype, bias, close):
    x, w = operands(rows, columns, depth, dtype)
    b = torch.linspace(-1, 1, columns, device=DEVICE).to(dtype) if bias else None
    expected = x.float() @ w.float().T + (b.float() if bias else 0)
    close(matmul_fixed(x, w, bias=b, config=SMALL), expected, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_are_bit_equal_in_every_batch_and_position(dtype):
    x, w = operands(70, 150, 200, dtype)
    whole = matmul_fixed(x, w)
    for first, end in ((0, 1), (69, 70), (3, 8), (5, 69), (63, 66)):
        assert torch.equal(matmul_fixed(x[first:end], w), whole[first:end])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(matmul_fixed(x[order], w), whole[order])
    # Other rows, NaN among them, are other rows.
    disturbed = x.clone()
    disturbed[::2] = float("nan")
    assert torch.equal(matmul_fixed(disturbed, w)[1::2], whole[1::2])


def test_float32_products_are_ieee():
    x = torch.tensor([[1.0 + 2.0**-12, 2.0**-23]], device=DEVICE)  # TF32 keeps 10 bits
    w = torch.tensor([[1.0 - 2.0**-12, 1.0]], device=DEVICE)
    exact = (x.double() @ w.double().T).float()
    assert torch.equal(matmul_fixed(x, w), exact)


def test_strided_operands_and_float32_results():
    x, w = operands(9, 40, 48, torch.bfloat16)
    wide = torch.full((9, 64), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wide[:, :48] = x
    out = torch.full((9, 50), 7.0, device=DEVICE)
    matmul_fixed(wide[:, :48], w, out=out[:, :40], config=SMALL)
    torch.testing.assert_close(out[:, :40], x.float() @ w.float().T, rtol=1e-5, atol=1e-5)
    assert (out[:, 40:] == 7.0).all()


def test_bad_arguments_are_named():
    x, w = operands(2, 3, 4, torch.float32)
    for change, message in (
        (dict(weight=w[:, :3].contiguous()), r"weight: must have shape \[any, 4\], got \[3, 3\]"),
        (dict(weight=w.half()), "weight: must be one of float32"),
        (dict(x=x[:, :0], weight=w[:, :0]), "K: must be between 1"),
        (dict(bias=torch.zeros(4)), r"bias: must have shape \[3\], got \[4\]"),
        (dict(out=torch.zeros(3, 3)), r"out: must have shape \[2, 3\], got \[3, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            matmul_fixed(**(dict(x=x.cpu(), weight=w.cpu()) | change))
    with pytest.raises(ValueError, match="architecture: must be one of sm_80"):
        matmul_config("sm_70", torch.float16)
