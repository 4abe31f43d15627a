"""The step in flight, and the blocks that it indexes.

Blocks are registered in the prefix index when the step that completes them is *planned*: within a step all
rows write their KV before any of them reads it, layer by layer, so a row may match what an earlier row of the
same step computes. A step that fails takes its registrations back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.replica.blocks import BlockManager
from quire.replica.chunking import StepBudget
from quire.replica.config import EngineConfig
from quire.replica.decode_rows import DecodeRows
from quire.replica.prefix import PrefixCache
from quire.replica.request import Request
from quire.replica.rows import RowTable

_NO_ROWS = np.empty(0, np.int64)


@dataclass(slots=True)
class Step:
    """What the scheduler remembers of the step in flight."""

    number: int
    budget: StepBudget  # of its chunks
    leaves_out_decodes: bool = False
    rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)  # [n]
    sample_rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)  # [S]
    decodes: DecodeRows | None = None  # the rows, if all of them decode
    chunks: list[tuple[int, int]] = field(default_factory=list)  # (row, tokens)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to) blocks, of forks
    registered: list[int] = field(default_factory=list)  # blocks, parents before children
    # (group, row, index in its table, its own block, the block that is indexed for the same content)
    duplicates: list[tuple[int, int, int, int, int]] = field(default_factory=list)


class StepIndexer:
    """Puts the blocks that a step completes into the prefix index, and takes them out if it fails."""

    def __init__(
        self, config: EngineConfig, prefix: PrefixCache, blocks: BlockManager, rows: RowTable
    ):
        self._block_size = config.block_size
        self._enabled = config.prefix_caching
        self._prefix = prefix
        self._blocks = blocks
        self._rows = rows

    def register_decodes(self, step: Step, decodes: DecodeRows) -> None:
        """Index the blocks that the next tokens of the decoding rows fill."""
        for row, request, i, blocks, token_bytes in self._rows.fill_blocks(decodes):
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
                else:
                    self._blocks.retain([indexed])
                    step.duplicates.append((g, row, i, block, indexed))
        self._prefix.advance_entry(entry)
        request.tip, request.num_indexed = entry, i + 1
        return True

    def adopt(self, step: Step) -> None:
        """Swap blocks whose content was already indexed for the indexed ones, and free the duplicates.

        The plan keeps the tables it was built with: the step writes and reads the duplicates, the next one
        reads the indexed blocks, complete by then. So every owner of an indexed block owns the indexed
        blocks before it too, which demotion leaf-first rests on (see `BlockManager`).
        """
        for g, row, i, own, indexed in step.duplicates:
            self._rows.replace_block(g, row, i, indexed)
            self._blocks.release([own])

    def forget(self, blocks: Sequence[int]) -> None:
        """The step failed: what it would have written to these blocks is unknown."""
        indexed = [
            block for block in blocks if block in self._prefix
        ]  # but if the cache was cleared
        for block in sorted(indexed, key=lambda b: -self._prefix.place_of(b)[0].depth):
            self._prefix.forget(block)
            self._blocks.forget_content(block)
