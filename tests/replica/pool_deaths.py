"""Members of a pool that die before any line of its code: `pool_deaths.py folder part` prints how many have died.

Of four parts each lets every fourth line be the last one.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
from pool_process import (
    LAYOUT,
    adopt,
    bytes_of,
    die_at_line,
    fill,
    key_of,
    open_pool,
    put,
    run_child,
)

from quire.replica.node_pool.pool_layout import State


def check_all(folder) -> None:
    """Every slot can be claimed, and what is published is right."""
    pool = open_pool(folder)
    pool.check()
    for slot in np.flatnonzero(pool._views.state == State.COMPLETE).tolist():
        key = pool._views.key[slot].tobytes()
        assert pool.lease([slot], [key]) == [True]
        if pool.verify(slot):
            assert (pool.slots[slot] == bytes_of(key)).all()
        pool.release([slot])
    claimed = pool.claim(LAYOUT.num_slots)
    assert claimed is not None and sorted(claimed) == list(range(LAYOUT.num_slots)), "a lost slot"
    pool.release(claimed)
    pool._file.close(remove=False)


def work(folder) -> None:
    """Every operation of a member, in a pool that is full."""
    pool = open_pool(folder)
    put(pool, *range(4))
    slots = pool.claim(3)
    pool.publish([fill(pool, slot, key_of(100 + slot)) for slot in slots[:2]])
    pool.retain(slots[:1])
    assert adopt(pool, 0)
    pool.drop(slots[1:2])
    pool.touch(slots[:1])
    pool.release(slots)
    pool.refresh()
    pool.close()


def main(folder: Path, part: int) -> int:
    """Let one member after the other die, each some lines later, until one gets to its end."""
    lines, deaths = part + 1, 0
    while True:
        keeper = open_pool(folder)
        put(keeper, *range(200, 200 + LAYOUT.num_slots - 3))
        keeper._file.close(remove=False)

        def action(lines: int = lines) -> None:
            die_at_line(lines)
            work(folder)

        ended = run_child(action)
        assert ended in (0, -signal.SIGKILL)
        check_all(folder)
        if ended == 0:
            return deaths
        deaths += 1
        lines += 4


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), int(sys.argv[2])))
