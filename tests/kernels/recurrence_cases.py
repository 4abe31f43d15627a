"""Random steps of recurrent layers, for the kernels of every device."""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.recurrence.recurrent_rows import RecurrentRows

NUM_SLOTS = 16


def make_rows(
    random: np.random.Generator, lengths: list[int], earlier: list[int], num_saves: int = 0
) -> RecurrentRows:
    """Rows of these lengths in random slots, with snapshots after random tokens."""
    slots = random.permutation(8)[: len(lengths)]
    places = [(i, n) for i, length in enumerate(lengths) for n in range(1, length + 1)]
    chosen = random.permutation(len(places))[:num_saves]
    saves = np.array([(*places[at], 8 + i) for i, at in enumerate(chosen)]).reshape(-1, 3)
    counts = np.array(lengths)
    return RecurrentRows.of(slots, counts, counts + np.array(earlier), saves)


def conv_arguments(tokens: int, channels: int, taps: int, dtype: torch.dtype = torch.float32):
    """x, weight, bias, and states that are no part of a contiguous tensor."""
    pool = torch.randn(NUM_SLOTS, taps * channels + 7).to(dtype)
    states = pool[:, : taps * channels].unflatten(1, (taps, channels))
    # The inputs are some columns of a wider product.
    x = torch.randn(tokens, channels + 3).to(dtype)[:, :channels]
    return x, torch.randn(taps, channels), torch.randn(channels), states


def scan_arguments(tokens: int, key_heads: int, heads: int, key_dim: int, value_dim: int):
    """q, k, v, log_decay, beta and states; keys have the length 1, as for the gated delta rule."""
    wide = torch.randn(tokens, 2 * key_heads * key_dim + heads * value_dim)
    q, k, v = wide.split([key_heads * key_dim, key_heads * key_dim, heads * value_dim], dim=1)
    q, k, v = (x.unflatten(1, (n, -1)) for x, n in ((q, key_heads), (k, key_heads), (v, heads)))
    k = k / k.norm(dim=-1, keepdim=True)
    log_decay, beta = torch.rand(tokens, heads).log(), torch.rand(tokens, heads)
    size = heads * key_dim * value_dim
    pool = torch.randn(NUM_SLOTS, size + 16)
    states = pool[:, :size].unflatten(1, (heads, key_dim, value_dim))
    return q, k, v, log_decay, beta, states
