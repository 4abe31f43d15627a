"""What a slot holds; plain data."""

from __future__ import annotations

from typing import NamedTuple


class Content(NamedTuple):
    """The content of a slot that is ready to be published."""

    slot: int
    key: bytes
    payer: int
    checksum: int
    # Routers' name of the block (`routing_hash.py`); 0: it has none.
    routing_hash: int = 0
