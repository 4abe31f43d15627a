"""Paged attention on the CPU: ragged prefill and decode in one call, with the same bits in any batch.

There are two implementations behind one interface. C code that reads the blocks in place (`cpu_attention_native.py`)
is used if the package was installed with a compiler and supports the shapes. Otherwise torch operations work on
gathered blocks (`cpu_attention_torch.py`). `plan_attention` chooses once per step; `paged_attention` follows the plan.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from quire.kernels.cpu import cpu_attention_native, cpu_attention_torch, native_library
from quire.kernels.cpu.cpu_attention_native import NativePlan
from quire.kernels.cpu.cpu_attention_torch import TorchPlan

AttentionPlan = NativePlan | TorchPlan
Backend = Literal["native", "torch"]


def has_native() -> bool:
    """Whether the compiled library is installed."""
    return native_library.load() is not None


def plan_attention(
    cu_q: np.ndarray,
    kv_len: np.ndarray,
    block_tables: np.ndarray,
    k_cache: torch.Tensor,
    num_heads: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
    query_tokens: int | None = None,
    value_dim: int | None = None,
    backend: Backend | None = None,
    before: AttentionPlan | None = None,
) -> AttentionPlan:
    """Plan the work of a ragged batch.

    Parameters
    ----------
    cu_q
        [rows + 1] int, row i has the query tokens [cu_q[i], cu_q[i + 1]).
    kv_len
        [rows] int, tokens in the cache, this step's included; the queries are the last ones.
    block_tables
        [rows, max blocks] int; entries of blocks without a key that the row sees are ignored.
    k_cache
        [blocks, kv_heads, block_size, head_dim]; only its shape, strides, dtype and device are used.
    num_heads
        Query heads, a multiple of the KV heads.
    window
        Keys that a query sees, its own included; None: all keys.
    chunk
        Tokens of a chunk of local attention: a query sees only keys of its own chunk. None: all keys.
    query_tokens
        For the torch implementation: query tokens of a prefill tile. None: the fastest. The value from
        `cpu_attention_torch.choose_query_tokens` gives prefill and decode the same bits on this machine.
    value_dim
        Elements of a value; None: as many as a key has. Other numbers run in torch.
    backend
        "native" or "torch" forces that implementation; None: native if it supports the shapes.
    before
        The previous plan, made with the same cache, heads and options. The new plan reuses its memory, so calls with
        the two plans must not run at the same time. If each row has one token more than in the previous plan, planning
        takes a third of the time.

    Raises
    ------
    ValueError
        `backend` is "native" but does not support the shapes, or native code would read outside the cache.
    """
    if backend not in (None, "native", "torch"):
        raise ValueError(f"backend must be 'native', 'torch' or None, got {backend!r}")
    if isinstance(before, NativePlan):
        following = before.following(cu_q, kv_len, block_tables)
        if following is not None:
            return following
    arguments = (cu_q, kv_len, block_tables, k_cache, num_heads)
    is_unequal = value_dim not in (None, k_cache.shape[3])
    if backend == "torch" or is_unequal or not cpu_attention_native.supports(k_cache, num_heads):
        if backend == "native":
            raise ValueError(
                f"backend 'native' needs the compiled library (installed: {has_native()}) and "
                f"{cpu_attention_native.LIMITS}; the cache is {tuple(k_cache.shape)} {k_cache.dtype} on "
                f"{k_cache.device}, for {num_heads} query heads, with values of {value_dim or k_cache.shape[3]}"
            )
        return cpu_attention_torch.plan(
            *arguments, window=window, chunk=chunk, query_tokens=query_tokens
        )
    before = before if isinstance(before, NativePlan) else None
    return cpu_attention_native.plan(*arguments, window=window, chunk=chunk, before=before)


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
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Compute causal attention of the last tokens of each row over its paged keys and values.

    Parameters
    ----------
    q
        [tokens, heads, head_dim], float32, bfloat16 or float16.
    k_cache, v_cache
        [blocks, kv_heads, block_size, head_dim] in the dtype of q; the heads of one block are contiguous. The keys of
        this step are already written. Values may have another size than keys, or be the beginning of the keys.
    block_tables, cu_q, kv_len
        The batch as for `plan_attention`, as integer tensors or arrays; ignored if `plan` is given.
    scale
        Factor on q . k.
    window, chunk, backend
        Options as for `plan_attention`; ignored if `plan` is given.
    softcap
        Replaces each score s by softcap * tanh(s / softcap).
    sinks
        [heads] logits that are added to the denominator only (gpt-oss).
    out
        [tokens, heads, elements of a value] for the result; None allocates it.
    plan
        `plan_attention` of the same arguments, which several layers can share; None makes it.

    Returns
    -------
    [tokens, heads, elements of a value] in the dtype of q. In float32, and with native code in any dtype, a row's bits
    do not depend on the other rows, on which of its tokens are queried together or on the number of threads.

    Raises
    ------
    ValueError
        A shape, stride or dtype is not supported.
    """
    check(q, k_cache, v_cache)
    if plan is None:
        plan = plan_attention(
            _as_numpy(cu_q),
            _as_numpy(kv_len),
            _as_numpy(block_tables),
            k_cache,
            q.shape[1],
            window=window,
            chunk=chunk,
            value_dim=v_cache.shape[3],
            backend=backend,
        )
    if out is None:
        out = torch.empty(*q.shape[:2], v_cache.shape[3], dtype=q.dtype, device=q.device)
    operands = q, k_cache, v_cache, scale
    if isinstance(plan, NativePlan):
        cpu_attention_native.attend(*operands, plan, softcap=softcap, sinks=sinks, out=out)
    else:
        cpu_attention_torch.attend(*operands, plan, softcap=softcap, sinks=sinks, out=out)
    return out


def check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raise ValueError unless `paged_attention` supports these tensors together."""
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "q must be [tokens, heads, head_dim] and k_cache, v_cache [blocks, kv_heads, block_size, head_dim], "
            f"got {tuple(q.shape)}, {tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
        )
    _, kv_heads, block_size, head_dim = k_cache.shape
    if q.shape[2] != head_dim or q.shape[1] % kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} heads of {q.shape[2]}, the cache {kv_heads} heads of {head_dim}: the head sizes "
            "must be equal and the query heads a multiple of the KV heads"
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        stride = cache.stride()
        size = head_dim if cpu_attention_torch.is_part_of_keys(k_cache, v_cache) else cache.shape[3]
        page = block_size * size
        if stride[1:] != (page, size, 1) or stride[0] % page or stride[0] != k_cache.stride(0):
            raise ValueError(f"{name}: heads of a block must be contiguous, got strides {stride}")
        if cache.dtype != q.dtype or cache.device != q.device:
            raise ValueError(
                f"{name} is {cache.dtype} on {cache.device}, q is {q.dtype} on {q.device}: must be equal"
            )


def _as_numpy(array: torch.Tensor | np.ndarray) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        array = array.cpu().numpy()
    return array.astype(np.int64)
