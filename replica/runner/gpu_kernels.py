"""`ModelKernels` of a GPU: Triton kernels and vendor libraries. Triton's interpreter runs them in tests."""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels.attention.paged_attention import Backend, PagedAttention
from quire.kernels.recurrence.short_conv import short_conv
from quire.kernels.recurrence.state_chunks import scan_rows
from quire.kernels.recurrence.state_scan import state_scan
from quire.kernels.sampling.sampling_kernel import sample_tokens
from quire.replica.adapters.gpu_adapted_model import GpuAdaptedModel
from quire.replica.config import EngineConfig
from quire.replica.device.device import Device
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.deterministic.gpu_fixed_products import fix_products, warm_products
from quire.replica.model.fusion.fuse_pass import fuse
from quire.replica.model.fusion.fuse_report import FuseReport
from quire.replica.model.fusion.gpu_fusion import GpuFusion
from quire.replica.model.output_head import split_model
from quire.replica.model.recurrence.recurrent_mixers import RecurrenceKernels
from quire.replica.runner.device_sampler import DeviceSampler
from quire.replica.runner.model_kernels import ModelKernels


class GpuKernels(ModelKernels):
    """`ModelKernels` of a GPU."""

    backend: Backend = "triton"

    def fuse(
        self, config: EngineConfig, model: nn.Module, pool: KVPool, attentions: list[PagedAttention]
    ) -> FuseReport:
        """See `ModelKernels.fuse`."""
        if config.fuse == "off":
            return FuseReport()
        decoder, _ = split_model(model)
        return fuse(model, decoder, pool, attentions, GpuFusion())

    def recurrence_kernels(self, config: EngineConfig) -> RecurrenceKernels | None:
        """See `ModelKernels.recurrence_kernels`."""
        # Chunks are multiplied in TF32.
        return RecurrenceKernels(short_conv, state_scan if config.dtype == "float32" else scan_rows)

    def fix_order(self, model: nn.Module, pool: KVPool, attentions: list[PagedAttention]) -> None:
        """See `ModelKernels.fix_order`."""
        fix_products(model)

    def warm_fixed_products(self, model: nn.Module, max_batch_tokens: int) -> None:
        """See `ModelKernels.warm_fixed_products`."""
        with torch.inference_mode():
            warm_products(model, max_batch_tokens)

    def adapt(
        self, decoder: nn.Module, num_slots: int, max_rank: int, dtype: torch.dtype, device: Device
    ) -> GpuAdaptedModel:
        """See `ModelKernels.adapt`."""
        return GpuAdaptedModel(decoder, num_slots, max_rank, dtype, device)

    def sampler(self, device: Device, vocab_size: int) -> DeviceSampler | None:
        """See `ModelKernels.sampler`."""
        return DeviceSampler(device, vocab_size)

    def sample(
        self, logits: torch.Tensor, limits: torch.Tensor, noise_keys: torch.Tensor
    ) -> torch.Tensor:
        """See `ModelKernels.sample`."""
        return sample_tokens(logits, limits, noise_keys)
