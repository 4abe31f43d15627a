"""The adapters that a router knows by name. Routers exchange their entries; the newest entry of a name counts.

```
 router 1   legal: loaded at 5      ──┐                  ┌──▶  legal: loaded at 5,  chess: removed at 7
 router 2   chess: removed at 7     ──┴── exchange ──────┴──▶  the same
```

An entry has its time, and a removed adapter keeps an entry without a folder, so that an exchange does not bring it
back. Replicas have no registry: a request carries the folder and the digest of its adapter.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.protos.adapter_ref import AdapterRef
from quire.protos.errors import InvalidRequest, ModelNotFound
from quire.router.status_types import AdapterEntry

MAX_ADAPTERS = 1024

# Name, path, digest, version in nanoseconds since 1970; path and digest are empty if the adapter was removed.
PlainEntry = tuple[str, str, str, int]


class AdapterRegistry:
    """Entries by name, those of removed adapters included."""

    def __init__(self) -> None:
        self._entries: dict[str, AdapterEntry] = {}

    def find(self, name: str) -> AdapterRef | None:
        """Return the adapter with this name."""
        entry = self._entries.get(name)
        return None if entry is None or entry.is_removed else entry.ref

    def loaded(self) -> list[AdapterEntry]:
        """The adapters that requests may use, by name."""
        entries = [entry for entry in self._entries.values() if not entry.is_removed]
        return sorted(entries, key=lambda entry: entry.ref.name)

    def uses(self, digest: str) -> bool:
        """Whether some name stands for these files."""
        return any(entry.ref.digest == digest for entry in self.loaded())

    def put(self, ref: AdapterRef, now_ns: int) -> AdapterEntry:
        """Add an adapter, or replace the one with its name.

        Raises
        ------
        InvalidRequest
            There are `MAX_ADAPTERS` others.
        """
        known = self._entries.get(ref.name)
        if known is None and len(self._entries) >= MAX_ADAPTERS:
            self._drop_oldest_removed()
        if known is None and len(self._entries) >= MAX_ADAPTERS:
            raise InvalidRequest(
                f"name: at most {MAX_ADAPTERS} adapters can be loaded; unload one first",
                field="name",
            )
        version_ns = now_ns if known is None else max(now_ns, known.version_ns + 1)
        entry = self._entries[ref.name] = AdapterEntry(ref, version_ns)
        return entry

    def remove(self, name: str, now_ns: int) -> AdapterRef:
        """Remove an adapter and return it.

        Raises
        ------
        ModelNotFound
            No adapter has this name.
        """
        entry = self._entries.get(name)
        if entry is None or entry.is_removed:
            raise ModelNotFound(f"no adapter has the name {name[:64]!r}", field="name")
        version_ns = max(now_ns, entry.version_ns + 1)
        self._entries[name] = AdapterEntry(entry.ref, version_ns, is_removed=True)
        return entry.ref

    def _drop_oldest_removed(self) -> None:
        removed = [name for name, entry in self._entries.items() if entry.is_removed]
        if removed:
            del self._entries[min(removed, key=lambda name: self._entries[name].version_ns)]

    def plain(self) -> list[PlainEntry]:
        """All entries as plain data."""
        return [
            (name, "", "", e.version_ns)
            if e.is_removed
            else (name, e.ref.path, e.ref.digest, e.version_ns)
            for name, e in self._entries.items()
        ]

    def merge(self, entries: Iterable[PlainEntry]) -> None:
        """Take over the entries of another router that are newer than the own ones."""
        for name, path, digest, version_ns in entries:
            known = self._entries.get(name)
            # Of two changes at the same time all routers keep the same one.
            new = (version_ns, digest)
            if known is not None and new <= (
                known.version_ns,
                "" if known.is_removed else known.ref.digest,
            ):
                continue
            if known is None and len(self._entries) >= MAX_ADAPTERS:
                continue
            self._entries[name] = AdapterEntry(
                AdapterRef(name, path, digest), version_ns, is_removed=not digest
            )
