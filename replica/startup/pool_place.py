"""The node's pool of an engine: its size, and joining it.

A pool is per node, not per engine. The engine that starts first makes it; the others take its size. By default the pool
takes what the node's memory leaves:

| device | default |
|---|---|
| GPU | memory available within the cgroup - checkpoint - reserve, at most 4 x the memory of the node's GPUs |
| CPU | 0.25 GiB |

The checkpoint counts because weights are staged in host memory while they are read. The reserve is a quarter of the
available memory, at least 4 GiB. More than four times the GPUs' memory gained little for long conversations. On a CPU
the pool is a copy in the same memory as the KV cache, so it is only for what outlives an engine and for what another
engine has computed.

/dev/shm also holds Ray's object store. Its whole capacity is set aside, whether it is in use or not. A default takes at
most half of the rest. A size that was asked for must fit into the rest, or the engine does not start.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import torch

from quire.replica.config import EngineArgs, EngineConfig, SizingError
from quire.replica.device.kv_pool import block_elements
from quire.replica.host_machine import available_bytes
from quire.replica.node_pool.node_pool import NodePool, open_node_pool
from quire.replica.node_pool.pool_file import NodePoolError, PoolPlace
from quire.replica.node_pool.pool_layout import PoolLayout
from quire.replica.startup.device_sizing import GIB

logger = logging.getLogger(__name__)

_CPU_BYTES = GIB // 4
_LEAST_RESERVE_BYTES = 4 * GIB
_RESERVED_PART = 4
_DEVICE_MULTIPLE = 4


def default_pool_bytes(
    available: int, checkpoint_bytes: int, device_bytes: int, shm_free: int, set_aside: int
) -> int:
    """The default size of a pool, by the rules above.

    Parameters
    ----------
    available
        Bytes of the node's memory that this process could allocate.
    device_bytes
        Memory of the node's GPUs; 0: the engines run on CPUs.
    shm_free
        Free bytes of the folder in which the pool is made.
    """
    reserve = max(_LEAST_RESERVE_BYTES, available // _RESERVED_PART)
    wanted = available - checkpoint_bytes - reserve
    if device_bytes:
        wanted = min(wanted, _DEVICE_MULTIPLE * device_bytes)
    else:
        # Small machines run CPU engines too, so the least reserve does not hold here.
        wanted = min(_CPU_BYTES, available // 16)
    return max(0, min(wanted, (shm_free - set_aside) // 2))


def with_pool_size(args: EngineArgs, place: PoolPlace, checkpoint: Path) -> EngineArgs:
    """Return the options with a size of the pool; the default if none is given."""
    if args.node_pool_gib is not None:
        return args
    device_bytes = 0
    if args.device != "cpu" and torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        device_bytes = sum(torch.cuda.get_device_properties(d).total_memory for d in devices)
    available = available_bytes("cpu")
    checkpoint_bytes = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    stat = os.statvfs(place.folder)
    shm_free = stat.f_bavail * stat.f_frsize
    num_bytes = default_pool_bytes(
        available, checkpoint_bytes, device_bytes, shm_free, place.set_aside
    )
    # Smaller ones hold too little to be of use.
    num_bytes = num_bytes if num_bytes >= 16 << 20 else 0
    logger.info(
        "node_pool_gib is %.3f: of %.3f GiB of memory available, a checkpoint of %.3f GiB, and %.3f GiB free in %s, "
        "%.3f GiB of them set aside for Ray's object store",
        *(num_bytes / GIB, available / GIB, checkpoint_bytes / GIB, shm_free / GIB, place.folder),
        place.set_aside / GIB,
    )
    return dataclasses.replace(args, node_pool_gib=num_bytes / GIB)


def join_pool(
    args: EngineArgs, config: EngineConfig, place: PoolPlace | None, *, is_exact: bool
) -> tuple[EngineConfig, NodePool | None]:
    """Join the node's pool, and give the configuration its number of blocks.

    A recurrent model's host tier stays private: a hit there needs snapshots of states, which the pool does not hold.

    Parameters
    ----------
    args
        The options with a size (`with_pool_size`), of all ranks together: a slot has the parts of all ranks.
    place
        None: the host tier is private.
    is_exact
        Whether the size was asked for.

    Raises
    ------
    SizingError
        The pool does not fit into /dev/shm, or has too many members.
    """
    if place is None or not config.num_host_blocks or config.has_states:
        return config, None
    element = getattr(torch, config.pool_dtype).itemsize
    slot_bytes = block_elements(config.groups, config.block_size) * element * args.tensor_parallel
    wanted = PoolLayout.that_fits(int((args.node_pool_gib or 0) * GIB), slot_bytes)
    if not wanted.num_slots:
        raise SizingError(
            f"node_pool_gib {args.node_pool_gib} holds no block of {slot_bytes} bytes"
        )
    try:
        pool = open_node_pool(
            place.name,
            wanted,
            is_exact=is_exact,
            set_aside=place.set_aside,
            folder=place.folder,
        )
    except NodePoolError as error:
        raise SizingError(f"node_pool_gib is {args.node_pool_gib}: {error}") from error
    counts = pool.counts()
    logger.info(
        "node pool %s: %s, %.3f GiB, %d slots of %d bytes, %d with content, %d engines",
        *(pool.path, "made" if pool.is_new else "joined", pool.layout.num_bytes / GIB),
        *(pool.num_slots, slot_bytes, counts.cached + counts.in_use, counts.members),
    )
    return dataclasses.replace(config, num_host_blocks=pool.num_slots), pool
