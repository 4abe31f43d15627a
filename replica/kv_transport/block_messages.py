"""What two nodes say to each other: one gRPC call with a stream of blocks as its answer, or of slots to read by NIXL.

```
 importer ── ExportRequest: keys in the order of the sequence ──▶ exporter
          ◀── BlockHeaders of a piece: about 1 MiB of blocks ──
          ◀── the contents of these blocks, one after the other
          ◀── BlockHeaders of the next piece, contents, ...
```

A message has the bus' version and checksum (`wire_codec.py`). Contents travel as they are: each block's checksum is in
its header. gRPC's flow control holds the exporter back while the importer writes. A message of its own for each block
of 64 KiB was slower.

With NIXL the same request is answered by `Lender`, and by `BlockHeaders` with slots instead of contents. The last ones
are empty. The slots stay leased until the importer ends the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from quire.protos.wire_codec import Message, array
from quire.replica.node_pool.pool_layout import KEY_BYTES

METHOD = "/quire.KvBlocks/Export"
LEND_METHOD = "/quire.KvBlocks/Lend"
# Of the blocks of a piece, which are leased together by the exporter.
PIECE_BYTES = 1 << 20
# 2 MiB of keys; gRPC's default takes messages of 4 MiB.
MAX_KEYS = 1 << 16


class WantedBlock(NamedTuple):
    """A block that an importer wants."""

    key: bytes
    # The blocks behind it are of no use without it.
    is_needed: bool = True


@dataclass(frozen=True, slots=True)
class ExportRequest(Message):
    """The blocks that an importer wants."""

    layout_version: int
    slot_bytes: int
    keys: bytes  # `KEY_BYTES` each


@dataclass(frozen=True, slots=True)
class BlockHeaders(Message):
    """The headers of a piece; its contents follow, unless they say in which slots these are."""

    keys: bytes  # `KEY_BYTES` each
    payers: Annotated[np.ndarray, array("<u8")]  # [n] uint64
    checksums: Annotated[np.ndarray, array("<u4")]  # [n] uint32
    routing_hashes: Annotated[np.ndarray, array("<u8")]  # [n] uint64
    slots: Annotated[np.ndarray, array("<u8")]  # [n] uint64 of the lender; [0]: the contents follow


@dataclass(frozen=True, slots=True)
class Lender(Message):
    """Where the slots are that will be lent."""

    agent: bytes  # NIXL's metadata
    begin: int  # address of slot 0


def split_keys(keys: bytes) -> list[bytes]:
    """The keys of a message."""
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def num_in_piece(slot_bytes: int) -> int:
    """Number of blocks of a piece."""
    return max(1, PIECE_BYTES // slot_bytes)
