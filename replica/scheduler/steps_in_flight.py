"""The steps in flight (planned, not yet committed), and the blocks that they add to the prefix index.

A block enters the prefix index when the step that fills it is *planned*; a block that is filled by the tokens of a
draft, when the step is committed. In each layer all rows of a step write their
KV before any row reads, so a row may share a block that an earlier row of the same step computes. If the step in flight
is still sampling the last token of a block, the block is indexed when that step is committed. That is before the next
plan, which is the first one that could share it. The blocks of a failed step are removed from the index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepPlan
from quire.replica.kv_cache.host_tier import Transfers
from quire.replica.kv_cache.prefix_entries import Entry
from quire.replica.request_table.decode_rows import DecodeRows, Draft
from quire.replica.request_table.rows import RowTable
from quire.replica.scheduler.chunking import StepBudget
from quire.replica.scheduler.engine_memory import EngineMemory

_NO_ROWS = np.empty(0, np.int64)


class TakenSlot(NamedTuple):
    """A slot for the snapshot of a row whose newest token is not known yet."""

    row: int
    owner: int  # `RowTable.owners` of the row
    block: int  # index in the row's tables of the block that ends at the snapshot
    slot: int


@dataclass(slots=True)
class Step:
    """The scheduler's record of a step in flight."""

    number: int
    # Prefill budget.
    budget: StepBudget
    leaves_out_decodes: bool = False
    # Number of rows that decode, those with a draft included.
    num_decodes: int = 0
    drafts: list[Draft] = field(default_factory=list)
    rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)  # [n] int64
    # [n] int64, `RowTable.owners` of the rows at the plan; a row with another owner belongs to another request
    owners: np.ndarray = field(default_factory=lambda: _NO_ROWS)
    # [m] int64, the rows that sample, each once
    sample_rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)
    # The rows, if the step has neither chunks nor drafts.
    decodes: DecodeRows | None = None
    # A copy of `decodes` as of this step, if the next step was planned with the same object, which moved it on by one
    # token.
    decodes_then: DecodeRows | None = None
    # If the step was planned before its input tokens were known: the rows with a next token that fills its block, the
    # blocks' table indices, and the rows' owners, [m] each.
    fills: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    transfers: Transfers = field(default_factory=Transfers)
    # (row, number of tokens) of each prefill chunk
    chunks: list[tuple[int, int]] = field(default_factory=list)
    # (from, to) blocks that are copied for forks.
    copies: list[tuple[int, int]] = field(default_factory=list)
    # Blocks that the step has added to the index, parents before children.
    registered: list[int] = field(default_factory=list)
    # (group, row, index in its table, its own block, the block that is indexed for the same content)
    duplicates: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    # (slot, entry) of each snapshot of recurrent states that the step takes.
    snapshots: list[tuple[int, Entry]] = field(default_factory=list)
    # Slots in host memory to which the step copies snapshots.
    moved: list[int] = field(default_factory=list)
    # Slots of snapshots whose entries are found when the step before is committed.
    taken: list[TakenSlot] = field(default_factory=list)

    def is_alive(self, table: RowTable, rows: np.ndarray) -> np.ndarray:
        """[m] bool, whether each of these rows of the step still belongs to the request that it was planned for."""
        owners = self.owners
        if len(rows) < len(self.rows):
            # Both arrays are in the order of the step.
            owners = owners[np.isin(self.rows, rows)]
        is_alive: np.ndarray = table.owners[rows] == owners
        return is_alive


class StepsInFlight(deque[Step]):
    """The steps that are planned and not yet committed, the oldest first."""

    # Number of the step planned last.
    num_planned = 0

    @property
    def newest(self) -> Step:
        return self[-1]

    def oldest(self, plan: StepPlan) -> Step:
        """The oldest step, which must be the one with this plan.

        Raises
        ------
        ValueError
            The oldest step has another plan, or no step is in flight.
        """
        if not self or self[0].number != plan.step:
            raise ValueError(f"step {plan.step} is not the oldest in flight")
        return self[0]

    def launch(self, step: Step) -> None:
        """Add a step."""
        self.append(step)
        self.num_planned = step.number

    def land(self) -> Step:
        """Remove the oldest step."""
        return self.popleft()

    def land_all(self) -> list[Step]:
        """Remove every step."""
        steps = list(self)
        self.clear()
        return steps


class StepIndexer:
    """Add the blocks that a step fills to the prefix index, and remove them if it fails."""

    def __init__(self, config: EngineConfig, memory: EngineMemory):
        self._block_size = config.block_size
        self._enabled = config.prefix_caching
        self._memory = memory
        self._prefix = memory.prefix
        self._blocks = memory.blocks
        self._rows = memory.rows

    def register_decodes(self, step: Step, decodes: DecodeRows, *, are_known: bool) -> None:
        """Index the blocks that are filled by the next tokens of the decoding rows.

        Parameters
        ----------
        are_known
            Whether these tokens are known. If not, `register_known` indexes the blocks later.
        """
        if not len(decodes.filling):
            return
        rows, index = decodes.fills()
        if are_known:
            self._register_fills(step, rows, index)
        else:
            step.fills = (rows, index, decodes.columns.owners[decodes.filling])

    def register_known(self, step: Step) -> None:
        """Index the blocks that `register_decodes` postponed. Call it once the step before this one is committed."""
        if step.fills is None:
            return
        (rows, index, owners), step.fills = step.fills, None
        alive = self._rows.owners[rows] == owners
        self._register_fills(step, rows[alive], index[alive])

    def _register_fills(self, step: Step, rows: np.ndarray, index: np.ndarray) -> None:
        if not len(rows):
            return
        for row, request, i, blocks, token_bytes in self._rows.fill_blocks(rows, index):
            if self._enabled:
                self._register(step, row, request, i, blocks, token_bytes)

    def register_chunk(self, step: Step, row: int, start: int, end: int) -> bool:
        """Index the blocks that the row's tokens at positions [start, end) fill. Returns whether they fill any."""
        if not self._enabled:
            return False
        block_size = self._block_size
        first, end = start // block_size, end // block_size
        request = self._rows.request(row)
        if end == first:
            return False
        width = 4 * block_size
        raw = request.token_ids[first * block_size : end * block_size].tobytes()
        blocks = self._rows.block_tables[:, row, first:end].T.tolist()
        for i, own in enumerate(blocks, first):
            begin = (i - first) * width
            if not self._register(step, row, request, i, own, raw[begin : begin + width]):
                break
        return True

    def _register(
        self,
        step: Step,
        row: int,
        request: Request,
        i: int,
        blocks: list[int],
        token_bytes: bytes,
    ) -> bool:
        """Index a row's block at index i of each group. Returns whether its content is indexed."""
        if i != request.num_indexed:
            # A block can be indexed only as the continuation of an indexed one.
            return False
        entry = self._prefix.register(blocks, request.tip, token_bytes, request.chain, i)
        if entry is None:
            return False
        if entry.blocks is blocks:
            # The content is new.
            self._blocks.mark_contents(blocks)
            step.registered += blocks
        else:
            for g, (block, indexed) in enumerate(zip(blocks, entry.blocks, strict=True)):
                if indexed == block:
                    self._blocks.mark_contents([block])
                    step.registered.append(block)
                elif indexed is not None:
                    self._blocks.add_owner([indexed])
                    step.duplicates.append((g, row, i, block, indexed))
        self._prefix.advance_entry(entry)
        request.tip, request.num_indexed = entry, i + 1
        return True

    def adopt(self, step: Step) -> None:
        """In the rows' tables, replace duplicates by the indexed blocks with the same content, and give them back.

        The plan keeps its tables: the step writes and reads the duplicates, and the next step reads the indexed blocks,
        which are complete by then. So every owner of an indexed block also owns the indexed blocks before it.
        Leaf-first eviction relies on this (`BlockManager`).
        """
        duplicates, step.duplicates = step.duplicates, []
        for g, row, i, own, indexed in duplicates:
            self._rows.replace_block(g, row, i, indexed)
            self._memory.give_back([own])

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove the blocks of failed steps from the index, because their content is unknown.

        `blocks` may contain a block twice, if it was copied back and then filled.
        """
        # The cache may have been cleared since.
        indexed = [block for block in dict.fromkeys(blocks) if block in self._prefix]
        for block in sorted(indexed, key=lambda b: -self._prefix.place_of(b)[0].depth):
            self._prefix.forget(block)
            self._blocks.forget_content(block)
