"""Starts a runner: reads the checkpoint, chooses sizes, loads the model, allocates the KV pool, warms up."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from quire.replica.checkpoint.checkpoint import resolve_checkpoint
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs, EngineConfig, SizingError, check_args
from quire.replica.device.open_device import open_device
from quire.replica.host_machine import give_back_free_memory
from quire.replica.model.loader import load_model
from quire.replica.model.packed_cache import kept_names
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.node_pool.node_pool import NodePool
from quire.replica.node_pool.pool_file import PoolPlace
from quire.replica.runner.runner import Runner
from quire.replica.startup.device_memory import measure_memory
from quire.replica.startup.device_sizing import GIB
from quire.replica.startup.draft_model import draft_bytes, find_draft_model
from quire.replica.startup.pool_place import join_pool, with_pool_size
from quire.replica.startup.rank_sizing import rank_args, rank_spec
from quire.replica.startup.sizing import resolve

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The configuration and the runner of an engine, ready for the first step."""

    checkpoint: Path
    spec: ModelSpec
    config: EngineConfig
    runner: Runner
    # None: the host tier is private.
    node_pool: NodePool | None
    # Of the model that drafts; None: there is none.
    draft_runner: Runner | None = None


class OtherRanks(Protocol):
    """The ranks that this process leads (`replica/ranks`)."""

    def begin(self, args: EngineArgs, config: EngineConfig) -> EngineConfig:
        """Return the configuration with the sizes of the smallest rank; `args` are the options of all ranks."""
        ...

    def join(self, config: EngineConfig) -> RankGroup:
        """Connect to the ranks, which load their parts now."""
        ...

    def agree(self, config: EngineConfig) -> EngineConfig:
        """Return the configuration with the sizes of the rank that has measured the least memory."""
        ...

    def make_runner(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        model: nn.Module,
        node_pool: NodePool | None,
        **options: Any,
    ) -> Runner:
        """Return the leader's runner. Every rank is ready for steps then, with its part of the pool's slots.

        `options` are those of `Runner`.
        """
        ...


def load_runtime(
    args: EngineArgs,
    startup_s: dict[str, float],
    check_model: Callable[[ModelSpec, str], None],
    ranks: OtherRanks | None = None,
    place: PoolPlace | None = None,
) -> Runtime:
    """Load a model and warm up. Afterwards serving compiles nothing and touches no memory for the first time.

    Parameters
    ----------
    startup_s
        Receives the seconds of the phases `checkpoint` (with the proof), `load` (on a GPU including measurements) and
        `warm_up`.
    check_model
        Called with the checkpoint's shape and the kind of device (cpu or cuda) before weights are read; raises
        CheckpointError for a model that the engine would compute otherwise than transformers.
    ranks
        With `tensor_parallel`, the other ranks.
    place
        Where the node's pool is; None: the host tier is private.

    Raises
    ------
    CheckpointError, SizingError
        The checkpoint is not supported, or does not fit into memory.
    """
    began = time.perf_counter()
    checkpoint = resolve_checkpoint(args.model, args.revision)
    whole = ModelSpec.from_checkpoint(checkpoint)
    check_args(args)
    is_exact = args.node_pool_gib is not None
    if place is not None:
        args = with_pool_size(args, place, checkpoint)
    spec = rank_spec(whole, args)
    own_args = rank_args(args)
    draft = find_draft_model(own_args, whole)
    config = resolve(own_args, spec, checkpoint, draft=draft_bytes(draft))
    check_model(whole, config.device)
    if ranks is not None:
        config = ranks.begin(args, config)
    device = open_device(config.device, use_nvtx=config.nvtx)
    startup_s["checkpoint"] = -began + (began := time.perf_counter())
    device.trim()  # frees memory cached by an earlier engine of this process
    # None on the CPU: its memory is not measured, and `config` is final.
    available = None if device.is_immediate else device.free_bytes()

    with contextlib.ExitStack() as opened:
        node_pool: NodePool | None = None

        def join(config: EngineConfig) -> EngineConfig:
            nonlocal node_pool
            config, node_pool = join_pool(args, config, place, is_exact=is_exact)
            if node_pool is not None:
                opened.callback(node_pool.close)
            return config

        try:
            if draft is not None:
                draft.load(config)
            if available is None:
                config = join(config)
            group = None if ranks is None else ranks.join(config)
            model = load_model(
                spec,
                config.device,
                config.dtype,
                config.weights,
                group=group,
                num_splits=config.reduction_splits,
                unread=kept_names(config),
            )
            options: dict[str, Any] = {}
            if available is not None:
                measured, fused = measure_memory(config, spec, model, device, available, group)
                if draft is not None:
                    measured = draft.measure(config, device, measured)
                # The rest goes to the KV pool.
                config = resolve(own_args, spec, checkpoint, measured, draft_bytes(draft))
                config = join(config if ranks is None else ranks.agree(config))
                options = dict(device=device, fused=fused)
            if ranks is None:
                slots = None if node_pool is None else node_pool.file.slots
                runner = Runner.with_pool(config, spec, model, pool_slots=slots, **options)
            else:
                runner = ranks.make_runner(config, spec, model, node_pool, **options)
            startup_s["load"] = -began + (began := time.perf_counter())
            runner.warm_up()
            draft_runner = None if draft is None else draft.start(config, device)
        except torch.OutOfMemoryError as error:
            raise SizingError(
                f"{spec.path}: the device ran out of memory while the engine started, of the "
                f"{(available or 0) / GIB:.3f} GiB that were free before: {error}"
            ) from error
        if available is not None:
            _check_budget(available - device.free_bytes(), int(available * args.max_memory_percent))
        # Loading and the largest steps leave free memory in the allocator.
        give_back_free_memory()
        runner.mark_ready()
        startup_s["warm_up"] = time.perf_counter() - began
        opened.pop_all()
    return Runtime(checkpoint, spec, runner.config, runner, node_pool, draft_runner)


def _check_budget(used: int, budget: int) -> None:
    if used > budget:
        logger.warning(
            "the engine uses %.3f GiB of the device, the budget of max_memory_percent is %.3f GiB",
            used / GIB,
            budget / GIB,
        )
