"""The host machine: memory and cores within its limits, and memory that is given back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from quire.replica.host_machine import (
    available_bytes,
    cpu_flags,
    give_back_free_memory,
    physical_cores,
)
from quire.replica.startup.device_sizing import GIB


def machine(tmp_path, files: dict[str, str]):
    meminfo = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 8388608 kB\n"}
    for name, text in {**meminfo, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_without_limits_the_machine_counts(tmp_path):
    assert available_bytes("cpu", machine(tmp_path, {})) == 8 * GIB


def test_cgroup_v2_limits_count_at_every_level(tmp_path):
    cgroup = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        f"{cgroup}/a/memory.max": f"{4 * GIB}",
        f"{cgroup}/a/memory.current": f"{3 * GIB}",
        f"{cgroup}/a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        f"{cgroup}/a/b/memory.max": "max",
        f"{cgroup}/a/b/memory.current": "5",
        f"{cgroup}/a/cpu.max": "150000 100000",
    }
    root = machine(tmp_path, files)
    assert available_bytes("cpu", root) == 2 * GIB
    assert physical_cores(root, frozenset(range(8))) == 2


def test_cgroup_v1_limits_count(tmp_path):
    cgroup = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "4:memory:/not/visible\n3:cpu,cpuacct:/\n",
        f"{cgroup}/memory/memory.limit_in_bytes": f"{2 * GIB}",
        f"{cgroup}/memory/memory.usage_in_bytes": f"{GIB // 2}",
        f"{cgroup}/cpu,cpuacct/cpu.cfs_quota_us": "300000",
        f"{cgroup}/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    root = machine(tmp_path, files)
    assert available_bytes("cpu", root) == 3 * GIB // 2
    assert physical_cores(root, frozenset(range(8))) == 3


def test_threads_of_one_core_count_once(tmp_path):
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    files = {topology.format(cpu): f"{cpu % 2},{cpu % 2 + 2}" for cpu in range(4)}
    files["proc/cpuinfo"] = "processor : 0\nflags\t\t: fpu avx512_bf16\n"
    root = machine(tmp_path, files)
    assert physical_cores(root, frozenset(range(4))) == 2
    assert physical_cores(root, frozenset({1})) == 1
    assert cpu_flags(root) == {"fpu", "avx512_bf16"}


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_freed_memory_goes_back_to_the_machine():
    """Pieces too small for mappings of their own, under one that stays, so that they stay with the allocator."""
    pieces = [torch.ones(16 << 10, dtype=torch.uint8) for _ in range(4096)]
    del pieces[:-1]
    held = resident_bytes()
    give_back_free_memory()
    assert held - resident_bytes() > 32 << 20
