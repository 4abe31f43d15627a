"""The rows (slots of running requests in the request table) and KV blocks of one engine.

```
 EngineMemory
  ├─ rows            which request has which row
  ├─ blocks          owners of the device's blocks        ◀── deferred_frees: blocks given back during a step
  ├─ host            owners of the host tier's blocks
  ├─ prefix          which blocks are cached, in both tiers
  ├─ retention       which of them are evicted after the others
  └─ events          changes of the cache, for the routers
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata

from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.kv_cache.adoption import Adoption
from quire.replica.kv_cache.blocks import BlockManager, IntegrityError
from quire.replica.kv_cache.cache_events import EventLog
from quire.replica.kv_cache.deferred_frees import DeferredFrees
from quire.replica.kv_cache.host_tier import HostTier
from quire.replica.kv_cache.pool_blocks import PoolBlocks
from quire.replica.kv_cache.prefix import PrefixCache
from quire.replica.kv_cache.publishing import Publishing
from quire.replica.kv_cache.retention import Retention
from quire.replica.node_pool.node_pool import NodePool
from quire.replica.request_table import table_checks
from quire.replica.request_table.rows import RowTable
from quire.replica.scheduler.queues import BlockedHead

# Budget for publishing filled blocks (`publishing.py`), by device. On a CPU the copies take at most as much again. On a
# GPU they run on a stream of their own, and 5% of the host's time are checksums of about 256 MB/s.
_MAX_PUBLISHING_SHARE = {"cpu": 0.01, "cuda": 0.05}
# Whether steps run beside the copies between the tiers, by device. A CPU makes a step's copies before it computes.
_COPIES_BESIDE_STEPS = {"cpu": False, "cuda": True}


def kv_format(config: EngineConfig) -> str:
    """Everything besides the tokens that the bytes of a block of KV depend on; engines share equal blocks only."""
    parts = (
        *(metadata.version("quire"), config.model_name, config.revision, config.device),
        *(config.number_format, config.pool_dtype, config.block_size, config.groups),
        *(config.deterministic, config.tensor_parallel, config.reduction_splits, config.fuse),
    )
    return repr(parts)


class EngineMemory:
    """Rows, blocks of both tiers, the prefix index and its events.

    All code that gives rows or blocks back calls this class. It makes sure that no block is reused while a step in
    flight uses it, and that the scheduler checks again whether the queue's head fits.

    Parameters
    ----------
    config
        The engine's sizes.
    epoch
        Name of this cache's lifetime for the event log; None: a random one.
    max_event_batches
        Number of batches of cache events to keep for routers that missed some.
    node_pool
        The node's pool, which holds the host tier; None: the host tier is private.
    """

    def __init__(
        self,
        config: EngineConfig,
        epoch: str | None,
        max_event_batches: int,
        node_pool: NodePool | None = None,
    ):
        self._num_blocks = config.num_blocks
        self.events = EventLog(epoch, max_event_batches)
        self.prefix = PrefixCache(
            config.block_size,
            config.num_blocks,
            self.events,
            num_host_blocks=config.num_host_blocks,
            groups=config.groups,
            model_name=config.model_name,
            revision=config.revision,
            # The slot after the rows' is the trash slot.
            snapshots=(
                config.num_rows + 1,
                config.num_snapshots,
                config.num_host_snapshots,
                config.snapshot_spacing,
            ),
        )
        self.copies_beside_steps = _COPIES_BESIDE_STEPS[config.device]
        share = config.session_max_share
        max_retained = int(share * config.num_host_blocks)
        pool_blocks = None
        if node_pool is not None:
            pool_blocks = PoolBlocks(
                node_pool,
                kv_format(config),
                len(config.groups),
                self.prefix.name_of_host_block,
                self.prefix.forget_host,
                self.events,
                max_retained=max_retained,
            )
        self.host = HostTier(
            config.num_host_blocks,
            self.prefix,
            max_retained=max_retained,
            pool_blocks=pool_blocks,
        )
        self._pool_hashes = None if pool_blocks is None else pool_blocks.hashes
        self.adoption: Adoption | None = None
        self.publishing: Publishing | None = None
        if node_pool is not None and pool_blocks is not None and config.prefix_caching:
            self.adoption = Adoption(self.prefix, pool_blocks)
            self.publishing = Publishing(
                self.prefix,
                self.host,
                pool_blocks,
                node_pool.layout.slot_bytes,
                _MAX_PUBLISHING_SHARE[config.device],
            )
        self.blocks = BlockManager(
            config.num_blocks,
            on_evict=self.host.take_evicted,
            order=config.demotion_order,
            payer_of=self.prefix.payer_of_block,
            max_retained=int(share * config.num_blocks),
        )
        self.retention = Retention(self.prefix, self.blocks, self.host.blocks)
        self.rows = RowTable(
            config.num_rows,
            config.max_row_blocks,
            config.block_size,
            config.vocab_size,
            config.groups,
            config.max_loaded_adapters,
        )
        self.deferred_frees = DeferredFrees(self.blocks)
        self.blocked_head = BlockedHead()

    def give_back(self, blocks: Iterable[int], *, passed: bool = False) -> None:
        """Release blocks once no step in flight uses them.

        Parameters
        ----------
        blocks
            Blocks of one sequence, last block first.
        passed
            The blocks fell out of a sliding window; they may have any order.
        """
        self.deferred_frees.give_back(blocks, passed=passed)

    def vacate(self, request: Request) -> None:
        """Give back a running request's row and blocks; its full blocks stay cached."""
        self.prefix.snapshots.cancel_load(request.row)
        self.give_back(reversed(self.rows.vacate(request.row)))
        self.blocked_head.unblock()

    def retain(self, request: Request) -> None:
        """Retain the indexed blocks of a request that ends, if it asks for that.

        After `clear_cache` the index knows none of its blocks, and nothing is retained.
        """
        if request.retain_s and request.tip is not None and request.tip.alive:
            self.retention.add(request.key, request.tip, request.retain_s)

    def release_tip(self, request: Request) -> None:
        """Drop the request's reference to the prefix entry of its last indexed block."""
        self.prefix.release_entry(request.tip)
        request.tip, request.num_indexed = None, 0

    def trim(self, held: Mapping[int, int] | None = None) -> bool:
        """Free the blocks that fell out of the rows' sliding windows. Returns whether there were any.

        Parameters
        ----------
        held
            Row to the position of a token that a fork of the row may still compute: blocks that it sees are kept.
        """
        stale = self.rows.trim(held)
        if stale:
            self.give_back(stale, passed=True)
            self.blocked_head.unblock()
        return bool(stale)

    def launch(self, step: int) -> None:
        """Record that a step is in flight: it may use every block that is given back before `land`."""
        self.deferred_frees.launch(step)

    def land(self, step: int) -> None:
        """Release the blocks that were kept for a step that has run or failed."""
        if self.deferred_frees.land(step):
            self.blocked_head.unblock()

    def clear_cache(self) -> None:
        """Forget every cached block of both tiers. Live requests keep their blocks, but no later request can
        share them."""
        self.retention.clear()
        blocks, host_blocks = self.prefix.clear()
        if self._pool_hashes is not None:
            self._pool_hashes.hold_again()
        for block in blocks:
            self.blocks.forget_content(block)
        for block in host_blocks:
            self.host.blocks.forget_content(block)
        self.blocked_head.unblock()

    def counts_in_use(self) -> dict[str, int]:
        """Name of each resource to the amount that live requests hold; all 0 if no request is alive."""
        return {
            "blocks of the device": self.blocks.num_in_use,
            "blocks of the host tier": self.host.blocks.num_in_use,
            "rows": self.rows.num_active,
            "decoding tokens": self.rows.num_decode_tokens,
            "missing tokens": self.rows.num_missing_tokens,
        }

    def check(self, requests: Collection[Request], num_ahead: int, num_taken: int) -> None:
        """Raise `IntegrityError` where two records of rows, blocks or prefix entries disagree.

        Parameters
        ----------
        requests
            Every live request.
        num_ahead
            Number of tokens of a row that are planned and not yet known.
        num_taken
            Number of slots for snapshots that steps in flight have taken and not given to an entry.
        """
        self.prefix.check(() if self._pool_hashes is None else self._pool_hashes.hashes())
        self.prefix.snapshots.check(self.prefix.entries(), num_taken)
        self.retention.check()
        owners = table_checks.num_owners(self.rows, self._num_blocks)
        held = self.deferred_frees.num_owners()
        self.blocks.check((owners + held).tolist(), self.prefix.__contains__)
        self.host.check(b.host_block for r in requests if r.offloaded for b in r.offloaded.blocks)
        table_checks.check(self.rows, owners, num_ahead)
        tips = Counter(id(r.tip) for r in requests if r.tip is not None)
        for request in requests:
            if request.tip is not None and request.tip.num_rows != tips[id(request.tip)]:
                raise IntegrityError(
                    f"the prefix entry of request {request.key!r} counts {request.tip.num_rows} rows"
                )
