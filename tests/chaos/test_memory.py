"""The statistic of the soak sees a leak and nothing else."""

from __future__ import annotations

import mmap
import os
import random

import pytest
from memory import Sampler, private_bytes, slope_mb_per_min

MB = 10**6


def samples(mb_per_min: float, seed: int, disturb=lambda second: 0.0) -> list[tuple[float, int]]:
    """A minute of a process of 600 MB that takes and returns up to 2 MB at random."""
    rng = random.Random(seed)
    return [
        (float(s), int((600 + mb_per_min * s / 60 + rng.uniform(0, 2) + disturb(s)) * MB))
        for s in range(60)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_shows_through_what_comes_and_goes(seed):
    assert slope_mb_per_min(samples(0.0, seed)) < 1
    assert slope_mb_per_min(samples(3.0, seed)) > 1


def test_a_peak_is_no_leak():
    assert slope_mb_per_min(samples(0.0, 1, lambda s: 50.0 * (20 < s < 30))) < 1


def test_memory_that_a_process_takes_is_seen():
    before = private_bytes(os.getpid())
    # From the kernel: the allocator of a process that has run for long has this much to give.
    with mmap.mmap(-1, 32 * MB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        for _ in range(32):
            taken.write(b"\xff" * MB)
        assert 30 * MB < private_bytes(os.getpid()) - before < 34 * MB
        with Sampler([os.getpid()], 0.01) as sampler:
            while len(sampler.samples[os.getpid()]) < 4:
                pass
        assert all(value > 32 * MB for _, value in sampler.samples[os.getpid()])


def test_a_process_that_ends_is_an_error():
    process = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(process, 0)
    with pytest.raises(OSError), Sampler([process], 0.001) as sampler:
        sampler._thread.join()
