"""Samples tokens from logits with torch on a CPU, vectorised over the rows that sample.

Order, as vLLM documents it: grammar masks, allowed ids, suppressed ids (bad words; EOS and stop ids before
min_tokens), logit bias, penalties, temperature, min-p, top-k, top-p, then random sampling, which is
argmax(logits + Gumbel noise). `quire.kernels.sampling.noise` computes the noise from seed, choice, position and token
id. A row's result depends only on its own logits, options and history. Operations that no row needs are skipped: a
greedy batch is one argmax, and a batch without top-k and top-p is not sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.kernels.sampling.noise import gumbel, noise_keys
from quire.replica.core.step_plan import NO_TOKEN, Penalties, SamplingBatch, TokenMask, TokenRules
from quire.replica.sampling.sampling_arrays import PENALTY_COLUMNS, HistoryArrays
from quire.replica.sampling.token_counts import TokenCounts

_NEVER = float("-inf")
_NO_ROWS = np.empty(0, np.int64)


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    counts: TokenCounts | None = None,
    grammar_masks: np.ndarray | None = None,
    choose: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Sample one token per row.

    Parameters
    ----------
    logits
        [S, vocab] float32; overwritten.
    batch
        Sampling options of the rows.
    counts
        Token counts of rows with penalties. Required if the batch has penalties; updated by the call.
    grammar_masks
        Result of `fill_masks` for the batch's grammars, if it was computed before.
    choose
        Samples tokens [S] int64 from the final logits [S, vocab] float32; None: sample with the batch's options.

    Returns
    -------
    [S] int64 token ids; `NO_TOKEN` if a row's constraints allow no token.
    """
    if batch.grammars and grammar_masks is None:
        grammar_masks = fill_masks(batch.grammars)
    constrained = _constrain(logits, batch, grammar_masks)
    if batch.penalties is not None:
        if counts is None:
            raise ValueError("the batch has penalties, so counts must not be None")
        _penalise(logits, batch, batch.penalties, counts)
    if choose is None:
        tokens = sample_tokens(logits, batch.columns, lambda rows: _noise_keys(batch, rows))
    else:
        tokens = choose(logits)
    if len(constrained):
        rows = torch.from_numpy(constrained)
        # Sampling works on copies of the logits, so masked logits are still -inf here.
        chosen = logits[rows, tokens[rows]]
        tokens[rows] = tokens[rows].masked_fill_(chosen == _NEVER, NO_TOKEN)
    if batch.penalties is not None and counts is not None:
        index, rows = (torch.from_numpy(x) for x in (batch.penalties.index, batch.penalties.row))
        drafts, is_counting = batch.drafts, None
        if drafts is not None:
            is_counting = torch.from_numpy(drafts.counting(tokens.numpy()))[index]
        counts.add(rows, tokens[index], is_counting)
    return tokens


def _noise_keys(batch: SamplingBatch, rows: np.ndarray) -> np.ndarray:
    """Noise keys [r] uint64 of rows [r]."""
    seed, choice = batch.columns["seed"], batch.columns["choice"]
    return noise_keys(seed[rows], choice[rows], batch.position[rows])


def _penalise(
    logits: torch.Tensor, batch: SamplingBatch, penalties: Penalties, counts: TokenCounts
) -> None:
    """Add new histories to the counts, and apply penalties to the logits in place."""
    history = HistoryArrays.of(penalties, logits.shape[1])
    if len(history.rows):
        counts.write(int(history.rows.max()) + 1, *map(torch.from_numpy, history))
    columns = [torch.from_numpy(batch.columns[name][penalties.index]) for name in PENALTY_COLUMNS]
    index, rows = torch.from_numpy(penalties.index), torch.from_numpy(penalties.row)
    own = counts.ahead(rows, torch.tensor(penalties.ahead))
    logits[index] = counts.apply(logits[index], own, *columns)


def fill_masks(grammars: Sequence[tuple[int, TokenMask]]) -> np.ndarray:
    """Compute the masks of a batch's grammars, [G, ceil(vocab / 32)] int32.

    Needs no logits, so it can run concurrently with the forward pass.
    """
    return np.stack([grammar.mask() for _, grammar in grammars])


def _constrain(
    logits: torch.Tensor, batch: SamplingBatch, grammar_masks: np.ndarray | None
) -> np.ndarray:
    """Apply masks and biases; returns the rows with a mask, [C] int64."""
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
    """Convert (row, ids) pairs to two index tensors [n] int64, rows and ids."""
    counts = [len(ids) for _, ids in ids_of_rows]
    rows = np.repeat([row for row, _ in ids_of_rows], counts).astype(np.int64)
    ids = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in ids_of_rows])
    return tuple(torch.from_numpy(x) for x in (rows, ids))


def sample_tokens(
    logits: torch.Tensor, columns: np.ndarray, keys_of: Callable[[np.ndarray], np.ndarray]
) -> torch.Tensor:
    """Sample one token per row, [S] int64, after masks, bias and penalties.

    Parameters
    ----------
    logits
        [S, vocab] float32, which are not changed.
    columns
        [S] records with the fields of `sampling_record.LIMITS`.
    keys_of
        Returns the noise keys [r] uint64 of rows [r].
    """
    temperature = columns["temperature"]
    if not temperature.any():
        return likeliest(logits)
    random = np.flatnonzero(temperature > 0)
    sampled = _sample_random(_rows(logits, random), columns.take(random), keys_of(random))
    if len(random) == len(logits):
        return sampled
    tokens = likeliest(logits)
    tokens[torch.from_numpy(random)] = sampled
    return tokens


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the smallest id with the largest logit of each row, [S, vocab] to [S] int64, like `argmax`.

    `argmax` takes three times as long on a CPU. Logits may have any float dtype: conversion to float32 would keep the
    order.
    """
    return logits.max(dim=-1).indices


def _sample_random(logits: torch.Tensor, columns: np.ndarray, keys: np.ndarray) -> torch.Tensor:
    """Sample rows with a temperature above 0: apply temperature, min-p, top-k, top-p and noise.

    The logits [R, vocab] are overwritten; `columns` [R] and `keys` [R] belong to them.
    """
    vocab_size = logits.shape[1]
    logits = logits.div_(torch.from_numpy(columns["temperature"].copy())[:, None])
    _leave_out_unlikely(logits, columns["min_p"])
    top_k, top_p = columns["top_k"], columns["top_p"]
    cut = np.flatnonzero(((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0))
    if len(cut):
        limited = _truncate(
            logits if len(cut) == len(logits) else _rows(logits, cut), top_k[cut], top_p[cut]
        )
        logits.index_copy_(0, torch.from_numpy(cut), limited)
    return likeliest(logits.add_(gumbel(keys, vocab_size)))


def _leave_out_unlikely(logits: torch.Tensor, min_p: np.ndarray) -> None:
    """Set tokens less likely than min_p times the row's likeliest token to -inf, in place.

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
    """Set tokens excluded by top-k and top-p to -inf.

    top-k keeps the k largest logits. Of these, top-p keeps the most likely ones until their probability reaches p, at
    least one token. Equal logits are kept in the order of their ids. Sorting, softmax and cumulative sum work row
    by row, so other rows do not change a row's bits.
    """
    rank = torch.arange(logits.shape[1])
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    k = torch.from_numpy(np.where(top_k > 0, top_k, logits.shape[1]).astype(np.int64))
    ordered = ordered.masked_fill_(rank >= k[:, None], _NEVER)
    if (top_p < 1.0).any():
        p = torch.from_numpy(top_p.astype(np.float32))[:, None]
        probability = torch.softmax(ordered, dim=-1)
        before = probability.cumsum(dim=-1).sub_(probability)
        # p = 1 must keep all tokens, although rounding may bring the cumulative sum to 1 before the last ids.
        ordered.masked_fill_((before >= p) & (p < 1.0) & (rank > 0), _NEVER)
    return torch.empty_like(logits).scatter_(1, index, ordered)


def _rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Copy some rows."""
    return logits.index_select(0, torch.from_numpy(rows))
