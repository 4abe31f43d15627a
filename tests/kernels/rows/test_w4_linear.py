"""Products with weights of 4 bits: the layout, the kernel against double precision, and its compilation."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from quire.kernels.rows import w4_linear, w4_matmul
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
# Relative to the largest |output|: rounding of the result.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-8}


def weight(columns, depth, groups):
    generator = torch.Generator().manual_seed(columns)
    numbers = torch.randint(0, 16, (columns, depth), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(columns, groups, generator=generator) / 100).half()
    zeros = torch.randint(0, 16, (columns, groups), generator=generator, dtype=torch.uint8)
    exact = (numbers.double().unflatten(1, (groups, -1)) - zeros[..., None]) * scales[..., None]
    words = w4_linear.pack_words(numbers)
    assert torch.equal(w4_linear.unpack_words(words), numbers)
    return words.to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE), exact.flatten(1)


def test_the_lowest_bits_of_a_word_are_its_first_number():
    words = torch.tensor([[0x76543210, -1]], dtype=torch.int32)
    assert w4_linear.unpack_words(words).tolist() == [[*range(8), *[15] * 8]]


# Groups of 32, 64, 128, and one group whose depth is no multiple of a step; every tile.
@pytest.mark.parametrize(
    "rows, columns, depth, groups, dtype",
    [
        (1, 40, 64, 2, torch.bfloat16),
        (16, 33, 128, 2, torch.float16),
        (17, 70, 256, 2, torch.bfloat16),
        (3, 32, 104, 1, torch.bfloat16),
        (65, 70, 128, 1, torch.float32),
    ],
)
def test_the_kernel_equals_the_product_in_double_precision(rows, columns, depth, groups, dtype):
    words, scales, zeros, exact = weight(columns, depth, groups)
    x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    bias = torch.linspace(-1, 1, columns).to(dtype).to(DEVICE)
    expected = x.cpu().double() @ exact.t() + bias.cpu().double()
    for by_triton in (True, False):
        found = w4_linear.product(x, words, scales, zeros, bias, triton=by_triton)
        assert found.dtype == dtype
        error = (found.cpu().double() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCES[dtype], by_triton
    assert w4_linear.product(x[:0], words, scales, zeros, triton=True).shape == (0, columns)


def test_arguments_that_do_not_fit_are_refused():
    words, scales, zeros, _ = weight(8, 96, 2)
    x = torch.zeros(1, 96, device=DEVICE)
    with pytest.raises(ValueError, match="must have all or a multiple of 32 of 96 input features"):
        w4_matmul.product(x, words, scales, zeros)
    with pytest.raises(ValueError, match="zeros"):
        w4_matmul.product(x, words, scales, zeros[:, :1])
    with pytest.raises(ValueError, match="x"):
        w4_matmul.product(x[:, 1:], words, scales, zeros)


COMPILE = """
from tests.kernels.compile import compile_entries, offline_compile
for entry in compile_entries.w4_entries():
    record = offline_compile.compile_entry(entry)
    print(entry.name, record)
    assert record.stack_bytes == 0 and not record.problems, entry.name
"""


def test_the_kernel_compiles_for_hopper(tmp_path):
    """The lowest and the highest tile compile with the installed Triton, without spills."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert run.stdout.count("w4_linear") == 2
