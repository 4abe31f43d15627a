"""Paged attention on the CPU in C, which reads the blocks in place: its plan and its call.

`native/attention_tile.h` describes the mathematics, the layout and why a row's bits do not depend on the batch;
`cpu_attention_work.py` describes how a batch is cut into work units.

Flops: 4 heads head_dim for each pair of a query and a key that it sees. Bytes: K and V once for each query tile; those
of a trunk (a prefix that several tiles share) once for all its branches. Scratch memory for each thread: 200 KiB, and
7 KiB more for each element of head_dim.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from quire.kernels.cpu import native_library
from quire.kernels.cpu.attention_span import first_key, query_rows
from quire.kernels.cpu.cpu_attention_work import (
    SPLIT_TOKENS,
    check_blocks,
    find_trunks,
    query_tiles,
    with_trunks,
    work_units,
)

MAX_ROWS = 256  # `MAX_ROWS` of native/attention.h
MAX_HEAD_DIM = 512  # `MAX_HEAD_DIM` of native/attention.h
UNIT_ROWS = 128  # most rows of a query tile without AMX (`_most_rows`)
_RUN_TOKENS = 8  # `RUN` of native/attention.h
ITEMS_PER_THREAD = 4  # long rows are split until there are this many items for each thread
MAX_PARTIAL_BYTES = 16 << 20  # memory of the results of splits, for one layer
LIMITS = (
    f"a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}, a block_size that is a multiple of {_RUN_TOKENS}, at "
    f"most {UNIT_ROWS} query heads a KV head, float32, float16 or bfloat16"
)
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _PlanPart(ctypes.Structure):
    """`struct attention_plan` of native/attention.h."""

    _fields_ = [
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("key_begin", ctypes.c_void_p),
        ("key_end", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("units", ctypes.c_void_p),
        ("num_tiles", ctypes.c_int64),
        ("num_units", ctypes.c_int64),
        ("partials", ctypes.c_void_p),
        ("missing", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_stride", ctypes.c_int64),
    ]


class AttentionCall(ctypes.Structure):
    """`struct attention_call` of native/attention.h."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("q_token_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_token_stride", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("plan", _PlanPart),
        ("dtype", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("item_heads", ctypes.c_int64),
        ("team", ctypes.c_void_p),
    ]

    @classmethod
    def of(
        cls,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        num_heads: int,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> AttentionCall:
        """Set the fields that are the same in all calls of a layer.

        `sinks` are [heads] float32. The caller keeps the caches and the sinks alive.
        """
        _, kv_heads, block_size, head_dim = k_cache.shape
        return cls(
            k=k_cache.data_ptr(),
            v=v_cache.data_ptr(),
            block_stride=k_cache.stride(0),
            sinks=None if sinks is None else sinks.data_ptr(),
            dtype=_DTYPES[k_cache.dtype],
            heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            scale=scale,
            softcap=softcap or 0.0,
        )


@dataclass(frozen=True, slots=True)
class NativePlan:
    """The work of one step, shared by all layers with the same blocks. `plan` makes it."""

    block_tables: np.ndarray  # [rows, max blocks] int64
    tokens: np.ndarray  # [tokens] int64, flat query tokens in the order of the tiles
    key_begin: np.ndarray  # [tokens] int64, first key that each of `tokens` sees
    key_end: np.ndarray  # [tokens] int64, one past the last key that each of `tokens` sees
    tiles: np.ndarray  # [query tiles, 7] int64, `struct query_tile`
    units: np.ndarray  # [units, 3] int64, `struct work_unit`
    partials: np.ndarray  # [partials, floats] float32, results of splits
    # [query tiles * kv_heads] int32, splits of a tile that are not yet computed
    missing: np.ndarray
    scratch: np.ndarray  # [threads, bytes] uint8
    cache_shape: torch.Size
    num_heads: int
    num_threads: int
    cu_q: np.ndarray  # argument of `plan`
    kv_len: np.ndarray  # argument of `plan`
    can_follow: bool  # whether `following` may derive the next plan: each row has one token and sees all keys
    part: _PlanPart = field(init=False, repr=False)  # addresses of the arrays above

    def __post_init__(self) -> None:
        part = _PlanPart(
            block_tables=self.block_tables.ctypes.data,
            table_stride=self.block_tables.shape[1],
            tokens=self.tokens.ctypes.data,
            key_begin=self.key_begin.ctypes.data,
            key_end=self.key_end.ctypes.data,
            tiles=self.tiles.ctypes.data,
            units=self.units.ctypes.data,
            num_tiles=len(self.tiles),
            num_units=len(self.units),
            partials=self.partials.ctypes.data,
            missing=self.missing.ctypes.data,
            scratch=-(-self.scratch.ctypes.data // 64) * 64,
            scratch_stride=self.scratch.strides[0],
        )
        object.__setattr__(self, "part", part)

    def check(self, num_tokens: int, num_heads: int, k_cache: torch.Tensor) -> None:
        """Raise ValueError unless the plan was made for this number of tokens and heads and this cache shape."""
        if (k_cache.shape, num_heads) != (self.cache_shape, self.num_heads) or num_tokens < len(
            self.key_end
        ):
            raise ValueError(
                f"plan: made for {len(self.key_end)} tokens of {self.num_heads} heads and a cache "
                f"{tuple(self.cache_shape)}, got {num_tokens} tokens of {num_heads} heads and k_cache "
                f"{tuple(k_cache.shape)}"
            )

    def following(
        self, cu_q: np.ndarray, kv_len: np.ndarray, block_tables: np.ndarray
    ) -> NativePlan | None:
        """Derive the plan of the next step if each row has one token more; return None for any other step.

        This serves nearly all steps that only decode. Tiles, trunks and units are kept. The new plan shares this plan's
        memory, so this plan must not be used afterwards. If no block table has changed, `plan` would return the same
        plan; otherwise it might find other trunks, which change no bit.

        Raises
        ------
        ValueError
            A block table is too short for its row, or has a block id outside the cache.
        """
        if (
            not self.can_follow
            or block_tables.shape != self.block_tables.shape
            or not np.array_equal(cu_q, self.cu_q)
            or not np.array_equal(kv_len, self.kv_len + 1)
            # A row begins a new split.
            or not (self.kv_len % SPLIT_TOKENS).all()
        ):
            return None
        tiles = self.tiles.copy()
        is_trunk = tiles[:, 6] > 0
        tiles[~is_trunk, 4] += 1
        num_blocks, _, block_size, _ = self.cache_shape
        is_same = np.array_equal(block_tables, self.block_tables)
        if not is_same and is_trunk.any():
            shared = tiles[is_trunk, 4].max() // block_size
            if not np.array_equal(block_tables[:, :shared], self.block_tables[:, :shared]):
                return None
        # The tables have changed, or a row begins a new block.
        if not is_same or not (self.kv_len % block_size).all():
            check_blocks(tiles, block_tables, block_size, num_blocks)
        return replace(
            self,
            block_tables=np.array(block_tables, np.int64, order="C"),
            key_end=self.key_end + 1,
            tiles=tiles,
            kv_len=np.array(kv_len),
        )


def supports(k_cache: torch.Tensor, num_heads: int) -> bool:
    """Whether the library is installed and supports this cache and number of query heads."""
    _, kv_heads, block_size, head_dim = k_cache.shape
    return (
        k_cache.device.type == "cpu"
        and k_cache.dtype in _DTYPES
        and fits(num_heads, kv_heads, head_dim, block_size)
        and native_library.load() is not None
    )


def fits(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Whether the library, installed or not, supports these shapes."""
    return (
        head_dim % 8 == 0
        and head_dim <= MAX_HEAD_DIM
        and block_size % _RUN_TOKENS == 0
        and num_heads // num_kv_heads <= UNIT_ROWS
    )


def workspace_bytes(num_threads: int, head_dim: int) -> int:
    """Upper bound of the memory that one layer's attention allocates, in bytes. Needs the library."""
    scratch_bytes = native_library.installed().functions.quire_scratch_bytes(head_dim)
    return num_threads * scratch_bytes + MAX_PARTIAL_BYTES


def plan(
    cu_q: np.ndarray,
    kv_len: np.ndarray,
    block_tables: np.ndarray,
    k_cache: torch.Tensor,
    num_heads: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
    before: NativePlan | None = None,
) -> NativePlan:
    """Cut a ragged batch into work units. The arguments are described at `cpu_attention.plan_attention`.

    The plan owns the scratch memory of its calls, or reuses the memory of `before`. So only one call may run at a time.

    Raises
    ------
    ValueError
        A block table is too short for its row, or has a block id outside the cache, so C would read outside the cache.
    """
    num_blocks, kv_heads, block_size, head_dim = k_cache.shape
    # Copy the tables: `following` compares with the tables that were checked, and the caller may change its array.
    block_tables = np.array(block_tables, np.int64, order="C")
    _, position = query_rows(cu_q, kv_len)
    key_begin, key_end = first_key(position, window, chunk), position + 1
    group_heads = num_heads // kv_heads
    library = native_library.installed()
    num_threads = torch.get_num_threads() if library.parallel else 1
    wanted_items = ITEMS_PER_THREAD * num_threads if num_threads > 1 else 0
    most_rows = _most_rows(library, k_cache.dtype)
    tiles = query_tiles(cu_q, key_begin, key_end, most_rows // group_heads)
    if most_rows > UNIT_ROWS and len(tiles) * kv_heads < wanted_items:
        most_rows = UNIT_ROWS
        tiles = query_tiles(cu_q, key_begin, key_end, most_rows // group_heads)
    check_blocks(tiles, block_tables, block_size, num_blocks)
    most_branches = len(tiles) * kv_heads // max(wanted_items, 1)
    trunks = find_trunks(
        tiles, key_begin, key_end, block_tables, block_size, most_rows // group_heads, most_branches
    )
    tokens = np.arange(len(key_end))
    if trunks:
        tiles, tokens = with_trunks(tiles, trunks)
        key_begin, key_end = key_begin[tokens], key_end[tokens]
    row_floats = library.functions.quire_partial_floats(head_dim)
    scratch_shape = (num_threads, library.functions.quire_scratch_bytes(head_dim) + 64)
    if before is not None and before.scratch.shape == scratch_shape:
        scratch = before.scratch
    else:
        scratch = np.empty(scratch_shape, np.uint8)
    units, num_partials = work_units(
        tiles, num_heads, kv_heads, wanted_items, MAX_PARTIAL_BYTES // (4 * row_floats)
    )
    return NativePlan(
        block_tables=block_tables,
        tokens=tokens,
        key_begin=key_begin,
        key_end=key_end,
        tiles=tiles,
        units=units,
        partials=np.empty((num_partials, row_floats), np.float32),
        missing=np.empty(len(tiles) * kv_heads, np.int32),
        scratch=scratch,
        cache_shape=k_cache.shape,
        num_heads=num_heads,
        num_threads=num_threads,
        cu_q=np.array(cu_q),
        kv_len=np.array(kv_len),
        can_follow=window is None and chunk is None and bool((np.diff(cu_q) == 1).all()),
    )


def _most_rows(library: native_library.NativeLibrary, dtype: torch.dtype) -> int:
    """Most rows of a query tile.

    A tile with more rows spreads the cost of packing keys. This pays with AMX, because its matrix products are so fast
    that packing is a large share of the time.
    """
    has_matrix_registers = library.best_isa == native_library.ISAS.index("amx_bf16")
    return MAX_ROWS if has_matrix_registers and dtype == torch.bfloat16 else UNIT_ROWS


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    plan: NativePlan,
    *,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    isa: str | None = None,
) -> None:
    """Run a plan. `cpu_attention.paged_attention` describes the arguments and has checked the tensors.

    Parameters
    ----------
    isa
        One of `native_library.ISAS` that this processor has, for tests and measurements; None: the best.

    Raises
    ------
    ValueError
        The plan was made for other shapes, or this processor lacks `isa`.
    """
    plan.check(len(q), q.shape[1], k_cache)
    library = native_library.installed()
    if q.stride(-1) != 1:
        q = q.contiguous()
    # C writes contiguous memory; a transposed or padded `out` is filled from it afterwards.
    dense = (
        out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    )
    if sinks is not None:
        sinks = sinks.detach().to(torch.float32).contiguous()
    call = AttentionCall.of(k_cache, v_cache, q.shape[1], scale, softcap, sinks)
    call.q, call.q_token_stride, call.q_head_stride = q.data_ptr(), q.stride(0), q.stride(1)
    call.out, call.out_token_stride, call.plan = dense.data_ptr(), dense.stride(0), plan.part
    library.functions.quire_attention(
        ctypes.byref(call), library.isa(isa), library.parallel, plan.num_threads
    )
    if dense is not out:
        out.copy_(dense)
