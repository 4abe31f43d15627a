"""Publishes the blocks of a prompt in the node's pool at once, for a stream that continues in another engine there."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from quire.protos.adapter_ref import cache_namespace
from quire.protos.wire import Submit
from quire.replica.kv_transport.peer_blocks import wanted_blocks

if TYPE_CHECKING:
    from quire.replica.engine import Engine
    from quire.replica.scheduler.scheduler import Scheduler

# Longest wait for the copies, and the time between two looks.
_MAX_S, _POLL_S = 8.0, 0.005


def kv_token_bytes(engine: Engine) -> int:
    """Bytes of a token's KV in a block of every layer group; 0: the engine has no pool of the node."""
    if engine.pool_blocks is None:
        return 0
    config = engine.config
    return engine.pool_blocks.pool.layout.slot_bytes * len(config.groups) // config.block_size


async def publish_prompt(engine: Engine, data: bytes) -> bool:
    """Publish the blocks of a prompt that the engine has on its device, before all others.

    Parameters
    ----------
    data
        A `Submit` with the prompt.

    Returns
    -------
    Whether the pool has all blocks that a request with this prompt can adopt.
    """
    blocks, config = engine.pool_blocks, engine.config
    if blocks is None:
        return False
    submit = Submit.decode(data)
    wanted = wanted_blocks(
        submit.prompt_ids,
        cache_namespace(submit.tenant, submit.adapter),
        0,
        len(submit.prompt_ids),
        config.block_size,
        config.groups,
        blocks.key,
    )
    missing = [block.key for block in wanted]

    def find_missing(scheduler: Scheduler) -> list[bytes]:
        return [key for key in missing if blocks.pool.find(key) is None]

    def ask(scheduler: Scheduler) -> bool:
        keys = find_missing(scheduler)
        return len(scheduler.publish_soon(keys)) == len(keys)

    end_s = time.monotonic() + _MAX_S
    if not await asyncio.wrap_future(engine.call(ask)):
        return False
    while missing := await asyncio.wrap_future(engine.call(find_missing)):
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True
