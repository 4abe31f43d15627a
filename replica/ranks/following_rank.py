"""The main loop of a rank other than the leader: load a part of the model, then execute the leader's steps."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from pathlib import Path

import msgpack

from quire.replica.checkpoint.checkpoint import resolve_checkpoint
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.node_pool.pool_file import PoolSlots
from quire.replica.node_pool.pool_layout import PoolLayout
from quire.replica.ranks.rank_links import LeaderLink
from quire.replica.ranks.rank_runners import FollowingRunner
from quire.replica.ranks.step_message import decode
from quire.replica.startup.rank_sizing import rank_args, rank_spec
from quire.replica.startup.sizing import resolve

logger = logging.getLogger(__name__)
# Options that the memory of a rank determines; the leader takes the smallest.
AGREED = ("num_blocks", "num_host_blocks", "max_model_len")
STORE = "store"


def follow(folder: Path, rank: int) -> None:
    """Run until the leader ends; `folder` is its `RankLinks.folder`.

    Raises
    ------
    Exception
        Loading or a step has failed; the leader has the message.
    """
    link = LeaderLink(folder, rank)
    try:
        _follow(link, folder, rank)
    except Exception as error:
        logger.exception("rank %d has failed", rank)
        link.send({"error": f"{type(error).__name__}: {error}"})
        raise


def _follow(link: LeaderLink, folder: Path, rank: int) -> None:
    options = link.receive()
    if options is None:
        return
    args = EngineArgs(**msgpack.unpackb(options))
    spec = rank_spec(ModelSpec.from_checkpoint(resolve_checkpoint(args.model, args.revision)), args)
    config = resolve(rank_args(args), spec)
    link.send({name: getattr(config, name) for name in AGREED})
    agreed = link.receive()
    if agreed is None:
        return
    config = dataclasses.replace(config, **msgpack.unpackb(agreed))
    with contextlib.ExitStack() as opened:
        layout = link.receive()
        if layout is None:
            return
        pool_slots = None
        if (sizes := msgpack.unpackb(layout)) is not None:
            file = link.receive_file()
            opened.callback(os.close, file)
            pool_slots = PoolSlots.of(file, PoolLayout(*sizes)).part(rank, args.tensor_parallel)
            config = dataclasses.replace(config, num_host_blocks=len(pool_slots.slots))
        group = RankGroup.join(folder / STORE, rank, args.tensor_parallel)
        runner = FollowingRunner.from_config(config, spec, group, pool_slots)
        runner.group = group
        link.send({"ready": True})
        while (message := link.receive()) is not None:
            runner.follow(decode(message))
        runner.close()


def main() -> None:
    """Run a rank in a process of its own; the arguments are folder and rank."""
    logging.basicConfig(level=logging.INFO)
    try:
        follow(Path(sys.argv[1]), int(sys.argv[2]))
    except Exception:
        # It is logged, and the leader knows it. Threads of torch must not delay the end of the process.
        os._exit(1)
