"""The sampling parameters of the rows that sample in a step, gathered from the request table."""

from __future__ import annotations

import numpy as np

from quire.replica.core.step_plan import Drafts, Penalties, SamplingBatch, TokenMask
from quire.replica.request_table.bad_words import BadWords
from quire.replica.request_table.rows import RowTable


def gather_batch(
    table: RowTable,
    rows: np.ndarray,
    token_index: np.ndarray,
    position: np.ndarray,
    drafts: Drafts | None = None,
) -> SamplingBatch:
    """Gather the parameters of the rows that sample.

    Parameters
    ----------
    rows
        [S] int64; a row with a draft several times in a row.
    token_index
        [S] int32, flat index of the hidden state to sample from.
    position
        [S] integers, absolute position of the token to be sampled.
    """
    columns = table.sampling.take(rows)
    num_top = columns["logprobs"]
    asked = np.flatnonzero(num_top >= 0)
    every = np.ones(len(rows), bool)
    return SamplingBatch(
        token_index=token_index,
        columns=columns,
        position=position.astype(np.int64),
        suppressed=_suppressed(table, rows, position, every, drafts),
        rules=tuple(
            (i, table.rules[rows[i]]) for i in np.flatnonzero(table.has_rules[rows]).tolist()
        ),
        penalties=_penalties(table, rows, drafts),
        logprobs=tuple(zip(asked.tolist(), num_top[asked].tolist(), strict=True)),
        grammars=_grammars(table, rows, every, drafts),
        rows=rows,
        drafts=drafts,
    )


def complete_batch(table: RowTable, batch: SamplingBatch, alive: np.ndarray) -> SamplingBatch:
    """Complete a batch that was made before the newest tokens were known: set `suppressed` and `grammars` again.

    Parameters
    ----------
    alive
        [S] bool, whether each row still belongs to its request. Rows that do not get no constraints, because their
        tokens are dropped.
    """
    return batch._replace(
        suppressed=_suppressed(table, batch.rows, batch.position, alive, batch.drafts),
        grammars=_grammars(table, batch.rows, alive, batch.drafts),
    )


def _before(drafts: Drafts | None, i: int) -> tuple[int, ...]:
    """The drafted tokens before sample i."""
    return () if drafts is None else drafts.before(i)


def _grammars(
    table: RowTable, rows: np.ndarray, alive: np.ndarray, drafts: Drafts | None
) -> tuple[tuple[int, TokenMask], ...]:
    """(index in `rows`, grammar) of each sample of a row with a grammar."""
    masks: list[tuple[int, TokenMask]] = []
    for i in np.flatnonzero(table.has_grammar[rows] & alive).tolist():
        grammar = table.request(int(rows[i])).grammar
        if grammar is not None:
            ahead = _before(drafts, i)
            masks.append((i, grammar.ahead(ahead) if ahead else grammar))
    return tuple(masks)


def _suppressed(
    table: RowTable,
    rows: np.ndarray,
    position: np.ndarray,
    alive: np.ndarray,
    drafts: Drafts | None,
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(index in `rows`, ids that must not come next) of each row with such ids."""
    masked = np.flatnonzero((position < table.min_length[rows]) & alive)
    suppressed = [
        (i, ids)
        for i, ids in zip(masked.tolist(), table.stop_ids[rows[masked]], strict=True)
        if ids
    ]
    for i in np.flatnonzero(table.has_bad_words[rows] & alive).tolist():
        bad_words: BadWords = table.bad_words[rows[i]]
        newest = table.newest_output(int(rows[i]), bad_words.context_len)
        if ids := bad_words.excluded((*newest, *_before(drafts, i))):
            suppressed.append((i, ids))
    return tuple(suppressed)


def _penalties(table: RowTable, rows: np.ndarray, drafts: Drafts | None) -> Penalties | None:
    index = np.flatnonzero(table.is_penalised[rows])
    if not len(index):
        return None
    ahead = [(p, token) for p, i in enumerate(index.tolist()) for token in _before(drafts, i)]
    rows = rows[index]
    begun = []
    for row in rows[~table.decoding[rows]].tolist():
        token_ids, num_prompt = table.request(row).token_ids, int(table.num_prompt_tokens[row])
        begun.append((row, token_ids[:num_prompt], token_ids[num_prompt:]))
    return Penalties(index, rows, tuple(begun), np.array(ahead, np.int64).reshape(-1, 2))
