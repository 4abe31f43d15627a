"""Log-probabilities of the model's own distribution: exact, and the largest ones in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.sampling.log_probs import log_probs
from quire.kernels.sampling.row_survey import SamplingConfig
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
CONFIG = SamplingConfig(chunk=16, part_chunks=2, part_slots=8, tile=64, num_warps=4)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def normal(*shape, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale


def column(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def scores_of(logits, tokens, num_top, width, source=None):
    out = torch.full((len(num_top), 1 + 2 * width), float("nan"), device=DEVICE)
    source = None if source is None else column(source)
    tokens = column(tokens, torch.int64)
    return log_probs(logits, tokens, column(num_top), source=source, out=out, config=CONFIG)


@settings(max_examples=12)
@given(data=st.data())
def test_they_are_those_of_the_sorted_softmax(data):
    vocab, dtype = data.draw(st.sampled_from([1, 64, 150])), data.draw(st.sampled_from(FLOATS))
    # With a spread of 0.01 nearly all logits are at the cut, so that the lists are too short.
    logits = normal(2, vocab, scale=data.draw(st.sampled_from([0.01, 3.0, 60.0])))
    logits = logits.to(dtype).to(DEVICE)
    if data.draw(st.booleans()):
        logits = logits.round()  # many ties
    num_top = data.draw(st.lists(st.sampled_from([0, 1, 5]), min_size=2, max_size=2))
    tokens = [data.draw(st.integers(0, vocab - 1)) for _ in range(2)]
    scores = scores_of(logits, tokens, num_top, 5)
    expected, order = torch.log_softmax(logits.float(), -1).sort(
        dim=-1, descending=True, stable=True
    )
    for row, (token, asked) in enumerate(zip(tokens, num_top, strict=True)):
        own = expected[row][order[row] == token][0]
        torch.testing.assert_close(scores.chosen[row], own, rtol=1e-5, atol=2e-5)
        size = min(asked, vocab)
        top, top_ids = scores.top[row], scores.top_ids[row]
        torch.testing.assert_close(top[:size], expected[row, :size], rtol=1e-5, atol=2e-5)
        assert torch.equal(top_ids[:size].long(), order[row, :size])
        assert (top_ids[size:asked] == -1).all() and (top[size:asked] == float("-inf")).all()
        assert top[asked:].isnan().all()


def test_rows_are_those_that_the_source_names():
    logits = normal(4, 90).to(DEVICE)
    tokens = [3, 7, -1, 90]
    expected = torch.log_softmax(logits, -1).cpu()
    scores = scores_of(logits, tokens, [2, 0, 1], 2, source=[3, 0, 1])
    wanted = torch.tensor([float("-inf"), float(expected[0, 3]), float(expected[1, 7])])
    torch.testing.assert_close(scores.chosen.cpu(), wanted, rtol=1e-5, atol=1e-5)
    assert scores.top_ids[0].tolist() == expected[3].argsort(descending=True)[:2].tolist()
    assert scores.top_ids[2, 0] == expected[1].argmax()


def test_a_row_does_not_depend_on_the_batch():
    logits = normal(5, 150, scale=1.0).bfloat16().to(DEVICE)
    tokens, num_top = [0, 149, 5, 9, 70], [5, 1, 3, 0, 5]
    whole = scores_of(logits, tokens, num_top, 5)
    for row in range(5):
        alone = scores_of(logits[row : row + 1], tokens[row : row + 1], num_top[row : row + 1], 5)
        for one, all_of in zip(alone, whole, strict=True):
            torch.testing.assert_close(one[0], all_of[row], rtol=0, atol=0, equal_nan=True)


def test_bad_arguments_are_named():
    logits, tokens, num_top = torch.zeros(2, 40), torch.zeros(2).long(), torch.zeros(2).int()
    good = dict(logits=logits, tokens=tokens, num_top=num_top, out=torch.zeros(2, 5))
    for change, message in (
        (dict(tokens=torch.zeros(2).int()), "tokens: must be one of int64"),
        (dict(source=torch.zeros(3).int()), r"source: must have shape \[2\], got \[3\]"),
        (dict(out=torch.zeros(2, 4)), "out: must be contiguous with 1 \\+ 2 width columns"),
        (dict(out=torch.zeros(2, 259)), "out: width: must be between 0 and 128, got 129"),
    ):
        with pytest.raises(ValueError, match=message):
            log_probs(**(good | change))
