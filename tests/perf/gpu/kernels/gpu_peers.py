"""Attention of other libraries on the same machine in the same run: torch's SDPA, FlashInfer, FlashAttention.

Each function returns a list of calls per installed peer, by name. SDPA and FlashAttention get contiguous keys, which is
their best case; FlashInfer gets the same pages as Quire's kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.perf.gpu.gpu_timing import Call

_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
_WORKSPACE_BYTES = 256 << 20  # for FlashInfer


def installed() -> list[str]:
    """Names of the installed peers other than torch."""
    names = ("flashinfer", "flash_attn_interface", "flash_attn")
    return [name for name in names if importlib.util.find_spec(name)]


def decode_peers(
    q: torch.Tensor, pool: torch.Tensor, kv_heads: int, length: int, layers: int
) -> dict[str, list[Call]]:
    """Calls that read `length` contiguous keys for each row of q [rows, heads, head_dim].

    `pool` is flat memory for 2 * layers tensors of rows * kv_heads * length * head_dim numbers.
    """
    rows, _, head_dim = q.shape
    kv = pool.view(layers, 2, rows, kv_heads, length, head_dim)
    calls = _sdpa(q[:, :, None], [(kv[i, 0], kv[i, 1]) for i in range(layers)], causal=False)
    function = _flash_function("flash_attn_with_kvcache")
    if function is not None:
        cache = pool.view(layers, 2, rows, length, kv_heads, head_dim)
        lengths = torch.full((rows,), length, dtype=torch.int32, device=q.device)
        calls["flash_attn"] = [
            partial(function, q[:, None], cache[i, 0], cache[i, 1], cache_seqlens=lengths)
            for i in range(layers)
        ]
    return calls


def paged_decode_peers(
    q: torch.Tensor,  # [rows, heads, head_dim]
    pages: list[torch.Tensor],  # a layer's [blocks, 2, kv_heads, block_size, head_dim]
    tables: torch.Tensor,  # [rows, max_blocks] int32
    lengths: list[int],
) -> dict[str, list[Call]]:
    """Calls that read the same pages as `decode_attention`."""
    if not importlib.util.find_spec("flashinfer"):
        return {}
    flashinfer = importlib.import_module("flashinfer")
    _, _, kv_heads, block_size, head_dim = pages[0].shape
    counts = torch.tensor([-(-length // block_size) for length in lengths])
    listed = torch.arange(tables.shape[1])[None] < counts[:, None]
    last = torch.tensor([(length - 1) % block_size + 1 for length in lengths])
    buffer = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        buffer, kv_layout="HND", use_tensor_cores=q.shape[1] > kv_heads
    )
    wrapper.plan(
        torch.cat([torch.zeros(1), counts.cumsum(0)]).int().to(q.device),
        tables[listed.to(q.device)],
        last.int().to(q.device),
        q.shape[1],
        kv_heads,
        head_dim,
        block_size,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    return {"flashinfer": [partial(wrapper.run, q, layer) for layer in pages]}


def prefill_peers(
    q: torch.Tensor, pool: torch.Tensor, kv_heads: int, layers: int
) -> dict[str, list[Call]]:
    """Causal attention of one fresh request, q [tokens, heads, head_dim]; `pool` as in `decode_peers`."""
    tokens, _, head_dim = q.shape
    kv = pool.view(layers, 2, 1, kv_heads, tokens, head_dim)
    pairs = [(kv[i, 0], kv[i, 1]) for i in range(layers)]
    calls = _sdpa(q.transpose(0, 1)[None], pairs, causal=True)
    function = _flash_function("flash_attn_func")
    if function is not None:
        cache = pool.view(layers, 2, 1, tokens, kv_heads, head_dim)
        calls["flash_attn"] = [
            partial(function, q[None], cache[i, 0], cache[i, 1], causal=True) for i in range(layers)
        ]
    return calls


def _sdpa(
    q: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]], *, causal: bool
) -> dict[str, list[Call]]:
    """Calls of each SDPA backend; q [rows, heads, queries, head_dim]. On the CPU torch chooses the backend."""

    def call(backend: SDPBackend | None, k: torch.Tensor, v: torch.Tensor) -> Any:
        attend = partial(scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=True)
        if backend is None:
            return attend()
        with sdpa_kernel(backend):
            return attend()

    backends = _BACKENDS if q.is_cuda else {"sdpa": None}
    return {
        name: [partial(call, backend, k, v) for k, v in pairs] for name, backend in backends.items()
    }


def _flash_function(name: str) -> Callable[..., Any] | None:
    """A function of FlashAttention 3 or 2; None if neither is installed."""
    for module in ("flash_attn_interface", "flash_attn"):
        if importlib.util.find_spec(module):
            return getattr(importlib.import_module(module), name)
    return None
