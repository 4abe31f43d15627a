"""A checkpoint of another machine is copied whole and unchanged, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from quire.replica.builtin_model import CHECKPOINT
from quire.replica.checkpoint import checkpoint, checkpoint_copy
from quire.replica.checkpoint.checkpoint import (
    DownloadError,
    NotHereError,
    checkpoint_here,
    resolve_checkpoint,
    weights_revision,
)
from quire.replica.checkpoint.checkpoint_copy import (
    ListedFile,
    Listing,
    Piece,
    PieceBytes,
    copy_checkpoint,
    copy_digest,
    list_checkpoint,
    read_piece,
)
from quire.replica.checkpoint.model_spec import CheckpointError

MODEL = "/models/harbour"  # the name on both machines; this one has no such folder
WEIGHTS = "model.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint_copy, "PIECE_BYTES", 100_000)
    return tmp_path / "cache"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The folder on the other machine."""
    return shutil.copytree(CHECKPOINT, tmp_path / "other")


def listing_of(folder: Path, *, weights: bool = True) -> Listing:
    listing = list_checkpoint(str(folder), None, weights)
    assert listing is not None
    return listing


def reader(
    listing: Listing, change: Callable[[Piece, PieceBytes], PieceBytes] = lambda _, found: found
) -> Callable[[Sequence[Piece]], Iterator[PieceBytes]]:
    def read(pieces: Sequence[Piece]) -> Iterator[PieceBytes]:
        for piece in pieces:
            yield change(piece, read_piece(listing.folder, piece))

    return read


def copy(listing: Listing, *, weights: bool = True, **how) -> bool:
    return copy_checkpoint(MODEL, None, listing, reader(listing, **how), weights=weights)


def left(cache: Path) -> list[str]:
    """The files of copies, locks aside."""
    return sorted(
        path.relative_to(cache).as_posix()
        for path in cache.rglob("*")
        if path.is_file() and path.name != "lock"
    )


def test_a_copy_is_found_and_has_the_same_files_and_revision(other: Path):
    with pytest.raises(NotHereError, match="there is no folder /models/harbour on node"):
        resolve_checkpoint(MODEL)
    (other / "notes.txt").write_text("not a part of the model")
    (other / "model.py").write_text("never read")
    listing = listing_of(other)
    assert listing.num_bytes == sum(file.num_bytes for file in listing.files)
    assert copy(listing)
    copied = resolve_checkpoint(MODEL)
    names = {path.name for path in copied.iterdir()}
    assert {"config.json", "tokenizer.json", WEIGHTS} <= names
    assert not names & {"notes.txt", "model.py"}
    for name in names:
        assert (copied / name).read_bytes() == (other / name).read_bytes()
    # So the replicas of both machines share cached blocks.
    assert weights_revision(copied) == weights_revision(other)
    assert not copy(listing), "it is there already"
    # A machine with a copy gives it to the next one.
    again = list_checkpoint(MODEL, None, True)
    assert again is not None and (again.folder, again.digest) == (str(copied), listing.digest)


def test_a_download_of_the_hub_keeps_its_commit(tmp_path: Path):
    snapshot = shutil.copytree(CHECKPOINT, tmp_path / "hub" / "snapshots" / COMMIT)
    assert copy(listing_of(snapshot))
    assert weights_revision(resolve_checkpoint(MODEL)) == COMMIT


def test_a_router_gets_no_weights(other: Path, cache: Path):
    listing = listing_of(other, weights=False)
    assert copy(listing, weights=False)
    assert not any(name.endswith(".safetensors") for name in left(cache))
    assert resolve_checkpoint(MODEL, weights=False).is_dir()
    with pytest.raises(NotHereError):
        resolve_checkpoint(MODEL)
    assert list_checkpoint(MODEL, None, True) is None, "nor does it give others any"
    # A copy for a replica serves a router too.
    assert copy(listing_of(other))
    assert checkpoint_here(MODEL, None, weights=False) == resolve_checkpoint(MODEL)


def test_other_weights_of_the_same_name_replace_the_copy(other: Path, cache: Path):
    assert copy(listing_of(other))
    old = resolve_checkpoint(MODEL)
    config = other / "config.json"
    config.write_text(config.read_text() + "\n")
    assert copy(listing_of(other))
    new = resolve_checkpoint(MODEL)
    assert new != old and not old.exists()
    assert (new / "config.json").read_text() == config.read_text()


def flipped(piece: Piece, found: PieceBytes) -> PieceBytes:
    content = found.content.copy()
    content[-1] ^= 1
    return found._replace(content=content)


def shortened(piece: Piece, found: PieceBytes) -> PieceBytes:
    return checkpoint_copy.PieceBytes(found.content[:-1], found.digest)


@pytest.mark.parametrize("change", [flipped, shortened])
@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_damage_on_the_way_is_found_and_nothing_is_left(other: Path, cache: Path, name, change):
    def damage(piece: Piece, found: PieceBytes) -> PieceBytes:
        is_last = piece.begin + piece.num_bytes == piece.file.num_bytes
        return change(piece, found) if piece.file.name == name and is_last else found

    with pytest.raises(DownloadError, match=f"{name} was damaged on its way"):
        copy(listing_of(other), change=damage)
    assert left(cache) == []
    assert copy(listing_of(other)), "the next attempt succeeds"


def test_a_file_that_changes_meanwhile_ends_the_copy(other: Path, cache: Path):
    listing = listing_of(other)
    os.utime(other / WEIGHTS)
    with pytest.raises(OSError, match="has changed since it was listed"):
        copy(listing)
    assert left(cache) == []


def test_what_was_listed_wrongly_is_found(other: Path, cache: Path):
    """All pieces are sound, but they are not the checkpoint that was named."""
    with pytest.raises(DownloadError, match="its copy differs from"):
        copy(listing_of(other)._replace(digest="0" * 64))
    assert left(cache) == []


@pytest.mark.parametrize("name", ["../escaped.json", "/etc/escaped.json", "a/../../b.json", ""])
def test_a_name_that_leaves_the_folder_is_refused(other: Path, cache: Path, tmp_path: Path, name):
    listing = listing_of(other)
    listing.files.append(ListedFile(name, 2, 0))
    with pytest.raises(CheckpointError, match="of another node has the file name"):
        copy(listing)
    assert left(cache) == []
    with pytest.raises(CheckpointError, match="of another node has the file name"):
        copy(listing_of(other)._replace(commit="../../escaped"))


def test_a_full_disk_is_named_with_the_numbers(other: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil._ntuple_diskusage(10**12, 10**12 - 10**9, 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        CheckpointError, match=r"takes 0\.00 GB and should leave 1\.07 GB, .* 1\.00"
    ):
        copy(listing_of(other))


def test_what_a_killed_process_has_left_is_removed(other: Path, cache: Path):
    partial = checkpoint_copy.copies_folder(MODEL, None, weights=True) / "partial"
    partial.mkdir(parents=True)
    (partial / "stray.json").write_text("{}")
    assert copy(listing_of(other))
    assert not any("stray" in name for name in left(cache))


def test_an_incomplete_checkpoint_is_not_listed(other: Path):
    (other / WEIGHTS).write_bytes((other / WEIGHTS).read_bytes()[:-1])
    assert list_checkpoint(str(other), None, True) is None
    assert list_checkpoint(str(other), None, False) is not None
    assert list_checkpoint("/nowhere", None, True) is None


def test_without_a_home_nothing_is_copied(other: Path, monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    listing = listing_of(other)
    monkeypatch.delenv("QUIRE_CACHE")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(CheckpointError, match="cannot be copied: Could not determine home"):
        copy(listing)
    with pytest.raises(NotHereError):
        resolve_checkpoint(MODEL)


def test_a_download_that_fails_gives_way_to_a_copy(other: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> Path:
        raise DownloadError("no network")

    monkeypatch.setattr(checkpoint, "_download", fails)
    listing = listing_of(other)
    with pytest.raises(DownloadError):
        resolve_checkpoint("quire/harbour")
    assert copy_checkpoint("quire/harbour", None, listing, reader(listing), weights=True)
    assert copy_digest(resolve_checkpoint("quire/harbour"), weights=True) == listing.digest
    with pytest.raises(DownloadError):
        resolve_checkpoint("quire/harbour", "another-branch")


def test_a_piece_is_its_bytes(other: Path):
    file = listing_of(other).files[0]
    whole = (other / file.name).read_bytes()
    found = read_piece(str(other), Piece(file, 3, 5))
    assert found.content.tobytes() == whole[3:8] and found.content.dtype == np.uint8
