"""Admission: whether a waiting request fits now, and the blocks that it gets when it starts.

A request starts only if it fits in all layer groups. In the full-attention groups it then gets the blocks of all its
known tokens. In a sliding-window group it gets the blocks of a chunk when the chunk is scheduled, and the next plan
frees the blocks that have fallen out of the window. So a long prompt needs no more blocks there than for one window and
one chunk, and admission reserves that many. Cached blocks that are only in the host tier (host memory) are copied back
in the request's first step, if that is faster than computing them again (`speed.py`).

While requests run, two thresholds on the available blocks hold admissions back::

    0 ─────────────────── safety_margin ─────────── resume_margin ───────────────── all
                          an admission must         after a preemption, no request starts
                          leave this many           until this many are available

The first one is for the rows that decode. A stream that comes from another replica was such a row, so it needs no
margin: otherwise the last streams of a drained replica wait for the end of others.

Without the second threshold a full cache thrashes: a prompt takes blocks as soon as they are free, the decoding rows
find none, and the work for a preempted request is lost again. A simulation of 300 requests (prompts of 32 to 200
tokens, outputs of up to 600, 512 blocks of 16 tokens, no host tier) gave:

| safety margin | resume margin | preemptions | |
|---|---|---|---|
| 0 | off | 318 | |
| 0 | on | 106 | 6 % less time to completion |
| 0.2 | off | 25 | |
| 0.2 | on | 25 | no difference |

Applying the second threshold also after an admission that did not fit was 2 % slower, without fewer preemptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.kv_cache.prefix_entries import Entry, Hit
from quire.replica.scheduler.engine_memory import EngineMemory
from quire.replica.scheduler.speed import CopySpeed


@dataclass(frozen=True, slots=True)
class Offer:
    """The blocks that a request gets if it starts now."""

    hit: Hit
    num_hit_tokens: int
    # Number of new blocks to allocate in each full-attention group.
    num_lacking: int


class Admission:
    """Give blocks to requests that start and to the chunks of their prompts."""

    def __init__(self, config: EngineConfig, memory: EngineMemory, copies: CopySpeed):
        self._config = config
        self._prefix = memory.prefix
        self._blocks = memory.blocks
        self._host = memory.host
        self._adoption = memory.adoption
        self._rows = memory.rows
        self._copies = copies
        # Whether a request was preempted and none has fitted since.
        self._held = False
        self.reconfigure(config)

    def reconfigure(self, config: EngineConfig) -> None:
        """Apply the margins of another configuration."""
        self._margin_blocks = config.safety_margin * config.num_blocks
        self._resume_blocks = config.resume_margin * config.num_blocks

    def hold(self) -> None:
        """Start no request until `resume_margin` of the blocks are available, because one was preempted."""
        self._held = True

    def _is_held(self) -> bool:
        short = self._blocks.num_available < self._resume_blocks
        return self._held and short and self._rows.num_active > 0

    def offer(self, request: Request, prefilling: Iterable[Request]) -> Offer | None:
        """The blocks that the request gets if it starts now, or None if it must wait. Changes nothing.

        While requests run, an admission must leave `safety_margin` of the blocks available, so that decoding rows can
        grow; a stream from another replica need not. A request that runs alone always fits, perhaps with smaller
        chunks, so every request starts eventually.

        Parameters
        ----------
        prefilling
            The running prefills; sliding-window blocks for their later chunks are reserved.
        """
        if self._is_held():
            return None
        groups, sliding = self._config.groups, self._rows.sliding
        hit = Hit([], [[] for _ in groups])
        if self._config.prefix_caching:
            hit = self._match(request)
        lacking = -(-request.num_tokens // self._config.block_size) - len(hit.entries)
        on_device = hit.device_blocks
        num_restored = sum(len(blocks) for blocks in hit.blocks) - len(on_device)
        num_fresh = lacking * (len(groups) - len(sliding)) + num_restored
        held = [len(hit.blocks[g]) for g in sliding]
        has_room = self.has_room(
            request.num_tokens,
            on_device,
            num_fresh,
            held,
            prefilling,
            needs_margin=not request.is_moved_here,
        )
        if not has_room:
            return None
        return Offer(hit, len(hit.entries) * self._config.block_size, lacking)

    def _match(self, request: Request) -> Hit:
        """The longest known prefix, with blocks of the host tier if copying them is faster than computing them.

        Blocks of the host tier are pinned. If some are lost or damaged, the index has forgotten them, and the prefix is
        a shorter one.
        """
        token_ids, chain = request.reusable_ids, request.chain
        hit = self._prefix.match(token_ids, chain=chain)
        if self._adoption is not None and self._adoption.extend(hit, token_ids, chain):
            hit = self._prefix.match(token_ids, chain=chain)
        while restores := hit.to_restore():
            near = self._prefix.match(token_ids, chain=chain, with_host=False)
            start, end = (len(h.entries) * self._config.block_size for h in (near, hit))
            if not self._copies.prefers_copy(len(restores), start, end - start):
                return near
            copies = [c for g, _, entry in restores if (c := entry.host_blocks[g]) is not None]
            if self._host.pin(copies):
                return hit
            hit = self._prefix.match(token_ids, chain=chain)
        return hit

    def has_room(
        self,
        num_tokens: int,
        known: Sequence[int],
        num_fresh: int,
        held: Sequence[int],
        prefilling: Iterable[Request],
        *,
        needs_margin: bool = True,
    ) -> bool:
        """Whether a request of `num_tokens` fits now, by the rules of `offer`.

        Parameters
        ----------
        known
            Device blocks that it would share.
        num_fresh
            Number of blocks that it would be allocated now.
        held
            Number of blocks that it would have in each sliding-window group after the start.
        prefilling
            The running prefills; sliding-window blocks for their later chunks are reserved.
        needs_margin
            Whether it must leave `safety_margin` of the blocks available.
        """
        if self._is_held():
            return False
        self._held = False
        runs = self._rows.num_active > 0
        left = self._blocks.num_available - self._blocks.num_unowned(known) - num_fresh
        if self._rows.sliding:
            chunk = self._config.max_batch_tokens if runs else 1
            left -= self._set_aside(num_tokens, chunk, held)
            left -= self._num_set_aside(prefilling)
        return left >= (self._margin_blocks if runs and needs_margin else 0)

    def take(self, request: Request, offer: Offer) -> None:
        """Give the request its row and the offered blocks."""
        hit, lacking = offer.hit, offer.num_lacking
        self._blocks.add_owner(hit.device_blocks)
        restores = hit.to_restore()
        # Own the host blocks before any allocation: a device block that is evicted to the host tier may evict one.
        copies = [c for g, _, entry in restores if (c := entry.host_blocks[g]) is not None]
        self._host.blocks.add_owner(copies)
        num_full = len(self._config.groups) - len(self._rows.sliding)
        fresh = self.allocate(lacking * num_full)
        restored: dict[tuple[int, int], int] = {}
        for (g, i, entry), copy, block in zip(
            restores, copies, self.allocate(len(restores)), strict=True
        ):
            restored[g, i] = block
            self.restore(entry, g, copy, block)
        blocks = [
            [restored[g, i] if block is None else block for i, block in enumerate(known)]
            + (fresh[g * lacking : (g + 1) * lacking] if g < num_full else [])
            for g, known in enumerate(hit.blocks)
        ]
        self._rows.claim(request, blocks, offer.num_hit_tokens)
        request.num_known = hit.num_known * self._config.block_size
        if hit.entries and self._prefix.snapshots:
            self._prefix.snapshots.load(hit.entries[-1], request.row)
        if hit.entries:
            request.tip, request.num_indexed = hit.entries[-1], len(hit.entries)
            self._prefix.add_row(request.tip)

    def restore(self, entry: Entry, g: int, copy: int, block: int) -> None:
        """Plan to copy an entry's host block, which the caller owns, to a device block."""
        self._host.restore(copy, block)
        self._prefix.place(entry, g, block)
        self._blocks.mark_contents([block])

    def extend_sliding(self, row: int, count: int) -> int:
        """Give the row the sliding-window blocks of its next `count` tokens, or of fewer if blocks are short.

        Returns
        -------
        Number of these tokens that have their blocks.
        """
        block_size, num_groups = self._config.block_size, len(self._rows.sliding)
        start = int(self._rows.num_computed[row])
        have = int(self._rows.num_blocks[self._rows.sliding[0], row])
        lacking = -(-(start + count) // block_size) - have
        lacking = max(0, min(lacking, self._blocks.num_available // num_groups))
        self._rows.extend(row, self.allocate(lacking * num_groups), self._rows.sliding)
        return min(count, (have + lacking) * block_size - start)

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks that must be available."""
        blocks = self._blocks.allocate(count)
        if blocks is None:
            raise IntegrityError(f"{count} blocks were found available, but the allocation failed")
        return blocks

    def _set_aside(self, num_tokens: int, step_tokens: int, held: Sequence[int]) -> int:
        """Number of sliding-window blocks that a prefill of `num_tokens` may need in addition to those it holds."""
        groups, block_size = self._config.groups, self._config.block_size
        return sum(
            max(0, groups[g].max_blocks(num_tokens, step_tokens, block_size) - count)
            for g, count in zip(self._rows.sliding, held, strict=True)
        )

    def _num_set_aside(self, prefilling: Iterable[Request]) -> int:
        """Number of sliding-window blocks that the running prefills may still need."""
        held = self._rows.num_blocks - self._rows.first_block
        return sum(
            self._set_aside(
                request.num_tokens,
                min(
                    self._config.max_batch_tokens,
                    request.num_tokens - int(self._rows.num_computed[request.row]),
                ),
                held[self._rows.sliding, request.row].tolist(),
            )
            for request in prefilling
        )
