"""Log-probabilities of the model's own distribution, for the rows that ask.

They are those of the raw logits, before bias, penalties, masks, temperature and truncation, as vLLM's V1 engine
reports by default: they say what the model thinks, not from what the token was drawn. So they do not depend on
the other parameters, and a token that was forced on the model has the probability the model gave it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.protos.wire import TokenLogprob
from quire.replica.plan import SamplingBatch


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """What a step computed, still on the device. L rows."""

    index: tuple[int, ...]  # which of the S rows that sample
    num_top: tuple[int, ...]
    chosen: torch.Tensor  # [L] float32
    top: torch.Tensor  # [L, k] float32, k the largest `num_top`
    top_ids: torch.Tensor  # [L, k] int64

    def to_host(self) -> dict[int, TokenLogprob]:
        """By index in [0, S); equal log-probabilities in the order of their ids."""
        chosen, top, ids = self.chosen.tolist(), self.top.cpu().numpy(), self.top_ids.cpu().numpy()
        order = np.lexsort((ids, -top), axis=-1)
        top, ids = np.take_along_axis(top, order, -1), np.take_along_axis(ids, order, -1)
        return {
            i: TokenLogprob(chosen[n], ids[n, :k].tolist(), top[n, :k].tolist())
            for n, (i, k) in enumerate(zip(self.index, self.num_top, strict=True))
        }


def log_distribution(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor | None:
    """[L, vocab] float32 of the rows that ask; None when none does.

    Called before `sample`, which overwrites the logits.
    """
    if not batch.logprobs:
        return None
    index = torch.tensor([i for i, _ in batch.logprobs], device=logits.device)
    return torch.log_softmax(logits[index], dim=-1)


def of_tokens(
    distribution: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor
) -> StepLogprobs:
    """What `distribution` says of the sampled tokens, [S] int64, and its likeliest ids."""
    index, num_top = zip(*batch.logprobs, strict=True)
    # A row without a token ends in this step and its log-probability is not told.
    chosen = tokens[torch.tensor(index, device=tokens.device)].clamp(min=0)
    top, top_ids = distribution.topk(min(max(num_top), distribution.shape[-1]), dim=-1)
    return StepLogprobs(
        index, num_top, distribution.gather(-1, chosen[:, None])[:, 0], top, top_ids
    )
