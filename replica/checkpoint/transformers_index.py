"""Keeps transformers' index of its own classes, which it otherwise makes at each import.

`import transformers` reads the source of all models, twice, to know which module has which class: a second of
processor time. The index is the same until a file changes, so it is kept in the cache folder under a name that depends
on the paths, sizes and times of these files. Without such a file, or with one that cannot be read, transformers makes
its index as always.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from quire.replica.checkpoint.cache_folder import cache_folder

# The module that makes the index, with `define_import_structure(path, prefix)`.
_MAKER = "transformers.utils.import_utils"
# Names of classes, by the libraries that they need and by module.
Index = dict[frozenset[str], dict[str, set[str]]]


def install() -> None:
    """Use the kept index in this process, if transformers is not imported yet."""
    if _MAKER not in sys.modules and not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Changes the module that makes the index when it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MAKER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_and_change(module: ModuleType) -> None:
                run(module)
                if make := getattr(module, "define_import_structure", None):
                    vars(module)["define_import_structure"] = functools.partial(_define, make)

            loader.exec_module = run_and_change
        return spec


def _define(
    make: Callable[..., Index], module_path: str | Path, prefix: str | None = None
) -> Index:
    """In the place of `define_import_structure`."""
    folder = Path(module_path)
    folder = folder.parent if folder.name == "__init__.py" else folder
    if folder.name != "models" or folder.parent.name != "transformers":
        return make(module_path, prefix)
    dot = "" if prefix is None else f"{prefix}."
    try:
        return {
            frozenset(libraries): {f"{dot}{module}": set(names) for module, names in of.items()}
            for libraries, of in _kept(make, folder)
        }
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError):
        # This user has no folder for it, or the file is damaged.
        return make(module_path, prefix)


@functools.cache
def _kept(make: Callable[..., Index], folder: Path) -> list[tuple[list[str], dict[str, list[str]]]]:
    """The index of a folder, from the cache or made and put there."""
    key = hashlib.sha256(repr([str(folder), *sorted(_files(folder))]).encode()).hexdigest()
    path = cache_folder() / "transformers" / f"{key[:32]}.json"
    with contextlib.suppress(FileNotFoundError):
        kept: list[tuple[list[str], dict[str, list[str]]]] = json.loads(path.read_text())
        return kept
    made = [
        (sorted(libraries), {module: sorted(names) for module, names in modules.items()})
        for libraries, modules in make(folder).items()
    ]
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(made, file)
        os.replace(file.name, path)
    return made


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of each Python file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                stat = entry.stat()
                yield entry.path, stat.st_size, stat.st_mtime_ns
            elif entry.is_dir() and entry.name != "__pycache__":
                yield from _files(Path(entry.path))
