"""The sampler against a plain reference, and its independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.noise import gumbel, noise_keys
from quire.replica.plan import SamplingBatch
from quire.replica.sampler import sample

torch.set_num_threads(1)
VOCAB = 97


def columns(rows: list[dict], suppressed=()) -> SamplingBatch:
    def column(name, default, dtype):
        return np.array([row.get(name, default) for row in rows], dtype)

    return SamplingBatch(
        token_index=np.arange(len(rows), dtype=np.int32),
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0, np.float32),
        seed=column("seed", 0, np.uint64),
        choice=column("choice", 0, np.int32),
        position=column("position", 1, np.int64),
        suppressed=suppressed,
    )


def reference(logits: torch.Tensor, row: dict, suppressed: tuple[int, ...] = ()) -> int:
    """One row, step by step."""
    logits = logits.clone()
    logits[list(suppressed)] = float("-inf")
    temperature = row.get("temperature", 1.0)
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / torch.tensor(temperature)
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    kept = order[: row.get("top_k", 0) or None]
    weights = torch.softmax(logits[kept].double(), 0).tolist()
    if row.get("top_p", 1.0) < 1.0:
        total, count = 0.0, 0
        while count < len(kept) and (count == 0 or total < row["top_p"]):
            total += weights[count]
            count += 1
        kept = kept[:count]
    keys = noise_keys(
        np.array([row.get("seed", 0)], np.uint64),
        np.array([row.get("choice", 0)]),
        np.array([row.get("position", 1)]),
    )
    noise = gumbel(keys, len(logits))[0]
    return max(kept, key=lambda i: float(logits[i] + noise[i]))


ROW = st.fixed_dictionaries(
    dict(
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 2, 10, VOCAB, VOCAB + 5]),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
        seed=st.integers(0, 2**64 - 1),
        choice=st.integers(0, 5),
        position=st.integers(1, 5000),
    )
)


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_equals_the_reference_row_by_row(rows, seed):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    banned = tuple((i, (i, 5, 40)) for i in range(0, len(rows), 2))
    tokens = sample(logits.clone(), columns(rows, banned))
    expected = [reference(logits[i], row, dict(banned).get(i, ())) for i, row in enumerate(rows)]
    assert tokens.tolist() == expected


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(ROW, min_size=2, max_size=12), seed=st.integers(0, 1000))
def test_a_row_gets_the_same_token_alone_and_in_any_batch(rows, seed):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    together = sample(logits.clone(), columns(rows)).tolist()
    alone = [sample(logits[i : i + 1].clone(), columns([row])).item() for i, row in enumerate(rows)]
    assert alone == together
    order = np.random.default_rng(seed).permutation(len(rows))
    shuffled = sample(logits[order].clone(), columns([rows[i] for i in order])).tolist()
    assert shuffled == [together[i] for i in order]


def test_suppressed_ids_are_never_chosen():
    logits = torch.zeros(2, VOCAB)
    logits[:, 7] = 50.0
    banned = ((0, (7,)), (1, (7,)))
    for temperature in (0.0, 1.0):
        tokens = sample(logits.clone(), columns([dict(temperature=temperature)] * 2, banned))
        assert 7 not in tokens.tolist()
    assert sample(logits.clone(), columns([dict(temperature=0.0)] * 2, banned[:1])).tolist() == [
        0,
        7,
    ]


def test_an_all_greedy_batch_is_one_argmax(monkeypatch):
    monkeypatch.setattr("quire.replica.sampler.gumbel", pytest.fail)
    monkeypatch.setattr("quire.replica.sampler._truncate", pytest.fail)
    logits = torch.randn(5, VOCAB)
    assert torch.equal(
        sample(logits.clone(), columns([dict(temperature=0.0)] * 5)), logits.argmax(-1)
    )


def test_rows_without_top_k_and_top_p_are_not_sorted(monkeypatch):
    monkeypatch.setattr("quire.replica.sampler._truncate", pytest.fail)
    sample(torch.randn(5, VOCAB), columns([dict(seed=i) for i in range(5)]))


def test_no_row_gives_no_token():
    assert sample(torch.empty(0, VOCAB), columns([])).shape == (0,)


@pytest.mark.parametrize(
    "row, kept",
    [
        (dict(), 12),
        (dict(top_k=4), 4),
        (dict(top_p=0.8), None),
        (dict(temperature=0.5, top_k=6), 6),
    ],
)
def test_the_distribution_is_the_truncated_softmax(row, kept):
    draws = 20_000
    logits = torch.linspace(2, -2, 12)
    scaled = logits / row.get("temperature", 1.0)
    weights = torch.softmax(scaled, 0).double()
    if kept is None:
        kept = int((weights.cumsum(0) - weights < row["top_p"]).sum())
    weights = weights[:kept] / weights[:kept].sum()
    batch = columns([row | dict(seed=3, position=i) for i in range(draws)])
    tokens = sample(logits.repeat(draws, 1), batch).numpy()
    observed = np.bincount(tokens, minlength=12)
    assert observed[kept:].sum() == 0
    expected = weights.numpy() * draws
    chi_squared = ((observed[:kept] - expected) ** 2 / expected).sum()
    freedom = kept - 1
    assert chi_squared < freedom + 4 * (2 * freedom) ** 0.5 + 4
