"""The trial pass: a run of a few random tokens through a model's decoder.

The fuse pass uses it to record how modules are called, and to compare fused modules with the original ones. Keys and
values are written to the pool's trash block, which no request reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.kernels.attention.paged_attention import PagedAttention
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.attention import StepContext, run_decoder, share_step

MAX_TOKENS = 5
_SEED = 0
# Errors that a module may raise if it is called with arguments that it does not expect.
CALLED_OTHERWISE = (TypeError, ValueError, AttributeError, RuntimeError)


class TrialPass:
    """Runs a decoder on random input, which is the same in every process.

    Parameters
    ----------
    decoder
        The part of the model from token ids to hidden states.
    vocab_size
        Number of rows of the embedding; token ids are below it.
    pool, attentions
        The runner's KV cache, and its attention for each layer group.
    make_context
        Builds a `StepContext` of the backend from its fields.

    Attributes
    ----------
    num_tokens
        Number of tokens of the pass, all of one sequence.
    random
        Generator of the input.
    """

    def __init__(
        self,
        decoder: nn.Module,
        vocab_size: int,
        pool: KVPool,
        attentions: Sequence[PagedAttention],
        make_context: Callable[..., StepContext],
    ):
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._attentions = attentions
        self._make_context = make_context
        self._device = pool.data.device
        self.pool = pool
        self.num_tokens = min(MAX_TOKENS, pool.block_size)
        self.random = torch.Generator().manual_seed(_SEED)

    def context(self) -> StepContext:
        """Return the metadata of a step with one row."""
        count, trash, block_size = self.num_tokens, self.pool.trash_block, self.pool.block_size
        num_groups = len(self.pool.groups)
        slots = torch.arange(count, device=self._device) + trash * block_size
        slots = slots.expand(num_groups, count)
        return self._make_context(
            pool=self.pool,
            attentions=self._attentions,
            cu_q=np.array([0, count]),
            kv_len=np.array([count]),
            block_tables=np.full((num_groups, 1, 1), trash),
            slots=slots,
        )

    def noting_context(self) -> tuple[StepContext, dict[int, dict[str, Any]]]:
        """Return a context, and a dict that receives the arguments of attention by layer when the context is used."""
        calls: dict[int, dict[str, Any]] = {}

        def note(layer: int, q: torch.Tensor, scaling: float, *options: Any) -> None:
            softcap, sinks = options
            calls[layer] = dict(q=q.clone(), scaling=scaling, softcap=softcap, sinks=sinks)

        context = self.context()
        context.on_attend = note
        return context, calls

    def input(self) -> dict[str, torch.Tensor]:
        """Return new random arguments of a decoder, except the context."""
        ids = torch.randint(self._vocab_size, (1, self.num_tokens), generator=self.random)
        # Positions are far apart, so that a wrong application of RoPE changes the results.
        positions = torch.arange(self.num_tokens)[None] * 37 + 11
        return dict(input_ids=ids.to(self._device), position_ids=positions.to(self._device))

    def run(
        self,
        context: StepContext,
        given: dict[str, torch.Tensor] | None = None,
        decoder: nn.Module | None = None,
    ) -> torch.Tensor:
        """Return hidden states [1, tokens, hidden]. Defaults: the model's decoder, new random input."""
        decoder = self._decoder if decoder is None else decoder
        given = self.input() if given is None else given
        share_step(decoder)
        return run_decoder(decoder, context=context, **given)

    def normal(self, like: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return normal random values with shape, dtype and device of another tensor."""
        values = torch.randn(like.shape, generator=self.random) * scale
        return values.to(like.dtype).to(like.device)
