"""Work lists of decode attention, built on the device: no host synchronisation, fit for CUDA graphs.

One launch a step serves all layers with the same window. A row is a *decode* row if it has one query token
(``cu_q[i + 1] - cu_q[i] == 1``); others are left to `quire.kernels.prefill_plan`. Keys are cut at absolute
multiples of SPLIT tokens, so a row's splits, and with them its bits, depend on nothing but the row::

    kv_len      700                  200            1300, window 400      (SPLIT 256)
    splits      0 | 1 | 2            0              3 | 4 | 5
    items       (0,0) (0,1) (0,2)    (1,0..0)       (2,3) (2,4) (2,5)      (row, split)
    partials    slots 0  1  2        none           slots 3  4  5

A row with one split is finished where it is computed. So is a row for whose splits no slot is left: one program
walks them in order with the same arithmetic as the reduction. The workspace can therefore be bounded without
a bound on the lengths. Such rows come first in the list: the longest items start first.

Bytes: 16 an item, read once; each program of the planner reads the lengths of all rows (8 B a row, from L2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels import checks
from quire.kernels.attention_call import AttentionShape
from quire.kernels.attention_tile import split_range
from quire.kernels.tuning import DecodeConfig, decode_config, device_arch, launch_options

ITEM_WIDTH = tl.constexpr(4)  # first member, members, first split, end of splits
MAX_ROWS = 4096  # one program of the planner holds the lengths of all rows


@triton.jit
def _decode_rows(
    cu_q_ptr, kv_len_ptr, members_ptr, num_rows, max_slots,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """For all members [BLOCK_ROWS]: row, first split, splits, first slot, has slots, is an empty decode row."""
    member = tl.arange(0, BLOCK_ROWS)
    valid = member < num_rows
    if members_ptr is not None:
        row = tl.load(members_ptr + member, mask=valid, other=0)
    else:
        row = member
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
    return row, first, splits, base, has_slots, decodes & (kv_len == 0)


@triton.jit(do_not_specialize=["num_rows", "max_slots"])
def _plan_rows_kernel(
    items_ptr, counts_ptr, row_slot_ptr, merge_rows_ptr,
    cu_q_ptr, kv_len_ptr, members_ptr, shared_len_ptr, num_rows, max_slots,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Program i lists the items of member i; program 0 also writes the counts."""
    here = tl.program_id(0)
    member = tl.arange(0, BLOCK_ROWS)
    row, first, splits, base, has_slots, empty = _decode_rows(
        cu_q_ptr, kv_len_ptr, members_ptr, num_rows, max_slots, SPLIT, WINDOW, CHUNK, BLOCK_ROWS
    )  # fmt: skip
    shared = tl.zeros_like(splits)
    if shared_len_ptr is not None:
        shared = tl.load(shared_len_ptr + member, mask=has_slots, other=0) // SPLIT
    overflow = ((splits > 1) & ~has_slots).to(tl.int32)
    own = tl.where(has_slots, splits - shared, (splits == 1).to(tl.int32))
    start = tl.where(
        overflow > 0,
        tl.cumsum(overflow, 0) - overflow,
        tl.sum(overflow, 0) + tl.cumsum(own, 0) - own,
    )
    merges = (has_slots | empty).to(tl.int32)
    if here == 0:
        tl.store(counts_ptr, tl.sum(overflow, 0) + tl.sum(own, 0))
        tl.store(counts_ptr + 1, tl.sum(merges, 0))

    mine = member == here
    my_row = tl.sum(tl.where(mine, row, 0), 0)
    my_start = tl.sum(tl.where(mine, start, 0), 0)
    my_first = tl.sum(tl.where(mine, first + shared, 0), 0)
    my_end = tl.sum(tl.where(mine, first + splits, 0), 0)
    my_items = tl.sum(tl.where(mine, own + overflow, 0), 0)
    step = tl.where(tl.sum(tl.where(mine & has_slots, 1, 0), 0) > 0, 1, my_end - my_first)
    tl.store(row_slot_ptr + my_row, tl.sum(tl.where(mine, tl.where(has_slots, base, -1), 0), 0))
    if tl.sum(tl.where(mine, merges, 0), 0) > 0:
        tl.store(merge_rows_ptr + tl.sum(tl.where(member < here, merges, 0), 0), my_row)
    lane = tl.arange(0, 128)
    for done in range(0, my_items, 128):
        item = items_ptr + (my_start + done + lane) * ITEM_WIDTH
        listed = done + lane < my_items
        split = my_first + (done + lane) * step
        tl.store(item, tl.zeros_like(lane) + here, mask=listed)
        tl.store(item + 1, tl.zeros_like(lane) + 1, mask=listed)
        tl.store(item + 2, split, mask=listed)
        tl.store(item + 3, split + step, mask=listed)


@triton.jit(do_not_specialize=["num_rows", "num_groups", "max_slots"])
def _plan_groups_kernel(
    items_ptr, counts_ptr,
    cu_q_ptr, kv_len_ptr, members_ptr, shared_len_ptr, cu_members_ptr, num_rows, num_groups, max_slots,
    ITEM_ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Program g lists the items of group g: its shared splits, each cut into runs of ITEM_ROWS members."""
    here = tl.program_id(0)
    member = tl.arange(0, BLOCK_ROWS)
    _, _, splits, _, has_slots, _ = _decode_rows(
        cu_q_ptr, kv_len_ptr, members_ptr, num_rows, max_slots, SPLIT, 0, 0, BLOCK_ROWS
    )
    # Slots go out in the order of the members: those that have them are a prefix of each group.
    served = tl.min(tl.where((splits > 1) & ~has_slots, member, num_rows), 0)
    group = member
    valid = group < num_groups
    begin = tl.load(cu_members_ptr + group, mask=valid, other=0)
    end = tl.minimum(tl.load(cu_members_ptr + group + 1, mask=valid, other=0), served)
    valid = valid & (begin < end)
    shared = tl.load(shared_len_ptr + begin, mask=valid, other=0) // SPLIT
    runs = (end - begin + ITEM_ROWS - 1) // ITEM_ROWS
    items = tl.where(valid, runs * shared, 0)
    if here == 0:
        tl.store(counts_ptr + 2, tl.sum(items, 0))

    mine = group == here
    my_start = tl.sum(tl.where(group < here, items, 0), 0)
    my_items = tl.sum(tl.where(mine, items, 0), 0)
    my_runs = tl.maximum(tl.sum(tl.where(mine, runs, 0), 0), 1)
    my_begin = tl.sum(tl.where(mine, begin, 0), 0)
    my_end = tl.sum(tl.where(mine, end, 0), 0)
    lane = tl.arange(0, 128)
    for done in range(0, my_items, 128):
        index = done + lane
        item = items_ptr + (my_start + index) * ITEM_WIDTH
        listed = index < my_items
        # The runs of one split are neighbours: they read the same keys at the same time, from L2.
        first = my_begin + index % my_runs * ITEM_ROWS
        tl.store(item, first, mask=listed)
        tl.store(item + 1, tl.minimum(my_end - first, ITEM_ROWS), mask=listed)
        tl.store(item + 2, index // my_runs, mask=listed)
        tl.store(item + 3, index // my_runs + 1, mask=listed)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Decode rows grouped by the blocks with which their tables begin.

    Each row is a member of exactly one group; a row that shares nothing is a group of its own with length 0.
    """

    members: torch.Tensor  # [rows] int32, row ids, group by group
    # [rows] int32, tokens that the member shares with its whole group, < its kv_len
    shared_len: torch.Tensor
    # [groups + 1] int32, members of group g: [cu_members[g], cu_members[g + 1])
    cu_members: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Device buffers of decode attention; layers of one window share it, kernels of one stream only."""

    config: DecodeConfig
    shape: AttentionShape
    max_rows: int
    max_slots: int  # partial results; rows for whose splits none is left are walked by one program
    arch: str  # key of the tuning tables
    num_programs: int  # persistent grid of the walk
    num_shared_programs: int  # of the walk over shared items
    num_merge_programs: int  # of the reduction, one warp each
    items: torch.Tensor  # [max_slots + max_rows, 4] int32
    shared_items: torch.Tensor  # [max_slots, 4] int32
    counts: torch.Tensor  # [3] int32: items, rows to merge, shared items
    row_slot: torch.Tensor  # [max_rows] int32, slot of a row's first split, -1: none
    merge_rows: torch.Tensor  # [max_rows] int32
    partial_acc: torch.Tensor  # [max_slots, heads, head_dim] float32
    partial_ml: torch.Tensor  # [max_slots, heads, 2] float32, maximum (base 2) and sum

    @property
    def item_rows(self) -> int:
        """Rows that one shared item serves at most."""
        return self.config.shared_subtiles * (16 // triton.next_power_of_2(self.shape.group))


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
    config: DecodeConfig | None = None,
    num_programs: int | None = None,
    partials_of: DecodeWorkspace | None = None,
) -> DecodeWorkspace:
    """Allocate what `plan_decode` and `decode_attention` need; nothing is allocated afterwards.

    Parameters
    ----------
    max_rows
        Most rows of a batch, at most 4096.
    max_slots
        Partial results to keep, num_heads * (head_dim + 2) * 4 bytes each. Enough for every row to be
        split: the sum of ceil(kv_len / split_tokens). With fewer the results are the same, slower.
    dtype
        Of q: float32 takes another configuration than the 16-bit types.
    window, chunk
        Keys a query sees, itself included, or the size of local attention's chunks; at most one of them.
    config
        Instead of the one from `quire.kernels.tuning`.
    num_programs
        Size of the persistent grids; None for what fills the device.
    partials_of
        A workspace of another window whose partial results this one may overwrite.

    Raises
    ------
    ValueError
        A number outside its bounds.
    """
    device = torch.device(device)
    checks.check_bounds("max_rows", max_rows, 1, MAX_ROWS)
    checks.check_bounds("max_slots", max_slots, 1, 2**24)
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, window, chunk)
    arch = device_arch(device)
    if config is None:
        config = decode_config(arch, head_dim, dtype)
    checks.check_decode_config(config)
    if num_programs is not None:
        checks.check_bounds("num_programs", num_programs, 1, 2**20)
    processors = _num_processors(device)

    def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if partials_of is None:
        partial_acc = buffer(max_slots, num_heads, head_dim, dtype=torch.float32)
        partial_ml = buffer(max_slots, num_heads, 2, dtype=torch.float32)
    else:
        partial_acc, partial_ml = partials_of.partial_acc, partials_of.partial_ml
        checks.check_shape("partials_of.partial_acc", partial_acc, (max_slots, num_heads, head_dim))
    return DecodeWorkspace(
        config=config,
        shape=shape,
        max_rows=max_rows,
        max_slots=max_slots,
        arch=arch,
        num_programs=num_programs or processors * config.programs_per_processor,
        num_shared_programs=num_programs or processors * config.shared_programs_per_processor,
        num_merge_programs=processors * config.merge_programs_per_processor,
        items=buffer(max_slots + max_rows, 4),
        shared_items=buffer(max_slots, 4),
        counts=buffer(3),
        row_slot=buffer(max_rows),
        merge_rows=buffer(max_rows),
        partial_acc=partial_acc,
        partial_ml=partial_ml,
    )


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What `decode_attention` works off: a filled workspace and the tensors that it was filled from."""

    workspace: DecodeWorkspace
    cu_q: torch.Tensor  # [rows + 1] int32
    kv_len: torch.Tensor  # [rows] int32
    shared: SharedPrefixes | None


def plan_decode(
    workspace: DecodeWorkspace,
    cu_q: torch.Tensor,
    kv_len: torch.Tensor,
    shared: SharedPrefixes | None = None,
) -> DecodePlan:
    """Fill the workspace's lists for one batch; once a step, before its first layer.

    Parameters
    ----------
    cu_q
        [rows + 1] int32; only rows with one query token are listed.
    kv_len
        [rows] int32, tokens in the cache, this step's included. 0 for a row that only pads the batch: its
        output is zero.
    shared
        Groups that read their common blocks once; None reads them for each row. The bits are the same.

    Raises
    ------
    ValueError
        Shapes or dtypes that do not fit, more rows than the workspace has, `shared` with a window or chunk.
    """
    num_rows = checks.check_rows(cu_q, kv_len, workspace.items.device)
    checks.check_bounds("rows of kv_len", num_rows, 1, workspace.max_rows)
    split = workspace.config.split_tokens
    block = block_rows(workspace.max_rows)  # one kernel for all batches
    shape = workspace.shape
    members = shared_len = None
    if shared is not None:
        if shape.window is not None or shape.chunk is not None:
            raise ValueError(
                f"shared: must be None for layers with a window or chunk, got window={shape.window}, "
                f"chunk={shape.chunk}"
            )
        members, shared_len = shared.members, shared.shared_len
        checks.check_ids("shared.members", members, num_rows, cu_q.device)
        checks.check_ids("shared.shared_len", shared_len, num_rows, cu_q.device)
        num_groups = shared.cu_members.shape[0] - 1
        checks.check_ids("shared.cu_members", shared.cu_members, num_groups + 1, cu_q.device)
        checks.check_bounds("groups of shared.cu_members", num_groups, 1, num_rows)
    # fmt: off
    _plan_rows_kernel[(num_rows,)](
        workspace.items, workspace.counts, workspace.row_slot, workspace.merge_rows,
        cu_q, kv_len, members, shared_len, num_rows, workspace.max_slots,
        SPLIT=split, WINDOW=shape.window or 0, CHUNK=shape.chunk or 0, BLOCK_ROWS=block,
        **launch_options(workspace.arch, 4),
    )
    if shared is not None:
        _plan_groups_kernel[(num_groups,)](
            workspace.shared_items, workspace.counts,
            cu_q, kv_len, members, shared_len, shared.cu_members, num_rows, num_groups, workspace.max_slots,
            ITEM_ROWS=workspace.item_rows, SPLIT=split, BLOCK_ROWS=block, **launch_options(workspace.arch, 4),
        )
    # fmt: on
    return DecodePlan(workspace, cu_q, kv_len, shared)


def block_rows(num_rows: int) -> int:
    """Size of a planner's vectors for batches of at most so many rows."""
    return max(triton.next_power_of_2(num_rows), 64)


def _num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 where the interpreter runs."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
