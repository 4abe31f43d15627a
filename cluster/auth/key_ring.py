"""The keys in memory, read again when their file changes.

A key is found by its SHA-256 digest in a dict. The time of this lookup depends on the digest of what the client sent,
not on how many of its characters are right, so it reveals nothing about a key. A comparison of each key in turn would
cost more with each key.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from quire.cluster.auth.access_rules import Right
from quire.cluster.auth.key_file import KeyEntry, KeyFileError, read_key_file
from quire.cluster.auth.quota_meter import QuotaMeter

logger = logging.getLogger("ray.serve")
OTHER = "other"
POLL_S = 1.0
# No key is longer. A longer text is not hashed.
_MAX_KEY_BYTES = 512


class LoadedKey:
    """A key that a router knows.

    Attributes
    ----------
    label
        The tenant's label in metrics: its name, or `other`.
    """

    __slots__ = ("entry", "expires_s", "label", "meter", "models", "rights")

    def __init__(self, entry: KeyEntry, meter: QuotaMeter, label: str):
        self.entry = entry
        self.meter = meter
        self.label = label
        self.rights: frozenset[Right] = entry.all_rights()
        self.models = frozenset(entry.models)
        self.expires_s = None if entry.expires is None else entry.expires.timestamp()


class KeyRing:
    """The keys of one file.

    Parameters
    ----------
    max_labels
        Most tenants that have a label of their own in metrics, in the order of the file. A tenant keeps its label, so
        that metrics have at most this many labels for as long as the process lives.
    clock
        Returns seconds since 1970.

    Raises
    ------
    KeyFileError
        The file cannot be used. Later a bad file is logged, and the keys stay as they are.
    """

    def __init__(self, path: Path, *, max_labels: int, clock: Callable[[], float] = time.time):
        self._path = path
        self._max_labels = max_labels
        self._clock = clock
        self._labels: set[str] = set()
        self._keys: dict[bytes, LoadedKey] = {}
        self._seen = self._identity()
        self._load()
        self._stop = threading.Event()

    def start(self) -> None:
        """Look at the file every second, in a thread."""
        threading.Thread(target=self._watch, name="key-file", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()

    def find(self, secret: bytes) -> LoadedKey | None:
        """Return a key; None if it is unknown or has expired."""
        if len(secret) > _MAX_KEY_BYTES:
            return None
        key = self._keys.get(hashlib.sha256(secret).digest())
        if key is not None and key.expires_s is not None and key.expires_s <= self._clock():
            return None
        return key

    def keys(self) -> list[LoadedKey]:
        """Return all keys."""
        return list(self._keys.values())

    def poll(self) -> None:
        """Read the file again if it has changed: its time, its size, or, behind links, which file it is."""
        seen = self._identity()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._load()
        except KeyFileError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("%d keys were read again from %s", len(self._keys), self._path)

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self.poll()

    def _identity(self) -> tuple[int, ...] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns

    def _load(self) -> None:
        """Replace all keys. A key that stays keeps its meter, so a new file does not refill its quotas."""
        keys = {}
        for entry in read_key_file(self._path):
            old = self._keys.get(entry.digest)
            meter = QuotaMeter(entry.quotas) if old is None else old.meter
            meter.quotas = entry.quotas
            keys[entry.digest] = LoadedKey(entry, meter, self._label(entry.tenant))
        self._keys = keys

    def _label(self, tenant: str) -> str:
        if tenant not in self._labels and len(self._labels) >= self._max_labels:
            return OTHER
        self._labels.add(tenant)
        return tenant
