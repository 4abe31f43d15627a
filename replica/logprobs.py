"""Log-probabilities of the model's own distribution, for the rows and the prompts that ask.

They are those of the raw logits, before bias, penalties, masks, temperature and truncation, as vLLM's V1 engine
reports by default: they say what the model thinks, not from what the token was drawn. So they do not depend on
the other parameters, and a token that was forced on the model has the probability the model gave it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.protos.wire import PromptLogprobs, TokenLogprob
from quire.replica.plan import PromptTargets, SamplingBatch


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
        top, ids = _in_order(top, ids)
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


@dataclass(frozen=True, slots=True)
class StepPromptLogprobs:
    """Those of one row's `PromptTargets`, still on the device. n tokens."""

    targets: PromptTargets
    chosen: torch.Tensor  # [n] float32
    ranks: torch.Tensor  # [n] int64
    top: torch.Tensor  # [n, k] float32
    top_ids: torch.Tensor  # [n, k] int64

    def to_host(self) -> PromptLogprobs:
        """Equal log-probabilities in the order of their ids."""
        top, ids = _in_order(self.top.cpu().numpy(), self.top_ids.cpu().numpy())
        return PromptLogprobs(
            self.targets.start,
            self.targets.token_ids.astype(np.int32),
            self.chosen.cpu().numpy(),
            self.ranks.cpu().numpy().astype(np.int32),
            ids.astype(np.int32),
            top,
        )


def score_prompt(
    hidden: torch.Tensor,
    targets: PromptTargets,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    max_rows: int,
) -> StepPromptLogprobs:
    """Log-probabilities of a prompt's tokens, given the hidden states of the step.

    A slice of rows at a time, so that no more than `max_rows` rows of logits exist at once. Every row is computed
    by itself: the result does not depend on the slices.

    Parameters
    ----------
    hidden
        [T, hidden size] the decoder's output.
    logits_of
        [n, hidden size] to [n, vocab] float32.
    """
    parts = []
    for first in range(0, len(targets.token_ids), max_rows):
        ids = torch.from_numpy(targets.token_ids[first : first + max_rows]).to(hidden.device)
        begin = targets.begin + first
        distribution = torch.log_softmax(logits_of(hidden[begin : begin + len(ids)]), dim=-1)
        chosen = distribution.gather(-1, ids[:, None])
        ranks = (distribution > chosen).sum(-1) + 1
        top, top_ids = distribution.topk(min(targets.num_top, distribution.shape[-1]), dim=-1)
        parts.append((chosen[:, 0], ranks, top, top_ids))
    return StepPromptLogprobs(targets, *map(torch.cat, zip(*parts, strict=True)))


def _in_order(top: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n, k] each, best first, equal ones by id: `topk` leaves their order open."""
    order = np.lexsort((ids, -top), axis=-1)
    return np.take_along_axis(top, order, -1), np.take_along_axis(ids, order, -1)
