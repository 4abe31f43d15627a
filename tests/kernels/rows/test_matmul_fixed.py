"""Fixed-order product: correct by the reference, with bits that do not depend on the batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.rows import matmul_fixed as module
from quire.kernels.rows.matmul_fixed import (
    FixedProduct,
    MatmulConfig,
    Splits,
    Tile,
    matmul_config,
    matmul_fixed,
)
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Smaller tiles than in the tables, so that small operands cross their boundaries.
SMALL = MatmulConfig(32, 16, (Tile(16, 4, 2), Tile(32, 4, 2)), Tile(32, 4, 2))


@pytest.fixture
def small_splits(monkeypatch):
    """k is split from 32 on; products with 5 tiles and more compute their splits in turn."""
    monkeypatch.setattr(module, "MIN_SPLIT_DEPTH", 32)
    monkeypatch.setattr(module, "PROGRAMS", 5)


def operands(rows, columns, depth, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(n, depth, generator=generator) for n in (rows, columns))
    return x.to(dtype).to(DEVICE), (w * depth**-0.5).to(dtype).to(DEVICE)


@settings(max_examples=25)
@given(
    rows=st.integers(0, 90),
    columns=st.integers(1, 70),
    depth=st.sampled_from([1, 15, 16, 17, 64, 100, 130]),
    dtype=st.sampled_from(FLOATS),
    bias=st.booleans(),
)
def test_product_is_the_reference(rows, columns, depth, dtype, bias, close):
    x, w = operands(rows, columns, depth, dtype)
    b = torch.linspace(-1, 1, columns, device=DEVICE).to(dtype) if bias else None
    expected = (x.double() @ w.double().T + (b.double() if bias else 0)).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_SPLIT_DEPTH", 32)
        patch.setattr(module, "PROGRAMS", 5)
        close(matmul_fixed(x, w, bias=b, config=SMALL), expected, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("depth", [200, 1100])
def test_rows_are_bit_equal_in_every_batch_and_position(dtype, depth):
    """Up to 70 rows the tables have tiles of two heights, and k of 1100 has 4 splits."""
    x, w = operands(70, 150, depth, dtype)
    whole = matmul_fixed(x, w)
    for first, end in ((0, 1), (69, 70), (3, 8), (5, 69), (63, 66)):
        assert torch.equal(matmul_fixed(x[first:end], w), whole[first:end])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(matmul_fixed(x[order], w), whole[order])
    # Other rows, even with NaN, have no influence.
    disturbed = x.clone()
    disturbed[::2] = float("nan")
    assert torch.equal(matmul_fixed(disturbed, w)[1::2], whole[1::2])


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_forms_and_heights_give_the_same_bits(small_splits, dtype):
    x, w = operands(100, 40, 200, dtype)
    bias = torch.linspace(-1, 1, 40, device=DEVICE).to(dtype)
    product = FixedProduct(w, bias, SMALL)
    assert product.splits == Splits(3, 5)
    assert [product.form(rows)[0] for rows in (1, 64, 65)] == ["apart", "apart", "in turn"]
    assert [product.form(rows)[1].block_m for rows in (16, 17)] == [16, 32]

    def result(rows):  # in float32, so that no difference is rounded away
        return product(x[:rows], torch.empty(rows, 40, device=DEVICE))

    whole = result(100)
    for rows in (1, 16, 17, 40, 64, 65):
        assert torch.equal(result(rows), whole[:rows])
    # The bits differ from another order of additions, which a tolerance would not show.
    assert not torch.equal(
        FixedProduct(w.float(), config=SMALL)(x.float()), x.float() @ w.float().T
    )


def test_k_is_cut_where_columns_are_too_few_for_the_processors():
    config = matmul_config("sm_90", torch.bfloat16)
    shapes = {  # columns, depth: programs of one tile of rows
        (4096, 4096): 128,
        (6144, 4096): 144,
        (4096, 14336): 128,
        (28672, 4096): 224,
        (128256, 4096): 1002,
        (4096, 1024): 128,
        (1024, 2048): 64,  # k is too short for more
        (1024, 3072): 64,
    }
    for (columns, depth), programs in shapes.items():
        splits = Splits.of(columns, depth, config)
        assert splits.count * -(-columns // config.block_n) == programs, (columns, depth)
        assert (
            (splits.count - 1) * splits.steps
            < -(-depth // config.block_k)
            <= splits.count * splits.steps
        )
    product = FixedProduct(
        torch.empty(4096, 4096, dtype=torch.bfloat16, device="cpu"), config=config
    )
    found = {rows: product.form(rows) for rows in (1, 64, 65, 256, 384, 385, 8192)}
    assert [form for form, _ in found.values()] == ["apart"] * 5 + ["in turn"] * 2
    assert [tile.block_m for _, tile in found.values()] == [64, 64, 128, 256, 256, 128, 128]
    wide = FixedProduct(torch.empty(28672, 64, dtype=torch.bfloat16, device="cpu"), config=config)
    assert [wide.form(rows)[1].block_m for rows in (64, 128, 8192)] == [64, 128, 256]


@pytest.mark.parametrize("shape", [(40, 200), (300, 200), (40, 20)])
def test_distinct_rows_need_every_kernel(small_splits, shape):
    product = FixedProduct(torch.empty(*shape, device="cpu"), config=SMALL)
    for max_rows in (1, 16, 40, 500):
        all_forms = {product.form(rows) for rows in range(1, max_rows + 1)}
        assert {product.form(rows) for rows in product.distinct_rows(max_rows)} == all_forms


def test_float32_products_are_ieee():
    x = torch.tensor([[1.0 + 2.0**-12, 2.0**-23]], device=DEVICE)  # TF32 keeps 10 bits
    w = torch.tensor([[1.0 - 2.0**-12, 1.0]], device=DEVICE)
    exact = (x.double() @ w.double().T).float()
    assert torch.equal(matmul_fixed(x, w), exact)


@pytest.mark.parametrize("depth", [48, 176])
def test_strided_operands_and_float32_results(small_splits, depth):
    x, w = operands(9, 40, depth, torch.bfloat16)
    wide = torch.full((9, depth + 16), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wide[:, :depth] = x
    out = torch.full((9, 50), 7.0, device=DEVICE)
    matmul_fixed(wide[:, :depth], w, out=out[:, :40], config=SMALL)
    torch.testing.assert_close(out[:, :40], x.float() @ w.float().T, rtol=1e-5, atol=1e-5)
    assert (out[:, 40:] == 7.0).all()


def test_bad_arguments_are_named():
    x, w = operands(2, 3, 4, torch.float32)
    for change, message in (
        (dict(weight=w[:, :3].contiguous()), r"x: must have shape \[any, 3\], got \[2, 4\]"),
        (dict(weight=w.half()), "x: must be one of float16, got torch.float32"),
        (dict(weight=w.double()), "weight: must be one of bfloat16, float16, float32"),
        (dict(x=x[:, :0], weight=w[:, :0]), "K: must be between 1"),
        (dict(bias=torch.zeros(4)), r"bias: must have shape \[3\], got \[4\]"),
        (dict(out=torch.zeros(3, 3)), r"out: must have shape \[2, 3\], got \[3, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            matmul_fixed(**(dict(x=x.cpu(), weight=w.cpu()) | change))
    with pytest.raises(ValueError, match="architecture: must be one of sm_80"):
        matmul_config("sm_70", torch.float16)


_READ_INSTRUCTIONS = """
import json
from tests.kernels.compile.compile_entries import matmul_entries
from tests.kernels.compile.offline_compile import matrix_instructions
entries = [e for e in matmul_entries("sm_90") if "/matmul/bf16/" in e.name and "rest" not in e.name]
print(json.dumps({entry.name: sorted(matrix_instructions(entry)) for entry in entries}))
"""


def test_all_heights_use_one_matrix_instruction(tmp_path):
    """On a device equal bits need the same instruction, which the interpreter cannot show."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", _READ_INSTRUCTIONS], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout)
    assert {name.split("/", 3)[3] for name in found} == {
        *(f"{form}/{height}" for form in ("whole", "apart") for height in (64, 128, 256)),
        "in_turn/128",
    }
    assert set(map(tuple, found.values())) == {("wgmma.mma_async m64n128k16",)}, found
