"""Shared parts of the kernel tests. Without a GPU the kernels run in Triton's interpreter, on CPU tensors.

If they run on a GPU instead (the root conftest chooses), every test of a kernel has the mark `gpu`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.kernels import reference

sys.path.insert(0, str(Path(__file__).parent))  # for `sampling_calls`


def pytest_configure(config):
    """Set up the device that the root conftest has chosen for the kernels."""
    if "TRITON_INTERPRET" in os.environ:
        from tests.kernels.compile.interpreter import repair_interpreter

        repair_interpreter()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items):
    """Mark the tests of modules whose DEVICE comes from `kernel_device`."""
    for item in items:
        if getattr(item.module, "DEVICE", None) == "cuda":
            item.add_marker("gpu")


@dataclass
class PagedBatch:
    """Ragged rows over a permuted pool of one layer of three; slots without a key contain NaN."""

    q: torch.Tensor  # [tokens, heads, head_dim]
    k: torch.Tensor  # [blocks, kv_heads, block_size, head_dim], a view into the pool
    v: torch.Tensor
    tables: torch.Tensor  # [rows, max_blocks] int32
    cu_q: torch.Tensor  # [rows + 1] int32
    kv_len: torch.Tensor  # [rows] int32
    scale: float

    @classmethod
    def draw(
        cls,
        q_lens,
        kv_lens,
        heads,
        kv_heads,
        head_dim,
        block_size,
        dtype,
        *,
        cache_dtype=None,
        seed=0,
        shared=0,
    ):
        """Random batch; the first `shared` blocks are the same for all rows."""
        from tests.kernels.compile import interpreter  # not before `pytest_configure`

        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        cache_dtype = cache_dtype or dtype
        counts = [-(-length // block_size) for length in kv_lens]
        blocks = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        pool = torch.full((len(blocks), 3, 2, kv_heads, block_size, head_dim), float("nan"))
        # An entry without a key is an address far outside the pool: a read of it would fail.
        tables = torch.full((len(kv_lens), max(counts) + 1), 2**30, dtype=torch.int32)
        for row, length in enumerate(kv_lens):
            for block in range(counts[row]):
                if row and block < shared:
                    tables[row, block] = tables[0, block]
                    continue
                tables[row, block] = blocks.pop()
                filled = min(block_size, length - block * block_size)
                pool[tables[row, block], 1, :, :, :filled] = normal(2, kv_heads, filled, head_dim)
        pool = pool.to(cache_dtype)
        cu_q = torch.tensor([0, *torch.tensor(q_lens).cumsum(0)], dtype=torch.int32)
        return cls(
            q=normal(int(cu_q[-1]), heads, head_dim).to(dtype),
            k=pool[:, 1, 0],
            v=pool[:, 1, 1],
            tables=tables,
            cu_q=cu_q,
            kv_len=torch.tensor(kv_lens, dtype=torch.int32),
            scale=head_dim**-0.5,
        ).to(interpreter.kernel_device())

    def to(self, device):
        """The batch on another device."""
        moved = {
            name: x.to(device) if isinstance(x, torch.Tensor) else x
            for name, x in vars(self).items()
        }
        if device != "cpu":  # the view's strides are part of the test
            pool = torch.empty(
                (len(self.k), 3, 2, *self.k.shape[1:]), dtype=self.k.dtype, device=device
            )
            pool[:, 1, 0], pool[:, 1, 1] = moved["k"], moved["v"]
            moved["k"], moved["v"] = pool[:, 1, 0], pool[:, 1, 1]
        return type(self)(**moved)

    def rows(self, rows):
        """A batch of some of the rows, in the given order."""
        tokens = [torch.arange(self.cu_q[row], self.cu_q[row + 1]) for row in rows]
        lens = torch.tensor([len(token) for token in tokens])
        return type(self)(
            q=self.q[torch.cat(tokens)],
            k=self.k,
            v=self.v,
            tables=self.tables[list(rows)],
            cu_q=torch.cat([torch.zeros(1), lens.cumsum(0)]).int().to(self.q.device),
            kv_len=self.kv_len[list(rows)],
            scale=self.scale,
        )

    @property
    def shape(self):
        """(heads, kv_heads, head_dim)."""
        return self.q.shape[1], self.k.shape[1], self.q.shape[2]

    def expected(self, **options):
        """The float32 reference."""
        return reference.paged_attention(
            self.q, self.k, self.v, self.tables, self.cu_q, self.kv_len, self.scale, **options
        )


TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def assert_close(result, expected, dtype):
    """Tolerance for the rounding of `dtype`: of the weights, and of results of magnitude about 1."""
    torch.testing.assert_close(
        result.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=False
    )


@pytest.fixture(scope="session")
def paged_batch():
    """The factory `PagedBatch.draw`."""
    return PagedBatch.draw


@pytest.fixture(scope="session")
def close():
    """`assert_close`."""
    return assert_close
