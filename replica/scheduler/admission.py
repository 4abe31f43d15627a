"""Whether a waiting request fits now, and what it gets when it starts.

All or nothing over the layer groups. A row gets all blocks of its known tokens in the groups of full attention
when it is admitted. In a sliding group it gets those of a chunk when the chunk is planned, and what fell out of
the window returns at the next plan, so that a long prompt needs no more than window and chunk; admission sets
that much aside. Blocks of its prefix that are only in the host tier are copied back while the step in which it starts
runs, if that is faster than computing them again (`copy_speed.py`).

While anything runs, two marks of the available blocks hold admissions back::

    0 ─────────────────── safety_margin ─────────── resume_margin ───────────────── all
                          an admission leaves       after a running request lost its blocks,
                          at least these            none starts before there are these

Without the second a full cache thrashes: blocks that come free go to a prompt at once, the rows that decode find none,
and what was computed for a victim is thrown away again. In a simulation (300 requests of 32 to 200 and up to 600
tokens, 512 blocks of 16, no host tier) without a safety margin it takes preemptions from 318 to 106 and 6 % off the
time to completion; a safety margin of 0.2 alone leaves 25, and the second mark then neither helps nor costs. Waiting
for it also after an admission that did not fit was tried: 2 % slower, and no fewer preemptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.kv_cache.prefix_entries import Entry, Hit
from quire.replica.scheduler.copy_speed import CopySpeed
from quire.replica.scheduler.engine_memory import EngineMemory


@dataclass(frozen=True, slots=True)
class Offer:
    """What a request gets if it starts now."""

    hit: Hit
    num_hit_tokens: int
    num_lacking: int  # blocks to allocate in each group of full attention


class Admission:
    """Gives blocks to requests that start and to chunks of their prompts."""

    def __init__(self, config: EngineConfig, memory: EngineMemory, copies: CopySpeed):
        self._config = config
        self._prefix = memory.prefix
        self._blocks = memory.blocks
        self._host = memory.host
        self._rows = memory.rows
        self._copies = copies
        self._held = False  # see `hold`
        self.reconfigure(config)

    def reconfigure(self, config: EngineConfig) -> None:
        """Take on other margins."""
        self._margin_blocks = config.safety_margin * config.num_blocks
        self._resume_blocks = config.resume_margin * config.num_blocks

    def hold(self) -> None:
        """A running request lost its blocks: none starts before `resume_margin` of them are available."""
        self._held = True

    def _is_held(self) -> bool:
        short = self._blocks.num_available < self._resume_blocks
        return self._held and short and self._rows.num_active > 0

    def offer(self, request: Request, prefilling: Iterable[Request]) -> Offer | None:
        """What the request gets if it starts now, or None if it must wait; nothing is changed.

        While anything runs, an admission must leave `safety_margin` of the blocks available, so that decoding
        rows can grow. A request alone always fits, maybe in smaller chunks than it would like, so nobody waits
        for ever.

        Parameters
        ----------
        prefilling
            The requests whose prompts are being computed: their sliding blocks are set aside.
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
        if not self.has_room(request.num_tokens, on_device, num_fresh, held, prefilling):
            return None
        return Offer(hit, len(hit.entries) * self._config.block_size, lacking)

    def _match(self, request: Request) -> Hit:
        """The longest known prefix, of the host tier what is faster copied than computed."""
        hit = self._prefix.match(request.reusable_ids, chain=request.chain)
        num_restored = len(hit.to_restore())
        if not num_restored:
            return hit
        near = self._prefix.match(request.reusable_ids, chain=request.chain, with_host=False)
        start, end = (len(h.entries) * self._config.block_size for h in (near, hit))
        return hit if self._copies.prefers_copy(num_restored, start, end - start) else near

    def has_room(
        self,
        num_tokens: int,
        known: Sequence[int],
        num_fresh: int,
        held: Sequence[int],
        prefilling: Iterable[Request],
    ) -> bool:
        """Whether a request of `num_tokens` fits now; see `offer`.

        Parameters
        ----------
        known
            Blocks of the device that it would share.
        num_fresh
            Blocks that it would be given at once.
        held
            How many blocks of each sliding group are among these.
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
        return left >= (self._margin_blocks if runs else 0)

    def take(self, request: Request, offer: Offer) -> None:
        """Give the request its row and what was offered."""
        hit, lacking = offer.hit, offer.num_lacking
        self._blocks.retain(hit.device_blocks)
        restores = hit.to_restore()
        # Held before anything is allocated: what leaves the device then may push others out of the host tier.
        copies = [c for g, _, entry in restores if (c := entry.host_blocks[g]) is not None]
        self._host.blocks.retain(copies)
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
        if hit.entries:
            request.tip, request.num_indexed = hit.entries[-1], len(hit.entries)
            self._prefix.retain_entry(request.tip)

    def restore(self, entry: Entry, g: int, copy: int, block: int) -> None:
        """Copy an entry's block back from the host tier, where it is held, to a block of the device."""
        self._host.restore(copy, block)
        self._prefix.place(entry, g, block)
        self._blocks.mark_contents([block])

    def extend_sliding(self, row: int, count: int) -> int:
        """Give the row the sliding blocks of its next `count` tokens, or of as many as there are blocks for.

        Returns
        -------
        How many of the tokens have their blocks.
        """
        block_size, num_groups = self._config.block_size, len(self._rows.sliding)
        start = int(self._rows.num_computed[row])
        have = int(self._rows.num_blocks[self._rows.sliding[0], row])
        lacking = -(-(start + count) // block_size) - have
        lacking = max(0, min(lacking, self._blocks.num_available // num_groups))
        self._rows.extend(row, self.allocate(lacking * num_groups))
        return min(count, (have + lacking) * block_size - start)

    def allocate(self, count: int) -> list[int]:
        """Blocks that are known to be available."""
        blocks = self._blocks.allocate(count)
        if blocks is None:
            raise IntegrityError(f"{count} blocks were available and are not")
        return blocks

    def _set_aside(self, num_tokens: int, step_tokens: int, held: Sequence[int]) -> int:
        """Sliding blocks that a prefill of `num_tokens` may need beside those it holds of each such group."""
        groups, block_size = self._config.groups, self._config.block_size
        return sum(
            max(0, groups[g].max_blocks(num_tokens, step_tokens, block_size) - count)
            for g, count in zip(self._rows.sliding, held, strict=True)
        )

    def _num_set_aside(self, prefilling: Iterable[Request]) -> int:
        """Sliding blocks that the running prefills may still need."""
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
