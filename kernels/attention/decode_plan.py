"""Work lists of decode attention, built on the device: no host synchronisation, usable in CUDA graphs.

One launch per step serves all layers with the same window. A *decode* row has one query token
(``cu_q[i + 1] - cu_q[i] == 1``); `quire.kernels.attention.prefill_plan` lists the others. Keys are cut at absolute
multiples of SPLIT tokens, so a row's splits, and its bits, depend on the row alone::

    kv_len      700                  200            1300, window 400      (SPLIT 256)
    splits      0 | 1 | 2            0              3 | 4 | 5
    items       (0,0) (0,1) (0,2)    (1,0..0)       (2,3) (2,4) (2,5)      (row, split)
    partials    slots 0  1  2        none           slots 3  4  5

A row with one split needs no merge: its item writes the output. If too few slots are left for a row's splits, one
program per KV head computes them all, with the same arithmetic as the merge. So the workspace has a fixed size, however
long the rows are. Such rows come first in the list, because their items take longest.

Shared prefixes. Two rows belong to one class at a split if their block tables are equal up to the end of that split.
Each run of up to `item_rows` rows of a class reads the split once. The first row of a run, its leader, lists the item.
Each row's program reads from the tables alone which runs its row leads. A class may branch at every split::

    tables    r0  a b c d . .        splits    0         1         2       (two blocks a split, 2 rows an item)
              r1  a b c d . .        items     (r0,r1)   (r0,r1)   (r0) (r1)
              r2  a b e f . .                  (r2,r3)   (r2)      (r2)
              r3  a b g .                                (r3)

Bytes: 8 for each item and 4 for each row that it may hold, read once. Each planner program reads the lengths of all
rows (8 B each, from L2) and, to find shared splits, one table entry of each row that may share the next split.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl

from quire.kernels import argument_checks
from quire.kernels.attention import attention_checks
from quire.kernels.attention.attention_call import AttentionShape
from quire.kernels.attention.attention_math import split_range
from quire.kernels.tuning import DecodeConfig, decode_config, device_arch, launch_options

MAX_ROWS = 4096  # each planner program holds the lengths of all rows


@triton.jit
def _decode_rows(
    cu_q_ptr, kv_len_ptr, num_rows, max_slots,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """For all rows [BLOCK_ROWS]: first split, number of splits, first slot, has slots, is an empty decode row."""
    row = tl.arange(0, BLOCK_ROWS)
    valid = row < num_rows
    q_len = tl.load(cu_q_ptr + row + 1, mask=valid, other=0) - tl.load(
        cu_q_ptr + row, mask=valid, other=0
    )
    decodes = valid & (q_len == 1)
    kv_len = tl.load(kv_len_ptr + row, mask=decodes, other=0)
    first, splits = split_range(kv_len, SPLIT, WINDOW, CHUNK)
    splits = tl.where(kv_len > 0, splits, 0)
    slots = tl.where(splits > 1, splits, 0)
    base = tl.cumsum(slots, 0) - slots
    has_slots = (splits > 1) & (base + slots <= max_slots)
    return first, splits, base, has_slots, decodes & (kv_len == 0)


@triton.jit(
    do_not_specialize=["num_rows", "max_slots", "stride_table"],
    do_not_specialize_on_alignment=["tables_ptr"],
)
def _find_runs_kernel(
    runs_ptr, num_shared_ptr, num_led_ptr,
    cu_q_ptr, kv_len_ptr, tables_ptr, num_rows, max_slots, stride_table,
    ITEM_ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Find the splits that row i = program_id shares with other rows, and write the runs that it leads.

    Writes `num_shared` (splits that row i shares), `num_led` (shared splits where row i leads the run) and, at each
    of its slots, [ITEM_ROWS] rows of the run, -1 for none. The first entry is -1 where another row is the leader.
    """
    BLOCKS: tl.constexpr = (SPLIT + BLOCK_SIZE - 1) // BLOCK_SIZE
    here = tl.program_id(0)
    row = tl.arange(0, BLOCK_ROWS)
    _, splits, base, has_slots, _ = _decode_rows(
        cu_q_ptr, kv_len_ptr, num_rows, max_slots, SPLIT, 0, 0, BLOCK_ROWS
    )
    mine = (row == here) & has_slots
    my_splits = tl.sum(tl.where(mine, splits, 0), 0)
    my_base = tl.sum(tl.where(mine, base, 0), 0)
    table_ptr = tables_ptr + tl.cast(here, tl.int64) * stride_table
    row_table_ptr = tables_ptr + row.to(tl.int64) * stride_table
    place = tl.arange(0, ITEM_ROWS)
    # 1 for each row in the same class as row i at the splits before `depth`.
    same = has_slots.to(tl.int32)
    num_same = tl.sum(same, 0)
    depth = 0
    led = 0
    # The last split is never shared: the row still appends keys to it.
    while (num_same > 1) & (depth + 1 < my_splits):
        block = depth * SPLIT // BLOCK_SIZE
        # Compare the split's last block first: if no row shares it, no other entry is read.
        longer = (same > 0) & (splits > depth + 1)
        other = tl.load(row_table_ptr + block + (BLOCKS - 1), mask=longer, other=0)
        candidates = longer & (other == tl.load(table_ptr + block + (BLOCKS - 1)))
        same = candidates.to(tl.int32)
        if tl.sum(same, 0) > 1:
            for i in tl.static_range(BLOCKS - 1):
                other = tl.load(row_table_ptr + block + i, mask=candidates, other=0)
                same = tl.where(other == tl.load(table_ptr + block + i), same, 0)
        num_same = tl.sum(same, 0)
        if num_same > 1:
            my_rank = tl.sum(tl.where(row < here, same, 0), 0)
            run_ptr = runs_ptr + (my_base + depth) * ITEM_ROWS
            leads = (my_rank % ITEM_ROWS == 0).to(tl.int32)
            offset = tl.cumsum(same, 0) - 1 - my_rank
            held = (same > 0) & (offset >= 0) & (offset < leads * ITEM_ROWS)
            tl.store(run_ptr + offset, row, mask=held)
            none = place >= leads * (num_same - my_rank)
            tl.store(run_ptr + place, tl.zeros_like(place) - 1, mask=none)
            led += leads
            depth += 1
    tl.store(num_shared_ptr + here, depth)
    tl.store(num_led_ptr + here, led)


@triton.jit(do_not_specialize=["num_rows", "max_slots"])
def _plan_rows_kernel(
    items_ptr, counts_ptr, row_slot_ptr, merge_rows_ptr,
    cu_q_ptr, kv_len_ptr, runs_ptr, num_shared_ptr, num_led_ptr, num_rows, max_slots,
    ITEM_ROWS: tl.constexpr, SPLIT: tl.constexpr, MERGE_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """List the items of row i = program_id. Program 0 also writes the counts. `runs_ptr` is None without sharing."""
    here = tl.program_id(0)
    row = tl.arange(0, BLOCK_ROWS)
    first, splits, base, has_slots, empty = _decode_rows(
        cu_q_ptr, kv_len_ptr, num_rows, max_slots, SPLIT, WINDOW, CHUNK, BLOCK_ROWS
    )
    shared = tl.zeros_like(splits)
    led = tl.zeros_like(splits)
    if runs_ptr is not None:
        shared = tl.load(num_shared_ptr + row, mask=has_slots, other=0)
        led = tl.load(num_led_ptr + row, mask=has_slots, other=0)
    overflow = ((splits > 1) & ~has_slots).to(tl.int32)
    own = tl.where(has_slots, splits - shared + led, (splits == 1).to(tl.int32))
    start = tl.where(
        overflow > 0,
        tl.cumsum(overflow, 0) - overflow,
        tl.sum(overflow, 0) + tl.cumsum(own, 0) - own,
    )
    merges = (has_slots | empty).to(tl.int32)
    long = (has_slots & (splits > MERGE_SPLITS)).to(tl.int32)
    if here == 0:
        tl.store(counts_ptr, tl.sum(overflow, 0) + tl.sum(own, 0))
        tl.store(counts_ptr + 1, tl.sum(merges, 0))
        tl.store(counts_ptr + 2, tl.sum(long, 0))

    mine = row == here
    my_start = tl.sum(tl.where(mine, start, 0), 0)
    my_base = tl.sum(tl.where(mine, base, 0), 0)
    my_slots = tl.sum((mine & has_slots).to(tl.int32), 0)
    my_shared = tl.sum(tl.where(mine, shared, 0), 0)
    my_first = tl.sum(tl.where(mine, first + shared, 0), 0)
    my_end = tl.sum(tl.where(mine, first + splits, 0), 0)
    my_items = tl.sum(tl.where(mine, own + overflow - led, 0), 0)
    step = tl.where(my_slots > 0, 1, my_end - my_first)
    tl.store(row_slot_ptr + here, tl.where(my_slots > 0, my_base, -1))
    if tl.sum(tl.where(mine, merges, 0), 0) > 0:
        # In the list of rows to merge, long rows come first.
        before = tl.where(row < here, merges, 0)
        place = tl.sum(tl.where(long > 0, before, 0), 0)
        if tl.sum(tl.where(mine, long, 0), 0) == 0:
            place = tl.sum(long, 0) + tl.sum(before, 0) - place
        tl.store(merge_rows_ptr + place, here)
    lane = tl.arange(0, 128)
    if runs_ptr is not None:
        for done in range(0, my_shared, 128):
            split = done + lane
            run_ptr = runs_ptr + (my_base + split) * ITEM_ROWS
            leads = (tl.load(run_ptr, mask=split < my_shared, other=-1) >= 0).to(tl.int32)
            item_ptr = items_ptr + (my_start + tl.cumsum(leads, 0) - leads) * (2 + ITEM_ROWS)
            tl.store(item_ptr, split, mask=leads > 0)
            tl.store(item_ptr + 1, split + 1, mask=leads > 0)
            for i in tl.static_range(ITEM_ROWS):
                member = tl.load(run_ptr + i, mask=leads > 0, other=-1)
                tl.store(item_ptr + 2 + i, member, mask=leads > 0)
            my_start += tl.sum(leads, 0)
    for done in range(0, my_items, 128):
        item_ptr = items_ptr + (my_start + done + lane) * (2 + ITEM_ROWS)
        listed = done + lane < my_items
        split = my_first + (done + lane) * step
        tl.store(item_ptr, split, mask=listed)
        tl.store(item_ptr + 1, split + step, mask=listed)
        tl.store(item_ptr + 2, tl.zeros_like(lane) + here, mask=listed)
        for i in tl.static_range(1, ITEM_ROWS):
            tl.store(item_ptr + 2 + i, tl.zeros_like(lane) - 1, mask=listed)


@dataclass(frozen=True, slots=True)
class SharedRuns:
    """Runs of rows that read a split together, found once per step; `_find_runs_kernel` describes the contents."""

    runs: torch.Tensor  # [max_slots, item_rows] int32
    num_shared: torch.Tensor  # [max_rows] int32
    num_led: torch.Tensor  # [max_rows] int32


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Device buffers of decode attention, shared by the layers of one window. Use them on one stream only."""

    config: DecodeConfig
    shape: AttentionShape
    max_rows: int
    # Number of slots for partial results. If too few are left for a row's splits, one program per KV head computes the
    # whole row.
    max_slots: int
    arch: str  # key of the tuning tables
    num_programs: int  # persistent grid of the decode kernel
    num_merge_programs: int  # persistent grid of the merge kernel
    # [max_slots + max_rows, 2 + item_rows] int32: first split, end of the splits, rows (-1: none)
    items: torch.Tensor
    counts: torch.Tensor  # [3] int32: items, rows to merge, long rows
    merge_counts: torch.Tensor  # [2] int32, view of `counts`: rows to merge, long rows
    row_slot: torch.Tensor  # [max_rows] int32, slot of a row's first split, -1: none
    merge_rows: torch.Tensor  # [max_rows] int32, long rows (more than merge_splits splits) first
    partial_acc: torch.Tensor  # [max_slots, heads, elements of a value] float32
    partial_ml: torch.Tensor  # [max_slots, heads, 2] float32, maximum (base 2) and sum
    shared: SharedRuns | None  # None: each row reads its own keys

    @property
    def item_rows(self) -> int:
        """Most rows of one item."""
        return item_rows(self.shape)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The device tensors by name."""
        owners = (self,) if self.shared is None else (self, self.shared)
        held = {
            field.name: getattr(owner, field.name) for owner in owners for field in fields(owner)
        }
        return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def item_rows(shape: AttentionShape) -> int:
    """Rows that fit one decode tile, with the query heads of one KV group each."""
    return attention_checks.TILE_HEADS // shape.group_pad


def allocate_decode_workspace(
    max_rows: int,
    max_slots: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    chunk: int | None = None,
    value_dim: int | None = None,
    values_in_keys: bool = False,
    share_prefixes: bool = False,
    config: DecodeConfig | None = None,
    num_programs: int | None = None,
) -> DecodeWorkspace:
    """Allocate the memory of `plan_decode` and `decode_attention`, which allocate nothing themselves.

    Parameters
    ----------
    max_rows
        Most rows of a batch, at most 4096.
    max_slots
        Slots for partial results, num_heads * (elements of a value + 2) * 4 bytes each. All rows of a batch can be
        split if there are as many slots as the sum of ceil(kv_len / split_tokens). With fewer slots the results are the
        same, but slower.
    num_heads, num_kv_heads, head_dim
        Heads of the layers (the fields of `AttentionShape`).
    device
        Device of all buffers.
    dtype
        Dtype of q. float32 has another configuration than the 16-bit types.
    window, chunk
        Keys that a query sees, its own included, or tokens of a chunk of local attention; at most one of the two.
    value_dim, values_in_keys
        Elements of a value, and whether a value is the beginning of its key (the fields of `AttentionShape`).
    share_prefixes
        Let rows with the same first blocks in their tables read these blocks together; this changes no bits. It has no
        effect with more than 8 query heads for each KV head, because one row then fills a tile.
    config
        Replaces the configuration from `quire.kernels.tuning`.
    num_programs
        Size of the persistent grid; None fills the device.

    Raises
    ------
    ValueError
        A number is outside its bounds, or `share_prefixes` is given with a window or chunk.
    """
    device = torch.device(device)
    argument_checks.check_bounds("max_rows", max_rows, 1, MAX_ROWS)
    argument_checks.check_bounds("max_slots", max_slots, 1, 2**24)
    shape = AttentionShape(
        num_heads, num_kv_heads, head_dim, window, chunk, value_dim, values_in_keys
    )
    if share_prefixes and (window is not None or chunk is not None):
        raise ValueError(
            f"share_prefixes: must be False for layers with a window or chunk, got {window=}, {chunk=}"
        )
    arch = device_arch(device)
    if config is None:
        config = decode_config(arch, shape.largest_dim, dtype)
    attention_checks.check_decode_config(config)
    if num_programs is not None:
        argument_checks.check_bounds("num_programs", num_programs, 1, 2**20)
    processors = _num_processors(device)

    def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    counts = buffer(3)
    rows = item_rows(shape)
    shared = None
    if share_prefixes and rows > 1:
        shared = SharedRuns(buffer(max_slots, rows), buffer(max_rows), buffer(max_rows))
    return DecodeWorkspace(
        config=config,
        shape=shape,
        max_rows=max_rows,
        max_slots=max_slots,
        arch=arch,
        num_programs=num_programs or processors * config.programs_per_sm,
        num_merge_programs=processors * config.merge_programs_per_sm,
        items=buffer(max_slots + max_rows, 2 + rows),
        counts=counts,
        merge_counts=counts[1:],
        row_slot=buffer(max_rows),
        merge_rows=buffer(max_rows),
        partial_acc=buffer(max_slots, num_heads, shape.value_size, dtype=torch.float32),
        partial_ml=buffer(max_slots, num_heads, 2, dtype=torch.float32),
        shared=shared,
    )


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work of one `decode_attention` call: the filled workspace and the tensors from which it was filled."""

    workspace: DecodeWorkspace
    cu_q: torch.Tensor  # [rows + 1] int32
    kv_len: torch.Tensor  # [rows] int32


def plan_decode(
    workspace: DecodeWorkspace,
    cu_q: torch.Tensor,
    kv_len: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> DecodePlan:
    """Fill the workspace's lists for one batch, once per step before the first layer.

    Parameters
    ----------
    workspace
        Its lists are overwritten.
    cu_q
        [rows + 1] int32, first query token of each row; only rows with one query token are listed.
    kv_len
        [rows] int32, tokens in the cache, this step's included. A padding row has 0; its output is zero.
    block_tables
        [>= rows, max_blocks] int32. Read only if the workspace shares prefixes.
    block_size
        Tokens of a block.

    Raises
    ------
    ValueError
        A shape or dtype is wrong, or the batch has more rows than the workspace.
    """
    num_rows = attention_checks.check_rows(cu_q, kv_len, workspace.items.device)
    argument_checks.check_bounds("rows of kv_len", num_rows, 1, workspace.max_rows)
    attention_checks.check_tables(block_tables, num_rows, cu_q.device)
    argument_checks.check_block_size(block_size)
    config, shape, shared = workspace.config, workspace.shape, workspace.shared
    rows = dict(
        ITEM_ROWS=workspace.item_rows,
        SPLIT=config.split_tokens,
        BLOCK_ROWS=block_rows(workspace.max_rows),
    )
    options = launch_options(workspace.arch, 4)
    runs: tuple[torch.Tensor, ...] = ()
    # fmt: off
    if shared is not None:
        runs = shared.runs, shared.num_shared, shared.num_led
        _find_runs_kernel[(num_rows,)](
            *runs, cu_q, kv_len, block_tables, num_rows, workspace.max_slots, block_tables.stride(0),
            BLOCK_SIZE=block_size, **rows, **options,
        )
    _plan_rows_kernel[(num_rows,)](
        workspace.items, workspace.counts, workspace.row_slot, workspace.merge_rows,
        cu_q, kv_len, *(runs or (None,) * 3), num_rows, workspace.max_slots,
        MERGE_SPLITS=config.merge_splits, WINDOW=shape.window or 0, CHUNK=shape.chunk or 0, **rows, **options,
    )
    # fmt: on
    return DecodePlan(workspace, cu_q, kv_len)


def block_rows(max_rows: int) -> int:
    """Vector size of the planners: a power of two that depends on `max_rows`, so that one kernel serves all batches."""
    return max(triton.next_power_of_2(max_rows), 64)


def _num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 for Triton's interpreter on the CPU."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
