"""Masks, bias and penalties on copies of rows of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.sampling.logit_edits import IN_PROMPT, Edits, edit_logits
from tests.kernels import reference
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def draw_edits(rows, vocab, num_listed, seed=0):
    """Edits for `len(num_listed)` rows with the given numbers of listed ids, some with masks and penalties."""
    rng = np.random.default_rng(seed)
    count = len(num_listed)
    states = rng.integers(0, 4, (3, vocab)) * rng.integers(0, 2, (3, vocab))
    states |= IN_PROMPT * rng.integers(0, 2, (3, vocab))
    bias = rng.normal(size=sum(num_listed))
    bias[::5] = -np.inf
    arrays = (
        (rng.permutation(rows)[:count], np.int32),
        (rng.integers(-(1 << 31), 1 << 31, (2, -(-vocab // 32))), np.int32),
        (rng.integers(-1, 2, count), np.int32),
        (np.concatenate([[0], np.cumsum(num_listed)]), np.int32),
        (np.concatenate([rng.permutation(vocab)[:n] for n in num_listed] or [[]]), np.int32),
        (bias, np.float32),
        (rng.integers(-1, 3, count), np.int32),
        (0.5 + rng.random(count), np.float32),
        (rng.random(count) - 0.5, np.float32),
        (rng.random(count) - 0.5, np.float32),
        (states, np.int32),
    )
    return Edits(*(torch.from_numpy(x.astype(dtype)).to(DEVICE) for x, dtype in arrays))


@settings(max_examples=20)
@given(data=st.data())
def test_edits_are_the_reference_bit_for_bit_and_the_logits_stay(data):
    rows, vocab = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([5, 300, 2500]))
    lengths = st.sampled_from([0, 1, min(5, vocab), min(300, vocab)])
    num_listed = data.draw(st.lists(lengths, max_size=rows))
    dtype = data.draw(st.sampled_from(FLOATS))
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)).mul(3)
    logits = logits.to(dtype).to(DEVICE)
    original = logits.clone()
    edits = draw_edits(rows, vocab, num_listed, data.draw(st.integers(0, 99)))
    edited = edit_logits(logits, edits)
    assert torch.equal(logits, original)
    assert edited.shape == (len(num_listed), vocab)
    for e in range(len(num_listed)):
        part = slice(int(edits.starts[e]), int(edits.starts[e + 1]))
        mask_row, count_row = int(edits.mask_rows[e]), int(edits.count_rows[e])
        expected = reference.edit_logits(
            original[int(edits.rows[e])],
            None if mask_row < 0 else edits.masks[mask_row],
            edits.ids[part],
            edits.bias[part],
            None if count_row < 0 else edits.counts[count_row],
            float(edits.repetition[e]),
            float(edits.presence[e]),
            float(edits.frequency[e]),
        )
        assert torch.equal(edited[e], expected)


def test_bad_arguments_are_named():
    logits = torch.zeros(2, 40)
    edits = Edits(*(x.cpu() for x in draw_edits(2, 40, [1, 1])))
    for change, message in (
        (dict(starts=edits.starts[:2]), r"starts: must have shape \[3\], got \[2\]"),
        (dict(bias=edits.bias.half()), "bias: must be one of float32"),
        (dict(masks=edits.masks[:, :1]), r"masks: must have shape \[any, 2\], got \[2, 1\]"),
        (dict(counts=edits.counts[:, ::2]), r"counts: must have shape \[any, 40\], got \[3, 20\]"),
    ):
        with pytest.raises(ValueError, match=message):
            edit_logits(logits, edits._replace(**change))
