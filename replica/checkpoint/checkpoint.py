"""Resolves a model's name to a checkpoint folder, and checks its files.

Only safetensors weights are supported. Pickles are rejected, and no Python file of a checkpoint is read. Headers are
checked here, because a wrong header would cause reads out of range later, or load bytes of another tensor.
"""

from __future__ import annotations

import hashlib
import math
import platform
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from quire.protos.unique_keys import parse_json
from quire.replica.checkpoint.cache_folder import copied_checkpoint
from quire.replica.checkpoint.model_spec import CheckpointError, read_json

_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# A fingerprint reads of each weight file the header, and samples of 1 MiB in total, spread over the data.
_SAMPLES = 256
_SAMPLE_BYTES = 4096
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_HUB_FILES = ("*.json", "tokenizer*", "*.jinja")
_WEIGHT_FILES = ("*.safetensors",)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class NotHereError(CheckpointError):
    """This machine has no such model. Another node may have it."""


class DownloadError(NotHereError):
    """The hub, the network or another node failed; another attempt may succeed."""


def resolve_checkpoint(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the folder of a model, downloading it if necessary; else the copy that another node has given.

    Parameters
    ----------
    model
        "embedded" (the built-in model), a folder, or a Hugging Face id. An id is downloaded to the hub's cache, with
        the access token that the hub's library finds.
    revision
        Branch, tag or commit of a Hugging Face id.
    weights
        False for routers: only configuration and tokenizer are downloaded and checked.

    Raises
    ------
    CheckpointError
        The model does not exist, or `check_files` rejects its files.
    """
    try:
        folder = own_checkpoint(model, revision, weights=weights)
    except NotHereError:
        copied = copied_checkpoint(model, revision, weights=weights)
        if copied is None:
            raise
        folder = copied
    check_files(folder, weights=weights)
    return folder


def own_checkpoint(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the folder of a model, without what other nodes have given, and unchecked; as `resolve_checkpoint`.

    Raises
    ------
    NotHereError
        This machine has no such folder, or could not download the model.
    CheckpointError
        The name is none.
    """
    if (folder := _folder_here(model)) is not None:
        return folder
    if model.startswith(("/", "./", "../", "~")):
        path = Path(model).expanduser().absolute()
        raise NotHereError(
            f"model {model!r}: there is no folder {path} on node {platform.node()!r}"
        )
    if _HUB_ID.fullmatch(model):
        return _download(model, revision, weights)
    raise CheckpointError(
        f"model {model!r} is neither 'embedded', nor a folder, nor a Hugging Face id (owner/name)"
    )


def checkpoint_here(model: str, revision: str | None, *, weights: bool) -> Path | None:
    """Return the folder of a model if this machine has it, without a download; parameters as of `resolve_checkpoint`.

    Raises
    ------
    CheckpointError
        `check_files` rejects its files.
    """
    folder = _folder_here(model) or _cached(model, revision)
    if folder is None:
        folder = copied_checkpoint(model, revision, weights=weights)
    if folder is not None:
        check_files(folder, weights=weights)
    return folder


def _folder_here(model: str) -> Path | None:
    if model == "embedded":
        from quire.replica.builtin_model import CHECKPOINT

        return Path(CHECKPOINT)
    path = Path(model).expanduser()
    return path if path.is_dir() else None


def _download(model: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = [*_HUB_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        is_final = isinstance(
            error, GatedRepoError | RepositoryNotFoundError | RevisionNotFoundError
        )
        raise (CheckpointError if is_final else DownloadError)(
            f"model {model!r}{at} could not be downloaded: {error}"
        ) from error


def fetch_checkpoint(model: str, revision: str | None, digest: str | None) -> tuple[Path, str]:
    """Bring a checkpoint into the hub's cache and return its folder and the digest of its files (`files_digest`).

    Files that are there and have `digest` need no network.

    Raises
    ------
    CheckpointError
        The files have another digest, or see `resolve_checkpoint`.
    """
    if digest is not None and (folder := _cached(model, revision)) is not None:
        if files_digest(folder) == digest:
            check_files(folder)
            return folder, digest
    folder = resolve_checkpoint(model, revision)
    found = files_digest(folder)
    if digest is not None and found != digest:
        raise CheckpointError(f"{folder}: its files have the digest {found}, expected {digest}")
    return folder, found


def _cached(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not _HUB_ID.fullmatch(model) or Path(model).is_dir():
        return None
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def files_digest(folder: Path) -> str:
    """Return `sha256:...` over the names and the whole contents of the files that `resolve_checkpoint` downloads.

    It hashes one line for each file, sorted by name, as `sha256sum` prints it.
    """
    text = ""
    for name in used_files(folder):
        with (folder / name).open("rb") as stream:
            text += f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {name}\n"
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def used_files(folder: Path, *, weights: bool = True) -> list[str]:
    """Return the sorted names of the files that `resolve_checkpoint` downloads, relative to the folder."""
    patterns = (*_HUB_FILES, *(_WEIGHT_FILES if weights else ()))
    names = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))


def weights_revision(folder: Path) -> str:
    """Return a revision that identifies the weights: the commit of a download, else a fingerprint.

    The fingerprint covers config.json, the name, size and header of each weight file, and `_SAMPLES` samples of its
    data, so two fine-tunes of one model differ. It does not cover the folder's path.

    Parameters
    ----------
    folder
        Result of `resolve_checkpoint` with weights.
    """
    return commit_of(folder) or fingerprint(folder)


def commit_of(folder: Path) -> str:
    """Return the commit of a download, whose folder is `snapshots/<commit>`; empty: it is another folder."""
    return folder.name if folder.parent.name == "snapshots" else ""


def fingerprint(folder: Path) -> str:
    """Return the fingerprint of `weights_revision`."""
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(length))
            for sample in range(_SAMPLES):
                stream.seek(8 + length + (size - 8 - length) * sample // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def check_files(folder: Path, *, weights: bool = True) -> None:
    """Reject pickled weights, and safetensors files with headers that do not match the file.

    Python files are ignored, because nothing reads them. `ModelSpec` checks the configuration.

    Raises
    ------
    CheckpointError
        The message names the file and the problem.
    """
    read_json(folder / "config.json")
    adapter = folder / "adapter_config.json"
    if adapter.is_file():  # transformers would load the base model that this file names
        raise CheckpointError(f"{adapter}: adapters are not served; merge it into its base model")
    if weights:
        for file in weight_files(folder):
            check_header(file)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint; checks that they are complete if there is an index."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        return _sharded_files(folder, index_path)
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder}: weights only as pickle ({', '.join(pickles)}), which can run code; convert them to "
            "safetensors"
        )
    raise CheckpointError(f"{folder}: neither model.safetensors nor model.safetensors.index.json")


def _sharded_files(folder: Path, index_path: Path) -> list[Path]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: weight_map must be an object that is not empty")
    tensors_of: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise CheckpointError(
                f"{index_path}: {tensor} is in {name!r}, must be a safetensors file beside the index"
            )
        tensors_of.setdefault(name, set()).add(tensor)
    for name, tensors in tensors_of.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: missing, named by {index_path.name}")
        absent = tensors - set(check_header(folder / name))
        if absent:
            raise CheckpointError(
                f"{folder / name}: lacks {min(absent)!r}, which the index places there"
            )
    return [folder / name for name in sorted(tensors_of)]


def check_header(file: Path) -> dict[str, Any]:
    """Read a safetensors header and verify it against the file: sizes, offsets, no overlap, no gap.

    Returns
    -------
    Header entries by tensor name.

    Raises
    ------
    CheckpointError
        The message names the file, the tensor and the contradiction.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little") if size >= 8 else -1
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{file}: header length {length} does not fit a file of {size} bytes"
            )
        try:
            header = parse_json(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file}: header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: header must be an object, is {type(header).__name__}")
    header.pop("__metadata__", None)
    spans = sorted((*_span(file, name, entry), name) for name, entry in header.items())
    end = 0
    for start, stop, name in spans:
        if start != end:
            problem = "overlaps the tensor before it" if start < end else "leaves a gap before it"
            raise CheckpointError(
                f"{file}: {name} starts at byte {start}, {problem}, which ends at {end}"
            )
        end = stop
    if end != size - 8 - length:
        raise CheckpointError(
            f"{file}: tensors end at byte {end}, the file holds {size - 8 - length} bytes of data"
        )
    return header


def _span(file: Path, name: str, entry: Any) -> tuple[int, int]:
    """Return the byte range of a tensor; checks it against shape and dtype."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, stop]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file}: {name} is not a tensor entry: {entry!r}") from error
    if dtype not in _DTYPE_BYTES:
        raise CheckpointError(f"{file}: {name} has the unknown dtype {dtype!r}")
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise CheckpointError(
            f"{file}: {name} has a shape or offsets that are not counts: {entry!r}"
        )
    expected = math.prod(shape) * _DTYPE_BYTES[dtype]
    if stop - start != expected:
        raise CheckpointError(
            f"{file}: {name} {dtype}{shape} needs {expected} bytes, its offsets give {stop - start}"
        )
    return start, stop


def count_parameters(folder: Path) -> int:
    """Count the elements stored in a checkpoint, from its headers."""
    headers = (check_header(file) for file in weight_files(folder))
    return sum(math.prod(entry["shape"]) for header in headers for entry in header.values())
