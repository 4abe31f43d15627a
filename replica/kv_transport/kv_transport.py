"""The transport of KV blocks between nodes: export and import, pool to pool.

```
 node A                                             node B
 engine ─publish─▶ pool ─▶ BlockExport ══gRPC══▶ BlockImport ─▶ pool ─adopt, verify─▶ engine
```

The importing engine knows nothing of it: what has come is found by adoption (`kv_cache/adoption.py`), as if
an engine of this node had published it. Each replica serves its node's whole pool, so any of them will do as a source.
Only the one that computed a block can give it before it is in the pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.protos.wire import BlockSource
from quire.replica.kv_transport.block_export import BlockExport
from quire.replica.kv_transport.block_import import BlockImport, ImportResult
from quire.replica.kv_transport.block_messages import WantedBlock
from quire.replica.kv_transport.nixl_memory import NixlMemory
from quire.replica.kv_transport.shared_pool import SharedPool
from quire.replica.node_pool.node_pool import open_node_pool
from quire.replica.node_pool.pool_layout import PoolLayout


class KvTransport:
    """Exports the blocks of a node's pool, and imports blocks into it.

    Parameters
    ----------
    name, folder
        Of the pool (`PoolPlace`). An engine of this process uses it already.
    layout
        The pool's layout.
    host
        The address of this node.
    publish
        Makes the engine of this process publish what its device has of these blocks; returns those that will be in the
        pool soon.
    uses_nixl
        Importers read the pool's memory by NIXL, as this process reads theirs. All nodes do, or none.

    Raises
    ------
    NixlMissingError
        `uses_nixl` is set, and NIXL cannot start.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        layout: PoolLayout,
        host: str,
        publish: Callable[[list[bytes]], set[bytes]] = lambda keys: set(),
        *,
        uses_nixl: bool = False,
    ):
        self.layout = layout
        self._memory: NixlMemory | None = None
        self._pool = SharedPool(
            open_node_pool(name, layout, is_exact=False, folder=folder, is_engine=False)
        )
        try:
            if uses_nixl:
                self._memory = NixlMemory(self._pool.slots)
            self.exporter = BlockExport(self._pool, host, publish, self._memory)
        except BaseException:
            self._pool.close()
            raise
        # Streams that will move here later hold up no request that waits.
        self._importer, self._ahead = (BlockImport(self._pool, self._memory) for _ in range(2))

    @property
    def source(self) -> BlockSource:
        """What a peer needs to import from this node."""
        return BlockSource(self.exporter.address, self.exporter.token)

    def import_blocks(
        self,
        source: BlockSource,
        wanted: Sequence[WantedBlock],
        timeout_s: float,
        cancelled: threading.Event | None = None,
        *,
        is_ahead: bool = False,
    ) -> ImportResult:
        """Import blocks of one sequence.

        Parameters
        ----------
        source, wanted, timeout_s, cancelled
            As of `BlockImport.run`.
        is_ahead
            No request waits for the blocks yet.
        """
        importer = self._ahead if is_ahead else self._importer
        return importer.run(source, wanted, timeout_s, cancelled)

    @property
    def num_imported(self) -> int:
        """Blocks published so far."""
        return self._importer.num_imported + self._ahead.num_imported

    @property
    def num_refused(self) -> int:
        """Blocks that came and were not published, because they are wrong or there is no room."""
        return self._importer.num_refused + self._ahead.num_refused

    def check(self) -> None:
        """Raise AssertionError if a slot of the pool is lost, or still leased for a copy."""
        self._pool.check()

    def close(self, linger_s: float = 0.0) -> None:
        """End all imports and exports, these after `linger_s` at most, and leave the pool."""
        self._importer.close()
        self._ahead.close()
        self.exporter.close(linger_s)
        if self._memory is not None:
            self._memory.close()
        self._pool.close()
