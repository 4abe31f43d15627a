"""The pool's file: made once per node and application, joined by every engine, removed by the last one that leaves.

```
 /dev/shm/quire-kv-<name>-<kind>      mode 0600; kind: layout version and bytes of a slot
```

| the file | is |
|---|---|
| of a process that was killed | kept: the next engine finds its blocks |
| of a Ray session that `quire serve` has ended | removed with it (`remove_pools`) |
| of the same name and another kind, without a living member | removed at the next start |
| of another name, without a living member for ten minutes | removed at the next start |

All of it is allocated when it is made. So a full /dev/shm is an error at the start, and never a SIGBUS later.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.replica.node_pool.pool_layout import (
    LAYOUT_VERSION,
    MAGIC,
    Fact,
    PoolLayout,
    PoolViews,
)
from quire.replica.node_pool.pool_locks import PoolLocks

SHM = Path("/dev/shm")
_PREFIX = "quire-kv-"
_STALE_S = 600.0
# A member that is stopped while it holds the mutex delays a start by this.
_START_TIMEOUT_S = 10.0
_GIB = 1 << 30


class NodePoolError(ValueError):
    """The pool cannot be made or joined; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Where the engines of a node find their pool."""

    name: str  # result of `pool_name`
    set_aside: int = 0  # bytes of /dev/shm for Ray's object store
    folder: Path = SHM


class PoolSlots(NamedTuple):
    """The memory of a pool's slots, or one rank's part of it."""

    memory: mmap.mmap  # the whole file
    slots: np.ndarray  # [slots, bytes of the part] uint8

    @classmethod
    def of(cls, fd: int, layout: PoolLayout) -> PoolSlots:
        """Map the slots of an open pool file. The mapping lives until its last view is freed."""
        memory = _map(fd, layout)
        return cls(memory, PoolViews(memory, layout).slots)

    def part(self, rank: int, num_ranks: int) -> PoolSlots:
        """One of `num_ranks` equal parts of each slot."""
        width = self.slots.shape[1] // num_ranks
        return self._replace(slots=self.slots[:, rank * width : (rank + 1) * width])


class PoolFile:
    """An open and mapped pool file. `make_pool_file` makes it.

    Attributes
    ----------
    fd
        The opening that has the locks.
    views
        Arrays over the mapping.
    is_new
        Whether this opening has made the file.
    """

    def __init__(self, path: Path, fd: int, layout: PoolLayout, *, is_new: bool):
        self.path = path
        self.layout = layout
        self.is_new = is_new
        self.locks = PoolLocks(fd)
        self.fd = fd
        self._memory = _map(fd, layout)
        self.views = PoolViews(self._memory, layout)

    @property
    def slots(self) -> PoolSlots:
        """The memory of all slots."""
        return PoolSlots(self._memory, self.views.slots)

    def touch(self) -> None:
        """Renew the file's time, by which other applications see that it is not stale."""
        os.utime(self.fd)

    def close(self, *, remove: bool) -> None:
        """Release the mutex and close the file. The mapping lives until its last view is freed."""
        if remove:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        # Ranks may still have this opening, and with it the mutex.
        self.locks.unlock()
        os.close(self.fd)


def _map(fd: int, layout: PoolLayout) -> mmap.mmap:
    # The mapping keeps a duplicate of what it was made from. So it gets an opening of its own: the locks end when `fd`
    # is closed, also while the mapping lives.
    mapped = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # Shared: all members write to the same pages.
        return mmap.mmap(mapped, layout.num_bytes, mmap.MAP_SHARED)
    finally:
        os.close(mapped)


def pool_name(*parts: str) -> str:
    """A file name for the names of a cluster and of an application."""
    readable = "-".join(map(_readable, parts))
    # The readable part is cut, so that two pairs of names could share it.
    return f"{readable}-{hashlib.blake2b('/'.join(parts).encode(), digest_size=4).hexdigest()}"


def _readable(part: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "_", part)[:40]


def remove_pools(part: str, folder: Path = SHM) -> None:
    """Remove the pools with this first part of their name that no living process uses."""
    for path in folder.glob(f"{_PREFIX}{_readable(part)}-*"):
        _remove_unused(path)


def make_pool_file(
    name: str, wanted: PoolLayout, *, is_exact: bool, set_aside: int = 0, folder: Path = SHM
) -> PoolFile:
    """Open the node's pool of this name, or make it. The caller holds its mutex afterwards.

    Parameters
    ----------
    name
        Result of `pool_name`.
    wanted
        The layout of a new file. An existing file of the same slots keeps its number of slots.
    is_exact
        Whether a file with another number of slots is replaced if it has no living member.
    set_aside
        Bytes of the folder's free space that are not for the pool.

    Raises
    ------
    NodePoolError
        The folder has too little room, or a stopped process holds the mutex.
    """
    prefix = f"{_PREFIX}{name}-"
    path = folder / f"{prefix}v{LAYOUT_VERSION}x{wanted.slot_bytes}"
    _remove_stale(folder, path, prefix)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            file = _open(path, fd, wanted, is_exact, set_aside)
        except BaseException:
            os.close(fd)
            raise
        if file is not None:
            return file
        os.close(fd)


def _open(
    path: Path, fd: int, wanted: PoolLayout, is_exact: bool, set_aside: int
) -> PoolFile | None:
    """Take the mutex and check or make the content. None: the file was removed meanwhile."""
    locks = PoolLocks(fd)
    if not locks.lock(_START_TIMEOUT_S):
        raise NodePoolError(f"{path}: a stopped process holds the node pool's lock")
    if not _is_linked(path, fd):
        return None
    found = _layout_of(fd)
    if found is not None and found.slot_bytes == wanted.slot_bytes:
        if found == wanted or not is_exact or locks.has_others():
            return PoolFile(path, fd, found, is_new=False)
    try:
        _allocate(path, fd, wanted, set_aside)
    except NodePoolError:
        path.unlink()
        raise
    file = PoolFile(path, fd, wanted, is_new=True)
    facts = file.views.facts
    facts[Fact.LAYOUT_VERSION] = LAYOUT_VERSION
    facts[Fact.NUM_SLOTS] = wanted.num_slots
    facts[Fact.SLOT_BYTES] = wanted.slot_bytes
    # Last: a file without it is not complete.
    facts[Fact.MAGIC] = MAGIC
    return file


def _allocate(path: Path, fd: int, layout: PoolLayout, set_aside: int) -> None:
    os.ftruncate(fd, 0)
    needed = layout.num_bytes
    stat = os.statvfs(path.parent)
    free = stat.f_bavail * stat.f_frsize
    told = (
        f"the node pool needs {needed} bytes ({needed / _GIB:.3f} GiB) in {path.parent}, which has {free} free"
        + (f", {set_aside} of them for Ray's object store" if set_aside else "")
        + f", of {stat.f_blocks * stat.f_frsize}; lower node_pool_gib or enlarge {path.parent}"
    )
    if needed + set_aside > free:
        raise NodePoolError(told)
    try:
        os.posix_fallocate(fd, 0, needed)
    except OSError as error:
        raise NodePoolError(f"{told}: {error}") from error


def _layout_of(fd: int) -> PoolLayout | None:
    """The layout of a complete file; None if it is new, or was not completed."""
    page = os.pread(fd, 8 * len(Fact), 0)
    if len(page) < 8 * len(Fact):
        return None
    facts = np.frombuffer(page, np.uint64)
    if facts[Fact.MAGIC] != MAGIC or facts[Fact.LAYOUT_VERSION] != LAYOUT_VERSION:
        return None
    layout = PoolLayout(int(facts[Fact.NUM_SLOTS]), int(facts[Fact.SLOT_BYTES]))
    return layout if os.fstat(fd).st_size == layout.num_bytes else None


def _is_linked(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _remove_stale(folder: Path, own: Path, prefix: str) -> None:
    """Remove pool files that no living process uses, by the rules above."""
    for path in folder.glob(f"{_PREFIX}*"):
        if path != own:
            _remove_unused(path, 0.0 if path.name.startswith(prefix) else _STALE_S)


def _remove_unused(path: Path, min_age_s: float = 0.0) -> None:
    """Remove a pool file without a living member. Files of other users are left alone.

    A replica that starts holds the mutex until it is a member, or waits for it and then finds that the file is gone.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        locks = PoolLocks(fd)
        is_old = time.time() - os.fstat(fd).st_mtime >= min_age_s
        if is_old and locks.lock(0.0) and not locks.has_others() and _is_linked(path, fd):
            path.unlink()
    finally:
        os.close(fd)
