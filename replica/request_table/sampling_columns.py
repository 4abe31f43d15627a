"""Sampling parameters of the running requests as columns, gathered for each step into a `SamplingBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.protos.wire import GREEDY_TEMPERATURE, SamplingParams
from quire.replica.core.request import Request
from quire.replica.core.step_plan import Penalties, SamplingBatch, TokenMask, TokenRules
from quire.replica.core.table_changes import ClaimedRows
from quire.replica.request_table.bad_words import BadWords


class Histories(Protocol):
    """The part of the request table (`rows.RowTable`) that `SamplingColumns` reads; R rows."""

    decoding: np.ndarray  # [R] bool
    num_prompt_tokens: np.ndarray  # [R] int32
    min_length: np.ndarray  # [R] int32; EOS and stop ids are masked up to this length
    stop_ids: np.ndarray  # [R] objects: sorted tuples

    def request(self, row: int) -> Request:
        """The row's request."""
        ...

    def newest_output(self, row: int, count: int) -> tuple[int, ...]:
        """At most `count` of the row's last generated tokens."""
        ...


class SamplingColumns:
    """Sampling parameters by row. Boolean columns mark the rows with rare parameters, so that only those are visited.

    Parameters
    ----------
    max_rows
        R, the largest number of requests that can run at once.
    """

    def __init__(self, max_rows: int):
        self.temperature = np.zeros(max_rows, dtype=np.float32)  # [R]
        self.top_k = np.zeros(max_rows, dtype=np.int32)  # [R]
        self.top_p = np.ones(max_rows, dtype=np.float32)  # [R]
        self.seed = np.zeros(max_rows, dtype=np.uint64)  # [R]
        self.choice = np.zeros(max_rows, dtype=np.int32)  # [R]
        self.min_p = np.zeros(max_rows, dtype=np.float32)  # [R]
        self.repetition = np.ones(max_rows, dtype=np.float32)  # [R]
        self.presence = np.zeros(max_rows, dtype=np.float32)  # [R]
        self.frequency = np.zeros(max_rows, dtype=np.float32)  # [R]
        self.logprobs = np.full(max_rows, -1, dtype=np.int16)  # [R] likeliest ids wanted; -1 = off
        self.rules = np.empty(max_rows, dtype=object)  # [R] TokenRules or None
        self.bad_words = np.empty(max_rows, dtype=object)  # [R] BadWords or None
        self._penalised = np.zeros(max_rows, dtype=bool)  # [R]
        self._ruled = np.zeros(max_rows, dtype=bool)  # [R]
        self._has_bad_words = np.zeros(max_rows, dtype=bool)  # [R]
        self.has_grammar = np.zeros(max_rows, dtype=bool)  # [R]
        # [R] whether the allowed ids depend on the tokens before, which the host must know first
        self.needs_history = np.zeros(max_rows, dtype=bool)
        # [R] whether the request's hidden states are pooled, so that it samples nothing
        self.pools = np.zeros(max_rows, dtype=bool)
        # [R] whether sampling needs more than temperature, top-k, top-p and noise, apart from `min_tokens`
        self.special = np.zeros(max_rows, dtype=bool)

    def claim(self, row: int, request: Request) -> None:
        """Write the parameters of the request that was given this row."""
        params = request.params
        greedy = params.temperature < GREEDY_TEMPERATURE
        self.temperature[row] = 0.0 if greedy else params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = max(params.top_p, float(np.finfo(np.float32).tiny))
        self.seed[row] = params.seed
        self.choice[row] = params.choice
        self.min_p[row] = params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self._penalised[row] = (
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.rules[row] = _token_rules(params)
        self._ruled[row] = self.rules[row] is not None
        self.bad_words[row] = BadWords(params.bad_words) if params.bad_words else None
        self._has_bad_words[row] = bool(params.bad_words)
        self.has_grammar[row] = request.grammar is not None
        self.needs_history[row] = self.has_grammar[row] or self._has_bad_words[row]
        self.pools[row] = bool(params.pooling)
        self.special[row] = (
            self._penalised[row]
            or self._ruled[row]
            or self._has_bad_words[row]
            or self.has_grammar[row]
            or self.logprobs[row] >= 0
            or self.min_p[row] > 0
        )

    def claimed(self, rows: Sequence[int]) -> ClaimedRows:
        """The sampling parameters of these rows that the device keeps in its copy of the table."""
        index = np.array(rows, np.int64)
        return ClaimedRows(
            index,
            self.temperature[index],
            self.top_p[index],
            self.min_p[index],
            self.top_k[index],
            self.seed[index],
            self.choice[index],
        )

    def batch(
        self, table: Histories, rows: np.ndarray, token_index: np.ndarray, position: np.ndarray
    ) -> SamplingBatch:
        """Gather the columns of the rows that sample.

        Parameters
        ----------
        table
            The request table.
        rows
            [S] int64.
        token_index
            [S] int32, flat index of the hidden state to sample from.
        position
            [S] integers, absolute position of the token to be sampled.
        """
        min_p = self.min_p[rows]
        return SamplingBatch(
            token_index=token_index,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            seed=self.seed[rows],
            choice=self.choice[rows],
            position=position.astype(np.int64),
            suppressed=self._suppressed(table, rows, position, np.ones(len(rows), bool)),
            min_p=min_p if min_p.any() else None,
            rules=tuple(
                (i, self.rules[rows[i]]) for i in np.flatnonzero(self._ruled[rows]).tolist()
            ),
            penalties=self._penalties(table, rows),
            logprobs=self._logprobs(rows),
            grammars=self._grammars(table, rows, np.ones(len(rows), bool)),
            rows=rows,
        )

    def complete(self, table: Histories, batch: SamplingBatch, alive: np.ndarray) -> SamplingBatch:
        """Complete a batch that was made before the newest tokens were known: set `suppressed` and `grammars` again.

        Parameters
        ----------
        alive
            [S] bool, whether each row still belongs to its request. Rows that do not get no constraints, because their
            tokens are dropped.
        """
        return batch._replace(
            suppressed=self._suppressed(table, batch.rows, batch.position, alive),
            grammars=self._grammars(table, batch.rows, alive),
        )

    def _grammars(
        self, table: Histories, rows: np.ndarray, alive: np.ndarray
    ) -> tuple[tuple[int, TokenMask], ...]:
        """(index in `rows`, grammar) of each row with a grammar."""
        index = np.flatnonzero(self.has_grammar[rows] & alive).tolist()
        grammars = ((i, table.request(int(rows[i])).grammar) for i in index)
        return tuple((i, grammar) for i, grammar in grammars if grammar is not None)

    def _suppressed(
        self, table: Histories, rows: np.ndarray, position: np.ndarray, alive: np.ndarray
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(index in `rows`, ids that must not come next) of each row with such ids."""
        masked = np.flatnonzero((position < table.min_length[rows]) & alive)
        suppressed = [
            (i, ids)
            for i, ids in zip(masked.tolist(), table.stop_ids[rows[masked]], strict=True)
            if ids
        ]
        for i in np.flatnonzero(self._has_bad_words[rows] & alive).tolist():
            bad_words: BadWords = self.bad_words[rows[i]]
            newest = table.newest_output(int(rows[i]), bad_words.context_len)
            if ids := bad_words.excluded(newest):
                suppressed.append((i, ids))
        return tuple(suppressed)

    def _logprobs(self, rows: np.ndarray) -> tuple[tuple[int, int], ...]:
        num_top = self.logprobs[rows]
        index = np.flatnonzero(num_top >= 0)
        return tuple(zip(index.tolist(), num_top[index].tolist(), strict=True))

    def _penalties(self, table: Histories, rows: np.ndarray) -> Penalties | None:
        index = np.flatnonzero(self._penalised[rows])
        if not len(index):
            return None
        rows = rows[index]
        begun = []
        for row in rows[~table.decoding[rows]].tolist():
            token_ids, num_prompt = table.request(row).token_ids, int(table.num_prompt_tokens[row])
            begun.append((row, token_ids[:num_prompt], token_ids[num_prompt:]))
        return Penalties(
            index=index,
            row=rows,
            repetition=self.repetition[rows],
            presence=self.presence[rows],
            frequency=self.frequency[rows],
            begun=tuple(begun),
        )


def _token_rules(params: SamplingParams) -> TokenRules | None:
    if not params.allowed_token_ids and not params.logit_bias:
        return None
    allowed = np.unique(np.array(params.allowed_token_ids, np.int64))
    biased = params.logit_bias
    return TokenRules(
        allowed_ids=allowed if len(allowed) else None,
        bias_ids=np.array([i for i, _ in biased], np.int64) if biased else None,
        bias=np.array([b for _, b in biased], np.float32) if biased else None,
    )
