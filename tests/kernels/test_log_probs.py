"""Edits of logits, and log-probs that do not see them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import reference
from quire.kernels.interpreter import kernel_device
from quire.kernels.log_probs import chosen_log_probs, top_log_probs
from quire.kernels.logit_edits import edit_logits
from quire.kernels.sampling import SamplingConfig

DEVICE = kernel_device()
CONFIG = SamplingConfig(tile=64, max_candidates=64, num_warps=4)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def normal(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def draw_edits(rows, vocab, counts, seed=0):
    """(starts, ids, output_count, bias, repetition, presence, frequency)."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    ids = torch.cat([torch.randperm(vocab, generator=generator)[:count] for count in counts]).int()
    output_count = torch.randint(-1, 4, (len(ids),), generator=generator, dtype=torch.int32)
    bias = normal(len(ids), seed=seed + 1)
    bias[::5], bias[::3] = float("-inf"), 0.0
    columns = (torch.rand(rows, generator=generator) + low for low in (0.5, -0.5, -0.5))
    return tuple(x.to(DEVICE) for x in (starts, ids, output_count, bias, *columns))


@settings(max_examples=10)
@given(data=st.data())
def test_edits_are_the_reference_and_touch_nothing_else(data):
    rows, vocab = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([5, 300, 700]))
    counts = [
        data.draw(st.sampled_from([0, 1, min(5, vocab), min(300, vocab)])) for _ in range(rows)
    ]
    dtype = data.draw(st.sampled_from(FLOATS))
    logits = normal(rows, vocab).to(dtype).to(DEVICE)
    original, edits = logits.clone(), draw_edits(rows, vocab, counts)
    before = edit_logits(logits, *edits)
    starts, ids, output_count, bias, *columns = edits
    for row in range(rows):
        part = slice(int(starts[row]), int(starts[row + 1]))
        numbers = (float(column[row]) for column in columns)
        expected = reference.edit_logits(
            original[row], ids[part], output_count[part], bias[part], *numbers
        )
        tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(logits[row].float(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(before[part], original[row][ids[part].long()])


@settings(max_examples=8)
@given(data=st.data())
def test_top_log_probs_are_sorted_softmax(data):
    vocab, dtype = data.draw(st.sampled_from([1, 64, 150])), data.draw(st.sampled_from(FLOATS))
    # A spread of 0.1: nearly all logits in two bins, so that the list is too short.
    logits = (
        normal(2, vocab, scale=data.draw(st.sampled_from([0.1, 3.0, 60.0]))).to(dtype).to(DEVICE)
    )
    if data.draw(st.booleans()):
        logits = logits.round()  # many ties
    num_top = data.draw(st.sampled_from([0, 1, 5]))
    values, ids, log_sum = top_log_probs(logits, num_top, config=CONFIG)
    expected, order = torch.log_softmax(logits.float(), -1).sort(
        dim=-1, descending=True, stable=True
    )
    size = min(num_top, vocab)
    torch.testing.assert_close(log_sum, logits.float().logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values[:, :size], expected[:, :size], rtol=1e-5, atol=2e-5)
    assert torch.equal(ids[:, :size].long(), order[:, :size])
    assert (ids[:, size:] == -1).all() and (values[:, size:] == float("-inf")).all()


def test_chosen_log_probs_are_of_the_raw_distribution():
    logits = normal(3, 90).to(DEVICE)
    expected = torch.log_softmax(logits, -1)
    _, _, log_sum = top_log_probs(logits, 0, config=CONFIG)
    starts, ids, *rest = draw_edits(3, 90, [40, 0, 90])
    before = edit_logits(logits, starts, ids, *rest)
    for tokens in ([int(ids[0]), 5, 7], [int(ids[39]), 89, 0], [1, -1, 90]):
        column = torch.tensor(tokens, device=DEVICE)
        got = chosen_log_probs(logits, column, log_sum, edits=(starts, ids, before))
        wanted = [
            float(expected[r, t]) if 0 <= t < 90 else float("-inf") for r, t in enumerate(tokens)
        ]
        torch.testing.assert_close(got.cpu(), torch.tensor(wanted), rtol=1e-5, atol=1e-5)


def test_bad_arguments_are_named():
    logits = torch.zeros(2, 40)
    with pytest.raises(ValueError, match="num_top: must be between 0 and 128, got 129"):
        top_log_probs(logits, 129)
    with pytest.raises(ValueError, match="tokens: must be one of int64"):
        chosen_log_probs(logits, torch.zeros(2).int(), torch.zeros(2))
    starts, ids, *rest = (x.cpu() for x in draw_edits(2, 40, [1, 1]))
    with pytest.raises(ValueError, match=r"starts: must have shape \[3\], got \[2\]"):
        edit_logits(logits, starts[:2], ids, *rest)
    with pytest.raises(ValueError, match="bias: must be one of float32"):
        edit_logits(logits, starts, ids, rest[0], rest[1].half(), *rest[2:])
