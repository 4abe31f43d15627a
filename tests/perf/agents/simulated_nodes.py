"""Nodes in virtual time: the pool of a node, and pulls of KV blocks from replicas of other nodes.

Pools, names of blocks, publishing, adoption and eviction are the product's; a slot of a pool has `_SLOT_BYTES`, which
nobody reads. Only the transport is replaced: a pull takes `PULL_OVERHEAD_S` and a time for each block, and the pulls of
a replica follow one another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.protos.wire import BlockSource, Hello, PullHint
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.kv_transport.block_import import ImportResult
from quire.replica.kv_transport.peer_blocks import wanted_blocks
from quire.replica.kv_transport.shared_pool import SharedPool
from quire.replica.node_pool.node_pool import NodePool, open_node_pool
from quire.replica.node_pool.pool_layout import PoolLayout
from quire.replica.scheduler.scheduler import Scheduler
from quire.router.policy.cost_terms import PULL_OVERHEAD_S

_SLOT_BYTES = 64
# Blocks that a peer sends at once.
_PIECE = 32
_POLL_S, _MAX_PUBLISH_S = 0.005, 1.0


@dataclass(frozen=True, slots=True)
class Network:
    """The network between nodes.

    Attributes
    ----------
    token_s
        Seconds to copy a token's KV.
    token_bytes
        Bytes of a token's KV, as the router counts them.
    """

    token_s: float
    token_bytes: int


class SimulatedNode:
    """A node with a pool that its replicas share.

    Parameters
    ----------
    folder
        Where the pool's file is.
    clock
        Seconds of virtual time.
    """

    def __init__(self, name: str, folder: Path, num_slots: int, clock: Callable[[], float]):
        self.name = name
        self._folder, self._layout, self._clock = folder, PoolLayout(num_slots, _SLOT_BYTES), clock
        self._members: list[NodePool] = []

    def join(self, *, is_engine: bool = True) -> NodePool:
        """A new member of the pool."""
        member = open_node_pool(
            self.name, self._layout, folder=self._folder, clock=self._clock, is_engine=is_engine
        )
        self._members.append(member)
        return member

    def close(self) -> None:
        """Let all members leave the pool."""
        for member in self._members:
            member.close()


class SimulatedTransport:
    """The exports and the pulls of one replica.

    Parameters
    ----------
    wake
        Wakes the replica's engine.
    peers
        The transports of all replicas by name.
    """

    def __init__(
        self,
        name: str,
        node: SimulatedNode,
        scheduler: Scheduler,
        wake: Callable[[], None],
        network: Network,
        peers: Mapping[str, SimulatedTransport],
    ):
        self.source = BlockSource(name)
        self.num_pulled = 0  # blocks
        self._node, self._scheduler, self._wake = node, scheduler, wake
        self._network, self._peers = network, peers
        self._pool = SharedPool(node.join(is_engine=False))
        self._one_at_a_time = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time

    def hello(self) -> Hello:
        """What a router learns of the replica."""
        config: EngineConfig = self._scheduler.config
        return Hello(
            replica=self.source.address,
            epoch=self._scheduler.events.epoch,
            model_name=config.model_name,
            revision=config.revision,
            dtype=config.dtype,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            max_cache_tokens=config.num_blocks * config.block_size,
            block_size=config.block_size,
            eos_token_ids=list(config.eos_token_ids),
            startup_s={},
            node=self._node.name,
            exports=self.source,
            kv_token_bytes=self._network.token_bytes,
        )

    async def pull(self, request: Request, hint: PullHint) -> ImportResult:
        """Pull what a hint names, for at most its time."""
        slots: list[int] = []
        try:
            return await asyncio.wait_for(self._pull(request, hint, slots), hint.max_wait_s)
        except TimeoutError:
            return ImportResult(0, 0, hint.max_wait_s, "it is late")
        finally:
            self._pool.release(slots)
            self.num_pulled += len(slots)

    async def _pull(self, request: Request, hint: PullHint, slots: list[int]) -> ImportResult:
        """Pull once no other pull runs; `slots` gets what has come."""
        async with self._one_at_a_time:
            return await self._pull_now(request, hint, slots)

    async def _pull_now(self, request: Request, hint: PullHint, slots: list[int]) -> ImportResult:
        config, blocks = self._scheduler.config, self._scheduler.memory.host.pool_blocks
        assert blocks is not None
        spans = hint.start, hint.end, config.block_size, config.groups, blocks.key
        wanted = wanted_blocks(request.token_ids, request.chain.tenant, *spans)
        missing = self._pool.missing([block.key for block in wanted])
        began_s = self._clock()
        if not missing:
            return ImportResult(0, 0, 0.0)
        source = self._peers[hint.source.address]
        await asyncio.sleep(PULL_OVERHEAD_S)
        coming = source.publish(missing)
        for begin in range(0, len(missing), _PIECE):
            piece = missing[begin : begin + _PIECE]
            headers, contents = await source.read(piece, coming)
            await asyncio.sleep(len(headers) * config.block_size * self._network.token_s)
            slots += self._pool.write(headers, contents)
            if len(headers) < len(piece):
                break
        num_bytes = len(slots) * config.block_size * self._network.token_bytes
        return ImportResult(len(slots), num_bytes, self._clock() - began_s)

    def publish(self, keys: Sequence[bytes]) -> set[bytes]:
        """Make the engine publish what its device has of these blocks; returns those that will come."""
        missing = self._pool.missing(keys)
        coming = self._scheduler.publish_soon(missing) if missing else set()
        self._wake()
        return coming

    async def read(self, keys: Sequence[bytes], coming: set[bytes]) -> tuple[list, bytes]:
        """Read those of these blocks that the pool has, once the coming ones are there."""
        awaited = [key for key in keys if key in coming]
        end_s = self._clock() + _MAX_PUBLISH_S
        while awaited and self._clock() < end_s:
            awaited = self._pool.missing(awaited)
            if awaited:
                await asyncio.sleep(_POLL_S)
        return self._pool.read(keys)
