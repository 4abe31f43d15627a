"""The main loop of a rank other than the leader: load a part of the model, then execute the leader's steps."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgpack

from quire.replica.checkpoint.checkpoint import resolve_checkpoint
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs, EngineConfig
from quire.replica.device.open_device import open_device
from quire.replica.model.fusion.fuse_report import FuseReport
from quire.replica.model.loader import load_model
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.node_pool.pool_file import PoolSlots
from quire.replica.node_pool.pool_layout import PoolLayout
from quire.replica.ranks.rank_copies import OwnCopies
from quire.replica.ranks.rank_links import LeaderLink
from quire.replica.ranks.rank_runners import FollowingRunner
from quire.replica.ranks.step_message import decode
from quire.replica.startup.device_memory import measure_memory
from quire.replica.startup.rank_sizing import rank_args, rank_spec
from quire.replica.startup.sizing import resolve

logger = logging.getLogger(__name__)
# Options that the memory of a rank determines; the leader takes the smallest.
AGREED = (
    *("num_blocks", "num_host_blocks", "max_model_len", "max_running_requests", "prefix_caching"),
    *("num_snapshots", "num_host_snapshots"),
)
STORE = "store"
# A rank looks so often whether its copies have ended, while there are any.
_COPY_POLL_S = 0.001
END_S = 5.0  # for the work of a rank whose leader has ended


def follow(folder: Path, rank: int, on_leader_end: Callable[[], None] = lambda: None) -> None:
    """Run until the leader ends.

    Parameters
    ----------
    folder
        The leader's `RankLinks.folder`.
    on_leader_end
        Called in a thread of its own.

    Raises
    ------
    Exception
        Loading or a step has failed; the leader has the message.
    """
    link = LeaderLink(folder, rank)
    link.watch(on_leader_end)
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
    own_args, checkpoint = rank_args(args), resolve_checkpoint(args.model, args.revision)
    spec = rank_spec(ModelSpec.from_checkpoint(checkpoint), args)
    config = _agreed(link, resolve(own_args, spec))
    if config is None:
        return
    device = open_device(config.device)
    available = None if device.is_immediate else device.free_bytes()
    group = RankGroup.join(
        folder / STORE, rank, args.tensor_parallel, config.device, config.deterministic
    )
    model = load_model(
        spec,
        config.device,
        config.dtype,
        config.weights,
        group=group,
        num_splits=config.reduction_splits,
    )
    fused: FuseReport | None = None
    if available is not None:
        # The leader does the same now, and each needs the sums of the others.
        measured, fused = measure_memory(config, spec, model, device, available, group)
        config = _agreed(link, resolve(own_args, spec, measured=measured))
        if config is None:
            return
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
        runner = FollowingRunner.with_pool(
            config, spec, model, group=group, device=device, fused=fused, pool_slots=pool_slots
        )
        layers = {} if runner.adapted is None else runner.adapted.all_layers
        link.send({"layers": list(layers.values())})
        while (message := _next_message(link, runner.copies)) is not None:
            runner.follow(decode(message))
        runner.close()


def _next_message(link: LeaderLink, copies: OwnCopies) -> bytes | None:
    """Wait for the leader's next message, and tell it meanwhile which copies have ended. None: it has ended."""
    while copies.are_queued:
        before, ended = copies.num_ended, copies.count()
        if ended != before:
            link.send({"copies": ended})
        if link.has_message(_COPY_POLL_S):
            break
    return link.receive()


def _agreed(link: LeaderLink, config: EngineConfig) -> EngineConfig | None:
    """Send this rank's sizes; return the configuration with the smallest ones. None: the leader has ended."""
    link.send({name: getattr(config, name) for name in AGREED})
    agreed = link.receive()
    return None if agreed is None else dataclasses.replace(config, **msgpack.unpackb(agreed))


def main() -> None:
    """Run a rank in a process of its own; the arguments are folder and rank."""
    logging.basicConfig(level=logging.INFO)

    def end() -> None:
        # A step on a GPU waits for a leader that was killed, without an end.
        time.sleep(END_S)
        os._exit(1)

    try:
        follow(Path(sys.argv[1]), int(sys.argv[2]), end)
    except Exception:
        # It is logged, and the leader knows it. Threads of torch must not delay the end of the process.
        os._exit(1)
