"""The sampler against a plain reference, and its independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.sampling.noise import gumbel, noise_keys
from quire.replica.core.sampling_record import RECORD, records
from quire.replica.core.step_plan import NO_TOKEN, Penalties, SamplingBatch, TokenRules
from quire.replica.sampling.sampler import likeliest, sample
from quire.replica.sampling.token_counts import TokenCounts

torch.set_num_threads(1)
VOCAB = 97


# Names of the rows' dictionaries that differ from those of the parameters.
SHORT = {name: f"{name}_penalty" for name in ("repetition", "presence", "frequency")}


def columns(rows: list[dict], suppressed=()) -> SamplingBatch:
    given = [{SHORT.get(name, name): value for name, value in row.items()} for row in rows]
    batch = records(len(rows))
    for record, row in zip(batch, given, strict=True):
        for name in row.keys() & set(RECORD.names):
            record[name] = row[name]
    return SamplingBatch(
        token_index=np.arange(len(rows), dtype=np.int32),
        columns=batch,
        position=np.array([row.get("position", 1) for row in rows], np.int64),
        suppressed=suppressed,
        rules=tuple(
            (i, rules(row)) for i, row in enumerate(rows) if {"allow", "bias"} & row.keys()
        ),
        penalties=penalties(rows),
    )


def rules(row: dict) -> TokenRules:
    bias = row.get("bias")
    return TokenRules(
        np.array(row["allow"], np.int64) if "allow" in row else None,
        np.array(list(bias), np.int64) if bias else None,
        np.array(list(bias.values()), np.float32) if bias else None,
    )


def penalties(rows: list[dict]) -> Penalties | None:
    """Each row with a history is in its place in the row table for the first time."""
    index = [i for i, row in enumerate(rows) if "prompt" in row]
    if not index:
        return None

    begun = [(i, np.array(rows[i]["prompt"], int), np.array(rows[i]["output"], int)) for i in index]
    places = np.array(index, np.int64)
    return Penalties(places, places, tuple(begun))


def penalised(logits: torch.Tensor, row: dict) -> torch.Tensor:
    """The three penalties from a row's whole history, id by id."""
    logits = logits.clone()
    for i in range(len(logits)):
        if i in row["prompt"] or i in row["output"]:
            factor = torch.tensor(row["repetition"])
            logits[i] = logits[i] / factor if logits[i] > 0 else logits[i] * factor
        count = row["output"].count(i)
        logits[i] -= torch.tensor(row["frequency"]) * count
        logits[i] -= torch.tensor(row["presence"]) * (count > 0)
    return logits


def reference(logits: torch.Tensor, row: dict, suppressed: tuple[int, ...] = ()) -> int:
    """One row, step by step."""
    logits = logits.clone()
    if "allow" in row:
        logits[[i for i in range(len(logits)) if i not in row["allow"]]] = float("-inf")
    logits[list(suppressed)] = float("-inf")
    for i, bias in (row.get("bias") or {}).items():
        logits[i] += bias
    if "prompt" in row:
        logits = penalised(logits, row)
    if logits.max() == float("-inf"):
        return NO_TOKEN
    temperature = row.get("temperature", 1.0)
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / torch.tensor(temperature)
    if row.get("min_p", 0.0):
        unlikely = logits < logits.max() + np.log(np.float32(row["min_p"]))
        logits[unlikely] = float("-inf")
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
        min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    )
)
HISTORY = st.lists(st.integers(0, VOCAB - 1), max_size=30)
PENALISED = st.fixed_dictionaries(
    dict(
        prompt=HISTORY,
        output=HISTORY,
        repetition=st.sampled_from([1.0, 1.3, 0.7, 100.0]),
        presence=st.sampled_from([0.0, 1.5, -2.0]),
        frequency=st.sampled_from([0.0, 0.3, -0.9]),
    )
)
RULED = st.fixed_dictionaries(
    dict(
        bias=st.dictionaries(
            st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -2.0, 1.5]), max_size=5
        )
    ),
    optional=dict(allow=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6, unique=True)),
)
ANY = st.builds(lambda *parts: {k: v for p in parts for k, v in p.items()}, ROW, PENALISED, RULED)


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(ROW | ANY, min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_equals_the_reference_row_by_row(rows, seed):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    banned = tuple((i, (i, 5, 40)) for i in range(0, len(rows), 2))
    tokens = sample(logits.clone(), columns(rows, banned), TokenCounts(VOCAB))
    expected = [reference(logits[i], row, dict(banned).get(i, ())) for i, row in enumerate(rows)]
    assert tokens.tolist() == expected


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(ROW | ANY, min_size=2, max_size=12), seed=st.integers(0, 1000))
def test_a_row_gets_the_same_token_alone_and_in_any_batch(rows, seed):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))

    def tokens_of(logits: torch.Tensor, rows: list[dict]) -> list[int]:
        return sample(logits.clone(), columns(rows), TokenCounts(VOCAB)).tolist()

    together = tokens_of(logits, rows)
    assert [tokens_of(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    order = np.random.default_rng(seed).permutation(len(rows))
    shuffled = tokens_of(logits[order], [rows[i] for i in order])
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
    monkeypatch.setattr("quire.replica.sampling.sampler.gumbel", pytest.fail)
    monkeypatch.setattr("quire.replica.sampling.sampler._truncate", pytest.fail)
    logits = torch.randn(5, VOCAB)
    assert torch.equal(
        sample(logits.clone(), columns([dict(temperature=0.0)] * 5)), logits.argmax(-1)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    vocab=st.integers(1, 5000),
    spread=st.sampled_from([0.0, 0.6, 3.0, 1000.0]),
    seed=st.integers(0, 2**32),
)
def test_the_likeliest_is_the_first_of_the_largest_in_any_dtype(dtype, rows, vocab, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * spread).round().to(dtype)  # many ties
    logits[0] = float("-inf")
    assert torch.equal(likeliest(logits), logits.float().argmax(dim=-1))


def test_rows_without_top_k_and_top_p_are_not_sorted(monkeypatch):
    monkeypatch.setattr("quire.replica.sampling.sampler._truncate", pytest.fail)
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
        (dict(min_p=0.2), 5),  # exp(-4/11 * i) >= 0.2
        (dict(temperature=2.0, min_p=0.1, top_k=9, top_p=0.7), None),
    ],
)
def test_the_distribution_is_the_truncated_softmax(row, kept):
    draws = 100_000
    logits = torch.linspace(2, -2, 12)
    scaled = logits / row.get("temperature", 1.0)
    weights = torch.softmax(scaled, 0).double()
    if kept is None:
        likely = weights >= row.get("min_p", 0.0) * weights[0]
        weights = weights[likely][: row.get("top_k")]
        weights /= weights.sum()
        kept = int((weights.cumsum(0) - weights < row["top_p"]).sum())
    weights = weights[:kept] / weights[:kept].sum()
    batch = columns([row | dict(seed=3, position=i) for i in range(draws)])
    assert 1 < kept <= 12
    tokens = sample(logits.repeat(draws, 1), batch).numpy()
    observed = np.bincount(tokens, minlength=12)
    assert observed[kept:].sum() == 0
    expected = weights.numpy() * draws
    chi_squared = ((observed[:kept] - expected) ** 2 / expected).sum()
    freedom = kept - 1
    assert chi_squared < freedom + 4 * (2 * freedom) ** 0.5 + 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_id_left_says_so_and_leaves_the_others_alone(temperature):
    logits = torch.randn(3, VOCAB)
    rows = [dict(temperature=temperature, allow=[4, 5]), dict(temperature=temperature, allow=[4])]
    batch = columns([*rows, dict(temperature=temperature)], ((0, (4,)), (1, (4, 9))))
    tokens = sample(logits.clone(), batch).tolist()
    assert tokens[:2] == [5, NO_TOKEN]
    assert 0 <= tokens[2] < VOCAB


def test_penalties_need_the_counts():
    batch = columns([dict(prompt=[1], output=[], repetition=2.0)])
    with pytest.raises(ValueError, match="counts"):
        sample(torch.zeros(1, VOCAB), batch)
