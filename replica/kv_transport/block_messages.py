"""What two nodes say to each other: one gRPC call with a stream of blocks as its answer.

```
 importer ── ExportRequest: keys in the order of the sequence ──▶ exporter
          ◀── BlockHeaders of some blocks ─────────────────────
          ◀── content of the first of them, content of the next, ...
          ◀── BlockHeaders of further blocks, their contents, ...
```

A message has the bus' version and checksum (`wire_codec.py`). A content travels as it is, one per gRPC message: its
checksum is in its header. gRPC's flow control holds the exporter back while the importer writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from quire.protos.wire_codec import Message, array
from quire.replica.node_pool.pool_layout import KEY_BYTES

METHOD = "/quire.KvBlocks/Export"
# Blocks of about this many bytes share their headers, and are leased together by the exporter.
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
    """The headers of blocks whose contents follow."""

    keys: bytes  # `KEY_BYTES` each
    payers: Annotated[np.ndarray, array("<u8")]  # [n] uint64
    checksums: Annotated[np.ndarray, array("<u4")]  # [n] uint32


def split_keys(keys: bytes) -> list[bytes]:
    """The keys of a message."""
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def num_in_piece(slot_bytes: int) -> int:
    """Number of blocks that share their headers."""
    return max(1, PIECE_BYTES // slot_bytes)
