"""`ModelKernels` of a CPU: the compiled library, or torch if the library is missing."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.kernels.attention.paged_attention import Backend, PagedAttention
from quire.kernels.cpu import cpu_attention_native, native_library
from quire.kernels.cpu.cpu_attention_torch import choose_query_tokens
from quire.kernels.cpu.cpu_call_sequence import Workspace
from quire.kernels.recurrence import cpu_recurrence
from quire.replica.adapters.adapted_model import AdaptedModel
from quire.replica.adapters.cpu_adapted_model import CpuAdaptedModel
from quire.replica.config import EngineConfig
from quire.replica.core.sampling_record import LIMITS
from quire.replica.device.device import Device
from quire.replica.device.kv_pool import KVPool
from quire.replica.kv_cache.groups import LayerGroup
from quire.replica.model.cpu_step_context import CpuStepContext
from quire.replica.model.deterministic.cpu_row_check import fix_other_modules
from quire.replica.model.deterministic.cpu_tiled_linear import make_deterministic
from quire.replica.model.fusion.cpu_fusion import CpuFusion
from quire.replica.model.fusion.fuse_pass import fuse
from quire.replica.model.fusion.fuse_report import FuseReport
from quire.replica.model.fusion.trial_pass import TrialPass
from quire.replica.model.output_head import split_model
from quire.replica.model.own_attention import attends_itself
from quire.replica.model.packed_cache import open_packer
from quire.replica.model.recurrence.recurrent_mixers import RecurrenceKernels
from quire.replica.runner.cpu_forward import CpuForward
from quire.replica.runner.model_kernels import ModelKernels
from quire.replica.runner.step_outputs import StepOutputs, TokenSlot
from quire.replica.sampling.sampler import sample_tokens


class CpuStepOutputs(StepOutputs):
    """`StepOutputs` with numpy, which saves about 0.1 ms per step compared with torch."""

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `StepOutputs.known`."""
        ids, last = token_ids.numpy(), self.last_token.numpy()
        if ids.min(initial=0) >= 0:
            return token_ids
        return torch.from_numpy(np.where(ids < 0, last[np.maximum(-1 - ids, 0)], ids))

    def _write(self, slot: TokenSlot, tokens: torch.Tensor) -> None:
        slot.tokens.numpy()[: len(tokens)] = tokens.numpy()

    def remember(self, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """See `StepOutputs.remember`."""
        if len(rows):
            self.last_token.numpy()[rows.numpy()] = np.maximum(tokens.numpy(), 0)


class CpuKernels(ModelKernels):
    """`ModelKernels` of a CPU.

    Parameters
    ----------
    num_threads
        Threads of torch and of the compiled library, set for the whole process.

    Attributes
    ----------
    workspace
        Memory that fused layers use between their parts.
    """

    backend: Backend = "cpu"

    def __init__(self, num_threads: int):
        torch.set_num_threads(num_threads)
        self.workspace = Workspace()

    def attention_options(
        self, config: EngineConfig, group: LayerGroup, pool: KVPool, num_heads: int
    ) -> dict[str, Any]:
        """Under `deterministic`, if attention runs in torch, choose the number of query tokens in a prefill tile.

        The chosen tile gives a token the same bits as the tile for decoding.
        """
        k_cache = pool.keys(group.layers[0])
        is_native = group.has_equal_sizes and cpu_attention_native.supports(k_cache, num_heads)
        if not config.deterministic or is_native:
            return {}
        shape = (num_heads, group.num_kv_heads, group.head_dim, config.block_size)
        return {"query_tokens": choose_query_tokens(*shape, group.value_size)}

    def fuse(
        self, config: EngineConfig, model: nn.Module, pool: KVPool, attentions: list[PagedAttention]
    ) -> FuseReport:
        """Replace modules by fused ones in place. Without the compiled library, which they need, nothing is fused."""
        if config.fuse == "off" or native_library.load() is None:
            return FuseReport()
        decoder, _ = split_model(model)
        if attends_itself(type(decoder)):
            return FuseReport()
        with open_packer(config, model) as packer:
            backend = CpuFusion(self.workspace, packer)
            report = fuse(model, decoder, pool, attentions, backend, int8=config.weights == "int8")
            packer.finish(report.dropped)
        return report

    def recurrence_kernels(self, config: EngineConfig) -> RecurrenceKernels | None:
        """See `ModelKernels.recurrence_kernels`; without the compiled library there are none."""
        if native_library.load() is None:
            return None
        return RecurrenceKernels(cpu_recurrence.short_conv, cpu_recurrence.state_scan)

    def fix_order(self, model: nn.Module, pool: KVPool, attentions: list[PagedAttention]) -> None:
        """See `ModelKernels.fix_order`."""
        make_deterministic(model)
        decoder, _ = split_model(model)
        context = partial(CpuStepContext, workspace=self.workspace)
        # Only the shapes of the pass count, so all token ids may be 0.
        fix_other_modules(decoder, TrialPass(decoder, 1, pool, attentions, context))

    def warm_fixed_products(self, model: nn.Module, max_batch_tokens: int) -> None:
        """Does nothing: matrix products on the CPU need no compilation."""

    def forward(
        self,
        model: nn.Module,
        pool: KVPool,
        attentions: list[PagedAttention],
        max_logits_rows: int,
        adapted: AdaptedModel | None = None,
    ) -> CpuForward:
        """See `ModelKernels.forward`."""
        return CpuForward(model, pool, attentions, max_logits_rows, self.workspace, adapted)

    def adapt(
        self, decoder: nn.Module, num_slots: int, max_rank: int, dtype: torch.dtype, device: Device
    ) -> CpuAdaptedModel:
        """See `ModelKernels.adapt`."""
        return CpuAdaptedModel(decoder, num_slots, max_rank, dtype)

    def outputs(self, device: Device, max_rows: int, max_samples: int) -> CpuStepOutputs:
        """See `ModelKernels.outputs`."""
        return CpuStepOutputs(device, max_rows, max_samples)

    def sample(
        self, logits: torch.Tensor, limits: torch.Tensor, noise_keys: torch.Tensor
    ) -> torch.Tensor:
        """See `ModelKernels.sample`."""
        keys = noise_keys.numpy().view(np.uint64)
        columns = limits.numpy().view(LIMITS)[:, 0]
        return sample_tokens(logits.float(), columns, lambda random: keys[random])
