"""Files that are carried between GPU machines: results that a later run resumes, and Triton's kernel cache.

```
 carry/  gpu_kernels.json  gpu_engine.json ──▶ out/ ──▶ --resume
         tc.tar.xz ──▶ the cache's folder ──▶ kernels that need no compilation ──▶ out/tc.tar.xz
```
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tests.perf.gpu.gpu_run import differs

RESULTS = ("gpu_kernels.json", "gpu_engine.json")
CACHE = "tc.tar.xz"
XZ_PRESET = 2
# A launch needs the binary, its description and the launcher. The other files are five times as large.
_FOR_READERS = frozenset({".source", ".ttir", ".ttgir", ".llir", ".ptx"})
_GROUP = "__grp__"  # Triton's files that list the files of a kernel, with their paths


def carry_results(carry: Path, out: Path, rehearsal: bool) -> Iterator[str]:
    """Copy the results that a run here can resume; yields a line for each result.

    A result in `out` that cannot be resumed is renamed, so that it is not overwritten.
    """
    for name in RESULTS:
        for folder in dict.fromkeys((out, carry)):
            path = folder / name
            if not path.exists():
                continue
            reason = _unfit(path, rehearsal)
            if not reason:
                if path != out / name:
                    shutil.copyfile(path, out / name)
                yield f"{name}: resumed"
                break
            yield f"{name}: not resumed, it {reason}"
            if folder == out:
                path.rename(_free_name(path))


def _unfit(path: Path, rehearsal: bool) -> str:
    try:
        return differs(json.loads(path.read_text()), rehearsal)
    except (ValueError, KeyError) as error:
        return f"cannot be read: {error!r}"


def _free_name(path: Path) -> Path:
    names = (path.with_suffix(f".{number}.json") for number in range(1, 1000))
    return next(name for name in names if not name.exists())


def unpack_cache(archive: Path, folder: Path) -> int:
    """Add the files of an archive to Triton's cache; returns their number, 0 without an archive.

    Triton lists a kernel's files with the paths of the compiling machine; the paths are changed to this machine's.
    """
    if not archive.exists():
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as files:
        members = [member for member in files.getmembers() if member.isfile()]
        files.extractall(folder, members, filter="data")
    for group in folder.glob(f"*/{_GROUP}*"):
        listed = json.loads(group.read_text())
        here = {name: (group.parent / name).absolute() for name in listed["child_paths"]}
        # Newer versions of Triton recompile if a listed file is missing.
        listed["child_paths"] = {name: str(path) for name, path in here.items() if path.exists()}
        group.write_text(json.dumps(listed))
    return len(members)


def pack_cache(folder: Path, archive: Path) -> int:
    """Write the files of Triton's cache that launches need to an archive; returns their number."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _is_needed(path))
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w:xz", preset=XZ_PRESET) as written:
        for path in files:
            data = path.read_bytes()
            member = tarfile.TarInfo(path.relative_to(folder).as_posix())
            member.size, member.mode = len(data), 0o644
            written.addfile(member, io.BytesIO(data))
    partial.replace(archive)
    return len(files)


def _is_needed(path: Path) -> bool:
    is_group = path.name.startswith(_GROUP)
    return is_group or (path.suffix not in _FOR_READERS and not path.parent.name.startswith("tmp."))
