"""A process that exports blocks, for tests that kill it. It prints address and token, and `half` after half of them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from pool_process import open_pool, put

from quire.replica.kv_transport import block_messages
from quire.replica.kv_transport.kv_transport import KvTransport
from quire.replica.node_pool.pool_layout import PoolLayout


def main(folder: Path, num_slots: int, slot_bytes: int, kind: str) -> None:
    layout = PoolLayout(num_slots, slot_bytes)
    block_messages.PIECE_BYTES = 4 * slot_bytes
    pool = open_pool(folder, layout)
    put(pool, *range(num_slots))
    transport = KvTransport("test", folder, layout, "127.0.0.1", uses_nixl=kind == "nixl")
    name = "lend" if kind == "nixl" else "read"
    read, num_read = getattr(transport._pool, name), 0

    def read_half(keys: list[bytes]) -> object:
        nonlocal num_read
        if num_read >= num_slots // 2:
            print("half", flush=True)
            threading.Event().wait()
        num_read += len(keys)
        return read(keys)

    setattr(transport._pool, name, read_half)
    print(transport.source.address, transport.source.token, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
