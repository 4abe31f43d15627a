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
) -> torch.Tensor:
    """Causal attention over paged keys, row by row.

    Arguments as in `quire.kernels.cpu_attention.paged_attention`; returns [tokens, heads, head_dim] float32.
    """
    _, kv_heads, _, head_dim = k_cache.shape
    heads = q.shape[1]
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for row in range(len(kv_len)):
        start, end, length = int(cu_q[row]), int(cu_q[row + 1]), int(kv_len[row])
        pages = block_tables[row].long()
        # [blocks, kv_heads, block_size, d] -> [kv_heads, tokens, d] -> [heads, tokens, d]
        k, v = (
            cache[pages].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length].float()
            for cache in (k_cache, v_cache)
        )
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
        scores = torch.einsum("qhd,hkd->hqk", q[start:end].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query = torch.arange(length - (end - start), length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)[None]
        hidden = key > query
        if window is not None:
            hidden = hidden | (key <= query - window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.float().view(heads, 1, 1).expand(heads, end - start, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :length]
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
