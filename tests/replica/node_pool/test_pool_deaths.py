"""Members that die at any point: never a wrong byte, never a lost slot."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pool_deaths
import pytest
from pool_deaths import check_all
from pool_process import LAYOUT, bytes_of, fill, key_of, open_pool, put, run_child, use

from quire.replica.node_pool.pool_layout import PoolLayout


@pytest.mark.parametrize("part", range(4))
def test_a_death_at_any_line_loses_nothing(tmp_path, part):
    """A process of its own forks the members that die: forking this one, with all its modules, takes much longer."""
    command = [sys.executable, pool_deaths.__file__, str(tmp_path), str(part)]
    paths = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 40


def test_members_that_are_killed_at_random_times_share_a_pool(tmp_path):
    def action(seed: int) -> None:
        pool, chance = open_pool(tmp_path), random.Random(seed)
        while True:
            use(pool, chance)

    chance, seed, children = random.Random(5), 0, []
    survivor = open_pool(tmp_path)
    own = random.Random(6)
    end_s = time.monotonic() + 3
    while time.monotonic() < end_s:
        while len(children) < 3:
            seed += 1
            child = os.fork()
            if child == 0:
                try:
                    # The parent's opening is shared with its children. Its member stays alive as long as they do.
                    action(seed)
                finally:
                    os._exit(7)
            children.append(child)
        for _ in range(20):
            use(survivor, own)
        time.sleep(0.01)
        child = children.pop(chance.randrange(len(children)))
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == -signal.SIGKILL, "a child saw a wrong byte"
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert seed > 20
    survivor.check()
    assert survivor.counts().damaged == 0
    survivor._file.close(remove=False)
    check_all(tmp_path)


def test_the_leases_of_a_dead_member_expire(tmp_path):
    pool = open_pool(tmp_path)
    slots = put(pool, *range(LAYOUT.num_slots))

    def action() -> None:
        other = open_pool(tmp_path)
        other.refresh()
        assert all(other.lease(slots, [key_of(n) for n in range(LAYOUT.num_slots)]))
        os.kill(os.getpid(), signal.SIGKILL)

    assert run_child(action) == -signal.SIGKILL
    assert pool.counts().in_use == LAYOUT.num_slots
    assert pool.claim(LAYOUT.num_slots) is not None


def damage_and_adopt(folder, num_blocks: int, seed: int) -> int:
    """Adopt that many damaged blocks. Returns how many were found at all; asserts that none was used."""
    pool, rng = open_pool(folder, PoolLayout(64, 256)), np.random.default_rng(seed)
    views, found = pool._views, 0
    for n in range(0, num_blocks, 64):
        keys = [key_of(n + i) for i in range(64)]
        slots = pool.claim(64)
        pool.publish([fill(pool, slot, key) for slot, key in zip(slots, keys, strict=True)])
        kinds, places = rng.integers(0, 6, 64), rng.integers(0, 255, 64)
        for slot, kind, place in zip(slots, kinds.tolist(), places.tolist(), strict=True):
            if kind == 0:  # a torn write: the end is what was there before, or zeros
                views.slots[slot, place:] = np.uint8(0) if place % 2 else ~views.slots[slot, place:]
            elif kind == 1:
                views.slots[slot, place] ^= np.uint8(1 << (place % 8))
            elif kind == 2:  # the header of the slot's content before
                views.epoch[slot] += np.uint64(1)
            elif kind == 3:  # the header of another slot
                other = slots[place % 64]
                for name in ("key", "num_bytes", "checksum", "header_sum"):
                    getattr(views, name)[slot] = getattr(views, name)[other]
                if other == slot:
                    views.num_bytes[slot] = 0
            elif kind == 4:  # a block of another layout, with a sound checksum over its own length
                views.num_bytes[slot] = place
            else:  # a block of another tenant under this name: its name is not the one of its sum
                views.key[slot] = np.void(bytes(views.key[slot])[::-1])
        pool._index._seen = 0
        pool.refresh()
        asked = [key if kind != 5 else key[::-1] for key, kind in zip(keys, kinds, strict=True)]
        for key in asked:
            slot = pool.find(key)
            if slot is not None and pool.lease([slot], [key]) == [True]:
                found += 1
                if pool.verify(slot):
                    assert (pool.slots[slot] == bytes_of(key, 256)).all(), "a damaged block is used"
                pool.release([slot])
        pool.drop(slots)
        pool.release(slots)
    pool.check()
    pool.close()
    return found


def test_damaged_blocks_are_never_used(tmp_path):
    assert damage_and_adopt(tmp_path, 6400, seed=1) > 5000


@pytest.mark.slow
def test_a_million_damaged_blocks_are_never_used(tmp_path):
    assert damage_and_adopt(tmp_path, 1_000_000, seed=2) > 800_000
