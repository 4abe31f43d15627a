"""Keys and values of unequal sizes, and values that are the beginning of their keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

from quire.kernels.attention.paged_attention import PagedAttention
from quire.kernels.cpu import cpu_attention
from quire.replica.device.kv_pool import KVPool, block_elements
from quire.replica.kv_cache.groups import LayerGroup
from tests.kernels import reference

UNEQUAL = LayerGroup((0, 2), num_kv_heads=2, head_dim=24, value_dim=16, window=9)
LATENT = LayerGroup((1, 3, 4), head_dim=40, value_dim=24, values_in_keys=True)
BLOCK = 16
BACKENDS = ("cpu", "triton") if triton.knobs.runtime.interpret else ("cpu",)


def filled(dtype: torch.dtype, scales=None):
    """A pool of both groups, 37 tokens written in blocks 4, 1, 5, and each layer's keys and values."""
    pool = KVPool(6, [UNEQUAL, LATENT], BLOCK, dtype, scales=scales)
    pool.poison()
    random = torch.Generator().manual_seed(1)
    slots = torch.tensor([[4, 1, 5][i // BLOCK] * BLOCK + i % BLOCK for i in range(37)])
    written = {}
    for group in pool.groups:
        for layer in group.layers:
            k = torch.randn(37, group.num_kv_heads, group.head_dim, generator=random)
            v = torch.randn(37, group.num_kv_heads, group.value_size, generator=random)
            written[layer] = k, k[..., : group.value_size] if group.values_in_keys else v
    return pool, slots, written


@pytest.mark.parametrize("group", [UNEQUAL, LATENT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_group_reads_what_it_wrote_and_overwrites_nothing(group, dtype):
    scales = {layer: (torch.full((2,), 0.5), torch.full((2,), 2.0)) for layer in UNEQUAL.layers}
    pool, slots, written = filled(dtype, scales)
    g = pool.groups.index(group)
    for layer in group.layers:
        pool.write(layer, *written[layer], pool.rows_of(g, slots))
    for layer in group.layers:
        for cache, x, scale in zip(
            (pool.keys(layer), pool.values(layer)),
            written[layer],
            pool.scales(layer),
            strict=True,
        ):
            found = cache[slots // BLOCK, :, slots % BLOCK].float()
            if scale is not None:
                torch.testing.assert_close(found * scale[:, None], x, rtol=0.07, atol=0.01)
            else:
                assert torch.equal(found, x)
    num_written = 37 * len(group.layers) * group.token_elements
    assert int(torch.isfinite(pool.data.float()).sum()) == num_written


def test_a_token_takes_no_more_bytes_than_its_key_and_value():
    assert UNEQUAL.token_elements == 2 * (24 + 16) and LATENT.token_elements == 40
    # Latents of DeepSeek V3: 61 layers of 512 + 64 elements a token, instead of 128 heads of 192 + 128.
    deepseek = LayerGroup(tuple(range(61)), head_dim=576, value_dim=512, values_in_keys=True)
    assert block_elements([deepseek], 64) == 64 * 61 * 576
    # Blocks begin at a multiple of a key's and of a value's page.
    assert block_elements([UNEQUAL], BLOCK) % (BLOCK * 48) == 0


@pytest.mark.parametrize("group, heads", [(UNEQUAL, 6), (LATENT, 20)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_equals_the_reference(group, heads, backend):
    pool, slots, written = filled(torch.float32)
    g, layer = pool.groups.index(group), group.layers[1]
    pool.write(layer, *written[layer], pool.rows_of(g, slots))
    k, v = pool.keys(layer), pool.values(layer)
    attention = PagedAttention(
        *(k, heads),
        max_rows=4,
        window=group.window,
        value_dim=group.value_size,
        values_in_keys=group.values_in_keys,
        backend=backend,
    )
    # A prefill chunk, and two decode rows of shorter sequences.
    cu_q, kv_len = np.array([0, 11, 12, 13]), np.array([37, 20, 3])
    table = np.array([[4, 1, 5]] * 3)
    q = torch.randn(13, heads, group.head_dim, generator=torch.Generator().manual_seed(2))
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(3))
    out = attention(q, k, v, 0.2, attention.plan(cu_q, kv_len, table), sinks=sinks)
    expected = reference.paged_attention(
        *(q, k, v, torch.from_numpy(table), cu_q, kv_len, 0.2), window=group.window, sinks=sinks
    )
    assert out.shape == (13, heads, group.value_size)
    torch.testing.assert_close(out, expected)


def test_compiled_code_refuses_unequal_sizes_by_name():
    keys = filled(torch.float32)[0].keys(0)
    with pytest.raises(ValueError, match="with values of 16"):
        cpu_attention.plan_attention(
            np.array([0, 1]), np.array([1]), np.array([[0]]), keys, 4, value_dim=16, backend="native"
        )  # fmt: skip
