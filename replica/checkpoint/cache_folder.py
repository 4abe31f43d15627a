"""This machine's cache folder, and the checkpoints in it that other nodes have given.

```
 checkpoints/<model and revision>/folders/<digest>      of a folder
                                  snapshots/<commit>    of a download from the Hugging Face hub
                                  partial               while it is copied
```

A copy for a router, without weights, is in `<model and revision>-tokenizer`.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path


def cache_folder() -> Path:
    """`QUIRE_CACHE`, by default `~/.cache/quire`. Raises RuntimeError if this user has no home folder."""
    return Path(os.environ.get("QUIRE_CACHE") or Path.home() / ".cache" / "quire")


@functools.cache
def sources_digest() -> str:
    """Return a digest of Quire's own modules and libraries of engine and kernels, by size and time."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for folder in ("kernels", "protos", "replica"):
        for file in sorted([*(root / folder).rglob("*.py"), *(root / folder).rglob("*.so")]):
            stat = file.stat()
            digest.update(f"{file.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def copies_folder(model: str, revision: str | None, *, weights: bool) -> Path:
    """The folder of the copies of a model; parameters as of `resolve_checkpoint`."""
    name = hashlib.sha256(f"{model}@{revision or ''}".encode()).hexdigest()[:32]
    return cache_folder() / "checkpoints" / (name if weights else f"{name}-tokenizer")


def copied_checkpoint(model: str, revision: str | None, *, weights: bool) -> Path | None:
    """The newest complete copy of a model; None: there is none. A copy with weights serves a router too."""
    for has_weights in (True,) if weights else (True, False):
        try:
            folder = copies_folder(model, revision, weights=has_weights)
        except RuntimeError:
            return None
        found = [*folder.glob("folders/*"), *folder.glob("snapshots/*")]
        if found:
            return max(found, key=lambda path: path.stat().st_mtime)
    return None
