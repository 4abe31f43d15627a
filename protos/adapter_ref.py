"""An adapter as messages name it, its digest, and the namespace of the cache that it has with a tenant.

Plain Python. An adapter is a folder in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from quire.protos.wire_codec import Record

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterRef(Record):
    """An adapter: its name in requests, its folder, and the digest of its files, which replicas verify."""

    name: str
    path: str
    digest: str

    @classmethod
    def of_folder(cls, name: str, path: str) -> AdapterRef:
        """Read the folder's files and compute the digest; raises OSError if a file cannot be read."""
        return cls(name, path, folder_digest(Path(path)))


def folder_digest(folder: Path) -> str:
    """Return BLAKE2b-128 of the two files of an adapter, as hexadecimal digits."""
    hasher = hashlib.blake2b(digest_size=16, person=b"quire-adapter")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = folder / name
        hasher.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
                hasher.update(piece)
    return hasher.hexdigest()


def adapter_key(digest: str) -> int:
    """Return the number that stands for an adapter in an `AdapterReport`: the first 8 bytes of its digest."""
    return int(digest[:16], 16)


def cache_namespace(tenant: str, adapter: AdapterRef | None) -> str:
    """Return the scope within which prompts share cached blocks: the tenant, and the adapter's weights.

    Different arguments give different results: a digest has no NUL, and only results with an empty or real digest
    begin with one.
    """
    if adapter is None and not tenant.startswith("\0"):
        return tenant
    return f"\0{'' if adapter is None else adapter.digest}\0{tenant}"
