"""The kernels that a model runs on, chosen once: those of Triton and the GPU's libraries, or the CPU's."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from quire.kernels.attention.paged_attention import Backend, PagedAttention
from quire.replica.config import EngineConfig
from quire.replica.device.device import Device
from quire.replica.device.kv_pool import KVPool
from quire.replica.kv_cache.groups import LayerGroup
from quire.replica.model.fusion.fuse_report import FuseReport
from quire.replica.runner.device_sampler import DeviceSampler
from quire.replica.runner.device_table import DrawColumns
from quire.replica.runner.forward import Forward
from quire.replica.runner.step_outputs import StepOutputs


class ModelKernels(Protocol):
    """What `CpuKernels` and `GpuKernels` offer."""

    backend: Backend

    def attention_options(
        self, config: EngineConfig, group: LayerGroup, pool: KVPool, num_heads: int
    ) -> dict[str, Any]:
        """Arguments of `PagedAttention` that only this backend has."""
        ...

    def fuse(
        self, config: EngineConfig, model: nn.Module, pool: KVPool, attentions: list[PagedAttention]
    ) -> FuseReport:
        """Replace modules of the model by fused ones, in place."""
        ...

    def fix_order(self, model: nn.Module) -> None:
        """Give a row the same bits in every batch, in place; the model has been fused."""
        ...

    def warm_fixed_products(self, model: nn.Module, max_batch_tokens: int) -> None:
        """Build what the products of `fix_order` need."""
        ...

    def forward(
        self,
        model: nn.Module,
        pool: KVPool,
        attentions: list[PagedAttention],
        max_logits_rows: int,
    ) -> Forward:
        """A model's forward pass."""
        ...

    def outputs(self, device: Device, max_rows: int) -> StepOutputs:
        """See `StepOutputs`."""
        ...

    def sampler(self, device: Device, vocab_size: int) -> DeviceSampler | None:
        """Draws rows with masks, penalties or log-probs on a device that queues work; None: torch does."""
        ...

    def draw(self, logits: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        """One token a row, [S] int64, of logits [S, vocab] of any type, which may be overwritten."""
        ...


def choose_kernels(config: EngineConfig, backend: Backend | None) -> ModelKernels:
    """Those of the configuration's device, if no backend is asked for."""
    if backend is None:
        backend = "cpu" if config.device == "cpu" else "triton"
    if backend == "cpu":
        from quire.replica.runner.cpu_kernels import CpuKernels

        return CpuKernels(config.num_threads)
    from quire.replica.runner.gpu_kernels import GpuKernels

    return GpuKernels()
