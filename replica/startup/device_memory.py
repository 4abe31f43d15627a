"""What the weights, the largest steps and the graphs take on a device, measured before the KV pool is allocated.

A graph holds the addresses of the KV pool, so the graphs that serve can only be captured when the pool is there; and
the pool gets what they leave. So everything is there twice: first with a pool of one block a group, to be measured,
and once the pool has its size, to serve::

    free     │ weights │ workspace │ graph 1 │ 2 │ 3 │ 4 │       measured; then all but the weights goes
    budget   │ weights │ workspace │ max_cached_graphs: 1 + mean of 2, 3, ... each │ KV pool │

Graph 1 is the largest, with what all of them share: logits, and the memory of what is computed in between.
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
from quire.replica.runner.runner import Runner
from quire.replica.startup.memory_table import MeasuredMemory

# Drivers hand memory out in pieces of so much: a smaller graph may show as nothing.
LEAST_GRAPH_BYTES = 2 << 20
# Each takes about a second on a model of 8 billion parameters.
_MEASURED_GRAPHS = 4


def measure_memory(
    config: EngineConfig, spec: ModelSpec, model: nn.Module, device: Device, available: int
) -> tuple[MeasuredMemory, FuseReport]:
    """Run the largest steps and capture the largest graphs without a KV cache to speak of.

    Parameters
    ----------
    config
        As it would be without what is measured here: lengths and batches count, blocks do not.
    model
        As loaded; its modules are fused in place.
    available
        `Device.free_bytes` before the model was loaded.

    Returns
    -------
    The bytes, and what was fused.
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
    device.trim()  # of the fuse pass: originals of what was fused
    trial.run_largest()
    # Not trimmed: the memory that the largest steps leave for reuse is their workspace.
    workspace = loaded - device.free_bytes() - pool.data.nbytes
    assert trial.graphs is not None
    graphs = graph_bytes(trial.graphs.measure(_MEASURED_GRAPHS), config.max_cached_graphs)
    del trial, pool
    device.trim()
    return MeasuredMemory(available, available - loaded, max(0, workspace), graphs), fused


def graph_bytes(taken: list[int], max_graphs: int) -> int:
    """Bytes of as many graphs as may be kept, given what the largest of them took, one after the other."""
    if not taken:
        return 0
    first, *others = taken
    mean = -(-sum(others) // len(others)) if others else 0
    return first + (max_graphs - 1) * max(mean, LEAST_GRAPH_BYTES)
