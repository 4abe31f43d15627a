"""Keeps the packed weights of a CPU engine in a file, for the next start of the same model on this node.

```
 first start    read ─▶ pack, verify ─▶ serve            later   read packed ─▶ serve
                             └─▶ file ──────────────────────────────┘
```

A start that finds the file reads neither the weights that are packed nor packs and verifies them. The rest of the fuse
pass is the same, so it asks for the same packed weights in the same order; each has the names of its weights.

The file is under `packed` in the cache folder. Its name depends on the checkpoint, the times of its files, dtype,
processor, and on the sources of Quire, torch and transformers. It replaces the file of other sources. There is none if
a candidate of the fuse pass was dropped, and for weights that are stored in 8 or 4 bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from quire.kernels.cpu.cpu_linear import PackedWeight
from quire.kernels.cpu.weight_code import WeightCode
from quire.kernels.huge_pages import ask_for_huge_pages
from quire.replica.checkpoint.cache_folder import cache_folder, sources_digest
from quire.replica.checkpoint.model_spec import CheckpointError
from quire.replica.config import EngineConfig
from quire.replica.host_machine import cpu_flags
from quire.replica.model.stored.weights import StoredTensor, list_tensors, read_tensors

logger = logging.getLogger(__name__)
_CODE = ("tables", "first", "apart", "high")


def cache_file(config: EngineConfig) -> Path | None:
    """Return the file of an engine's packed weights; None: they are not kept."""
    if not config.cache_packed_weights or config.weights != "auto" or config.fuse == "off":
        return None
    if config.reduction_splits > 1 or config.has_states:
        return None
    import transformers

    about = [torch.__version__, transformers.__version__, sources_digest(), sorted(cpu_flags())]
    # The revision of a folder covers samples of its weights only, and a folder may be written again.
    folder = Path(config.model_name)
    if folder.is_dir():
        stats = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
        about.append([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
    model = hashlib.sha256(f"{config.revision} {config.dtype}".encode()).hexdigest()[:24]
    try:
        return cache_folder() / "packed" / f"{model}-{key}.safetensors"
    except RuntimeError:  # This user has no home folder.
        return None


class StaleFileError(Exception):
    """A file lacks the packed weights that the fuse pass asks for. The fuse pass does not catch this class."""


class Packer:
    """Packs the weights of linear layers."""

    # Whether the results have been compared with the layers.
    is_proven = False

    def pack(self, parts: Sequence[nn.Linear]) -> PackedWeight:
        """Pack the weights of layers with the same input."""
        weights = [part.weight.detach() for part in parts]
        return PackedWeight.pack(weights, sum(len(weight) for weight in weights))

    def finish(self, dropped: Sequence[str]) -> None:
        """Called after the fuse pass, with the candidates that it has dropped."""


class KeepingPacker(Packer):
    """Packs weights, and writes them to a file in the end.

    Parameters
    ----------
    model
        All weights of `parts` are its parameters, or the file is not written.
    """

    def __init__(self, model: nn.Module, path: Path):
        self._names = _Names(model)
        self._path = path
        self._packed: list[tuple[list[str], PackedWeight]] = []
        self._refusal: str | None = None

    def pack(self, parts: Sequence[nn.Linear]) -> PackedWeight:
        """See `Packer.pack`."""
        packed = super().pack(parts)
        names = self._names.of(parts)
        if not all(names):
            self._refusal = "a layer's weight is not the model's"
        self._packed.append((names, packed))
        return packed

    def finish(self, dropped: Sequence[str]) -> None:
        """See `Packer.finish`."""
        refusal = self._refusal or next(iter(dropped), None)
        if refusal is not None or not self._packed:
            logger.info("packed weights are not kept: %s", refusal or "there are none")
            return
        tensors: dict[str, torch.Tensor] = {}
        about = []
        for i, (names, packed) in enumerate(self._packed):
            tensors |= {f"{i}.{name}": tensor for name, tensor in _tensors(packed)}
            dtype = str(packed.dtype).removeprefix("torch.")
            about.append([names, packed.columns, packed.depth, dtype, packed.in_strips])
        folder, part = self._path.parent, self._path.with_suffix(f".{os.getpid()}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part, {"packed": json.dumps(about)})
            part.chmod(0o600)
            part.replace(self._path)
            for other in folder.glob(f"{self._path.name.partition('-')[0]}-*"):
                if other != self._path:
                    other.unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                part.unlink()
            logger.warning("packed weights are not kept: %s", error)


class KeptPacker(Packer):
    """Returns the packed weights of a file instead of packing.

    Raises
    ------
    CheckpointError
        The file is damaged.
    """

    is_proven = True

    def __init__(self, path: Path):
        self._path = path
        self._about = _read_about(path)
        self._stored = list_tensors([path])
        self._next = 0
        # The parameters that need not be read.
        self.names = frozenset(name for names, *_ in self._about for name in names)

    def for_model(self, model: nn.Module) -> KeptPacker:
        """Prepare for the weights of a model, which need not be read."""
        self._own = _Names(model)
        return self

    def pack(self, parts: Sequence[nn.Linear]) -> PackedWeight:
        """See `Packer.pack`.

        Raises
        ------
        StaleFileError
            The file has the weights of other layers next.
        """
        i, self._next = self._next, self._next + 1
        names = self._own.of(parts)
        columns, depth = sum(len(part.weight) for part in parts), parts[0].weight.shape[1]
        dtype = str(parts[0].weight.dtype).removeprefix("torch.")
        if i >= len(self._about) or self._about[i][:4] != [names, columns, depth, dtype]:
            raise StaleFileError(f"packed weight {i} is not that of {', '.join(names)}")
        found = dict(self._read(i))
        code = WeightCode.of(*(found[name] for name in _CODE)) if "tables" in found else None
        in_strips = self._about[i][4]
        return PackedWeight(
            found["data"], columns, depth, parts[0].weight.dtype, in_strips, code=code
        )

    def finish(self, dropped: Sequence[str]) -> None:
        """See `Packer.finish`.

        Raises
        ------
        StaleFileError
            Some packed weights are not used, so that their layers have no weights.
        """
        if dropped or self._next != len(self._about):
            used = f"{self._next} of {len(self._about)} packed weights are used"
            raise StaleFileError("; ".join([used, *dropped]))

    def _read(self, i: int) -> Iterator[tuple[str, torch.Tensor]]:
        own = [t for n, t in self._stored.items() if n.partition(".")[0] == str(i)]
        for stored, tensor in read_tensors(own, _huge):
            yield stored.name.partition(".")[2], tensor


@contextlib.contextmanager
def open_packer(config: EngineConfig, model: nn.Module) -> Iterator[Packer]:
    """Return what packs a model's weights.

    Raises
    ------
    CheckpointError
        Weights of the model were not read (`kept_names`), and their packed form is not there any more. Or the file is
        that of other layers; it is removed, so that the next start packs the checkpoint's weights.
    """
    path, unread = cache_file(config), unread_names(model)
    packer: Packer = Packer()
    if path is not None and path.exists():
        kept = KeptPacker(path).for_model(model)
        packer = kept if unread <= kept.names else packer
    if unread and not packer.is_proven:
        raise CheckpointError(f"{path}: was removed while the engine started; start it again")
    if path is not None and not packer.is_proven:
        packer = KeepingPacker(model, path)
    try:
        yield packer
    except StaleFileError as error:
        assert path is not None
        path.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path}: {error}; the file is removed, so that the next start packs the checkpoint's weights"
        ) from error


def kept_names(config: EngineConfig) -> frozenset[str]:
    """Return the names of the parameters that need not be read, because their packed form is kept."""
    path = cache_file(config)
    if path is None or not path.exists():
        return frozenset()
    try:
        return KeptPacker(path).names
    except CheckpointError as error:
        logger.warning("%s; the checkpoint's weights are packed again", error)
        path.unlink(missing_ok=True)
        return frozenset()


def mark_unread(model: nn.Module, names: frozenset[str]) -> None:
    """Note in a model which of its parameters hold zeros."""
    vars(model)["_quire_unread"] = names


def unread_names(model: nn.Module) -> frozenset[str]:
    """Return what `mark_unread` has noted."""
    names: frozenset[str] = vars(model).get("_quire_unread", frozenset())
    return names


class _Names:
    """Finds the name of a parameter; it does not keep the parameter alive."""

    def __init__(self, model: nn.Module):
        self._found = {id(p): (name, weakref.ref(p)) for name, p in model.named_parameters()}

    def of(self, parts: Sequence[nn.Linear]) -> list[str]:
        """Return the names of the layers' weights; empty for one that is not the model's."""
        found = [(part.weight, *self._found.get(id(part.weight), ("", None))) for part in parts]
        return [name if ref is not None and ref() is weight else "" for weight, name, ref in found]


def _tensors(packed: PackedWeight) -> Iterator[tuple[str, torch.Tensor]]:
    yield "data", packed.data
    if packed.code is not None:
        yield from ((name, getattr(packed.code, name)) for name in _CODE)


def _huge(stored: StoredTensor) -> torch.Tensor:
    assert stored.dtype is not None
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    ask_for_huge_pages(tensor)
    return tensor


def _read_about(path: Path) -> list[Any]:
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["packed"])
        assert all(len(entry) == 5 for entry in about)
    except (OSError, SafetensorError, KeyError, ValueError, AssertionError, TypeError) as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from error
    return list(about)
