"""The forward pass on the CPU: attention reads its metadata as numpy arrays; last norm and head may be one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from quire.kernels.attention.paged_attention import PagedAttention
from quire.kernels.cpu.cpu_call_sequence import Workspace
from quire.kernels.cpu.cpu_lm_head import NormedProduct
from quire.replica.adapters.adapted_model import AdaptedModel
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.cpu_step_context import CpuStepContext
from quire.replica.model.fusion.cpu_fused_layer import CpuDecoder
from quire.replica.model.layers.state_layers import StepCache
from quire.replica.runner.forward import Forward
from quire.replica.sampling.logprobs import score_by_torch


class CpuForward(Forward):
    """`Forward` on the CPU.

    Parameters
    ----------
    workspace
        Memory for intermediate results of layers that run as one call; None: each part of a layer is a call.
    """

    score = staticmethod(score_by_torch)

    def __init__(
        self,
        model: nn.Module,
        pool: KVPool,
        attentions: Sequence[PagedAttention],
        max_logits_rows: int,
        workspace: Workspace | None = None,
        adapted: AdaptedModel | None = None,
    ):
        super().__init__(model, pool, attentions, max_logits_rows, adapted)
        self._workspace = workspace

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cu_q: torch.Tensor,
        kv_len: torch.Tensor,
        block_tables: torch.Tensor,
        slots: torch.Tensor,
        num_query: np.ndarray,
        selected: np.ndarray | None = None,
        states: StepCache | None = None,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Forward.hidden`, but without the last norm if `_fused_head` contains it."""
        context = CpuStepContext(
            self._pool,
            self._attentions,
            cu_q.numpy().astype(np.int64),
            kv_len.numpy().astype(np.int64),
            block_tables.numpy().astype(np.int64),
            slots=slots,
            num_query=num_query,
            workspace=self._workspace,
            selected=selected,
        )
        if self._adapted is not None and adapters is not None and len(adapters):
            context.adapters = self._adapted.begin(adapters.numpy())
        if self._fused_head is not None:
            return self._decoder.before_norm(token_ids, positions, context)
        return self._run_decoder(token_ids, positions, context, states)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward.normed`."""
        if self._fused_head is not None:
            return self._decoder.last_norm(hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward.logits`."""
        if self._fused_head is not None and self._workspace is not None:
            return self._fused_head(hidden, self._workspace)
        return super().logits(hidden)

    @property
    def _fused_head(self) -> NormedProduct | None:
        """Last norm and output head as one call, if the fuse pass has joined them; `hidden` then skips the norm."""
        if self._workspace is None or not isinstance(self._decoder, CpuDecoder):
            return None
        return self._decoder.head
