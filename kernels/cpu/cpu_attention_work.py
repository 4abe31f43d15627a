"""Cuts a ragged batch of paged attention into work units, once per step for all layers with the same blocks.

    query tile   tokens of one row that share packed keys; with the heads of a KV group at most 128 or 256 rows
    trunk        the tokens of several tiles whose rows share their first blocks (a cascade): these keys are read once
                 for all tiles; then each tile continues alone, as a branch, from the state that the trunk has reached
    work unit    a query tile, or a trunk with its branches, with all their keys. If there are too few units for the
                 threads, a tile is cut into units of one split (512 keys), and their partial results are merged
    item         a work unit and one KV head, or several heads where the keys are not packed; threads take items, the
                 most expensive first, until none is left

How the work is cut changes no bit of the result. A tile is a row of seven int64: first token, number of tokens, row of
the batch, first key, last key + 1, first partial (-1: not split), number of branches (0: not a trunk).
"""

from __future__ import annotations

import numpy as np

TILE_TOKENS = 128  # `TILE` of native/attention.h
SPLIT_TOKENS = 512  # `SPLIT` of native/attention.h


def query_tiles(
    cu_q: np.ndarray, key_begin: np.ndarray, key_end: np.ndarray, tile_tokens: int
) -> np.ndarray:
    """Cut the rows into tiles of at most `tile_tokens` tokens: [query tiles, 7] int64, unsplit and without trunks."""
    q_len = np.diff(cu_q)
    num_tiles = -(-q_len // tile_tokens)
    row = np.repeat(np.arange(len(q_len)), num_tiles)
    number = np.arange(len(row)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    first = cu_q[row] + number * tile_tokens
    last = np.minimum(first + tile_tokens, cu_q[row + 1]) - 1
    tiles = np.empty((len(row), 7), np.int64)
    tiles[:, 0], tiles[:, 1], tiles[:, 2] = first, last - first + 1, row
    tiles[:, 3], tiles[:, 4] = key_begin[first], key_end[last]
    tiles[:, 5], tiles[:, 6] = -1, 0
    return tiles


def find_trunks(
    tiles: np.ndarray,
    key_begin: np.ndarray,
    key_end: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    most_tokens: int,
    most_branches: int,
) -> list[tuple[int, list[int]]]:
    """Find tiles that can read a prefix together: (number of keys, indices of the tiles) of each trunk.

    The tiles are sorted so that tiles with long shared prefixes are neighbours. A trunk takes the next tile if the
    larger trunk saves more reads of keys in total, although its common prefix may be shorter.
    """
    if len(tiles) < 2:
        return []
    # Consider only tiles that see their row from its first key, because with a window the first key differs between
    # rows. Each token of a branch must see all keys of the trunk and at least one more.
    seen = key_end[tiles[:, 0]] - 1
    from_begin = key_begin[tiles[:, 0] + tiles[:, 1] - 1] == 0
    whole = np.flatnonzero(from_begin & (seen >= TILE_TOKENS))
    if most_branches < 2 or len(whole) < 2:
        return []
    tables = block_tables[tiles[whole, 2]]
    if len(set(tables[:, 0].tolist())) == len(whole):
        return []
    columns = [tables[:, 0]]
    while 1 << (len(columns) - 1) < tables.shape[1]:
        columns.append(tables[:, 1 << (len(columns) - 1)])
    order = np.lexsort(columns[::-1])
    whole, tables = whole[order], tables[order]
    same = np.logical_and.accumulate(tables[1:] == tables[:-1], axis=1).sum(axis=1) * block_size
    seen = seen[whole]
    shared = np.minimum(same, np.minimum(seen[1:], seen[:-1])) // TILE_TOKENS * TILE_TOKENS
    trunks, members, keys, room = [], [int(whole[0])], 0, most_tokens - int(tiles[whole[0], 1])
    for number, common in zip(whole[1:].tolist(), shared.tolist(), strict=True):
        count, tokens = len(members), int(tiles[number, 1])
        longer = min(keys, common) if count > 1 else common
        if count < most_branches and tokens <= room and longer * count > keys * (count - 1):
            members.append(number)
            keys, room = longer, room - tokens
            continue
        if count > 1:
            trunks.append((keys, members))
        members, keys, room = [number], 0, most_tokens - tokens
    if len(members) > 1:
        trunks.append((keys, members))
    return trunks


def with_trunks(
    tiles: np.ndarray, trunks: list[tuple[int, list[int]]]
) -> tuple[np.ndarray, np.ndarray]:
    """Put a trunk before each group of branches; return the tiles and the flat tokens in the order of the tiles."""
    is_branch = np.zeros(len(tiles), bool)
    parts = []
    for keys, members in trunks:
        is_branch[members] = True
        branches = tiles[members]
        trunk = branches[:1].copy()
        trunk[0, 1], trunk[0, 4], trunk[0, 6] = 0, keys, len(members)
        parts += [trunk, branches]
    tiles = np.concatenate([*parts, tiles[~is_branch]])
    counts, first = tiles[:, 1], tiles[:, 0]
    begins = np.cumsum(counts) - counts
    tokens = np.arange(counts.sum()) + np.repeat(first - begins, counts)
    tiles[:, 0] = begins
    at = 0
    for _, members in trunks:
        tiles[at, 1] = tiles[at + 1 : at + 1 + len(members), 1].sum()
        at += 1 + len(members)
    return tiles, tokens


def work_units(
    tiles: np.ndarray, num_heads: int, kv_heads: int, wanted_items: int, max_partials: int
) -> tuple[np.ndarray, int]:
    """Split the tiles with the most keys until there are `wanted_items` items or `max_partials` partials.

    A partial is the result of one query token, head and split. Writes the first partial of each split tile into
    `tiles`. Returns the units, [units, 3] int64 (tile, first split, end of splits), the most expensive first, and the
    number of partials.
    """
    tokens, begin, end, branches = tiles[:, 1], tiles[:, 3], tiles[:, 4], tiles[:, 6]
    cost = (end - begin) * tokens
    is_unit = np.ones(len(tiles), bool)
    for trunk in np.flatnonzero(branches).tolist():
        own = slice(trunk + 1, trunk + 1 + branches[trunk])
        is_unit[own] = False
        cost[trunk] = cost[own].sum()
    split_begin, split_end = begin // SPLIT_TOKENS, -(-end // SPLIT_TOKENS)
    num_splits = np.maximum(split_end - split_begin, 0)
    is_split = np.zeros(len(tiles), bool)
    num_partials, num_items = 0, int(is_unit.sum()) * kv_heads
    # With trunks nothing is split: `find_trunks` limits branches so that enough items remain.
    for t in np.argsort(begin - end, kind="stable") if num_items < wanted_items else ():
        if num_splits[t] < 2 or num_items >= wanted_items:
            break
        own_partials = int(tokens[t] * num_heads * num_splits[t])
        if num_partials + own_partials <= max_partials:
            is_split[t] = True
            tiles[t, 5] = num_partials
            num_partials += own_partials
            num_items += int(num_splits[t] - 1) * kv_heads
    tile = np.repeat(np.arange(len(tiles)), np.where(is_split, num_splits, is_unit))
    number = np.arange(len(tile)) - np.searchsorted(tile, tile)
    first = split_begin[tile] + number
    last = np.where(is_split[tile], first + 1, split_end[tile])
    keys = np.minimum(last * SPLIT_TOKENS, end[tile]) - np.maximum(
        first * SPLIT_TOKENS, begin[tile]
    )
    cost = np.where(is_split[tile], keys * tokens[tile], cost[tile])
    order = np.argsort(-cost, kind="stable")
    return np.stack([tile, first, last], axis=1)[order].astype(np.int64), num_partials


def check_blocks(
    tiles: np.ndarray, block_tables: np.ndarray, block_size: int, num_blocks: int
) -> None:
    """Raise ValueError unless every block that a tile reads is in its row's table and in the cache."""
    tiles = tiles[tiles[:, 4] > tiles[:, 3]]
    first, last = tiles[:, 3] // block_size, (tiles[:, 4] - 1) // block_size
    columns = np.arange(block_tables.shape[1])
    if len(tiles) and last.max() >= len(columns):
        worst = int(last.argmax())
        raise ValueError(
            f"block_tables: row {tiles[worst, 2]} needs {last[worst] + 1} blocks for {tiles[worst, 4]} tokens, "
            f"the table has {len(columns)} columns"
        )
    blocks = block_tables[tiles[:, 2]]
    wrong = (columns >= first[:, None]) & (columns <= last[:, None])
    wrong &= (blocks < 0) | (blocks >= num_blocks)
    if wrong.any():
        tile, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"block_tables: row {tiles[tile, 2]}, column {column} must be between 0 and {num_blocks - 1}, "
            f"got {blocks[tile, column]}"
        )
