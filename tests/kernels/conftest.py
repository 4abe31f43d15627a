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

sys.path.insert(0, str(Path(__file__).parent))  # for `sampling_calls` and `recurrence_cases`


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
    v: torch.Tensor  # [blocks, kv_heads, block_size, value_dim], behind the keys or their beginning
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
        value_dim=None,
        values_in_keys=False,
    ):
        """Random batch; the first `shared` blocks are the same for all rows."""
        from tests.kernels.compile import interpreter  # not before `pytest_configure`

        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        cache_dtype = cache_dtype or dtype
        counts = [-(-length // block_size) for length in kv_lens]
        blocks = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        widths = (head_dim, value_dim or head_dim)
        elements = kv_heads * block_size * sum(widths[: 1 if values_in_keys else 2])
        pool = torch.full((len(blocks), 3, elements), float("nan"))
        k, v = cls.views(pool, kv_heads, block_size, *widths, values_in_keys)
        # An entry without a key is an address far outside the pool: a read of it would fail.
        tables = torch.full((len(kv_lens), max(counts) + 1), 2**30, dtype=torch.int32)
        for row, length in enumerate(kv_lens):
            for block in range(counts[row]):
                if row and block < shared:
                    tables[row, block] = tables[0, block]
                    continue
                tables[row, block] = blocks.pop()
                filled = min(block_size, length - block * block_size)
                for cache in (k,) if values_in_keys else (k, v):
                    cache[tables[row, block], :, :filled] = normal(kv_heads, filled, cache.shape[3])
        pool = pool.to(cache_dtype)
        k, v = cls.views(pool, kv_heads, block_size, *widths, values_in_keys)
        cu_q = torch.tensor([0, *torch.tensor(q_lens).cumsum(0)], dtype=torch.int32)
        return cls(
            q=normal(int(cu_q[-1]), heads, head_dim).to(dtype),
            k=k,
            v=v,
            tables=tables,
            cu_q=cu_q,
            kv_len=torch.tensor(kv_lens, dtype=torch.int32),
            scale=head_dim**-0.5,
        ).to(interpreter.kernel_device())

    @staticmethod
    def views(pool, kv_heads, block_size, head_dim, value_dim, values_in_keys):
        """Keys and values of the middle layer of a pool [blocks, 3, elements]."""
        k = pool[:, 1, : kv_heads * block_size * head_dim].unflatten(1, (kv_heads, block_size, -1))
        if values_in_keys:
            return k, k[..., :value_dim]
        v = pool[:, 1, kv_heads * block_size * head_dim :]
        return k, v.unflatten(1, (kv_heads, block_size, -1))

    def to(self, device):
        """The batch on another device."""
        moved = {
            name: x.to(device) if isinstance(x, torch.Tensor) else x
            for name, x in vars(self).items()
        }
        if device != "cpu":  # the view's strides are part of the test
            pool = torch.empty(len(self.k), self.k.stride(0), dtype=self.k.dtype, device=device)
            for name in ("k", "v"):
                view = pool.as_strided(
                    getattr(self, name).shape,
                    getattr(self, name).stride(),
                    getattr(self, name).storage_offset() - self.k.storage_offset(),
                )
                view.copy_(moved[name])
                moved[name] = view
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

    @property
    def values(self):
        """Keywords of a plan about the values."""
        is_part = self.v.shape[3] < self.k.shape[3] and self.v.data_ptr() == self.k.data_ptr()
        return dict(value_dim=self.v.shape[3], values_in_keys=is_part)

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


# Elements of a key and of a value, whether the keys have the values; heads, KV heads; dtype; options; what is seen.
UNLIKE = (
    (576, 512, True, 20, 1, torch.bfloat16, {}, {}),
    (56, 40, True, 33, 1, torch.float32, {"softcap": 3.0, "sinks": True}, {}),
    (192, 128, False, 16, 2, torch.float16, {}, {"window": 20}),
    (32, 20, False, 6, 3, torch.float32, {}, {"chunk": 12}),
    (24, 64, False, 40, 2, torch.bfloat16, {"sinks": True}, {"window": 1}),
    (32, 32, False, 17, 1, torch.float32, {"softcap": 3.0}, {}),
)


@pytest.fixture(params=UNLIKE, ids=lambda case: "-".join(map(str, case[:5])))
def unlike(request):
    """A function that draws rows, with options of attention and of its plan, of keys unlike their values.

    The last case has only a group of more heads than a tile.
    """
    head_dim, value_dim, in_keys, heads, kv_heads, dtype, options, local = request.param

    def draw(q_lens, kv_lens):
        batch = PagedBatch.draw(
            *(q_lens, kv_lens, heads, kv_heads, head_dim, 16, dtype),
            value_dim=value_dim,
            values_in_keys=in_keys,
        )
        sinks = torch.linspace(-2, 2, heads, device=batch.q.device)
        return batch, options | ({"sinks": sinks} if "sinks" in options else {}), local

    return draw


@pytest.fixture(scope="session")
def close():
    """`assert_close`."""
    return assert_close
