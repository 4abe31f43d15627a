"""RMS norm: correct by the reference, rounded as in transformers, with the same bits alone and in a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.rows.norm import MAX_HIDDEN, rms_norm
from tests.kernels import reference
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rows(tokens, hidden, dtype, seed=0, pad=0):
    """Random rows; `pad` columns of NaN between them."""
    x = torch.full((tokens, hidden + pad), float("nan"))
    x[:, :hidden] = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)) * 3
    return x.to(dtype).to(DEVICE)[:, :hidden]


@settings(max_examples=20)
@given(
    tokens=st.integers(0, 4),
    hidden=st.sampled_from([1, 7, 64, 80, 333, 1000, 4096, 5120]),
    dtype=st.sampled_from(FLOATS),
    gemma=st.booleans(),
    add=st.booleans(),
    pad=st.sampled_from([0, 8]),
)
def test_norm_is_the_reference(tokens, hidden, dtype, gemma, add, pad, close):
    x, weight = rows(tokens, hidden, dtype, pad=pad), rows(1, hidden, dtype, seed=1)[0] / 3
    if not add:
        close(
            rms_norm(x, weight, 1e-5, gemma=gemma),
            reference.rms_norm(x, weight, 1e-5, gemma=gemma),
            dtype,
        )
        return
    residual = rows(tokens, hidden, dtype, seed=2, pad=3 * pad)
    out, stream = rms_norm(x, weight, 1e-5, gemma=gemma, residual=residual)
    assert torch.equal(stream, x + residual)
    expected = reference.rms_norm(stream, weight, 1e-5, gemma=gemma)
    torch.testing.assert_close(
        out.float(), expected, rtol=3e-2 if dtype == torch.bfloat16 else 4e-3, atol=1e-5
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_do_not_depend_on_the_batch(dtype):
    x, residual, weight = rows(9, 768, dtype), rows(9, 768, dtype, 1), rows(1, 768, dtype, 2)[0]
    out, _ = rms_norm(x, weight, 1e-6, residual=residual)
    for row in range(9):
        alone, _ = rms_norm(x[row : row + 1], weight, 1e-6, residual=residual[row : row + 1])
        assert torch.equal(alone[0], out[row])


def test_the_llama_form_rounds_before_the_weight_and_gemma_after():
    x, weight = rows(4, 256, torch.bfloat16), rows(1, 256, torch.bfloat16, 1)[0]
    exact = reference.rms_norm(x, torch.ones_like(weight), 1e-6)
    llama = exact.bfloat16() * weight
    gemma = reference.rms_norm(x, weight, 1e-6, gemma=True).bfloat16()
    # The sums of squares are added in another order, which changes some roundings.
    assert (rms_norm(x, weight, 1e-6) == llama).float().mean() > 0.99
    assert (rms_norm(x, weight, 1e-6, gemma=True) == gemma).float().mean() > 0.99
    assert (reference.rms_norm(x, weight, 1e-6).bfloat16() == llama).float().mean() < 0.9


def test_in_place_is_the_same():
    x, residual, weight = (rows(n, 96, torch.float16, i) for i, n in enumerate((3, 3, 1)))
    out, stream = rms_norm(x, weight[0], 1e-6, residual=residual)
    got = rms_norm(x, weight[0], 1e-6, residual=residual, out=x, residual_out=residual)
    assert got[0] is x and torch.equal(x, out)
    assert got[1] is residual and torch.equal(residual, stream)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=torch.zeros(2, MAX_HIDDEN + 1)), f"hidden: must be between 1 and {MAX_HIDDEN}"),
        (dict(x=torch.zeros(2, 8).double()), "x: must be one of bfloat16, float16, float32"),
        (dict(x=torch.zeros(8, 2).T), "x: rows must be contiguous"),
        (dict(x=torch.zeros(8)), r"x: must have shape \[any, any\]"),
        (dict(weight=torch.zeros(9)), r"weight: must have shape \[8\], got \[9\]"),
        (dict(eps=float("nan")), "eps: must be >= 0, got nan"),
        (dict(residual=torch.zeros(3, 8)), r"residual: must have shape \[2, 8\], got \[3, 8\]"),
        (dict(residual_out=torch.zeros(2, 8)), "residual_out: needs a residual"),
        (dict(out=torch.zeros(2, 8).half()), "out: must be one of float32, got torch.float16"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = dict(x=torch.zeros(2, 8), weight=torch.zeros(8), eps=1e-6) | change
    with pytest.raises(ValueError, match=message):
        rms_norm(arguments.pop("x"), arguments.pop("weight"), arguments.pop("eps"), **arguments)
