"""Paged attention in torch operations: ragged prefill and decode, with the same bits in any batch.

For a query at position p over keys 0..p (or the last `window` of these, or those in p's `chunk`)::

    s_j = scale * q . k_j      m = max_j s_j      o = sum_j exp(s_j - m) v_j / sum_j exp(s_j - m)

The sequence is cut into KV tiles at absolute multiples of `tile` tokens. A pair of a query tile and a KV tile is a
*job*: two matrix products of one fixed shape. Jobs are ordered by KV tile, and query tiles by falling number of KV
tiles. So the jobs of KV tile t are a contiguous run, for a prefix of the query tiles, and the reduction over KV tiles
is a short loop of additions to prefixes::

    query tile    A    B    C          jobs   A0 B0 C0 | A1 B1 | A2
    KV tiles      3    2    1          acc   [A  B  C] += jobs 0..2;  [A B] += jobs 3..4;  [A] += job 5

A row's result does not depend on the batch, for these reasons. The matrix products have a fixed shape, with a height
that is a multiple of four (for other heights MKL takes another kernel, with another order of additions). The maximum is
exact. The sums over tiles run in the order of the positions, and a tile that a query does not see adds an exact zero.
All other operations are element-wise. One property depends on the matrix library: whether a row has the same result in
a tile of `group` rows and in a tile of 64 rows. `choose_query_tokens` checks this on the machine. If it does not hold,
prefill uses the decode tiles, which is slower.

Flops: 4 heads head_dim for each query and each key of its tiles, more where rows are padded. Bytes: decode reads K
and V once, writes them to a gathered copy that fits the L2 cache (`_GATHER_BYTES`) and reads that; prefill does so once
for each query tile. KV heads are not repeated, and a mask covers one query tile at most. All arithmetic is float32;
bfloat16 and float16 blocks are widened after the gather.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.cpu.attention_span import first_key, query_rows

TILE_TOKENS = 128  # least tokens of a KV tile
PREFILL_ROWS = 64  # rows of a prefill query tile: query tokens x heads of a KV group
# Bytes of gathered K, and of gathered V, of one group of decode rows; they should stay in the L2 cache.
_GATHER_BYTES = 2 << 20
_HEIGHT_STEP = 4  # the height of every matrix product is a multiple of this


def is_part_of_keys(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether a value is the beginning of its key, in the same memory."""
    return k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride()


def tile_tokens(block_size: int) -> int:
    """Tokens of a KV tile: the least multiple of `block_size` that is at least `TILE_TOKENS`."""
    return -(-TILE_TOKENS // block_size) * block_size


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class _Group:
    """Q query tiles of q tokens that are computed together, and their J jobs."""

    token_index: torch.Tensor  # [Q * q] int64, flat query tokens; q > 1 only where Q = 1
    num_query_tiles: int
    num_tile_queries: tuple[int, ...]  # entry t: number of query tiles that have a KV tile t
    job_query: torch.Tensor  # [J] int64, query tile of each job
    kv_rows: torch.Tensor  # [J * kv_heads * blocks of a tile] int64, rows of the flat cache
    num_queries: int  # q
    edge: torch.Tensor  # [E] int64, jobs with a key that some query does not see
    # [E, 1 or height of the query tile, tile] bool, the unseen keys of the jobs in `edge`
    hidden: torch.Tensor
    blank_rows: torch.Tensor  # [B] int64, rows of V [J * kv_heads * tile, head_dim] without a key


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Index arithmetic of one step, shared by all layers with the same blocks. `plan` makes it."""

    groups: tuple[_Group, ...]
    tile: int
    num_kv_heads: int


@dataclass(frozen=True, slots=True)
class _Geometry:
    block_size: int
    num_kv_heads: int
    group_heads: int  # query heads of a KV head
    head_dim: int
    heads_stride: int  # distance between blocks, in rows of [block_size * head_dim]
    window: int | None
    chunk: int | None
    device: torch.device

    @property
    def tile(self) -> int:
        return tile_tokens(self.block_size)


def plan(
    cu_q: np.ndarray,
    kv_len: np.ndarray,
    block_tables: np.ndarray,
    k_cache: torch.Tensor,
    num_heads: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
    query_tokens: int | None = None,
) -> TorchPlan:
    """Plan the jobs of a ragged batch. The other arguments are described at `cpu_attention.plan_attention`.

    Parameters
    ----------
    query_tokens
        Query tokens of a prefill tile; None: as many as fill `PREFILL_ROWS` rows.
    """
    _, kv_heads, block_size, head_dim = k_cache.shape
    stride = k_cache.stride(0) // k_cache.stride(1)
    geometry = _Geometry(
        block_size, kv_heads, num_heads // kv_heads, head_dim, stride, window, chunk, k_cache.device
    )
    q_len = np.diff(cu_q)
    if query_tokens is None:
        query_tokens = default_query_tokens(num_heads // kv_heads)
    short = (q_len == 1) if query_tokens > 1 else (q_len >= 1)
    row, position = query_rows(cu_q, kv_len)
    decode = np.flatnonzero(np.repeat(short, q_len))
    groups = _decode_groups(geometry, decode, row, position, block_tables)
    for r in np.flatnonzero((q_len > 0) & ~short):
        for start in range(cu_q[r], cu_q[r + 1], query_tokens):
            tokens = np.arange(start, min(start + query_tokens, cu_q[r + 1]))
            table = block_tables[r : r + 1]
            groups.append(_group(geometry, tokens[None], position[tokens][None], table))
    return TorchPlan(tuple(groups), geometry.tile, kv_heads)


def default_query_tokens(group: int) -> int:
    """Query tokens of a full prefill tile, for `group` query heads of each KV head."""
    return max(PREFILL_ROWS // group, 2)


def _decode_groups(
    geometry: _Geometry,
    tokens: np.ndarray,
    row: np.ndarray,
    position: np.ndarray,
    block_tables: np.ndarray,
) -> list[_Group]:
    """Form groups of single query tokens, longest first, so that a group's gathered K fits `_GATHER_BYTES`."""
    if not len(tokens):
        return []
    first, last = _kv_tiles(geometry, position[tokens], position[tokens])
    num_tiles = last - first
    order = np.argsort(-num_tiles, kind="stable")
    tile_bytes = geometry.num_kv_heads * geometry.tile * geometry.head_dim * 4
    share = np.cumsum(num_tiles[order]) * tile_bytes // _GATHER_BYTES
    cuts = np.flatnonzero(np.diff(share)) + 1
    return [
        _group(geometry, part[:, None], position[part][:, None], block_tables[row[part]])
        for part in (tokens[chunk] for chunk in np.split(order, cuts))
    ]


def _kv_tiles(
    geometry: _Geometry, first_position: np.ndarray, last_position: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Half-open range of the KV tiles that queries at these positions see."""
    first_key = _first_key(geometry, first_position)
    return first_key // geometry.tile, last_position // geometry.tile + 1


def _first_key(geometry: _Geometry, position: np.ndarray) -> np.ndarray:
    """Position of the first key that a query at `position` sees."""
    return first_key(position, geometry.window, geometry.chunk)


def _group(
    geometry: _Geometry, tokens: np.ndarray, position: np.ndarray, block_tables: np.ndarray
) -> _Group:
    """Plan the jobs of the query tiles `tokens` [Q, q] at `position` [Q, q]; block_tables [Q, max blocks]."""
    tile, device = geometry.tile, geometry.device
    first, last = _kv_tiles(geometry, position[:, 0], position[:, -1])
    num_tiles = last - first
    counts = [int((num_tiles > t).sum()) for t in range(int(num_tiles.max()))]
    job_query = np.concatenate([np.arange(count) for count in counts])
    job_tile = np.repeat(np.arange(len(counts)), counts) + first[job_query]

    # Table entries outside a query tile's range may be invalid: gather its last block instead.
    per_tile = tile // geometry.block_size
    low, high = _first_key(geometry, position[:, 0]), position[:, -1]
    last_block = (high // geometry.block_size)[job_query, None]
    entry = job_tile[:, None] * per_tile + np.arange(per_tile)  # [J, blocks of a tile]
    foreign = (entry > last_block) | (entry < (low // geometry.block_size)[job_query, None])
    block = block_tables[job_query[:, None], np.where(foreign, last_block, entry)].astype(np.int64)
    head = np.arange(geometry.num_kv_heads)
    kv_rows = block[:, None, :] * geometry.heads_stride + head[:, None]  # [J, kv_heads, per_tile]

    key = job_tile[:, None] * tile + np.arange(tile)  # [J, tile]
    blank = key > high[job_query, None]
    blank |= key < low[job_query, None]
    blank_job, blank_offset = np.nonzero(blank)
    blank_rows = (blank_job * geometry.num_kv_heads)[:, None] + head
    edge, hidden = _hidden(geometry, key, position[job_query])

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return _Group(
        token_index=on_device(tokens.reshape(-1)),
        num_query_tiles=len(tokens),
        num_tile_queries=tuple(counts),
        job_query=on_device(job_query),
        kv_rows=on_device(kv_rows.reshape(-1)),
        num_queries=tokens.shape[1],
        edge=on_device(edge),
        hidden=on_device(hidden),
        blank_rows=on_device((blank_rows * tile + blank_offset[:, None]).reshape(-1)),
    )


def _hidden(
    geometry: _Geometry, key: np.ndarray, query: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the jobs with an unseen key, and these keys for each row of the query tile.

    `key` [J, tile] and `query` [J, q] are positions. Padding rows of a tile see the same keys as its last query.
    """
    seen_by_all = (key <= query[:, :1]) & (key >= _first_key(geometry, query[:, -1:]))
    edge = np.flatnonzero(~seen_by_all.all(1))
    if query.shape[1] > 1:
        rows = np.repeat(query[edge], geometry.group_heads, axis=1)
        padding = tile_height(query.shape[1], geometry.group_heads) - rows.shape[1]
        query = np.pad(rows, ((0, 0), (0, padding)), mode="edge")
    else:
        query = query[edge]
    key, query = key[edge, None, :], query[:, :, None]
    return edge, (key > query) | (key < _first_key(geometry, query))


def tile_height(num_queries: int, group_heads: int) -> int:
    """Rows of a query tile, padding included: the height of its matrix products."""
    return _round_up(num_queries * group_heads, _HEIGHT_STEP if num_queries == 1 else PREFILL_ROWS)


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    plan: TorchPlan,
    *,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Run a plan. `cpu_attention.paged_attention` describes the arguments and has checked the tensors."""
    group_heads = q.shape[1] // plan.num_kv_heads
    q_scaled = q.float() * scale
    if sinks is not None:
        sinks = sinks.float().view(plan.num_kv_heads, group_heads)
    # All groups share one buffer: new memory would cost a page fault every 4 KiB.
    rows = max((len(group.kv_rows) for group in plan.groups), default=0)
    k_buffer, v_buffer = (
        q.new_empty(rows, cache.shape[2] * cache.shape[3]) for cache in (k_cache, v_cache)
    )
    is_part = is_part_of_keys(k_cache, v_cache)
    # Rows of the flat cache from one block to the next.
    k_stride, v_stride = (cache.stride(0) // cache.stride(1) for cache in (k_cache, v_cache))
    for group in plan.groups:
        k = v = _gather(k_cache, group.kv_rows, plan.tile, k_buffer)
        if not is_part:
            v_rows = group.kv_rows
            if v_stride != k_stride:
                v_rows = v_rows // k_stride * v_stride + v_rows % k_stride
            v = _gather(v_cache, v_rows, plan.tile, v_buffer)
        # Slots without a key may hold NaN, which would survive a weight of 0.
        v.view(-1, v.shape[-1]).index_fill_(0, group.blank_rows, 0.0)
        queries = q_scaled.index_select(0, group.token_index)
        result = _attend(queries, k, v[..., : v_cache.shape[3]], group, softcap, sinks)
        out.index_copy_(0, group.token_index, result.to(out.dtype))


def _gather(
    cache: torch.Tensor, kv_rows: torch.Tensor, tile: int, buffer: torch.Tensor
) -> torch.Tensor:
    """Gather the KV tiles of a group's jobs: [J, kv_heads, tile, head_dim] float32."""
    blocks, kv_heads, block_size, head_dim = cache.shape
    page = block_size * head_dim
    stride = cache.stride(0) // page
    rows = cache.as_strided(((blocks - 1) * stride + kv_heads, page), (page, 1))
    tiles = torch.index_select(rows, 0, kv_rows, out=buffer[: len(kv_rows)])
    return tiles.float().view(-1, kv_heads, tile, head_dim)


def _attend(
    queries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: _Group,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute scores, softmax and weighted sums of one group.

    Parameters
    ----------
    queries
        [Q * q, heads, head_dim] float32, scaled.
    k, v
        [J, kv_heads, tile, head_dim] float32; values may have another size.

    Returns
    -------
    [Q * q, heads, elements of a value] float32.
    """
    jobs, kv_heads, tile, head_dim = k.shape
    num_tiles, num_queries = group.num_query_tiles, group.num_queries
    group_heads = queries.shape[1] // kv_heads
    used = num_queries * group_heads
    height = tile_height(num_queries, group_heads)

    padded = queries.new_zeros(num_tiles, kv_heads, height, head_dim)
    by_head = queries.view(num_tiles, num_queries, kv_heads, group_heads, head_dim).transpose(1, 2)
    padded[:, :, :used] = by_head.reshape(num_tiles, kv_heads, used, head_dim)
    q_jobs = padded.index_select(0, group.job_query).view(jobs * kv_heads, height, head_dim)
    scores = torch.bmm(q_jobs, k.view(jobs * kv_heads, tile, head_dim).transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(jobs, kv_heads, height, tile)
    scores.index_copy_(
        0,
        group.edge,
        scores.index_select(0, group.edge).masked_fill_(group.hidden[:, None], float("-inf")),
    )

    # Maximum of each row, [Q, kv_heads, height].
    top = _over_tiles(scores.amax(-1), group.num_tile_queries, torch.maximum)
    if sinks is not None:
        sink_rows = _sink_rows(sinks, num_queries, height)
        top = torch.maximum(top, sink_rows)
    weights = scores.sub_(top.index_select(0, group.job_query)[..., None]).exp_()
    total = _over_tiles(weights.sum(-1), group.num_tile_queries, torch.add)
    if sinks is not None:
        total = total + torch.exp(sink_rows - top)
    value_dim = v.shape[-1]
    product = torch.bmm(weights.view(jobs * kv_heads, height, tile), v.flatten(0, 1))
    mixed = _over_tiles(
        product.view(jobs, kv_heads, height, value_dim), group.num_tile_queries, torch.add
    )
    mixed = (mixed[:, :, :used] / total[:, :, :used, None]).view(
        num_tiles, kv_heads, num_queries, group_heads, value_dim
    )
    return mixed.transpose(1, 2).reshape(num_tiles * num_queries, kv_heads * group_heads, value_dim)


def _over_tiles(values: torch.Tensor, num_tile_queries: tuple[int, ...], combine) -> torch.Tensor:
    """Reduce [J, ...] over the KV tiles of each query tile, in tile order: [Q, ...]."""
    start = num_tile_queries[0]
    result = values[:start].clone()
    for count in num_tile_queries[1:]:
        prefix = result[:count]
        combine(prefix, values[start : start + count], out=prefix)
        start += count
    return result


def _sink_rows(sinks: torch.Tensor, num_queries: int, height: int) -> torch.Tensor:
    """The sink of each row of a query tile, [kv_heads, height]; padding rows take the first row's sink."""
    rows = sinks.repeat(1, num_queries)
    padding = rows[:, :1].expand(-1, height - rows.shape[1])
    return torch.cat([rows, padding], dim=1)


@functools.cache
def choose_query_tokens(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, value_dim: int | None = None
) -> int:
    """Query tokens of a prefill tile for which float32 results have the bits of decode tiles on this machine.

    The default is tested with random data, which is enough because the matrix library chooses its kernel by shapes, not
    by values. If the bits differ, the function returns 1: prefill then uses the decode tiles.
    """
    candidate = default_query_tokens(num_heads // num_kv_heads)
    tile = tile_tokens(block_size)
    length = 2 * tile + candidate + 3
    blocks = -(-length // block_size)
    random = torch.Generator().manual_seed(0)
    k_cache, v_cache = (
        torch.randn(blocks, num_kv_heads, block_size, size, generator=random)
        for size in (head_dim, value_dim or head_dim)
    )
    q = torch.randn(length, num_heads, head_dim, generator=random)
    table = np.arange(blocks)[None]

    def run(cu_q: list[int], kv_len: list[int], first: int, query_tokens: int) -> torch.Tensor:
        tables = np.repeat(table, len(kv_len), axis=0)
        work = plan(
            np.array(cu_q), np.array(kv_len), tables, k_cache, num_heads, query_tokens=query_tokens
        )
        out = torch.empty(len(q) - first, num_heads, value_dim or head_dim)
        options = dict(softcap=None, sinks=None, out=out)
        attend(q[first:], k_cache, v_cache, head_dim**-0.5, work, **options)
        return out

    whole = run([0, length], [length], 0, candidate)
    decode = run(list(range(length + 1)), list(range(1, length + 1)), 0, candidate)
    alone = run([0, 1], [length], length - 1, candidate)
    equal = torch.equal(whole, decode) and torch.equal(whole[-1:], alone)
    return candidate if equal else 1
