"""Sampling options of a step's rows as arrays for one upload to the device.

Rows are plain if they need no masks, bias, penalties or log-probs. In most steps all rows are plain, so arrays may be
empty. `EditArrays` are masks, lists of ids and penalties for `quire.kernels.sampling.logit_edits`. `HistoryArrays` are
token histories of rows that sample for the first time, for `TokenCounts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from quire.kernels.sampling.noise import noise_keys
from quire.replica.core.sampling_record import limits_of
from quire.replica.core.step_plan import Penalties, SamplingBatch

# The penalties, in the order of the arguments of `TokenCounts.apply`.
PENALTY_COLUMNS = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NEVER = np.float32(-np.inf)
_NO_ROWS = np.empty(0, np.int64)


class EditArrays(NamedTuple):
    """Edits of E of the S rows that sample, in ascending order of rows.

    The fields are those of `logit_edits.Edits` except the counts, and are explained there.
    """

    rows: np.ndarray  # [E] int32, in [0, S)
    masks: np.ndarray  # [M, ceil(vocab / 32)] int32
    mask_rows: np.ndarray  # [E] int32
    starts: np.ndarray  # [E + 1] int32
    ids: np.ndarray  # [n] int32
    bias: np.ndarray  # [n] float32
    # [E] int32, rows of the request table; entries of `SamplingArrays.counted` if `ahead` has any
    count_rows: np.ndarray
    repetition: np.ndarray  # [E] float32
    presence: np.ndarray  # [E] float32
    frequency: np.ndarray  # [E] float32

    @classmethod
    def of(
        cls, batch: SamplingBatch, grammar_masks: np.ndarray | None, vocab_size: int
    ) -> EditArrays:
        """Collect the edits of a batch.

        Parameters
        ----------
        grammar_masks
            Masks of the batch's grammars, [G, ceil(vocab / 32)] int32; None if it has none.
        """
        allowed = _allowed(batch, grammar_masks, vocab_size)
        listed = dict(_listed(batch))
        penalties = batch.penalties
        penalised = {} if penalties is None else _place(penalties.index)
        rows = sorted({*allowed, *listed, *penalised})
        mask_at, penalty_at = _place(allowed), [penalised.get(i, -1) for i in rows]
        ids = [listed[i][0] for i in rows if i in listed]
        bias = [listed[i][1] for i in rows if i in listed]
        lengths = [len(listed[i][0]) if i in listed else 0 for i in rows]
        table_rows = [-1]
        if penalties is not None:
            # With drafts, each sample has counts of its own (`TokenCounts.ahead`).
            own = range(len(penalties.row)) if len(penalties.ahead) else penalties.row.tolist()
            table_rows = [*own, -1]
        edited = batch.columns.take(np.array(rows, np.int64))
        return cls(
            np.array(rows, np.int32),
            np.array(list(allowed.values()), np.int32).reshape(-1, -(-vocab_size // 32)),
            np.array([mask_at.get(i, -1) for i in rows], np.int32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            np.concatenate([np.empty(0, np.int32), *ids]).astype(np.int32),
            np.concatenate([np.empty(0, np.float32), *bias]).astype(np.float32),
            np.array([table_rows[place] for place in penalty_at], np.int32),
            *(edited[name] for name in PENALTY_COLUMNS),
        )


def _constrained(batch: SamplingBatch) -> np.ndarray:
    """Rows with constraints that may allow no token, [C] int64 in [0, S)."""
    allowed = [i for i, rules in batch.rules if rules.allowed_ids is not None]
    return np.unique([i for i, _ in (*batch.grammars, *batch.suppressed)] + allowed).astype(
        np.int64
    )


def _place(items: Iterable[int] | np.ndarray) -> dict[int, int]:
    """Map each item to its index."""
    return {int(item): place for place, item in enumerate(items)}


def _allowed(
    batch: SamplingBatch, grammar_masks: np.ndarray | None, vocab_size: int
) -> dict[int, np.ndarray]:
    """Packed masks by row."""
    masks: dict[int, np.ndarray] = {}
    if grammar_masks is not None:
        masks = {i: mask for (i, _), mask in zip(batch.grammars, grammar_masks, strict=True)}
    for i, rules in batch.rules:
        if rules.allowed_ids is not None:
            own = _packed(rules.allowed_ids, vocab_size)
            masks[i] = masks[i] & own if i in masks else own
    return masks


def _packed(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Pack ids as bits: [ceil(vocab / 32)] int32, bit i % 32 of word i // 32 for id i."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _listed(batch: SamplingBatch) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
    """Yield (row, (unique ids, bias of each)); suppressed ids have bias -inf."""
    biased = {
        i: (own.bias_ids, own.bias)
        for i, own in batch.rules
        if own.bias_ids is not None and own.bias is not None
    }
    suppressed = dict(batch.suppressed)
    for i in {**biased, **suppressed}:
        never = np.unique(np.array(suppressed.get(i, ()), np.int64))
        ids, bias = never, np.full(len(never), _NEVER)
        if i in biased:
            own_ids, own_bias = biased[i]
            keeps = ~np.isin(own_ids, never)
            ids = np.concatenate([ids, own_ids[keeps]])
            bias = np.concatenate([bias, own_bias[keeps]])
        yield i, (ids, bias)


class HistoryArrays(NamedTuple):
    """Token histories of B rows that sample for the first time, for `TokenCounts.write`."""

    rows: np.ndarray  # [B] int64
    prompts: np.ndarray  # [n] int64, row * vocab + id of every token of their prompts
    outputs: np.ndarray  # [m] int64, the same for their outputs

    @classmethod
    def of(cls, penalties: Penalties, vocab_size: int) -> HistoryArrays:
        empty = np.empty(0, np.int64)
        begun = penalties.begun
        return cls(
            np.array([row for row, _, _ in begun], np.int64),
            np.concatenate(
                [empty, *(row * vocab_size + np.asarray(ids, np.int64) for row, ids, _ in begun)]
            ),
            np.concatenate(
                [empty, *(row * vocab_size + np.asarray(ids, np.int64) for row, _, ids in begun)]
            ),
        )


class SamplingArrays(NamedTuple):
    """Other sampling options of S rows, in the order of the upload."""

    source: np.ndarray  # [S] int32, -1 - e for edited row e, else the row itself
    constrained: np.ndarray  # [C] int64 in [0, S), rows with constraints that may allow no token
    # Fields of `HistoryArrays`:
    begun: np.ndarray  # [B] int64
    prompts: np.ndarray  # [n] int64
    outputs: np.ndarray  # [m] int64
    # Rows with penalties: index in [0, S), and table row.
    counted: np.ndarray  # [P] int64
    counted_rows: np.ndarray  # [P] int64
    ahead: np.ndarray  # [k, 2] int64, `Penalties.ahead`
    # `Drafts`, if the counts must leave out rejected tokens; else empty.
    offset: np.ndarray  # [S] int64
    drafted: np.ndarray  # [S] int64
    # Rows that asked for log-probs: index in [0, S), and number of likeliest ids.
    scored: np.ndarray  # [L] int32
    num_top: np.ndarray  # [L] int32
    # The S rows' limits and noise keys; empty if the request table on the device has the limits.
    limits: np.ndarray  # [S, NUM_LIMITS] int32
    noise_keys: np.ndarray  # [S] int64

    @classmethod
    def of(
        cls, batch: SamplingBatch, edits: EditArrays, vocab_size: int, *, has_limits: bool
    ) -> SamplingArrays:
        source = np.arange(len(batch.token_index), dtype=np.int32)
        source[edits.rows] = -1 - np.arange(len(edits.rows), dtype=np.int32)
        penalties = batch.penalties
        counted = (_NO_ROWS, _NO_ROWS)
        ahead, draft_arrays = np.empty((0, 2), np.int64), (_NO_ROWS, _NO_ROWS)
        history = HistoryArrays(_NO_ROWS, _NO_ROWS, _NO_ROWS)
        if penalties is not None:
            counted = penalties.index.astype(np.int64), penalties.row.astype(np.int64)
            history = HistoryArrays.of(penalties, vocab_size)
            ahead = penalties.ahead
            if batch.drafts is not None:
                draft_arrays = batch.drafts.offset, batch.drafts.token_ids
        scored = np.array(batch.logprobs, np.int32).reshape(-1, 2)
        chosen, position = batch.columns, batch.position
        if has_limits:
            chosen, position = chosen[:0], position[:0]
        keys = noise_keys(chosen["seed"], chosen["choice"], position).view(np.int64)
        drafted = (ahead, *draft_arrays)
        asked = (scored[:, 0], scored[:, 1])
        edited = (source, _constrained(batch), *history, *counted)
        return cls(*edited, *drafted, *asked, limits_of(chosen), keys)
