"""Plain torch references in float32: written to be read, not to be fast."""

from __future__ import annotations

import torch


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_q: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    chunk: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over paged keys, row by row.

    Arguments as in `quire.kernels.cpu_attention.paged_attention`, and those of the Triton kernels: `k_scale`,
    `v_scale` [kv_heads], factors of the cache. Returns [tokens, heads, head_dim] float32; zeros for a row with
    kv_len 0.
    """
    _, kv_heads, block_size, head_dim = k_cache.shape
    heads = q.shape[1]
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for row in range(len(kv_len)):
        start, end, length = int(cu_q[row]), int(cu_q[row + 1]), int(kv_len[row])
        # Keys before the first query's window or chunk may have been evicted: their table entries mean nothing.
        first = max(length - (end - start), 0)
        reach = [first - window + 1] if window else []
        reach += [first // chunk * chunk] if chunk else []
        first = max([0, *reach]) if reach else 0
        pages = block_tables[row, first // block_size : -(-length // block_size)].long()
        skipped = first - first // block_size * block_size
        # [blocks, kv_heads, block_size, d] -> [kv_heads, tokens, d] -> [heads, tokens, d]
        k, v = (
            cache[pages].float().transpose(0, 1).reshape(kv_heads, -1, head_dim)
            for cache in (k_cache, v_cache)
        )
        k, v = (x[:, skipped : skipped + length - first] for x in (k, v))
        if k_scale is not None:
            k, v = k * k_scale.view(-1, 1, 1), v * v_scale.view(-1, 1, 1)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
        scores = torch.einsum("qhd,hkd->hqk", q[start:end].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query = torch.arange(length - (end - start), length, device=q.device)[:, None]
        key = torch.arange(first, length, device=q.device)[None]
        hidden = key > query
        if window is not None:
            hidden = hidden | (key <= query - window)
        if chunk is not None:
            hidden = hidden | (key < query // chunk * chunk)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.float().view(heads, 1, 1).expand(heads, end - start, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : length - first]
        out[start:end] = torch.einsum("hqk,hkd->qhd", weights, v)
    return out


def uniform_noise(token_id: int, key_low: int, key_high: int) -> float:
    """One uniform number of `quire.kernels.noise`, in Python integers."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & 0xFFFFFFFF
        x ^= x >> 13
        x = x * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    x = mix((token_id * 0x9E3779B1 + key_low) & 0xFFFFFFFF) ^ key_high
    return ((mix(x) >> 9) + 0.5) * 2.0**-23
