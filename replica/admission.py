"""Whether a waiting request fits now, and what it gets when it starts.

All or nothing over the layer groups. A row gets all blocks of its known tokens in the groups of full attention
when it is admitted. In a sliding group it gets those of a chunk when the chunk is planned, and what fell out of
the window returns at the next plan, so that a long prompt needs no more than window and chunk; admission sets
that much aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.replica.blocks import BlockManager, IntegrityError
from quire.replica.config import EngineConfig
from quire.replica.prefix import Hit, PrefixCache
from quire.replica.request import Request
from quire.replica.rows import RowTable


@dataclass(frozen=True, slots=True)
class Offer:
    """What a request gets if it starts now."""

    hit: Hit
    num_lacking: int  # blocks to allocate in each group of full attention


class Admission:
    """Gives blocks to requests that start and to chunks of their prompts."""

    def __init__(
        self, config: EngineConfig, prefix: PrefixCache, blocks: BlockManager, rows: RowTable
    ):
        self._config = config
        self._prefix = prefix
        self._blocks = blocks
        self._rows = rows
        self._margin_blocks = config.safety_margin * config.num_blocks

    def offer(self, request: Request, prefilling: Iterable[Request]) -> Offer | None:
        """What the request gets if it starts now, or None if it must wait; nothing is changed.

        While anything runs, an admission must leave `safety_margin` of the blocks available, so that decoding
        rows can grow. A request alone may take smaller chunks than it would like.

        Parameters
        ----------
        prefilling
            The requests whose prompts are being computed: their sliding blocks are set aside.
        """
        groups, sliding = self._config.groups, self._rows.sliding
        hit = Hit([], [[] for _ in groups])
        if self._config.prefix_caching:
            hit = self._prefix.match(request.reusable_ids, chain=request.chain)
        lacking = -(-request.num_tokens // self._config.block_size) - len(hit.entries)
        left = self._blocks.num_available - self._blocks.num_unowned(hit.all_blocks)
        left -= lacking * (len(groups) - len(sliding))
        if sliding:
            chunk = self._config.max_batch_tokens if self._rows.num_active else 1
            held = [len(hit.blocks[g]) for g in sliding]
            left -= self._set_aside(request.num_tokens, chunk, held)
            left -= self._num_set_aside(prefilling)
        if left < self._margin():
            return None
        return Offer(hit, lacking)

    def has_room(self, num_blocks: int, prefilling: Iterable[Request]) -> bool:
        """Whether a request that starts now may take so many blocks and no more; see `offer`."""
        left = self._blocks.num_available - num_blocks
        if self._rows.sliding:
            left -= self._num_set_aside(prefilling)
        return left >= self._margin()

    def _margin(self) -> float:
        return self._margin_blocks if self._rows.num_active else 0

    def take(self, request: Request, offer: Offer) -> int:
        """Give the request its row and what was offered; returns how many of its tokens are computed."""
        hit, lacking = offer.hit, offer.num_lacking
        self._blocks.retain(hit.all_blocks)
        num_full = len(self._config.groups) - len(self._rows.sliding)
        fresh = self._allocate(lacking * num_full)
        blocks = [
            known + (fresh[g * lacking : (g + 1) * lacking] if g < num_full else [])
            for g, known in enumerate(hit.blocks)
        ]
        num_hit = len(hit.entries) * self._config.block_size
        self._rows.claim(request, blocks, num_hit)
        if hit.entries:
            request.tip, request.num_indexed = hit.entries[-1], len(hit.entries)
            self._prefix.retain_entry(request.tip)
        return num_hit

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
        self._rows.extend(row, self._allocate(lacking * num_groups))
        return min(count, (have + lacking) * block_size - start)

    def _allocate(self, count: int) -> list[int]:
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
