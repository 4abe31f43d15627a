"""Gated activations: correct by the reference for odd sizes, and rounded like the separate operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.rows.activation import gelu_tanh_mul, silu_mul
from tests.kernels import reference
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FORMS = {"silu": (silu_mul, False), "gelu": (gelu_tanh_mul, True)}


def gate_up(tokens, size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, 2 * size, generator=generator) * 2).to(dtype).to(DEVICE)


@settings(max_examples=20)
@given(
    form=st.sampled_from(sorted(FORMS)),
    tokens=st.integers(0, 3),
    size=st.sampled_from([1, 3, 64, 1000, 1023, 1024, 1025, 2050]),
    dtype=st.sampled_from(FLOATS),
)
def test_activation_is_the_reference(form, tokens, size, dtype):
    function, gelu = FORMS[form]
    x = gate_up(tokens, size, dtype)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(
        function(x).float(), reference.gated(x, gelu=gelu), rtol=tolerance, atol=1e-6
    )


@pytest.mark.parametrize("form", sorted(FORMS))
def test_extreme_gates_neither_overflow_nor_cancel(form):
    function, gelu = FORMS[form]
    gate = torch.tensor([-1e4, -100.0, -20.0, -5.0, -1e-6, 0.0, 1e-6, 5.0, 20.0, 100.0, 1e4])
    x = torch.cat([gate, torch.ones_like(gate)])[None].to(DEVICE)
    out = function(x)
    assert torch.isfinite(out).all()
    expected = reference.gated(x.double(), gelu=gelu)
    # torch's float32 formula loses digits for the most negative gates: compare absolute errors there.
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-7)


def test_fused_rounds_as_the_separate_operations():
    x = gate_up(4, 512, torch.bfloat16)
    gate, up = x.chunk(2, dim=-1)
    separate = torch.nn.functional.silu(gate) * up
    assert (silu_mul(x) == separate).float().mean() > 0.999


def test_rows_and_strides_do_not_matter():
    wide = torch.full((5, 200), float("nan"), device=DEVICE)
    wide[:, :120] = gate_up(5, 60, torch.float32)
    out = silu_mul(wide[:, :120])
    for row in range(5):
        assert torch.equal(silu_mul(wide[row : row + 1, :120].clone())[0], out[row])


@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        (torch.zeros(2, 7), None, "gate_up: must have an even number of columns, got 7"),
        (torch.zeros(2, 8).int(), None, "gate_up: must be one of bfloat16, float16, float32"),
        (torch.zeros(2, 0), None, "n: must be between 1 and"),
        (torch.zeros(2, 8), torch.zeros(2, 8), r"out: must have shape \[2, 4\], got \[2, 8\]"),
        (torch.zeros(8, 2).T, None, "gate_up: rows must be contiguous"),
    ],
)
def test_bad_arguments_are_named(x, out, message):
    with pytest.raises(ValueError, match=message):
        silu_mul(x, out=out)
