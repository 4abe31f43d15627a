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
    args
        The replica's options, before `rank_args`.
    start
        Starts a rank.

    Raises
    ------
    EngineError
        A rank has not started.
    """

    def __init__(self, args: EngineArgs, start: StartRank):
        self._args = args
        self.links = RankLinks(args.tensor_parallel)
        self._ends = [start(self.links.folder, rank) for rank in range(1, args.tensor_parallel)]

    def agree(self, config: EngineConfig) -> EngineConfig:
        """Return the leader's configuration with the sizes of the smallest rank."""
        self.links.accept()
        # Ranks take the leader's choices where machines could differ.
        names = ("num_threads", "dtype", "deterministic", "device")
        options = dataclasses.asdict(self._args) | {name: getattr(config, name) for name in names}
        self.links.send(msgpack.packb(options))
        each = self.links.receive()
        agreed = {
            name: min([getattr(config, name), *(sizes[name] for sizes in each)]) for name in AGREED
        }
        self.links.send(msgpack.packb(agreed))
        return dataclasses.replace(config, **agreed)

    def load(self, config: EngineConfig, spec: ModelSpec) -> LeadingRunner:
        """Load the leader's part; every rank is ready then."""
        group = RankGroup.join(self.links.folder / STORE, 0, self._args.tensor_parallel)
        runner = LeadingRunner.from_config(config, spec, group)
        runner.links = self.links
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
