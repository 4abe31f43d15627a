"""From logits to tokens: one vectorised pass over the rows that sample.

Order, as vLLM documents it: suppressed ids, temperature, top-k, top-p, then the draw. The draw is
argmax(logits + Gumbel noise) with noise that is a function of (seed, choice, position, token id), see
`quire.kernels.noise`. A row's result depends on nothing but its own logits and columns. Work that no row asks for
is not done: a greedy batch is one argmax, a batch without top-k and top-p is never sorted.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.noise import gumbel, noise_keys
from quire.replica.plan import SamplingBatch


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Choose one token a row.

    Parameters
    ----------
    logits
        [S, vocab] float32; overwritten where ids are suppressed.
    batch
        The rows' columns.

    Returns
    -------
    [S] int64 token ids.
    """
    _suppress(logits, batch.suppressed)
    random = np.flatnonzero(batch.temperature > 0)
    if not len(random):
        return logits.argmax(dim=-1)
    drawn = _draw(_rows(logits, random), batch, random)
    if len(random) == len(logits):
        return drawn
    tokens = logits.argmax(dim=-1)
    tokens[torch.from_numpy(random).to(logits.device)] = drawn
    return tokens


def _suppress(logits: torch.Tensor, suppressed: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
    if not suppressed:
        return
    counts = [len(ids) for _, ids in suppressed]
    rows = np.repeat([row for row, _ in suppressed], counts).astype(np.int64)
    ids = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in suppressed])
    index = tuple(torch.from_numpy(x).to(logits.device) for x in (rows, ids))
    logits[index] = float("-inf")


def _draw(logits: torch.Tensor, batch: SamplingBatch, random: np.ndarray) -> torch.Tensor:
    """Temperature, top-k, top-p and noise for the rows `random`; logits [R, vocab] belong to this call."""
    vocab_size = logits.shape[1]
    temperature = torch.from_numpy(batch.temperature[random]).to(logits.device)
    logits = logits.div_(temperature[:, None])
    top_k, top_p = batch.top_k[random], batch.top_p[random]
    cut = np.flatnonzero(((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0))
    if len(cut):
        limited = _truncate(
            logits if len(cut) == len(logits) else _rows(logits, cut), top_k[cut], top_p[cut]
        )
        logits.index_copy_(0, torch.from_numpy(cut).to(logits.device), limited)
    keys = noise_keys(batch.seed[random], batch.choice[random], batch.position[random])
    return logits.add_(gumbel(keys, vocab_size, logits.device)).argmax(dim=-1)


def _truncate(logits: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray) -> torch.Tensor:
    """Set what top-k and top-p leave out to -inf.

    top-k keeps the k largest; top-p keeps, of those, the smallest set of the most likely whose probability
    reaches p, at least one. Equal logits are kept in the order of their ids. A row stands with the same
    arithmetic alone and among others: sorting, softmax and the running sum work row by row.
    """
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    k = torch.from_numpy(np.where(top_k > 0, top_k, logits.shape[1]).astype(np.int64))
    ordered = ordered.masked_fill_(rank >= k.to(logits.device)[:, None], float("-inf"))
    if (top_p < 1.0).any():
        p = torch.from_numpy(top_p.astype(np.float32)).to(logits.device)[:, None]
        probability = torch.softmax(ordered, dim=-1)
        before = probability.cumsum(dim=-1).sub_(probability)
        # p = 1 must keep all: rounding may bring the sum before the last ids to 1.
        ordered.masked_fill_((before >= p) & (p < 1.0) & (rank > 0), float("-inf"))
    return torch.empty_like(logits).scatter_(1, index, ordered)


def _rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """A copy of some rows."""
    return logits.index_select(0, torch.from_numpy(rows).to(logits.device))
