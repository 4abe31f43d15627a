"""Paged attention on the device of the cache: the Triton kernels on a GPU, `cpu_attention` on the CPU.

Layers with the same heads, head size and window or chunk share one `PagedAttention` and one plan per step::

    attention = PagedAttention(k_cache, num_heads, max_rows=256)        # once
    plan = attention.plan(cu_q, kv_len, block_tables)                   # once a step, numpy arrays
    attention(q, k_cache, v_cache, scale, plan, out=out)                # each layer

On a GPU the decode kernel computes rows with one query token and the prefill kernel the others, into the same output.
With `uniform` the prefill kernel computes all rows, so a token has the same bits whether it is decoded or prefilled
again (after a preemption, say). The disadvantage is that long decode rows are not split, which makes them slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from quire.kernels.attention.decode_workspace_size import num_partial_slots
from quire.kernels.cpu import cpu_attention

if TYPE_CHECKING:  # a CPU needs no Triton
    from quire.kernels.attention.decode_plan import DecodePlan
    from quire.kernels.attention.prefill_plan import PrefillPlan

Backend = Literal["cpu", "triton"]


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """The work of one step on a GPU."""

    decode: DecodePlan | None  # None: the decode kernel has no rows
    prefill: PrefillPlan | None  # None: the prefill kernel has no rows
    block_tables: torch.Tensor  # [rows, max blocks] int32


Plan = TritonPlan | cpu_attention.AttentionPlan


class PagedAttention:
    """Causal attention over a paged cache, for layers of one kind.

    Parameters
    ----------
    k_cache
        [blocks, kv_heads, block_size, head_dim] of any of the layers. Only its shape, strides, dtype and device are
        used.
    num_heads
        Query heads, a multiple of the KV heads.
    max_rows
        Most rows of a batch.
    max_len
        Most tokens of a row; None: as many as the cache holds.
    window, chunk
        Keys that a query sees, its own included, or tokens of a chunk of local attention; None: all keys.
    share_prefixes
        On a GPU, for layers without window and chunk: decode rows with the same first blocks in their tables read these
        blocks together. This changes no bits. On the CPU, rows always share such reads.
    uniform
        On a GPU: give decoded and prefilled tokens the same bits. On the CPU they always have the same bits.
    query_tokens
        Tokens of a query tile on the CPU without the compiled library; passed to `cpu_attention.plan_attention`.
    value_dim
        Elements of a value; None: as many as a key has.
    values_in_keys
        A value is the beginning of its key, and `v_cache` a view of it (latent attention). On a GPU the kernels then
        load keys only.
    dtype
        Dtype of q; None: the cache's. It may differ only for a float8_e4m3fn cache, which needs Triton.
    backend
        "triton" on a GPU, and in its interpreter; "cpu" on the CPU. None chooses by the cache's device.

    Raises
    ------
    ValueError
        The kernels do not support these heads or this cache; the message says what they support.
    """

    def __init__(
        self,
        k_cache: torch.Tensor,
        num_heads: int,
        *,
        max_rows: int,
        max_len: int | None = None,
        window: int | None = None,
        chunk: int | None = None,
        share_prefixes: bool = False,
        uniform: bool = False,
        query_tokens: int | None = None,
        value_dim: int | None = None,
        values_in_keys: bool = False,
        dtype: torch.dtype | None = None,
        backend: Backend | None = None,
    ):
        if backend not in (None, "cpu", "triton"):
            raise ValueError(f"backend must be 'cpu', 'triton' or None, got {backend!r}")
        self.backend: Backend = backend or ("cpu" if k_cache.device.type == "cpu" else "triton")
        self._dtype = dtype or k_cache.dtype
        if self._dtype != k_cache.dtype and (
            self.backend == "cpu" or k_cache.dtype != torch.float8_e4m3fn
        ):
            raise ValueError(
                f"k_cache: must be {self._dtype} as q, or float8_e4m3fn with backend 'triton', got "
                f"{k_cache.dtype} with {self.backend!r}"
            )
        self._k_cache = k_cache
        self._value_dim = value_dim
        self._values_in_keys = values_in_keys
        self._num_heads = num_heads
        self._max_rows = max_rows
        self._window = window
        self._chunk = chunk
        self._uniform = uniform
        self._query_tokens = query_tokens
        self._workspace = None
        # On the CPU: the plan of the previous step, whose memory the next one reuses.
        self._last: cpu_attention.AttentionPlan | None = None
        if self.backend == "triton" and not uniform:
            from quire.kernels.attention.decode_plan import allocate_decode_workspace

            num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
            shares = share_prefixes and window is None and chunk is None
            cache_tokens = num_blocks * block_size
            self._workspace = allocate_decode_workspace(
                max_rows,
                num_partial_slots(
                    *(cache_tokens, max_rows, max_len or cache_tokens),
                    window=window,
                    chunk=chunk,
                    share_prefixes=shares,
                ),
                num_heads,
                num_kv_heads,
                head_dim,
                k_cache.device,
                dtype=self._dtype,
                window=window,
                chunk=chunk,
                value_dim=value_dim,
                values_in_keys=values_in_keys,
                share_prefixes=shares,
            )

    def buffers(self) -> dict[str, torch.Tensor]:
        """The workspace's device tensors by name; their addresses never change."""
        return {} if self._workspace is None else self._workspace.buffers()

    def plan(
        self,
        cu_q: np.ndarray | torch.Tensor,
        kv_len: np.ndarray | torch.Tensor,
        block_tables: np.ndarray | torch.Tensor,
        num_query: np.ndarray | None = None,
    ) -> Plan:
        """Plan the work of a ragged batch.

        On the CPU all plans of one object share memory, so a new plan makes the previous one invalid.

        Parameters
        ----------
        cu_q
            [rows + 1] int, row i has the query tokens [cu_q[i], cu_q[i + 1]).
        kv_len
            [rows] int, tokens in the cache, this step's included; the queries are the last ones.
        block_tables
            [rows, max blocks] int; only entries of blocks with a key that the row sees are read.
        num_query
            [rows] int, query tokens of each row, on the host. It is required if the other arguments are int32 device
            tensors, which backend "triton" accepts and does not copy.

        Returns
        -------
        A plan for `__call__`.
        """
        if self.backend == "cpu":
            self._last = cpu_attention.plan_attention(
                cu_q,
                kv_len,
                block_tables,
                self._k_cache,
                self._num_heads,
                window=self._window,
                chunk=self._chunk,
                query_tokens=self._query_tokens,
                value_dim=self._value_dim,
                before=self._last,
            )
            return self._last
        return self._triton_plan(cu_q, kv_len, block_tables, num_query)

    def _triton_plan(
        self,
        cu_q: np.ndarray | torch.Tensor,
        kv_len: np.ndarray | torch.Tensor,
        block_tables: np.ndarray | torch.Tensor,
        num_query: np.ndarray | None,
    ) -> TritonPlan:
        from quire.kernels.attention.decode_plan import plan_decode
        from quire.kernels.attention.prefill_plan import plan_prefill
        from quire.kernels.tuning import device_arch, low_prefill_config

        device = self._k_cache.device
        starts, lengths, tables = (
            x
            if isinstance(x, torch.Tensor)
            else torch.from_numpy(np.ascontiguousarray(x, np.int32)).to(device, non_blocking=True)
            for x in (cu_q, kv_len, block_tables)
        )
        if num_query is None:
            num_query = np.diff(cu_q)
        decode = prefill = None
        if self._workspace is not None and (num_query == 1).any():
            block_size = self._k_cache.shape[2]
            decode = plan_decode(self._workspace, starts, lengths, tables, block_size)
        least = 1 if self._uniform else 2
        if (num_query >= least).any():
            _, num_kv_heads, _, head_dim = self._k_cache.shape
            largest = max(head_dim, self._value_dim or 0)
            only_decodes = (num_query == 1).all()
            prefill = plan_prefill(
                starts,
                lengths,
                int(num_query.sum()),
                self._num_heads,
                num_kv_heads,
                head_dim,
                dtype=self._dtype,
                window=self._window,
                chunk=self._chunk,
                value_dim=self._value_dim,
                values_in_keys=self._values_in_keys,
                min_query_tokens=least,
                max_rows=self._max_rows,
                config=low_prefill_config(device_arch(device), largest, self._dtype)
                if only_decodes
                else None,
            )
        return TritonPlan(decode, prefill, tables)

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        plan: Plan,
        *,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of one layer.

        Parameters
        ----------
        q
            [tokens, heads, head_dim].
        k_cache, v_cache
            [blocks, kv_heads, block_size, elements of a key or a value] of the layer; the keys of this step are already
            written.
        scale
            Factor on q . k.
        plan
            The plan of this batch.
        softcap
            Replaces each score s by softcap * tanh(s / softcap).
        sinks
            [heads] logits that are added to the denominator only.
        k_scale, v_scale
            [kv_heads] float32 factors of a float8_e4m3fn cache.
        out
            [tokens, heads, elements of a value] for the result; None allocates it.

        Returns
        -------
        [tokens, heads, elements of a value] in the dtype of q: `out` if it is given.
        """
        if not isinstance(plan, TritonPlan):
            return cpu_attention.paged_attention(
                q, k_cache, v_cache, None, None, None, scale,
                softcap=softcap, sinks=sinks, out=out, plan=plan,
            )  # fmt: skip
        from quire.kernels.attention.attention_decode import decode_attention
        from quire.kernels.attention.attention_prefill import prefill_attention

        if out is None:
            size = (*q.shape[:2], v_cache.shape[3])
            out = torch.empty(size, dtype=q.dtype, device=q.device)
        call = (q, k_cache, v_cache, plan.block_tables, scale)
        sinks = None if sinks is None else sinks.float()
        options = dict(softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out)
        if plan.prefill is not None:
            prefill_attention(*call, plan.prefill, **options)
        if plan.decode is not None:
            decode_attention(*call, plan.decode, **options)
        return out
