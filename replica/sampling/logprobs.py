"""Log-probabilities of the model's own distribution, for requests that ask for them.

They are computed from the raw logits, before bias, penalties, masks, temperature and truncation, as in vLLM's V1 engine
by default. So they do not depend on other sampling parameters, and a token that a grammar or a list of allowed ids has
forced gets the probability that the model gave it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.protos.sampling_params import MAX_LOGPROBS
from quire.protos.wire import PromptLogprobs, TokenLogprob
from quire.replica.core.step_plan import PromptTargets, SamplingBatch

# Columns of a row: log-prob of the sampled token; log-probs of the likeliest ids; these ids, int32 bits stored as
# float32. Columns beyond the number of ids asked for are undefined.
SCORE_COLUMNS = 1 + 2 * MAX_LOGPROBS


def log_distribution(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor | None:
    """Return log-probabilities [L, vocab] float32 of the L rows that asked for them; None if no row did.

    Call it before `sample`, which overwrites the logits.
    """
    if not batch.logprobs:
        return None
    index = torch.tensor([i for i, _ in batch.logprobs])
    return torch.log_softmax(logits[index], dim=-1)


def score_tokens(
    distribution: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor, scores: torch.Tensor
) -> None:
    """Write the log-probabilities of the sampled tokens [S] int64 and of the likeliest ids to `scores`, on a CPU.

    Parameters
    ----------
    scores
        [L or more, SCORE_COLUMNS] float32.
    """
    index, num_top = zip(*batch.logprobs, strict=True)
    # A negative token means that the row's constraints allow no token: its request ends in this step, and the
    # log-probability is not sent.
    chosen = tokens[torch.tensor(index)].clamp(min=0)
    top, top_ids = _likeliest(distribution, max(num_top))
    top, top_ids = _in_order(top.numpy(), top_ids.numpy())
    width, out = top.shape[1], scores[: len(index)].numpy()
    out[:, 0] = distribution.gather(-1, chosen[:, None])[:, 0].numpy()
    out[:, 1 : 1 + width] = top
    out[:, 1 + MAX_LOGPROBS :][:, :width] = top_ids.astype(np.int32).view(np.float32)


def token_logprobs(
    asked: tuple[tuple[int, int], ...], scores: np.ndarray
) -> dict[int, TokenLogprob]:
    """Convert scores to `TokenLogprob` by row index in [0, S).

    Parameters
    ----------
    asked
        `SamplingBatch.logprobs`: (row index, number of likeliest ids) of each of L rows.
    scores
        [L, SCORE_COLUMNS] float32.
    """
    top, ids = scores[:, 1 : 1 + MAX_LOGPROBS], scores.view(np.int32)[:, 1 + MAX_LOGPROBS :]
    return {
        i: TokenLogprob(float(own[0]), ids[n, :k].tolist(), top[n, :k].tolist())
        for n, (own, (i, k)) in enumerate(zip(scores, asked, strict=True))
    }


@dataclass(frozen=True, slots=True)
class StepPromptLogprobs:
    """Log-probabilities of n tokens of one row's `PromptTargets`, on the device."""

    targets: PromptTargets
    chosen: torch.Tensor  # [n] float32
    ranks: torch.Tensor  # [n] int64
    top: torch.Tensor  # [n, k] float32
    top_ids: torch.Tensor  # [n, k] integers

    def to_host(self) -> PromptLogprobs:
        """Copy to the host; sorts equal log-probabilities by id."""
        top, ids = _in_order(self.top.cpu().numpy(), self.top_ids.cpu().numpy())
        return PromptLogprobs(
            self.targets.start,
            self.targets.token_ids.astype(np.int32),
            self.chosen.cpu().numpy(),
            self.ranks.cpu().numpy().astype(np.int32),
            ids.astype(np.int32),
            top,
        )


Scored = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# Logits [n, vocab], ids [n] int64, number of likeliest tokens; returns the tensor fields of `StepPromptLogprobs`
Score = Callable[[torch.Tensor, torch.Tensor, int], Scored]


def score_prompt(
    hidden: torch.Tensor,
    targets: PromptTargets,
    token_ids: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    score: Score,
    max_rows: int,
) -> StepPromptLogprobs:
    """Compute log-probabilities of a prompt's tokens from the hidden states of the step.

    Works in slices, so that at most `max_rows` rows of logits exist at a time. Rows are independent, so slicing does
    not change results.

    Parameters
    ----------
    hidden
        [T, hidden size], output of the decoder.
    token_ids
        [n] int64, tokens of `targets`, on the device of `hidden`.
    logits_of
        Computes logits [n, vocab] in the model's dtype from [n, hidden size].
    score
        `score_by_torch` or `score_by_kernels`.
    """
    parts = []
    for first in range(0, len(token_ids), max_rows):
        ids = token_ids[first : first + max_rows]
        begin = targets.begin + first
        parts.append(score(logits_of(hidden[begin : begin + len(ids)]), ids, targets.num_top))
    return StepPromptLogprobs(targets, *map(torch.cat, zip(*parts, strict=True)))


def score_by_torch(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> Scored:
    """A `Score` in torch: computes the log-probabilities of the whole vocabulary in float32."""
    distribution = torch.log_softmax(logits.float(), dim=-1)
    chosen = distribution.gather(-1, ids[:, None])
    ranks = (distribution > chosen).sum(-1) + 1
    return chosen[:, 0], ranks, *_likeliest(distribution, num_top)


def score_by_kernels(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> Scored:
    """A `Score` by GPU kernels, which need no float32 copy of the logits."""
    from quire.kernels.sampling.log_probs import log_probs

    width = min(num_top, logits.shape[1])
    each = torch.full((len(ids),), width, dtype=torch.int32, device=logits.device)
    # Pass the same arguments as for sampled tokens, so that no other variant of the kernels is compiled.
    source = torch.arange(len(ids), dtype=torch.int32, device=logits.device)
    out = torch.empty(len(ids), 1 + 2 * width, dtype=torch.float32, device=logits.device)
    scores = log_probs(logits, ids, each, source=source, out=out)
    ranks = (logits > logits.gather(-1, ids[:, None])).sum(-1) + 1
    return scores.chosen, ranks, scores.top, scores.top_ids


def _likeliest(distribution: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest `num_top` values of each row of [n, vocab] and their ids; of equal ones the first, as the kernels do.

    `topk` leaves open which of several equal values it takes: a row's ids could depend on what its neighbours ask for.
    """
    top, top_ids = distribution.topk(min(num_top, distribution.shape[-1]), dim=-1)
    if top.numel():
        last = top[:, -1:]
        num_last = (top == last).sum(-1)
        for row in ((distribution == last).sum(-1) > num_last).nonzero()[:, 0].tolist():
            equal = (distribution[row] == last[row]).nonzero()[:, 0]
            top_ids[row, top[row] == last[row]] = equal[: int(num_last[row])]
    return top, top_ids


def _in_order(top: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort [n, k] log-probabilities in descending order, equal ones by id; `topk` leaves their order undefined."""
    order = np.lexsort((ids, -top), axis=-1)
    return np.take_along_axis(top, order, -1), np.take_along_axis(ids, order, -1)
