"""One call of an attention kernel: its operands and options, checked, in the form in which the kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
import triton

from quire.kernels import checks
from quire.kernels.attention_tile import cache_operands, score_scale


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads, and which keys a query sees: what a plan and the call that uses it agree on.

    Raises
    ------
    ValueError
        A number outside its bounds, or both a window and a chunk.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # keys that a query sees, itself included
    chunk: int | None = None  # size of local attention's chunks

    def __post_init__(self) -> None:
        checks.check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        checks.check_local(self.window, self.chunk)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    def constants(self) -> dict[str, int]:
        """Compile-time arguments of the decode and prefill kernels."""
        return dict(
            KV_HEADS=self.num_kv_heads,
            GROUP=self.group,
            HEAD_DIM=self.head_dim,
            HEAD_PAD=triton.next_power_of_2(self.head_dim),
            WINDOW=self.window or 0,
            CHUNK=self.chunk or 0,
        )


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of `decode_attention` and `prefill_attention`, all optional."""

    softcap: float | None  # s becomes softcap * tanh(s / softcap)
    sinks: torch.Tensor | None  # [heads] float32 logits that join the denominator only
    k_scale: torch.Tensor | None  # [kv_heads] float32 factor of a float8_e4m3fn cache
    v_scale: torch.Tensor | None  # as k_scale, and given with it
    out: torch.Tensor | None  # [tokens, heads, head_dim] as q; allocated (uninitialised) where None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Operands of one launch; `prepare_call` makes it."""

    out: torch.Tensor  # [tokens, heads, head_dim]
    q: torch.Tensor  # [tokens, heads, head_dim]
    k_cache: torch.Tensor  # [num_blocks, kv_heads, block_size, head_dim]
    v_cache: torch.Tensor
    block_tables: torch.Tensor  # [>= rows, max_blocks] int32
    sinks: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    qk_scale: float  # `quire.kernels.attention_tile.score_scale`
    softcap: float  # 0: none
    fp8: int  # how an element of the cache becomes an operand

    def strides(self) -> tuple[int, ...]:
        """Of q, out, the block tables, and a block and a head of the caches, in elements."""
        tensors = (self.q, self.out, self.block_tables)
        return *(x.stride(0) for x in tensors), *self.k_cache.stride()[:2]

    def constants(self, shape: AttentionShape) -> dict[str, int | float]:
        """Compile-time arguments of the decode and prefill kernels."""
        own = dict(BLOCK_SIZE=self.k_cache.shape[2], SOFTCAP=self.softcap, FP8=self.fp8)
        return shape.constants() | own


def prepare_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    shape: AttentionShape,
    kv_len: torch.Tensor,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> AttentionCall:
    """Check a call against the plan it was made for.

    Parameters
    ----------
    q
        [tokens, heads, head_dim] bfloat16, float16 or float32; tokens may be strided.
    k_cache, v_cache
        [num_blocks, kv_heads, block_size, head_dim] in the dtype of q or float8_e4m3fn, pages contiguous. The
        keys of this step are already written. Slots that hold no key may hold anything.
    block_tables
        [>= rows, max_blocks] int32; entries without a key that the row sees are not read.
    scale
        Factor on q.k, > 0.
    shape, kv_len
        Of the plan; kv_len [rows] int32.
    softcap, sinks, k_scale, v_scale, out
        `AttentionOptions`.

    Raises
    ------
    ValueError
        A shape, dtype, stride, device or option that does not fit, with its bound.
    """
    checks.check_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        kv_len.shape[0],
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
    )
    checks.check_options(q, k_cache, scale, softcap, sinks, k_scale, v_scale)
    checks.check_device("plan", kv_len, q.device)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    checks.check_out(out, q)
    k_cache, v_cache, fp8 = cache_operands(k_cache, v_cache)
    return AttentionCall(
        out=out,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=block_tables,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        qk_scale=score_scale(scale, softcap),
        softcap=softcap or 0.0,
        fp8=fp8,
    )
