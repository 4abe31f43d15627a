"""A forward pass of the model over a ragged batch: hidden states, then logits of the sampling tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from quire.kernels.attention.paged_attention import PagedAttention
from quire.replica.adapters.adapted_model import AdaptedModel
from quire.replica.core.step_plan import PoolTargets, PromptTargets
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.attention import StepContext, run_decoder, share_step
from quire.replica.model.fusion.fused_parts import FusedAttention, FusedNorm, Product
from quire.replica.model.gpu_step_context import GpuStepContext
from quire.replica.model.layers.state_layers import StepCache, cache_argument
from quire.replica.model.output_head import split_model
from quire.replica.model.own_attention import attends_itself, run_rows
from quire.replica.sampling.logprobs import StepPromptLogprobs, score_by_kernels, score_prompt
from quire.replica.sampling.pooling import sum_exactly


class Forward:
    """Runs the model's decoder and head. All metadata of a step is on the device.

    `cpu_forward.py` has the version for the CPU.

    Parameters
    ----------
    model
        The model after the fuse pass. Decoder and head are its own modules, not copies.
    pool, attentions
        KV cache, and one attention for each layer group.
    max_logits_rows
        Largest number of rows for which logits are computed at a time; sizing reserves memory for this number.
    adapted
        The model's adapters; None: it has none.
    """

    score = staticmethod(score_by_kernels)

    def __init__(
        self,
        model: nn.Module,
        pool: KVPool,
        attentions: Sequence[PagedAttention],
        max_logits_rows: int,
        adapted: AdaptedModel | None = None,
    ):
        self._decoder, self._head = split_model(model)
        share_step(self._decoder)
        self._attends_itself = attends_itself(type(self._decoder))
        self._cache_name = cache_argument(self._decoder) or ""
        self._pool = pool
        self._attentions = attentions
        self._max_logits_rows = max_logits_rows
        self._adapted = adapted

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
        """Run the decoder and write the step's KV. The step has n rows and T tokens.

        Parameters
        ----------
        token_ids, positions
            [T] int64.
        cu_q, kv_len
            [n + 1] and [n] int32.
        block_tables
            [G, n, max blocks] int32.
        slots
            [G, T] int64.
        num_query
            [n] number of query tokens of each row.
        selected
            [S] int64, ascending and unique indices of the tokens that are read; None: all.
        states
            The rows' slots, if the model is recurrent.
        adapters
            [T] int32, the adapter slot of each token; None or empty: no token has an adapter.

        Returns
        -------
        [T, hidden size] for `logits`; undefined for tokens that are not selected.
        """
        context = GpuStepContext(
            self._pool, self._attentions, cu_q, kv_len, block_tables, slots, num_query
        )
        if self._adapted is not None and adapters is not None and len(adapters):
            context.adapters = self._adapted.begin(adapters)
        return self._run_decoder(token_ids, positions, context, states)

    def _run_decoder(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: StepContext,
        states: StepCache | None,
    ) -> torch.Tensor:
        if self._attends_itself:
            return run_rows(self._decoder, token_ids[None], positions[None], context)[0]
        options = {} if states is None else {self._cache_name: states}
        return run_decoder(self._decoder, token_ids[None], positions[None], context, **options)[0]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Tensors that every forward pass reads, by name, except the KV pool."""
        found: dict[str, torch.Tensor] = {}
        for part, root in (("decoder", self._decoder), ("head", self._head)):
            for prefix, module in root.named_modules(prefix=part):
                own = [
                    *module.named_parameters(recurse=False),
                    *module.named_buffers(recurse=False),
                ]
                if isinstance(module, (FusedNorm, FusedAttention, Product)):
                    own += module.constants().items()
                found |= {f"{prefix}.{name}": tensor for name, tensor in own}
        for g, attention in enumerate(self._attentions):
            found |= {f"attention {g}.{name}": x for name, x in attention.buffers().items()}
        if self._adapted is not None:
            found |= self._adapted.buffers()
        return found

    def score_prompts(
        self, hidden: torch.Tensor, prompts: Sequence[PromptTargets], token_ids: torch.Tensor
    ) -> tuple[StepPromptLogprobs, ...]:
        """Compute log-probabilities of prompt tokens from the hidden states [T, hidden size] of a step.

        `token_ids` [P] int64 are the tokens of all `prompts`, concatenated.
        """
        each = token_ids.split([len(targets.token_ids) for targets in prompts])
        return tuple(
            score_prompt(hidden, targets, ids, self.logits, self.score, self._max_logits_rows)
            for targets, ids in zip(prompts, each, strict=True)
        )

    def pool_hidden(
        self, hidden: torch.Tensor, pooling: Sequence[PoolTargets]
    ) -> tuple[torch.Tensor, ...]:
        """Sum hidden states of a step for embeddings: from [T, hidden size], for each target [hidden size] float64."""
        return tuple(
            sum_exactly(hidden[targets.begin : targets.end], self.normed) for targets in pooling
        )

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the decoder's output [n, hidden size] for results of `hidden`."""
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [n, vocab] in the model's dtype from hidden states [n, hidden size]."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
