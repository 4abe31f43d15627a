"""FP8 products: exact codes and scales, and errors within the bound of rounding to four bits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.rows import fp8_linear, fp8_rows
from tests.kernels import reference
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
needs_products = pytest.mark.skipif(
    fp8_linear.missing(DEVICE) is not None, reason=f"no FP8 here: {fp8_linear.missing(DEVICE)}"
)


def normal(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def same_bits(found, expected):
    return torch.equal(found.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 3),
    columns=st.sampled_from([1, 16, 1000, 4096, 8192, 8193, 20000]),
    dtype=st.sampled_from(FLOATS),
    bound=st.sampled_from([None, 1200.0, 0.5]),
    magnitude=st.sampled_from([1.0, 1e-4, 1e3]),
)
def test_codes_and_scales_are_those_of_the_reference(rows, columns, dtype, bound, magnitude):
    x = (normal(rows, columns, dtype=torch.float32) * magnitude).to(dtype)
    if rows > 1:
        x[1] = 0.0
    if rows > 2:
        # The largest number is in the last part, and small ones are subnormal.
        x[2, -1] = 30 * magnitude
    if not rows:
        codes, scales = fp8_rows.quantise_rows(x)
        assert codes.shape == (0, columns) and scales.shape == (0, 1)
        return
    expected = reference.quantise_rows(x.cpu(), float("inf") if bound is None else bound)
    for by_triton in (True, False):
        codes, scales = fp8_linear.quantise_rows(x, bound, triton=by_triton)
        assert same_bits(codes, expected[0])
        assert torch.equal(scales.cpu(), expected[1])


def test_rows_may_be_strided():
    x = normal(4, 96)
    codes, scales = fp8_rows.quantise_rows(x[:, :40])
    expected = fp8_rows.quantise_rows(x[:, :40].contiguous())
    assert same_bits(codes, expected[0]) and torch.equal(scales, expected[1])


@pytest.mark.parametrize(
    "x, options, message",
    [
        (torch.zeros(3), {}, r"x: must have shape \[any, any\], got \[3\]"),
        (torch.zeros(3, 2, dtype=torch.int32), {}, "x: must be one of bfloat16, float16, float32"),
        (torch.zeros(2, 3).t(), {}, "x: rows must be contiguous"),
        (torch.zeros(2, 0), {}, "n: must be"),
        (torch.zeros(2, 3), dict(bound=0.0), "bound: must be > 0 or None, got 0.0"),
    ],
)
def test_bad_arguments_are_refused(x, options, message):
    with pytest.raises(ValueError, match=message):
        fp8_rows.quantise_rows(x.to(DEVICE), **options)


def product(x, w, bias=None):
    return fp8_linear.scaled_product(
        *fp8_linear.quantise_rows(x), *fp8_linear.quantise_rows(w), bias
    )


@needs_products
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("depth, columns", [(64, 16), (1024, 512), (2832, 48)])
def test_no_element_is_further_off_than_rounding_allows(rows, depth, columns):
    """The bound in the module's docstring, with the part of subnormal numbers, without an additional margin."""
    x, w = normal(rows, depth), normal(columns, depth, seed=1)
    x[0, : depth // 2] *= 1e-4  # mostly subnormal in comparison with the rest
    bias = normal(columns, seed=2)
    exact_x, exact_w = x.double(), w.double()
    exact = exact_x @ exact_w.t() + bias.double()
    # Half a unit in the last place of each number, and at least half of the smallest step.
    off_x, off_w = (
        torch.maximum(a.abs() * 2.0**-4, a.abs().amax(1, keepdim=True) / 448 * 2.0**-10)
        for a in (exact_x, exact_w)
    )
    bound = exact_x.abs() @ off_w.t() + off_x @ exact_w.abs().t() + off_x @ off_w.t()
    # The rounding of bfloat16; that of sums and scales in float32, at most one in 2^24 for each operation.
    bound = bound + (exact.abs() + bound) * (2.0**-8 + depth * 2.0**-24)
    error = (product(x, w, bias).double() - exact).abs()
    assert (error <= bound).all()


@needs_products
@pytest.mark.parametrize("depth", [256, 4096])
def test_the_error_of_a_product_is_that_of_two_roundings_to_four_bits(depth):
    """Independent errors of 2.6 % of each factor give 3.7 % of the result for any depth; bfloat16 alone has 0.2 %."""
    x, w = normal(64, depth), normal(256, depth, seed=1)
    exact = x.double() @ w.double().t()
    deviation = ((product(x, w).double() - exact).norm() / exact.norm()).item()
    assert 0.034 < deviation < 0.040
    coarse = x.float() @ w.float().t()
    assert (coarse.bfloat16().double() - exact).norm() / exact.norm() < 0.003


@needs_products
def test_scales_are_of_the_channel_and_of_the_token():
    """A channel or a token that is a million times larger does not change the relative error of the others."""
    x, w = normal(4, 512), normal(32, 512, seed=1)
    plain = product(x, w).float()
    w[3] *= 2.0**20
    x[1] *= 2.0**20
    scaled = product(x, w).float()
    scaled[:, 3] /= 2.0**20
    scaled[1] /= 2.0**20
    assert torch.equal(scaled, plain)


def test_a_gpu_that_has_no_fp8_units_is_told_apart(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    for capability, expected in (((8, 0), "8.9 or later; NVIDIA A100 has 8.0"), ((9, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        found = fp8_linear.missing.__wrapped__("cuda")
        assert found is None if expected is None else expected in found


COMPILE = """
from tests.kernels.compile import compile_entries, offline_compile
for entry in compile_entries.fp8_entries():
    record = offline_compile.compile_entry(entry)
    print(entry.name, record)
    assert record.stack_bytes == 0 and not record.problems, entry.name
"""


def test_the_kernel_compiles_where_products_exist(tmp_path):
    """The kernels compile for Hopper and Blackwell with the installed Triton, without spills."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert run.stdout.count("quantise_rows") == 8
