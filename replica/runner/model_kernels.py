"""The kernels that a model runs on; `cpu_kernels.py` and `gpu_kernels.py` have those of each device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from quire.kernels.attention.paged_attention import Backend, PagedAttention
from quire.replica.adapters.adapted_model import AdaptedModel
from quire.replica.config import EngineConfig
from quire.replica.device.device import Device
from quire.replica.device.kv_pool import KVPool
from quire.replica.device.state_pool import StateShape
from quire.replica.kv_cache.groups import LayerGroup
from quire.replica.model.fusion.fuse_report import FuseReport
from quire.replica.model.recurrence.recurrent_fusion import fuse_recurrences
from quire.replica.model.recurrence.recurrent_mixers import RecurrenceKernels
from quire.replica.runner.device_sampler import DeviceSampler
from quire.replica.runner.forward import Forward
from quire.replica.runner.step_outputs import StepOutputs


class ModelKernels(ABC):
    """The kernels of a device. `CpuKernels` and `GpuKernels` replace what differs there."""

    backend: Backend

    def attention_options(
        self, config: EngineConfig, group: LayerGroup, pool: KVPool, num_heads: int
    ) -> dict[str, Any]:
        """Return extra arguments of `PagedAttention` for this backend."""
        return {}

    @abstractmethod
    def fuse(
        self, config: EngineConfig, model: nn.Module, pool: KVPool, attentions: list[PagedAttention]
    ) -> FuseReport:
        """Replace modules of the model by fused ones, in place."""

    def fuse_recurrences(
        self, config: EngineConfig, model: nn.Module, layout: Sequence[StateShape]
    ) -> FuseReport:
        """Let recurrent modules run in Quire's kernels where both compute the same, in place. Call it before `fuse`."""
        kernels = self.recurrence_kernels(config)
        if config.fuse == "off" or kernels is None or not layout:
            return FuseReport()
        return fuse_recurrences(model, layout, kernels)

    @abstractmethod
    def recurrence_kernels(self, config: EngineConfig) -> RecurrenceKernels | None:
        """Return the kernels of recurrent layers; None: transformers' modules compute them."""

    @abstractmethod
    def fix_order(self, model: nn.Module, pool: KVPool, attentions: list[PagedAttention]) -> None:
        """Replace matrix products in place so that a row has the same bits in every batch. Call it after `fuse`.

        `pool` and `attentions` serve a trial pass, which writes to the trash block.
        """

    @abstractmethod
    def warm_fixed_products(self, model: nn.Module, max_batch_tokens: int) -> None:
        """Compile the kernels of the matrix products that `fix_order` installed, for up to `max_batch_tokens` rows."""

    @abstractmethod
    def adapt(
        self, decoder: nn.Module, num_slots: int, max_rank: int, dtype: torch.dtype, device: Device
    ) -> AdaptedModel:
        """Let a decoder add adapters. Call it after `fix_order`; the arguments are those of `AdaptedModel`."""

    def forward(
        self,
        model: nn.Module,
        pool: KVPool,
        attentions: list[PagedAttention],
        max_logits_rows: int,
        adapted: AdaptedModel | None = None,
    ) -> Forward:
        """Create the forward pass of a model."""
        return Forward(model, pool, attentions, max_logits_rows, adapted)

    def outputs(self, device: Device, max_rows: int, max_samples: int) -> StepOutputs:
        """Create the owner of last tokens and result slots, for `max_rows` rows including the padding row."""
        return StepOutputs(device, max_rows, max_samples)

    def sampler(self, device: Device, vocab_size: int) -> DeviceSampler | None:
        """Create the sampler for rows with masks, penalties or log-probs; None: torch samples these rows."""
        return None

    @abstractmethod
    def sample(
        self, logits: torch.Tensor, limits: torch.Tensor, noise_keys: torch.Tensor
    ) -> torch.Tensor:
        """Sample one token per row, [S] int64.

        Parameters
        ----------
        logits
            [S, vocab] of any dtype; may be overwritten.
        limits
            [S, NUM_LIMITS] int32, words of `sampling_record.LIMITS`.
        noise_keys
            [S] int64.
        """
