"""The likeliest ids of a row depend on nothing but the row: of equal log-probabilities the first ids are told."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.replica.core.step_plan import SamplingBatch
from quire.replica.sampling.logprobs import (
    SCORE_COLUMNS,
    log_distribution,
    score_by_torch,
    score_tokens,
    token_logprobs,
)
from tests.replica.sampling.test_sampler import columns


def first_of_the_largest(row: torch.Tensor, count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[:count]


@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, float("-inf")]), min_size=40, max_size=40).filter(
            lambda row: max(row) >= 0
        ),
        min_size=1,
        max_size=4,
    ),
    data=st.data(),
)
def test_they_are_the_first_of_equal_ones_whatever_the_neighbours_ask_for(rows, data):
    logits = torch.tensor(rows)
    asked = tuple((i, data.draw(st.integers(0, 20))) for i in range(len(rows)))
    batch: SamplingBatch = columns([{} for _ in rows])._replace(logprobs=asked)
    scores = torch.full((len(rows), SCORE_COLUMNS), float("nan"))
    tokens = torch.zeros(len(rows), dtype=torch.int64)
    score_tokens(log_distribution(logits, batch), batch, tokens, scores)
    told = token_logprobs(batch.logprobs, scores.numpy())
    for i, count in asked:
        assert told[i].top_ids == first_of_the_largest(logits[i], count)


@pytest.mark.parametrize("count", [0, 1, 7, 20, 40])
def test_those_of_a_prompt_too(count):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 3, (6, 40), generator=generator).float()
    _, _, top, ids = score_by_torch(logits, torch.zeros(6, dtype=torch.int64), count)
    for row, values, own in zip(logits, top, ids, strict=True):
        assert sorted(own.tolist()) == sorted(first_of_the_largest(row, count))
        assert torch.equal(torch.log_softmax(row, -1)[own], values)
