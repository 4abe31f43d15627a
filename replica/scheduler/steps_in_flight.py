"""The steps in flight, and the blocks that they index.

Blocks are registered in the prefix index when the step that completes them is *planned*: within a step all
rows write their KV before any of them reads it, layer by layer, so a row may match what an earlier row of the
same step computes. Where the last token of a block is still being sampled by the step in flight, the block is
registered when that step is committed: before the next plan, which is the first that could match it. A step that
fails takes its registrations back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepPlan
from quire.replica.kv_cache.host_tier import Transfers
from quire.replica.request_table.decode_rows import DecodeRows
from quire.replica.request_table.rows import RowTable
from quire.replica.scheduler.chunking import StepBudget
from quire.replica.scheduler.engine_memory import EngineMemory

_NO_ROWS = np.empty(0, np.int64)


@dataclass(slots=True)
class Step:
    """What the scheduler remembers of a step in flight."""

    number: int
    budget: StepBudget  # of its chunks
    leaves_out_decodes: bool = False
    num_decodes: int = 0  # rows
    rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)  # [n]
    claims: np.ndarray = field(default_factory=lambda: _NO_ROWS)  # [n] of the rows
    sample_rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)  # [S]
    decodes: DecodeRows | None = None  # the rows, if all of them decode
    # `decodes` as this step left them, once the step after it has been planned with them
    decodes_then: DecodeRows | None = None
    # [m] each, if the step was planned before the tokens of the one before it were known: rows whose next token
    # fills its block, of which block in their tables, and their claims
    fills: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    transfers: Transfers = field(default_factory=Transfers)
    chunks: list[tuple[int, int]] = field(default_factory=list)  # (row, tokens)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to) blocks, of forks
    registered: list[int] = field(default_factory=list)  # blocks, parents before children
    # (group, row, index in its table, its own block, the block that is indexed for the same content)
    duplicates: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def is_alive(self, table: RowTable, rows: np.ndarray) -> np.ndarray:
        """[m] bool, which of the step's rows [m] still belong to the requests that it was planned for."""
        claims = self.claims
        if len(rows) < len(self.rows):
            claims = claims[np.isin(self.rows, rows)]  # both in the order of the step
        is_alive: np.ndarray = table.claims[rows] == claims
        return is_alive


class StepsInFlight:
    """The steps that are planned and not yet committed, the oldest first."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        # Number of the step planned last.
        self.num_planned = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    @property
    def newest(self) -> Step:
        return self._steps[-1]

    def oldest(self, plan: StepPlan) -> Step:
        """The oldest step, which must be the one with this plan.

        Raises
        ------
        ValueError
            It is not.
        """
        if not self._steps or self._steps[0].number != plan.step:
            raise ValueError(f"step {plan.step} is not the oldest in flight")
        return self._steps[0]

    def launch(self, step: Step) -> None:
        """Add a step."""
        self._steps.append(step)
        self.num_planned = step.number

    def land(self) -> Step:
        """Remove the oldest step."""
        return self._steps.popleft()

    def land_all(self) -> list[Step]:
        """Remove every step."""
        steps = list(self._steps)
        self._steps.clear()
        return steps


class StepIndexer:
    """Puts the blocks that a step completes into the prefix index, and takes them out if it fails."""

    def __init__(self, config: EngineConfig, memory: EngineMemory):
        self._block_size = config.block_size
        self._enabled = config.prefix_caching
        self._memory = memory
        self._prefix = memory.prefix
        self._blocks = memory.blocks
        self._rows = memory.rows

    def register_decodes(self, step: Step, decodes: DecodeRows, *, are_known: bool) -> None:
        """Index the blocks that the next tokens of the decoding rows fill.

        Parameters
        ----------
        are_known
            Those tokens. Otherwise `register_known` does it when they are.
        """
        if not len(decodes.filling):
            return
        rows, index = decodes.fills()
        if are_known:
            self._register_fills(step, rows, index)
        else:
            step.fills = (rows, index, decodes.claims[decodes.filling])

    def register_known(self, step: Step) -> None:
        """The tokens of the step before it are known: what `register_decodes` has put off."""
        if step.fills is None:
            return
        (rows, index, claims), step.fills = step.fills, None
        alive = self._rows.claims[rows] == claims
        self._register_fills(step, rows[alive], index[alive])

    def _register_fills(self, step: Step, rows: np.ndarray, index: np.ndarray) -> None:
        if not len(rows):
            return
        for row, request, i, blocks, token_bytes in self._rows.fill_blocks(rows, index):
            if self._enabled:
                self._register(step, row, request, i, blocks, token_bytes)

    def register_chunk(self, step: Step, row: int, count: int) -> bool:
        """Index the blocks that the row's next `count` tokens fill; returns whether there are any."""
        if not self._enabled:
            return False
        block_size = self._block_size
        start = int(self._rows.num_computed[row])
        first, end = start // block_size, (start + count) // block_size
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
        """Index a row's i-th block of each group; returns whether its content is indexed."""
        if i != request.num_indexed:
            return False  # nothing can be indexed behind a block that is not
        entry = self._prefix.register(blocks, request.tip, token_bytes, request.chain, i)
        if entry is None:
            return False
        if entry.blocks is blocks:  # the content is new
            self._blocks.mark_contents(blocks)
            step.registered += blocks
        else:
            for g, (block, indexed) in enumerate(zip(blocks, entry.blocks, strict=True)):
                if indexed == block:
                    self._blocks.mark_contents([block])
                    step.registered.append(block)
                elif indexed is not None:
                    self._blocks.retain([indexed])
                    step.duplicates.append((g, row, i, block, indexed))
        self._prefix.advance_entry(entry)
        request.tip, request.num_indexed = entry, i + 1
        return True

    def adopt(self, step: Step) -> None:
        """Swap blocks whose content was already indexed for the indexed ones, and give the duplicates back.

        The plan keeps the tables it was built with: the step writes and reads the duplicates, the next one
        reads the indexed blocks, complete by then. So every owner of an indexed block owns the indexed
        blocks before it too, which leaf-first eviction rests on (see `BlockManager`).
        """
        duplicates, step.duplicates = step.duplicates, []
        for g, row, i, own, indexed in duplicates:
            self._rows.replace_block(g, row, i, indexed)
            self._memory.give_back([own])

    def forget(self, blocks: Sequence[int]) -> None:
        """The step failed: what it would have written to these blocks is unknown.

        A block may be named twice: it was copied back and then filled.
        """
        # Without those of a cache that was cleared meanwhile.
        indexed = [block for block in dict.fromkeys(blocks) if block in self._prefix]
        for block in sorted(indexed, key=lambda b: -self._prefix.place_of(b)[0].depth):
            self._prefix.forget(block)
            self._blocks.forget_content(block)
