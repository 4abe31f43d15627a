"""The leader's side of a tensor-parallel replica: starts the other ranks, agrees on sizes, loads its own part."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgpack

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs, EngineConfig
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.node_pool.node_pool import NodePool
from quire.replica.ranks.following_rank import AGREED, STORE
from quire.replica.ranks.rank_links import RankLinks
from quire.replica.ranks.rank_runners import LeadingRunner

logger = logging.getLogger(__name__)
_END_S = 5.0  # for a process to end after its connection has
_MAIN = "from quire.replica.ranks.following_rank import main; main()"

# Starts rank number `rank` (from 1 on), which calls `follow(folder, rank)`; returns a function that ends it.
StartRank = Callable[[Path, int], Callable[[], None]]


def start_process(folder: Path, rank: int) -> Callable[[], None]:
    """Start a rank as a child of this process."""
    child = subprocess.Popen(
        [sys.executable, "-c", _MAIN, str(folder), str(rank)], stdin=subprocess.DEVNULL
    )

    def end() -> None:
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    return end


class LeadingRanks:
    """The ranks that this process leads.

    Parameters
    ----------
    num_ranks
        Number of ranks with this one.
    start
        Starts a rank.

    Raises
    ------
    EngineError
        A rank has not started.
    """

    def __init__(self, num_ranks: int, start: StartRank):
        self._num_ranks = num_ranks
        self.links = RankLinks(num_ranks)
        self._ends = [start(self.links.folder, rank) for rank in range(1, num_ranks)]

    def agree(self, args: EngineArgs, config: EngineConfig) -> EngineConfig:
        """Return the leader's configuration with the sizes of the smallest rank.

        Parameters
        ----------
        args
            The replica's options, before `rank_args`.
        """
        self.links.accept()
        # Ranks take the leader's choices where machines could differ.
        names = ("num_threads", "dtype", "deterministic", "device")
        options = dataclasses.asdict(args) | {name: getattr(config, name) for name in names}
        self.links.send(msgpack.packb(options))
        each = self.links.receive()
        agreed = {
            name: min([getattr(config, name), *(sizes[name] for sizes in each)]) for name in AGREED
        }
        self.links.send(msgpack.packb(agreed))
        return dataclasses.replace(config, **agreed)

    def load(
        self, config: EngineConfig, spec: ModelSpec, node_pool: NodePool | None
    ) -> LeadingRunner:
        """Load the leader's part; every rank is ready then.

        Parameters
        ----------
        node_pool
            The host tier is in it: each slot has the parts of all ranks, in their order. None: each rank has its own.
        """
        pool_slots = None
        layout = None if node_pool is None else dataclasses.astuple(node_pool.layout)
        self.links.send(msgpack.packb(layout))
        if node_pool is not None:
            self.links.send_file(node_pool.file.fd)
            pool_slots = node_pool.file.slots.part(0, self._num_ranks)
        group = RankGroup.join(self.links.folder / STORE, 0, self._num_ranks)
        runner = LeadingRunner.from_config(config, spec, group, pool_slots)
        runner.group, runner.links = group, self.links
        self.links.receive()
        self.links.forget_folder()
        self.links.watch()
        logger.info(
            "%d ranks, each with %.0f%% of the weights", group.size, 100 * spec.weight_share
        )
        return runner

    def close(self) -> None:
        """End the other ranks."""
        self.links.close()
        for end in self._ends:
            end()
