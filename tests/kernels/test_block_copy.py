"""Block copy: the bytes of whole blocks, and of nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.block_copy import BLOCK_WORDS, copy_blocks
from quire.kernels.interpreter import kernel_device

DEVICE = kernel_device()


def random_pool(*shape, dtype=torch.uint8, seed=0):
    """Random bytes, all bit patterns of the dtype, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(DEVICE)
    return data.view(dtype).view(shape)


def as_bytes(x):
    return x.contiguous().view(-1).view(torch.uint8)


@settings(max_examples=20)
@given(data=st.data(), index=st.sampled_from([torch.int32, torch.int64]))
def test_blocks_move_and_nothing_else_changes(data, index):
    words = data.draw(st.sampled_from([2, 6, 2 * BLOCK_WORDS - 2, 2 * BLOCK_WORDS + 2]))
    source = random_pool(data.draw(st.integers(1, 6)), 8 * words)
    target = random_pool(data.draw(st.integers(1, 6)), 8 * words, seed=1)
    targets = data.draw(st.lists(st.integers(0, len(target) - 1), unique=True))
    pairs = [(data.draw(st.integers(0, len(source) - 1)), t) for t in targets]
    expected = target.clone()
    for s, t in pairs:
        expected[t] = source[s]
    copy_blocks(source, target, torch.tensor(pairs, dtype=index, device=DEVICE).view(-1, 2))
    assert torch.equal(target, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_layer_of_a_pool_is_gathered_and_scattered_back(dtype):
    pool = random_pool(7, 3, 2, 2, 16, 64, dtype=dtype)
    before, layer = as_bytes(pool).clone(), pool[:, 1]
    staging = torch.zeros(3, *layer.shape[1:], dtype=dtype, device=DEVICE)
    order = torch.tensor([5, 0, 6], device=DEVICE)
    slot = torch.arange(3, device=DEVICE)
    copy_blocks(layer, staging, torch.stack([order, slot], 1))
    assert torch.equal(as_bytes(staging), as_bytes(layer[order]))
    layer[order] = 0
    copy_blocks(staging, layer, torch.stack([slot, order], 1))
    assert torch.equal(as_bytes(pool), before)


def test_copy_on_write_within_one_pool_skips_padding_and_foreign_ids():
    pool = random_pool(5, 64)
    expected = pool.clone()
    expected[4], expected[2] = pool[0], pool[0]
    pairs = [(0, 4), (-1, -1), (0, 2), (5, 1), (1, 5), (3, -1), (2**31 - 1, 0)]
    copy_blocks(pool, pool, torch.tensor(pairs, dtype=torch.int32, device=DEVICE))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(
    ("source", "target", "pairs", "message"),
    [
        (torch.zeros(2, 16), torch.zeros(2, 12), [[0, 0]], r"target: must be \[blocks, ...\]"),
        (
            torch.zeros(2, 3),
            torch.zeros(2, 3),
            [[0, 0]],
            "source: block must be a multiple of 16 bytes, got 12",
        ),
        (
            torch.zeros(2, 5)[:, :4],
            torch.zeros(2, 4),
            [[0, 0]],
            "source: stride must be a multiple of 16 bytes",
        ),
        (
            torch.zeros(9)[1:].view(2, 4),
            torch.zeros(2, 4),
            [[0, 0]],
            "source: address must be a multiple",
        ),
        (
            torch.zeros(2, 4, 4).mT,
            torch.zeros(2, 4, 4),
            [[0, 0]],
            "source: blocks must be contiguous",
        ),
        (torch.zeros(2, 4), torch.zeros(2, 4).int(), [[0, 0]], "target: must be one of float32"),
        (torch.zeros(2, 4), torch.zeros(2, 4), [0, 0], r"pairs: must have shape \[any, 2\]"),
        (
            torch.zeros(2, 4)[:, :0],
            torch.zeros(2, 4)[:, :0],
            [[0, 0]],
            "block bytes: must be between 16 and",
        ),
    ],
)
def test_bad_arguments_are_named(source, target, pairs, message):
    with pytest.raises(ValueError, match=message):
        copy_blocks(source, target, torch.tensor(pairs))
