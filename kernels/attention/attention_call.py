"""Checks of a decode or prefill attention call, and its launch arguments.

::

    decode_attention ──┐                                      ┌─▶ operands (FP8 caches viewed as bytes where needed)
                       ├─▶ prepare_call ─▶ checks, memoised ──┤
    prefill_attention ─┘                   by TensorMeta      └─▶ strides, compile-time constants
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypedDict

import torch
import triton

from quire.kernels import argument_checks
from quire.kernels.attention import attention_checks
from quire.kernels.attention.attention_math import FP8_BITS, fp8_mode, score_scale
from quire.kernels.tensor_meta import CACHED_CHECKS, TensorMeta, meta_of


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of the layers, and the keys that a query sees. A plan and its attention calls share it.

    Raises
    ------
    ValueError
        A number outside its bounds, both a window and a chunk, or values in keys that are not smaller than a key.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # keys that a query sees, its own included
    chunk: int | None = None  # tokens of a chunk of chunked local attention
    value_dim: int | None = None  # elements of a value; None: as many as a key has
    values_in_keys: bool = False  # a value is the beginning of its key (latent attention)

    def __post_init__(self) -> None:
        argument_checks.check_group(self.num_heads, self.num_kv_heads)
        attention_checks.check_sizes(self.head_dim, self.value_size, self.values_in_keys)
        attention_checks.check_local(self.window, self.chunk)

    @property
    def value_size(self) -> int:
        """Elements of a value."""
        return self.value_dim or self.head_dim

    @property
    def largest_dim(self) -> int:
        """Elements of a key or of a value, whichever has more: the size by which configurations are chosen."""
        return max(self.head_dim, self.value_size)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def tile_heads(self) -> int:
        """Heads of a group that share a tile; a larger group is several tiles, each of which reads the keys."""
        return min(self.group, attention_checks.TILE_HEADS)

    @property
    def group_tiles(self) -> int:
        """Tiles for the heads of a group."""
        return -(-self.group // self.tile_heads)

    @property
    def group_pad(self) -> int:
        """Lanes of a decode tile for its heads of a group, a power of two."""
        return 1 << (self.tile_heads - 1).bit_length()

    @property
    def key_part(self) -> int:
        """Elements of a key's first tile; the others, if any, are a second tile.

        Keys that contain their values are cut behind the value. Other keys are cut where padding them to one tile would
        need more memory than the two.
        """
        if self.values_in_keys:
            return self.value_size
        if self.value_size == self.head_dim:
            return self.head_dim
        lower = 1 << (self.head_dim.bit_length() - 1)
        is_cut = lower >= 16 and lower + _padded(self.head_dim - lower) < _padded(self.head_dim)
        return lower if is_cut else self.head_dim

    def constants(self) -> dict[str, int]:
        """Compile-time arguments of the decode and prefill kernels."""
        rest = self.head_dim - self.key_part
        return dict(
            KV_HEADS=self.num_kv_heads,
            GROUP=self.group,
            TILE_HEADS=self.tile_heads,
            HEAD_DIM=self.head_dim,
            KEY_PART=self.key_part,
            KEY_PAD=_padded(self.key_part),
            REST_PAD=_padded(rest) if rest else 0,
            VALUE_DIM=self.value_size,
            VALUE_PAD=_padded(self.value_size),
            WINDOW=self.window or 0,
            CHUNK=self.chunk or 0,
        )


def _padded(elements: int) -> int:
    """Width of a tile for that many elements of a key or a value: a power of two that a matrix instruction takes."""
    return max(16, triton.next_power_of_2(elements))


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of `decode_attention` and `prefill_attention`, all optional."""

    softcap: float | None  # s becomes softcap * tanh(s / softcap)
    sinks: torch.Tensor | None  # [heads] float32 logits that join the denominator only
    k_scale: torch.Tensor | None  # [kv_heads] float32 factor of a float8_e4m3fn cache
    v_scale: torch.Tensor | None  # the same for the values; both scales are given or neither
    out: (
        torch.Tensor | None
    )  # [tokens, heads, elements of a value] in the dtype of q; None: a new tensor, uninitialised


@dataclass(frozen=True, slots=True)
class LaunchArguments:
    """The launch arguments that depend on shapes, strides and dtypes alone."""

    # In elements: between tokens of q and of out, between rows of the block tables, between blocks of the caches,
    # between heads of the keys and of the values.
    strides: tuple[int, ...]
    constants: dict[str, int | float]  # compile-time arguments of the decode and prefill kernels


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Checked operands of one launch, made by `prepare_call`."""

    out: torch.Tensor  # [tokens, heads, elements of a value]
    q: torch.Tensor  # [tokens, heads, head_dim]
    k_cache: torch.Tensor  # [num_blocks, kv_heads, block_size, head_dim]
    v_cache: torch.Tensor | None  # [..., elements of a value]; None: the keys have the values
    block_tables: torch.Tensor  # [>= rows, max_blocks] int32
    sinks: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    qk_scale: float  # factor on q.k in base 2, from `attention_math.score_scale`
    launch: LaunchArguments


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
    """Check an attention call against its plan and prepare the launch.

    Parameters
    ----------
    q
        [tokens, heads, head_dim] bfloat16, float16 or float32; tokens may be strided.
    k_cache, v_cache
        [num_blocks, kv_heads, block_size, head_dim or elements of a value] in the dtype of q or float8_e4m3fn. The
        tokens of one block and head are contiguous. The keys of this step are already written. Slots without a key may
        hold any value. With `values_in_keys`, `v_cache` is a view of the first elements of `k_cache`.
    block_tables
        [>= rows, max_blocks] int32. Only entries of blocks with a key that the row sees are read.
    scale
        Factor on q.k, > 0.
    shape, kv_len
        Heads and window of the plan, and its kv_len, [rows] int32.
    softcap, sinks, k_scale, v_scale, out
        Options of attention and the output tensor; `AttentionOptions` has shapes and dtypes.

    Raises
    ------
    ValueError
        A shape, dtype, stride, device or option is not supported; the message has the bound.
    """
    if out is None:
        out = torch.empty(*q.shape[:2], shape.value_size, dtype=q.dtype, device=q.device)
    operands = (q, k_cache, v_cache, block_tables, sinks, k_scale, v_scale, out, kv_len)
    launch = _checked(shape, scale, softcap, *map(meta_of, operands))
    if launch.constants["FP8"] == FP8_BITS:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    qk_scale = score_scale(scale, softcap)
    values = None if shape.values_in_keys else v_cache
    return AttentionCall(
        out, q, k_cache, values, block_tables, sinks, k_scale, v_scale, qk_scale, launch
    )


@functools.lru_cache(CACHED_CHECKS)
def _checked(
    shape: AttentionShape,
    scale: float,
    softcap: float | None,
    q: TensorMeta,
    k_cache: TensorMeta,
    v_cache: TensorMeta,
    block_tables: TensorMeta,
    sinks: TensorMeta | None,
    k_scale: TensorMeta | None,
    v_scale: TensorMeta | None,
    out: TensorMeta,
    kv_len: TensorMeta,
) -> LaunchArguments:
    """Check the operands against the plan's shape; return the launch arguments that follow from them."""
    attention_checks.check_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        kv_len.shape[0],
        (shape.num_heads, shape.num_kv_heads),
        (shape.head_dim, shape.value_size),
        values_in_keys=shape.values_in_keys,
    )
    attention_checks.check_options(q, k_cache, scale, softcap, sinks, k_scale, v_scale)
    argument_checks.check_device("plan", kv_len, q.device)
    attention_checks.check_out(out, q, shape.value_size)
    strides = (
        *(x.stride(0) for x in (q, out, block_tables)),
        *k_cache.strides[:2],
        v_cache.stride(1),
    )
    own = dict(
        BLOCK_SIZE=k_cache.shape[2],
        SOFTCAP=softcap or 0.0,
        FP8=fp8_mode(k_cache.dtype, k_cache.device),
    )
    return LaunchArguments(strides, shape.constants() | own)
