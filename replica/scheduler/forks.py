"""Forks: requests with the same prompt as another request (the parent). The prompt is computed only once.

```
 parent   [ full ][ full ][ full ][ pro.. ]──▶ own tokens
              │       │       │       │ copied in the fork's first step
 fork     [  same  ][ same ][ same ][ pro.. ]──▶ own tokens
```

A fork waits outside the queue until its parent has sampled its first token. Then it shares the parent's blocks before
the block with the last prompt token, gets a copy of that block, and computes the last prompt token again for its own
logits. So only the single owner of a block writes to it, and forks do not need the prefix index. If the parent has
ended or has been preempted, the fork runs as an ordinary request.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import dataclass

import numpy as np

from quire.protos.errors import InvalidRequest
from quire.replica.config import EngineConfig
from quire.replica.core.request import Phase, Request
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.kv_cache.prefix_entries import Entry
from quire.replica.scheduler.admission import Admission
from quire.replica.scheduler.engine_memory import EngineMemory


@dataclass(frozen=True, slots=True)
class Share:
    """The blocks that a fork gets from its parent."""

    # For each of G layer groups the blocks that parent and fork will both own.
    blocks: list[list[int]]
    # [G] the parent's blocks with the last prompt token, to be copied. Empty if that token is the first of its block,
    # so that nothing is copied.
    sources: tuple[int, ...]
    # Number of prompt tokens without the last one.
    num_computed: int
    # Prefix entry of the last shared block that is indexed.
    tip: Entry | None
    num_indexed: int


class WaitingForks:
    """Forks that wait for the first token of their parents. Operations except `keys` and `check` are O(1)."""

    def __init__(self) -> None:
        self._of_parent: dict[Hashable, dict[Hashable, Request]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, request: Request) -> bool:
        parent = request.parent
        return parent is not None and request.key in self._of_parent.get(parent.key, ())

    def append(self, request: Request) -> None:
        """Add a fork, which waits for its parent."""
        self._of_parent.setdefault(_parent_key(request), {})[request.key] = request
        self._count += 1

    def remove(self, request: Request) -> None:
        """Take out a fork that ends or pauses before its parent has a token."""
        parent_key = _parent_key(request)
        siblings = self._of_parent[parent_key]
        del siblings[request.key]
        if not siblings:
            del self._of_parent[parent_key]
        self._count -= 1

    def take(self, parent: Request) -> list[Request]:
        """Remove and return the forks that wait for this parent, in order of submission."""
        forks = list(self._of_parent.pop(parent.key, {}).values())
        self._count -= len(forks)
        return forks

    def keys(self) -> Set[Hashable]:
        return {key for forks in self._of_parent.values() for key in forks}

    def check(self, requests: Mapping[Hashable, Request]) -> None:
        """Raise `IntegrityError` when a fork waits for a parent that will not release it."""
        if len(self.keys()) != self._count:
            raise IntegrityError(
                f"{self._count} waiting forks are counted, there are {len(self.keys())}"
            )
        for parent_key, forks in self._of_parent.items():
            parent = requests.get(parent_key)
            if parent is None or parent.phase is Phase.DECODING:
                raise IntegrityError(f"forks wait for {parent_key!r}, which has its first token")
            if any(fork.parent is not parent for fork in forks.values()):
                raise IntegrityError(f"a fork of another parent waits for {parent_key!r}")


def _parent_key(request: Request) -> Hashable:
    if request.parent is None:
        raise IntegrityError(f"request {request.key!r} is not a fork")
    return request.parent.key


class Sharing:
    """Give forks the blocks of their parents."""

    def __init__(self, config: EngineConfig, memory: EngineMemory):
        self._block_size = config.block_size
        self._num_groups = len(config.groups)
        self._has_states = config.has_states
        self._prefix = memory.prefix
        self._blocks = memory.blocks
        self._rows = memory.rows

    def offer(self, request: Request) -> Share | None:
        """The blocks that the request can take from its parent now; None: it must start as an ordinary request."""
        parent = request.parent
        if parent is None or parent.phase is not Phase.DECODING or self._has_states:
            # The fork of a recurrent model starts from the prompt's snapshot, as the same prompt again would.
            return None
        if request.num_tokens > request.num_prompt_tokens:
            # A preempted fork that has generated tokens of its own needs KV for these too, which the parent lacks.
            return None
        row, block_size = parent.row, self._block_size
        last = request.num_tokens - 1
        end = last // block_size
        first = [int(group.first_key(last)) // block_size for group in self._rows.groups]
        if (self._rows.first_block[:, row] > first).any():
            # The parent has given back blocks that have fallen out of its window.
            return None
        tables = self._rows.block_tables[:, row]
        num_indexed = min(parent.num_indexed, end)
        tip = parent.tip if num_indexed else None
        while tip is not None and tip.depth >= num_indexed:
            tip = tip.parent
        return Share(
            blocks=[tables[g, first[g] : end].tolist() for g in range(self._num_groups)],
            sources=tuple(tables[:, end].tolist()) if last % block_size else (),
            num_computed=last,
            tip=tip,
            num_indexed=num_indexed,
        )

    def fits(self, request: Request, admission: Admission, prefilling: Iterable[Request]) -> bool:
        """Whether there is room for the fork now."""
        num_sliding = len(self._rows.sliding)
        # The fork gets all blocks of its prompt now, so nothing is reserved for later chunks.
        held = [-(-request.num_tokens // self._block_size)] * num_sliding
        return admission.has_room(request.num_tokens, [], self._num_groups, held, prefilling)

    def take(self, request: Request, share: Share) -> list[tuple[int, int]]:
        """Give the fork its row. Returns (from, to) of each block to copy before its first step.

        `fits` must have found room for one block in each group.
        """
        for blocks in share.blocks:
            self._blocks.add_owner(blocks)
        fresh = self._blocks.allocate(self._num_groups)
        if fresh is None:
            raise IntegrityError(
                f"{self._num_groups} blocks were found available, but the allocation failed"
            )
        own = [[*blocks, block] for blocks, block in zip(share.blocks, fresh, strict=True)]
        self._rows.claim(request, own, share.num_computed)
        if share.tip is not None:
            request.tip, request.num_indexed = share.tip, share.num_indexed
            self._prefix.add_row(share.tip)
        return list(zip(share.sources, fresh, strict=True)) if share.sources else []


def find_parent(
    request: Request, requests: Mapping[Hashable, Request], waiting: WaitingForks
) -> Request | None:
    """The live parent of a request; None if there is none, or if nothing can be shared with it.

    A request that needs log-probabilities of its prompt computes these tokens itself, so it shares nothing.

    Raises
    ------
    InvalidRequest
        `fork_of` names a request with another prompt or tenant.
    """
    parent = None if request.fork_of is None else requests.get(request.fork_of)
    if parent is None or parent.is_paused:
        return None
    prompt = parent.token_ids[: parent.num_prompt_tokens]
    if request.chain.tenant != parent.chain.tenant or not np.array_equal(prompt, request.token_ids):
        raise InvalidRequest(
            f"fork_of: request {request.fork_of!r} has another prompt or cache_salt",
            field="fork_of",
        )
    if request.params.prompt_logprobs is not None:
        return None
    # If the named request is itself a waiting fork, both have the same parent.
    return parent.parent if parent in waiting else parent


def held_positions(parents: Iterable[Request]) -> dict[int, int]:
    """Map the row of each parent to the position of the last prompt token, which its forks compute again."""
    return {p.row: p.num_prompt_tokens - 1 for p in parents if p.phase is Phase.DECODING}
