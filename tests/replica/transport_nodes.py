"""Nodes with a pool and a transport each, in one process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from pool_process import adopt, key_of, open_pool

from quire.replica.kv_transport.block_messages import WantedBlock
from quire.replica.kv_transport.kv_transport import KvTransport
from quire.replica.node_pool.node_pool import NodePool
from quire.replica.node_pool.pool_layout import PoolLayout

HOST = "127.0.0.1"
LAYOUT = PoolLayout(48, 512)


class Node(NamedTuple):
    """A node's pool, an engine's membership of it, and its transport."""

    pool: NodePool
    transport: KvTransport

    @classmethod
    def made(cls, folder: Path, *, uses_nixl: bool = False) -> Node:
        folder.mkdir()
        pool = open_pool(folder, LAYOUT)
        return cls(pool, KvTransport("test", folder, LAYOUT, HOST, uses_nixl=uses_nixl))

    def has(self, *names: int) -> list[bool]:
        """Which blocks an engine of the node can use; each is read and compared."""
        return [adopt(self.pool, name) for name in names]

    def check(self) -> None:
        """Check both; a lender learns a little later that an importer has ended its call."""
        member, end_s = self.transport._pool._pool, time.monotonic() + 30
        while member.num_leased() and time.monotonic() < end_s:
            time.sleep(0.005)
        self.transport.check()
        self.pool.check()

    def end(self) -> None:
        self.check()
        self.transport.close()
        self.pool.close()


def wanted(*names: int) -> list[WantedBlock]:
    return [WantedBlock(key_of(name)) for name in names]
