"""The interface of the kernels that a model runs on, and the factory that chooses them once at start."""

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
    """The interface of `CpuKernels` and `GpuKernels`."""

    backend: Backend

    def attention_options(
        self, config: EngineConfig, group: LayerGroup, pool: KVPool, num_heads: int
    ) -> dict[str, Any]:
        """Return extra arguments of `PagedAttention` for this backend."""
        ...

    def fuse(
        self, config: EngineConfig, model: nn.Module, pool: KVPool, attentions: list[PagedAttention]
    ) -> FuseReport:
        """Replace modules of the model by fused ones, in place."""
        ...

    def fix_order(self, model: nn.Module) -> None:
        """Replace matrix products in place so that a row has the same bits in every batch. Call it after `fuse`."""
        ...

    def warm_fixed_products(self, model: nn.Module, max_batch_tokens: int) -> None:
        """Compile the kernels of the matrix products that `fix_order` installed, for up to `max_batch_tokens` rows."""
        ...

    def forward(
        self,
        model: nn.Module,
        pool: KVPool,
        attentions: list[PagedAttention],
        max_logits_rows: int,
    ) -> Forward:
        """Create the forward pass of a model."""
        ...

    def outputs(self, device: Device, max_rows: int) -> StepOutputs:
        """Create the owner of last tokens and result slots, for `max_rows` rows including the padding row."""
        ...

    def sampler(self, device: Device, vocab_size: int) -> DeviceSampler | None:
        """Create the sampler for rows with masks, penalties or log-probs; None: torch samples these rows."""
        ...

    def draw(self, logits: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        """Sample one token per row, [S] int64, from logits [S, vocab] of any dtype; may overwrite the logits."""
        ...


def choose_kernels(config: EngineConfig, backend: Backend | None) -> ModelKernels:
    """Create the kernels of a backend; None chooses by the configuration's device."""
    if backend is None:
        backend = "cpu" if config.device == "cpu" else "triton"
    if backend == "cpu":
        from quire.replica.runner.cpu_kernels import CpuKernels

        return CpuKernels(config.num_threads)
    from quire.replica.runner.gpu_kernels import GpuKernels

    return GpuKernels()
