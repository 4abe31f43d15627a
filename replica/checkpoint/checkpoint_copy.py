"""Copies a checkpoint from another machine: listed and read there, verified and written here.

```
 the other machine                    this one
 list_checkpoint ─────Listing─────▶
 read_piece ◀──────── Piece ──────    copy_checkpoint ─▶ partial/ ─ all digests fit ─▶ folders/<digest>
            ───bytes, SHA-256─────▶
```

How functions are called on another machine is the caller's business (`serving/node_checkpoints.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from quire.replica.checkpoint.cache_folder import copies_folder
from quire.replica.checkpoint.checkpoint import (
    DownloadError,
    check_files,
    checkpoint_here,
    commit_of,
    fingerprint,
    used_files,
)
from quire.replica.checkpoint.model_spec import CheckpointError

PIECE_BYTES = 16 << 20
# Room that a copy leaves on the disk.
_SPARED_BYTES = 1 << 30


class ListedFile(NamedTuple):
    """A file of a checkpoint. Its size and time tell whether it has changed since."""

    name: str  # relative to the folder
    num_bytes: int
    modified_ns: int


class Listing(NamedTuple):
    """A checkpoint on the machine that has it."""

    folder: str
    commit: str  # of a download from the hub; empty: another folder
    digest: str  # result of `copy_digest`
    files: list[ListedFile]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)


class Piece(NamedTuple):
    """Consecutive bytes of a file."""

    file: ListedFile
    begin: int
    num_bytes: int


class PieceBytes(NamedTuple):
    """What a machine has read: the bytes, and their SHA-256."""

    content: np.ndarray  # [num_bytes] uint8
    digest: bytes


def list_checkpoint(model: str, revision: str | None, weights: bool) -> Listing | None:
    """List a model's files on this machine; None: it lacks them, or they are not complete.

    Parameters
    ----------
    model, revision, weights
        As of `resolve_checkpoint`.
    """
    try:
        folder = checkpoint_here(model, revision, weights=weights)
        if folder is None:
            return None
        files = []
        for name in used_files(folder, weights=weights):
            stat = (folder / name).stat()
            files.append(ListedFile(name, stat.st_size, stat.st_mtime_ns))
        return Listing(str(folder), commit_of(folder), copy_digest(folder, weights=weights), files)
    except (CheckpointError, OSError):
        return None


def copy_digest(folder: Path, *, weights: bool) -> str:
    """Return a digest of a checkpoint's files: of samples of its weights, and of the whole of all others."""
    digest = hashlib.sha256()
    if weights:
        digest.update(fingerprint(folder).encode())
    for name in used_files(folder, weights=False):
        content = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        digest.update(f"{content}  {name}\n".encode())
    return digest.hexdigest()


def read_piece(folder: str, piece: Piece) -> PieceBytes:
    """Read a part of a file on this machine.

    Raises
    ------
    OSError
        The file has changed since it was listed.
    """
    path = Path(folder) / piece.file.name
    content = np.empty(piece.num_bytes, np.uint8)
    with path.open("rb", buffering=0) as stream:
        stat = os.fstat(stream.fileno())
        stream.seek(piece.begin)
        rest = memoryview(content)
        while rest and (count := stream.readinto(rest)):
            rest = rest[count:]
    if rest or (stat.st_size, stat.st_mtime_ns) != piece.file[1:]:
        raise OSError(f"{path} has changed since it was listed")
    return PieceBytes(content, hashlib.sha256(content).digest())


def copy_checkpoint(
    model: str,
    revision: str | None,
    listing: Listing,
    read: Callable[[Sequence[Piece]], Iterator[PieceBytes]],
    *,
    weights: bool,
) -> bool:
    """Copy a checkpoint to this machine's cache, where `resolve_checkpoint` finds it.

    Other copies of the model are removed. A second process waits for the first one's copy.

    Parameters
    ----------
    model, revision, weights
        As of `resolve_checkpoint`.
    listing
        Result of `list_checkpoint` on the other machine.
    read
        Yields the bytes of pieces in their order.

    Returns
    -------
    False if the copy is there already.

    Raises
    ------
    DownloadError
        What came is not what was listed. Another attempt may succeed.
    CheckpointError
        The disk has no room, or this user has no home folder.
    """
    try:
        copies = copies_folder(model, revision, weights=weights)
    except RuntimeError as error:
        raise CheckpointError(f"model {model!r} cannot be copied: {error}") from error
    kind, name = ("snapshots", listing.commit) if listing.commit else ("folders", listing.digest)
    target, partial = copies / kind / _plain(name), copies / "partial"
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(copies / "lock"):
        if target.is_dir():
            # The newest copy counts.
            os.utime(target)
            return False
        _remove(partial)
        _check_room(copies, listing)
        try:
            _write(partial, listing, read)
            if copy_digest(partial, weights=weights) != listing.digest:
                raise DownloadError(f"model {model!r}: its copy differs from {listing.folder}")
            check_files(partial, weights=weights)
            partial.rename(target)
        finally:
            _remove(partial)
        for other in (*copies.glob("folders/*"), *copies.glob("snapshots/*")):
            if other != target:
                _remove(other)
    return True


def _write(partial: Path, listing: Listing, read: Callable[..., Iterator[PieceBytes]]) -> None:
    pieces = [piece for file in listing.files for piece in _pieces(file)]
    for file in listing.files:
        path = partial / _plain(file.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for piece, found in zip(pieces, read(pieces), strict=True):
        if len(found.content) != piece.num_bytes or _sha256(found.content) != found.digest:
            raise DownloadError(f"{listing.folder}/{piece.file.name} was damaged on its way")
        with (partial / piece.file.name).open("ab", buffering=0) as stream:
            rest = memoryview(found.content)
            while rest:
                rest = rest[stream.write(rest) :]


def _pieces(file: ListedFile) -> Iterator[Piece]:
    for begin in range(0, file.num_bytes, PIECE_BYTES):
        yield Piece(file, begin, min(PIECE_BYTES, file.num_bytes - begin))


def _sha256(content: np.ndarray) -> bytes:
    return hashlib.sha256(content).digest()


def _plain(name: str) -> str:
    """Return a name of another machine if it stays within the folder."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"a checkpoint of another node has the file name {name!r}")
    return name


def _check_room(copies: Path, listing: Listing) -> None:
    free = shutil.disk_usage(copies).free
    if free < listing.num_bytes + _SPARED_BYTES:
        raise CheckpointError(
            f"{copies}: a copy of {listing.folder} takes {listing.num_bytes / 1e9:.2f} GB and should leave "
            f"{_SPARED_BYTES / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB"
        )


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
