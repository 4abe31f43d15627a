"""Processes that use one pool and die at any line of its code.

The bytes of a block follow from its key, so every process can tell a wrong byte.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from quire.replica.node_pool.node_pool import NodePool, open_node_pool
from quire.replica.node_pool.pool_layout import PoolLayout
from quire.replica.node_pool.slot_content import Content

LAYOUT = PoolLayout(24, 512)
_FOLDER = "node_pool"


def open_pool(folder: Path, layout: PoolLayout = LAYOUT, **options: Any) -> NodePool:
    return open_node_pool("test", layout, folder=folder, **options)


def key_of(name: int) -> bytes:
    return hashlib.blake2b(str(name).encode(), digest_size=32).digest()


def bytes_of(key: bytes, num_bytes: int = LAYOUT.slot_bytes) -> np.ndarray:
    return np.frombuffer(hashlib.shake_128(key).digest(num_bytes), np.uint8)


def fill(pool: NodePool, slot: int, key: bytes) -> Content:
    """Write a block in two parts, between which a process may die."""
    content = bytes_of(key, pool.layout.slot_bytes)
    half = len(content) // 2
    pool.slots[slot, :half] = content[:half]
    pool.slots[slot, half:] = content[half:]
    return Content(slot, key, len(key), pool.checksum(slot))


def put(pool: NodePool, *names: int) -> list[int]:
    """Publish blocks; they are cached."""
    slots = pool.claim(len(names))
    assert slots is not None
    pool.publish([fill(pool, s, key_of(n)) for s, n in zip(slots, names, strict=True)])
    pool.release(slots)
    return slots


def adopt(pool: NodePool, name: int) -> bool:
    """Lease, verify and read a block, as an engine does. Returns whether it was found; asserts that it is right."""
    pool.refresh()
    key = key_of(name)
    slot = pool.find(key)
    if slot is None or pool.lease([slot], [key]) != [True]:
        return False
    is_sound = pool.verify(slot)
    if is_sound:
        assert (pool.slots[slot] == bytes_of(key, pool.layout.slot_bytes)).all()
    pool.release([slot])
    return is_sound


def use(pool: NodePool, chance: random.Random, num_names: int = 60) -> None:
    """Do one thing that engines do."""
    kind = chance.randrange(6)
    names = [chance.randrange(num_names) for _ in range(chance.randrange(1, 5))]
    if kind <= 1:
        slots = pool.claim(len(names), may_evict_retained=chance.random() < 0.5)
        if slots is not None:
            # Some stay private, as the blocks of a preempted request do.
            some = slots[: chance.randrange(len(slots) + 1)]
            pool.publish([fill(pool, s, key_of(n)) for s, n in zip(some, names, strict=False)])
            pool.retain(some[:1])
            pool.release(slots)
    elif kind <= 3:
        adopt(pool, names[0])
    elif kind == 4:
        pool.refresh()
        slot = pool.find(key_of(names[0]))
        if slot is not None:
            pool.touch([slot])
            pool.retain([slot], chance.random() < 0.5)
    else:
        pool.drop([chance.randrange(pool.num_slots)])


def die_at_line(number: int) -> None:
    """Kill this process before it runs this many lines of the pool's modules."""
    left = number

    def trace(frame: FrameType, what: str, argument: object) -> Callable[..., Any] | None:
        nonlocal left
        if Path(frame.f_code.co_filename).parent.name != _FOLDER:
            return None
        if what == "line":
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def run_child(action: Callable[[], None]) -> int:
    """Run an action in a forked process and return how it ended: 0, or the negative signal number."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.__stderr__, flush=True)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
