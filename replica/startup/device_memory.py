"""Measures the GPU memory of weights, largest steps and graphs before the KV pool is allocated.

Graphs contain addresses of the KV pool, so they are captured after the pool is allocated. But the size of the pool
depends on the size of the graphs. Therefore a trial runner, with a pool of one block per layer group, captures a few
graphs and is measured. Then the real pool is allocated, and the graphs are captured again::

    free     │ weights │ workspace │ graph 1 │ 2 │ 3 │ 4 │       measured, then freed except the weights
    budget   │ weights │ workspace │ max_cached_graphs: 1 + mean of 2, 3, ... each │ KV pool │

Graph 1 is the largest. Its bytes include memory that all graphs share: logits and intermediate results.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineConfig
from quire.replica.device.device import Device
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.fusion.fuse_report import FuseReport
from quire.replica.model.kv_scales import read_kv_scales
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.runner.runner import Runner
from quire.replica.startup.memory_table import MeasuredMemory

# Drivers allocate memory in units of this size, so a smaller graph may measure as 0 bytes.
LEAST_GRAPH_BYTES = 2 << 20
# Each capture takes about 1 s on a model of 8 billion parameters.
_MEASURED_GRAPHS = 4


def measure_memory(
    config: EngineConfig,
    spec: ModelSpec,
    model: nn.Module,
    device: Device,
    available: int,
    group: RankGroup | None = None,
) -> tuple[MeasuredMemory, FuseReport]:
    """Run the largest steps and capture the largest graphs with a minimal KV cache, and measure their memory.

    Parameters
    ----------
    config
        Preliminary configuration. Lengths and batch sizes are used, numbers of blocks are not.
    model
        The loaded model; its modules are fused in place.
    available
        `Device.free_bytes` before the model was loaded.
    group
        The ranks that compute the model together; all call this at the same time.

    Returns
    -------
    The measured bytes, and the report of the fuse pass.
    """
    device.trim()
    loaded = device.free_bytes()
    pool = KVPool(
        len(spec.groups),
        spec.groups,
        config.block_size,
        getattr(torch, config.pool_dtype),
        config.device,
        read_kv_scales(spec) if config.kv_cache_dtype == "fp8" else None,
    )
    trial = Runner(dataclasses.replace(config, num_host_blocks=0), spec, model, pool, device=device)
    fused = trial.fused
    device.trim()  # frees the original modules that the fuse pass replaced
    trial.run_largest()
    # No trim here: memory that the largest steps leave in torch's cache counts as their workspace.
    workspace = loaded - device.free_bytes() - pool.data.nbytes
    assert trial.graphs is not None
    if group is not None:
        trial.graphs.agree = group.worst
    graphs = graph_bytes(trial.graphs.measure(_MEASURED_GRAPHS), config.max_cached_graphs)
    del trial, pool
    device.trim()
    return MeasuredMemory(available, available - loaded, max(0, workspace), graphs), fused


def graph_bytes(taken: list[int], max_graphs: int) -> int:
    """Estimate the bytes of `max_graphs` graphs; `taken` are the bytes of the largest ones, in order of capture."""
    if not taken:
        return 0
    first, *others = taken
    mean = -(-sum(others) // len(others)) if others else 0
    return first + (max_graphs - 1) * max(mean, LEAST_GRAPH_BYTES)
