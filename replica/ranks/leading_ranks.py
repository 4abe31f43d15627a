"""The leader's side of a tensor-parallel replica: starts the other ranks, agrees on sizes, loads its own part."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
from torch import nn

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs, EngineConfig
from quire.replica.model.layers.linear_parts import LinearPart, WholeLayer
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.node_pool.node_pool import NodePool
from quire.replica.ranks.following_rank import AGREED, STORE, follow
from quire.replica.ranks.rank_links import RankLinks
from quire.replica.ranks.rank_runners import LeadingRunner

logger = logging.getLogger(__name__)
_END_S = 5.0  # for a process to end after its connection has
_GPUS = "CUDA_VISIBLE_DEVICES"
_MAIN = "from quire.replica.ranks.following_rank import main; main()"

# Starts rank number `rank` (from 1 on), which calls `follow(folder, rank)`; returns a function that ends it.
StartRank = Callable[[Path, int], Callable[[], None]]


def start_process(folder: Path, rank: int) -> Callable[[], None]:
    """Start a rank as a child of this process; of the GPUs that this process sees, it gets the one of its number."""
    child = subprocess.Popen(
        [sys.executable, "-c", _MAIN, str(folder), str(rank)],
        stdin=subprocess.DEVNULL,
        env=os.environ | {_GPUS: gpu_of_rank(os.environ.get(_GPUS), rank)},
    )

    def end() -> None:
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    return end


def start_thread(folder: Path, rank: int) -> Callable[[], None]:
    """Start a rank as a thread of this process, on a CPU."""
    thread = threading.Thread(target=follow, args=(folder, rank), daemon=True)
    thread.start()
    return thread.join


def gpu_of_rank(visible: str | None, rank: int) -> str:
    """Return the CUDA_VISIBLE_DEVICES of a rank; `visible` is the leader's. Empty: there is no GPU for it."""
    if visible is None:
        return str(rank)
    names = [name.strip() for name in visible.split(",")]
    return names[rank] if rank < len(names) else ""


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
        self._group: RankGroup | None = None
        self._ends = [start(self.links.folder, rank) for rank in range(1, num_ranks)]

    def begin(self, args: EngineArgs, config: EngineConfig) -> EngineConfig:
        """Send the options; return the leader's configuration with the sizes of the smallest rank.

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
        return self.agree(config)

    def join(self, config: EngineConfig) -> RankGroup:
        """Connect to the ranks, which load their parts now."""
        store, fixed_order = self.links.folder / STORE, config.deterministic
        self._group = RankGroup.join(store, 0, self._num_ranks, config.device, fixed_order)
        return self._group

    def agree(self, config: EngineConfig) -> EngineConfig:
        """Return the leader's configuration with the sizes of the smallest rank."""
        each = self.links.receive()
        agreed = {
            name: min([getattr(config, name), *(sizes[name] for sizes in each)]) for name in AGREED
        }
        self.links.send(msgpack.packb(agreed))
        return dataclasses.replace(config, **agreed)

    def make_runner(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        model: nn.Module,
        node_pool: NodePool | None,
        **options: Any,
    ) -> LeadingRunner:
        """Return the leader's runner; every rank is ready for steps then.

        Parameters
        ----------
        node_pool
            The host tier is in it: each slot has the parts of all ranks, in their order. None: each rank has its own.
        options
            Of `Runner`.
        """
        assert self._group is not None
        pool_slots = None
        layout = None if node_pool is None else dataclasses.astuple(node_pool.layout)
        self.links.send(msgpack.packb(layout))
        if node_pool is not None:
            self.links.send_file(node_pool.file.fd)
            pool_slots = node_pool.file.slots.part(0, self._num_ranks)
        runner = LeadingRunner.with_pool(
            config,
            spec,
            model,
            group=self._group,
            links=self.links,
            pool_slots=pool_slots,
            **options,
        )
        runner.layers_of_others = [
            _layers_by_name(message["layers"]) for message in self.links.receive()
        ]
        if config.device == "cpu":
            # Gloo has no more use for it. A process that is killed would leave it.
            self.links.forget_folder()
        self.links.watch(self._group.abort)
        logger.info(
            "%d ranks, each with %.0f%% of the weights", self._num_ranks, 100 * spec.weight_share
        )
        return runner

    def close(self) -> None:
        """End the other ranks."""
        self.links.close()
        for end in self._ends:
            end()


def _layers_by_name(layers: list[Any]) -> dict[str, LinearPart]:
    """Return the linear layers that a rank has sent, by name."""
    return {
        name: LinearPart(name, in_features, out_features, whole and WholeLayer(*whole))
        for name, in_features, out_features, whole in layers
    }
