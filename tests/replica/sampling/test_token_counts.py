"""Counts kept step by step are those of the whole history."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.replica.core.step_plan import Penalties
from quire.replica.sampling.sampling_arrays import HistoryArrays
from quire.replica.sampling.token_counts import TokenCounts

VOCAB = 23
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
LOGITS = torch.linspace(-3, 4, VOCAB)


def penalties(rows, begun=()):
    places = np.array(rows, np.int64)
    return Penalties(np.arange(len(rows)), places, tuple(begun))


def begin(counts, batch):
    history = HistoryArrays.of(batch, VOCAB)
    counts.write(int(history.rows.max(initial=-1)) + 1, *map(torch.from_numpy, history))


def expected(prompt, output):
    logits = LOGITS.clone()
    for i in range(VOCAB):
        if i in prompt or i in output:
            logits[i] = logits[i] / 2 if logits[i] > 0 else logits[i] * 2
        logits[i] -= 0.25 * output.count(i) + (i in output)
    return logits


@given(
    histories=st.lists(st.tuples(IDS, IDS, st.integers(0, 9)), min_size=1, max_size=6),
    steps=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=6, max_size=6), max_size=8),
)
def test_counts_follow_the_samples(histories, steps):
    """Rows begin at different steps, and a place is used again by whoever begins in it."""
    counts = TokenCounts(VOCAB)
    prompts, outputs = {}, {}
    for number, tokens in enumerate([*steps, [0] * 6]):
        begun = []
        for row, (prompt, output, start) in enumerate(histories):
            if start in (number, number + 4):  # the second time is a new history in the same place
                begun.append((row, np.array(prompt, np.int32), np.array(output, np.int32)))
                prompts[row], outputs[row] = prompt, list(output)
        rows = sorted(prompts)
        if not rows:
            continue
        batch = penalties(rows, begun)
        begin(counts, batch)
        one = torch.ones(len(rows))
        no_ahead = torch.empty(0, 2, dtype=torch.int64)
        columns = (counts.ahead(torch.from_numpy(batch.row), no_ahead), 2 * one, one, 0.25 * one)
        logits = counts.apply(LOGITS.repeat(len(rows), 1), *columns)
        for i, row in enumerate(rows):
            torch.testing.assert_close(logits[i], expected(prompts[row], outputs[row]))
        counts.add(torch.tensor(rows), torch.tensor(tokens[: len(rows)]))
        for token, row in zip(tokens, rows, strict=False):
            outputs[row].append(token)


def test_drafted_tokens_are_counted_along_the_draft_and_kept_if_they_count():
    counts = TokenCounts(VOCAB)
    begin(counts, penalties([1], [(1, np.array([2, 3]), np.array([5]))]))
    before = counts.table.clone()
    rows = torch.tensor([1, 1, 1])
    found = counts.ahead(rows, torch.tensor([[1, 4], [2, 4], [2, 5]]))
    assert torch.equal(counts.table, before)
    for i, ahead in enumerate([[], [4], [4, 5]]):
        right = before[1].clone()
        for token in ahead:
            right[token] += 1
        assert torch.equal(found[i], right)
    counts.add(rows, torch.tensor([4, 6, 7]), torch.tensor([True, True, False]))
    before[1, [4, 6]] += 1
    assert torch.equal(counts.table, before)


def test_only_rows_that_ask_are_allocated():
    counts = TokenCounts(VOCAB)
    assert counts.table.shape == (0, VOCAB)
    begin(counts, penalties([2], [(2, np.array([1]), np.array([], np.int64))]))
    assert counts.table.shape == (3, VOCAB)
    assert torch.equal(counts.table[:2], torch.zeros(2, VOCAB, dtype=torch.int32))
