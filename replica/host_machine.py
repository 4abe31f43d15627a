"""Resources of the machine that this process can use: memory, cores and instruction sets, within its cgroups."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Keep the garbage collector away."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def available_bytes(device: str, root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate: on the GPU, or on the machine within its cgroups."""
    if device == "cuda":
        import torch  # not needed by the other functions

        # Memory that torch caches, for example after an earlier engine of this process, is available too.
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + unused
    fields = dict(
        line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line
    )
    limits = [int(fields["MemAvailable"].split()[0]) * 1024]
    for folder in _cgroup_folders(root, "memory"):
        limits += _cgroup_room(folder)
    return max(min(limits), 0)


def lock_limit_bytes() -> int | None:
    """Bytes that this process may lock in memory (RLIMIT_MEMLOCK); None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def give_back_free_memory() -> None:
    """Return freed memory to the operating system; otherwise glibc may keep more than 100 MB for later allocations.

    Does nothing if the C library has no `malloc_trim`.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _cgroup_room(folder: Path) -> list[int]:
    """Return [bytes left below a cgroup's limit], not counting page cache that can be dropped; [] if unlimited."""
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),  # version 2
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
    ):
        limit, usage = _read(folder / limit_name), _read(folder / usage_name)
        if limit.isdigit() and usage.isdigit():
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            return [int(limit) - int(usage) + int(stat.get(cache_name, 0))]
    return []


def physical_cores(root: Path = Path("/"), allowed: frozenset[int] | None = None) -> int:
    """Return the number of physical cores that this process may use, by its CPU affinity and its cgroup quotas."""
    if allowed is None:
        allowed = frozenset(os.sched_getaffinity(0))
    topology = root / "sys/devices/system/cpu"
    siblings = {
        _read(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed
    }
    cores = len(siblings)
    for folder in _cgroup_folders(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")  # version 2
        if not quota:
            quota = _read(folder / "cpu.cfs_quota_us")  # version 1, -1 = none
            period = _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, -(-int(quota) // int(period)))
    return max(cores, 1)


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the instruction sets of the first CPU."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Folders with this process's limits, innermost first, for both cgroup versions.

    In a container, the path in /proc/self/cgroup may be one that exists only on the host; folders that do not exist are
    skipped. The mount point is always included; in this case it is the container's own cgroup.
    """
    folders: list[Path] = []
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = base
        elif controller in controllers.split(","):
            mount = base / controllers if (base / controllers).is_dir() else base / controller
        else:
            continue
        inner = mount / path.lstrip("/")
        while inner != mount and mount in inner.parents:
            folders.append(inner)
            inner = inner.parent
        folders.append(mount)
    return [folder for folder in folders if folder.is_dir()]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
