"""The number of reads of a row of logits, and equal results on every path."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_calls import choose, draw_rows, ids, keys_of
from triton.runtime.interpreter import InterpreterBuilder

from quire.kernels.sampling.log_probs import log_probs
from quire.kernels.sampling.row_survey import DEFAULT_CONFIG, SamplingConfig, full_chunks
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
VOCAB = 20_000
TRUNCATED = {
    "top-k": dict(temperature=0.8, top_k=50),
    "top-k and top-p": dict(temperature=0.8, top_k=50, top_p=0.95),
    "many": dict(temperature=0.8, top_k=250),
    "top-p": dict(temperature=0.8, top_p=0.9),
    "min-p": dict(temperature=0.8, min_p=0.05),
    "min-p and top-p": dict(temperature=1.0, min_p=0.01, top_p=0.8),
    "low temperature": dict(temperature=0.1, top_p=0.99),
}


@pytest.fixture
def passes(monkeypatch):
    """Counts the kernels' loads of a tensor, in passes over the whole tensor."""
    if DEVICE != "cpu":
        pytest.skip("the interpreter counts")

    def count(logits, work):
        begin, size, read = logits.data_ptr(), logits.nbytes, [0]
        load = InterpreterBuilder.create_masked_load  # a load without a mask calls it too

        def counted_load(self, pointers, mask, *rest):
            offset = pointers.data.astype("int64") - begin
            read[0] += int(((offset >= 0) & (offset < size) & mask.data).sum())
            return load(self, pointers, mask, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
            work()
        return read[0] / logits.numel()

    return count


def likely(dtype, rows=1):
    """Logits like a model's: normal, with some ids that stand out."""
    logits = draw_rows(rows, VOCAB, spread=2.0)
    at = torch.rand(rows, VOCAB, generator=torch.Generator().manual_seed(1)).topk(32).indices
    logits.scatter_add_(1, at.to(DEVICE), torch.linspace(12, 2, 32, device=DEVICE).expand(rows, -1))
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_leave_nothing_out_are_read_once(passes, dtype, temperature):
    logits = likely(dtype)
    assert passes(logits, lambda: choose(logits, temperature, config=DEFAULT_CONFIG)) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limits", TRUNCATED.values(), ids=TRUNCATED)
def test_truncated_rows_are_read_at_most_twice(passes, dtype, limits):
    logits = likely(dtype)
    assert 1 < passes(logits, lambda: choose(logits, **limits, config=DEFAULT_CONFIG)) <= 2.0


def test_parts_without_a_candidate_are_not_read_again(passes):
    logits = draw_rows(1, VOCAB, spread=0.1)
    logits[0, [5, 700]] += 20
    work = lambda: choose(logits, top_p=0.9, config=DEFAULT_CONFIG)  # noqa: E731
    part = DEFAULT_CONFIG.chunk * DEFAULT_CONFIG.part_chunks
    assert passes(logits, work) == 1 + part / VOCAB


def test_log_probs_read_a_row_at_most_twice(passes):
    logits = likely(torch.bfloat16, rows=2)
    out = torch.empty(2, 41, device=DEVICE)
    tokens = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    # One more number: the token's logit.
    most = 2.0 + 1 / VOCAB
    assert passes(logits, lambda: log_probs(logits, tokens, ids(20, 20), out=out)) <= most


@pytest.mark.parametrize(
    "limits", [dict(top_k=5), dict(top_k=3000), dict(top_p=0.9), dict(min_p=0.5)], ids=str
)
def test_a_flat_row_is_read_more_often(passes, limits):
    """The lists are then too short; `test_sampling_kernel.py` checks the result."""
    logits = torch.zeros(1, VOCAB, device=DEVICE)
    config = SamplingConfig(part_slots=16, pivots=16)
    assert passes(logits, lambda: choose(logits, **limits, config=config)) > 2.0


@pytest.mark.parametrize("limits", TRUNCATED.values(), ids=TRUNCATED)
def test_long_and_short_lists_give_the_same_token(limits):
    logits, keys = likely(torch.float32, rows=2), keys_of(2, 5)
    # With one slot a part nearly every list is too short.
    found = [
        choose(logits, **limits, keys=keys, config=SamplingConfig(part_slots=slots, pivots=16))
        for slots in (1, 128)
    ]
    assert torch.equal(*found)


def test_the_share_of_chunks_that_fills_the_lists():
    """The number of chunks that have one of n evenly spread values, where n values fill a quarter of the slots."""
    for vocab in (1000, 50_257, 151_936, 262_144):
        chunks = math.ceil(vocab / DEFAULT_CONFIG.chunk)
        slots = DEFAULT_CONFIG.num_parts(vocab) * DEFAULT_CONFIG.part_slots
        generator = torch.Generator().manual_seed(0)
        at = torch.randint(chunks, (slots // 4,), generator=generator)
        assert abs(len(at.unique()) - full_chunks(vocab, DEFAULT_CONFIG)) < 0.05 * chunks + 2
