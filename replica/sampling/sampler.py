"""From logits to tokens by torch on a CPU: one vectorised pass over the rows that sample.

Order, as vLLM documents it: grammar masks, allowed ids, suppressed ids (bad words; EOS and stop ids before
min_tokens), logit bias, penalties, temperature, min-p, top-k, top-p, then the draw. The draw is
argmax(logits + Gumbel noise) with noise that is a function of (seed, choice, position, token id), see
`quire.kernels.sampling.noise`. A row's result depends on nothing but its own logits, columns and history. Work that no
row asks for is not done: a greedy batch is one argmax, a batch without top-k and top-p is never sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.kernels.sampling.noise import gumbel, noise_keys
from quire.replica.core.step_plan import NO_TOKEN, Penalties, SamplingBatch, TokenMask, TokenRules
from quire.replica.sampling.sampling_arrays import HistoryArrays
from quire.replica.sampling.token_counts import TokenCounts

_NEVER = float("-inf")
_NO_ROWS = np.empty(0, np.int64)


class Draw(NamedTuple):
    """How the rows' tokens are drawn, once bias, masks and penalties are applied. S rows."""

    temperature: np.ndarray  # [S] float32, 0 = greedy
    top_k: np.ndarray  # [S] int32, 0 = off
    top_p: np.ndarray  # [S] float32, 1 = off
    min_p: np.ndarray | None  # [S] float32, 0 = off
    noise_keys: Callable[[np.ndarray], np.ndarray]  # [r] rows to their [r] uint64

    @classmethod
    def of(cls, batch: SamplingBatch) -> Draw:
        return cls(
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            lambda rows: noise_keys(batch.seed[rows], batch.choice[rows], batch.position[rows]),
        )


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    counts: TokenCounts | None = None,
    grammar_masks: np.ndarray | None = None,
    choose: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Choose one token a row.

    Parameters
    ----------
    logits
        [S, vocab] float32; overwritten.
    batch
        The rows' columns.
    counts
        History of the rows with penalties; required when the batch has any, and brought up to date.
    grammar_masks
        `fill_masks` of the batch's grammars, if somebody has filled them meanwhile.
    choose
        [S, vocab] float32 logits, all done to them, to [S] int64 tokens, if a device does that itself.

    Returns
    -------
    [S] int64 token ids; `NO_TOKEN` where a row's constraints leave none.
    """
    if batch.grammars and grammar_masks is None:
        grammar_masks = fill_masks(batch.grammars)
    constrained = _constrain(logits, batch, grammar_masks)
    if batch.penalties is not None:
        if counts is None:
            raise ValueError("the batch has penalties: the counts of its rows are needed")
        _penalise(logits, batch.penalties, counts)
    tokens = draw(logits, Draw.of(batch)) if choose is None else choose(logits)
    if len(constrained):
        rows = torch.from_numpy(constrained)
        # A draw changes its own copy of the logits, an argmax none: what was masked still is.
        chosen = logits[rows, tokens[rows]]
        tokens[rows] = tokens[rows].masked_fill_(chosen == _NEVER, NO_TOKEN)
    if batch.penalties is not None and counts is not None:
        index, rows = (torch.from_numpy(x) for x in (batch.penalties.index, batch.penalties.row))
        counts.add(rows, tokens[index])
    return tokens


def _penalise(logits: torch.Tensor, penalties: Penalties, counts: TokenCounts) -> None:
    """Take in the rows' histories, and change their logits in place."""
    history = HistoryArrays.of(penalties, logits.shape[1])
    if len(history.rows):
        counts.write(int(history.rows.max()) + 1, *map(torch.from_numpy, history))
    index, rows, *columns = (
        torch.from_numpy(x)
        for x in (
            *(penalties.index, penalties.row),
            *(penalties.repetition, penalties.presence, penalties.frequency),
        )
    )
    logits[index] = counts.apply(logits[index], rows, *columns)


def fill_masks(grammars: Sequence[tuple[int, TokenMask]]) -> np.ndarray:
    """[G, ceil(vocab / 32)] int32, what each grammar of a batch allows next. Needs no logits, so it can run
    beside the forward pass."""
    return np.stack([grammar.mask() for _, grammar in grammars])


def _constrain(
    logits: torch.Tensor, batch: SamplingBatch, grammar_masks: np.ndarray | None
) -> np.ndarray:
    """Mask and bias ids; returns the rows that have a mask, [C] int64."""
    if not (batch.grammars or batch.rules or batch.suppressed):
        return _NO_ROWS
    if grammar_masks is not None:
        _apply_grammars(logits, batch.grammars, grammar_masks)
    allowed = [(i, rules.allowed_ids) for i, rules in batch.rules if rules.allowed_ids is not None]
    if allowed:
        index = _index(allowed)
        kept = logits[index]
        logits[torch.tensor([i for i, _ in allowed])] = _NEVER
        logits[index] = kept
    if batch.suppressed:
        logits[_index(batch.suppressed)] = _NEVER
    biased = [(i, rules) for i, rules in batch.rules if rules.bias_ids is not None]
    if biased:
        _add_bias(logits, biased)
    masked = (*batch.grammars, *allowed, *batch.suppressed)
    return np.unique([i for i, _ in masked]).astype(np.int64)


def _apply_grammars(
    logits: torch.Tensor, grammars: Sequence[tuple[int, TokenMask]], masks: np.ndarray
) -> None:
    packed = torch.from_numpy(masks)
    ids = torch.arange(logits.shape[1])
    allowed = (packed[:, ids // 32] >> (ids % 32)) & 1  # [G, vocab] int32
    rows = torch.tensor([i for i, _ in grammars])
    logits[rows] = logits[rows].masked_fill_(allowed == 0, _NEVER)


def _add_bias(logits: torch.Tensor, biased: list[tuple[int, TokenRules]]) -> None:
    index = _index([(i, rules.bias_ids) for i, rules in biased if rules.bias_ids is not None])
    bias = np.concatenate([rules.bias for _, rules in biased if rules.bias is not None])
    logits[index] += torch.from_numpy(bias)


def _index(
    ids_of_rows: Sequence[tuple[int, Sequence[int] | np.ndarray]],
) -> tuple[torch.Tensor, ...]:
    """(row, ids) pairs as the two index tensors of their elements, each [n] int64."""
    counts = [len(ids) for _, ids in ids_of_rows]
    rows = np.repeat([row for row, _ in ids_of_rows], counts).astype(np.int64)
    ids = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in ids_of_rows])
    return tuple(torch.from_numpy(x) for x in (rows, ids))


def draw(logits: torch.Tensor, how: Draw) -> torch.Tensor:
    """One token a row: [S, vocab] float32, overwritten, to [S] int64."""
    if not how.temperature.any():
        return likeliest(logits)
    random = np.flatnonzero(how.temperature > 0)
    drawn = _draw_random(_rows(logits, random), how, random)
    if len(random) == len(logits):
        return drawn
    tokens = likeliest(logits)
    tokens[torch.from_numpy(random)] = drawn
    return tokens


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """[S, vocab] to [S] int64, the first of the largest in each row, as `argmax` says; that takes three times as long
    on a CPU. Of any float dtype there: what float32 makes of it has the same order."""
    return logits.max(dim=-1).indices


def _draw_random(logits: torch.Tensor, how: Draw, random: np.ndarray) -> torch.Tensor:
    """Temperature, min-p, top-k, top-p and noise for the rows `random`; logits [R, vocab] belong to this call."""
    vocab_size = logits.shape[1]
    temperature = torch.from_numpy(how.temperature[random])
    logits = logits.div_(temperature[:, None])
    if how.min_p is not None:
        _leave_out_unlikely(logits, how.min_p[random])
    top_k, top_p = how.top_k[random], how.top_p[random]
    cut = np.flatnonzero(((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0))
    if len(cut):
        limited = _truncate(
            logits if len(cut) == len(logits) else _rows(logits, cut), top_k[cut], top_p[cut]
        )
        logits.index_copy_(0, torch.from_numpy(cut), limited)
    keys = how.noise_keys(random)
    return likeliest(logits.add_(gumbel(keys, vocab_size)))


def _leave_out_unlikely(logits: torch.Tensor, min_p: np.ndarray) -> None:
    """Set to -inf, in place, what is less likely than min_p times the likeliest token of its row.

    p / p_max = exp(logit - logit_max), so no softmax is needed.
    """
    rows = np.flatnonzero(min_p > 0)
    if not len(rows):
        return
    part = logits if len(rows) == len(logits) else _rows(logits, rows)
    log_ratio = torch.from_numpy(np.log(min_p[rows]))[:, None]
    highest = part.amax(dim=-1, keepdim=True)
    part.masked_fill_(part < highest + log_ratio, _NEVER)
    if part is not logits:
        logits.index_copy_(0, torch.from_numpy(rows), part)


def _truncate(logits: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray) -> torch.Tensor:
    """Set what top-k and top-p leave out to -inf.

    top-k keeps the k largest; top-p keeps, of those, the smallest set of the most likely whose probability
    reaches p, at least one. Equal logits are kept in the order of their ids. A row stands with the same
    arithmetic alone and among others: sorting, softmax and the running sum work row by row.
    """
    rank = torch.arange(logits.shape[1])
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    k = torch.from_numpy(np.where(top_k > 0, top_k, logits.shape[1]).astype(np.int64))
    ordered = ordered.masked_fill_(rank >= k[:, None], _NEVER)
    if (top_p < 1.0).any():
        p = torch.from_numpy(top_p.astype(np.float32))[:, None]
        probability = torch.softmax(ordered, dim=-1)
        before = probability.cumsum(dim=-1).sub_(probability)
        # p = 1 must keep all: rounding may bring the sum before the last ids to 1.
        ordered.masked_fill_((before >= p) & (p < 1.0) & (rank > 0), _NEVER)
    return torch.empty_like(logits).scatter_(1, index, ordered)


def _rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """A copy of some rows."""
    return logits.index_select(0, torch.from_numpy(rows))
