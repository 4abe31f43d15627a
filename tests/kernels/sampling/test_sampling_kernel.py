"""Sampling kernel: keeps the same ids as a sort, and samples with the noise of `quire.kernels.sampling.noise`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_calls import choose, draw_rows, keys_of, packed

from quire.kernels.sampling.noise import gumbel, uniform
from quire.kernels.sampling.row_survey import SamplingConfig, Workspace
from quire.kernels.sampling.sampling_kernel import NO_TOKEN, sample_tokens
from quire.kernels.sampling.sampling_tile import uniform_noise
from tests.kernels import reference
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _uniform_kernel(out_ptr, keys_ptr, SIZE: tl.constexpr):
    token = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    low = tl.load(keys_ptr).to(tl.uint32, bitcast=True)
    high = tl.load(keys_ptr + 1).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + token, uniform_noise(token, low, high))


@settings(max_examples=15)
@given(key=st.integers(0, 2**64 - 1))
def test_uniform_noise_is_bit_equal(key):
    keys = np.array([key], np.uint64)
    out = torch.empty(4096, device=DEVICE)
    _uniform_kernel[(4,)](out, torch.from_numpy(keys.view(np.int32)).to(DEVICE), SIZE=1024)
    assert torch.equal(out, uniform(keys, 4096, DEVICE)[0])


@settings(max_examples=10)
@given(data=st.data())
def test_greedy_is_the_first_argmax(data):
    vocab = data.draw(st.sampled_from([1, 63, 64, 65, 200]))
    logits = draw_rows(
        2, vocab, data.draw(st.sampled_from(FLOATS)), levels=data.draw(st.sampled_from([0, 2]))
    )
    allowed = torch.rand(2, vocab) < 0.7
    allowed[:, data.draw(st.integers(0, vocab - 1))] = True
    assert torch.equal(choose(logits, temperature=0.0, top_k=3, top_p=0.1), logits.argmax(-1))
    masked = logits.float().masked_fill(~allowed.to(DEVICE), float("-inf"))
    assert torch.equal(choose(logits, temperature=0.0, mask=packed(allowed)), masked.argmax(-1))


@settings(max_examples=25)
@given(data=st.data())
def test_kept_set_is_the_sorted_one_and_the_draw_uses_the_noise(data):
    """The row's noise decides among the ids that a sort keeps; many keys test many ids."""
    vocab = data.draw(st.sampled_from([2, 40, 64, 130, 200]))
    levels = data.draw(st.sampled_from([0, 0, 3, 12]))
    temperature = data.draw(st.sampled_from([0.05, 0.7, 1.0, 4.0]))
    logits = draw_rows(1, vocab, data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from([0.3, 3.0, 40.0])),
                       seed=data.draw(st.integers(0, 99)), levels=levels)  # fmt: skip
    top_k = data.draw(st.sampled_from([0, 1, 2, 7, 50, 129, 1000]))
    top_p = data.draw(st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 1e-3]))
    min_p = data.draw(st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]))
    mask = None
    scaled = logits[0].float() / torch.tensor(temperature, device=DEVICE)
    if data.draw(st.booleans()):
        allowed = torch.rand(1, vocab, generator=torch.Generator().manual_seed(vocab)) < 0.6
        allowed[0, -1] = True
        mask = packed(allowed)
        scaled = scaled.masked_fill(~allowed[0].to(DEVICE), float("-inf"))
    kept, margin = reference.kept_ids(
        scaled.cpu(), top_k, float(np.float32(top_p)), float(np.float32(min_p))
    )
    assume(margin > 1e-5)
    tries = 2
    keys = keys_of(tries, seed=data.draw(st.integers(0, 2**64 - 1)))
    tokens = choose(
        logits.expand(tries, -1).contiguous(), temperature, top_k, top_p, min_p, keys,
        mask=None if mask is None else mask.expand(tries, -1).contiguous(),
    )  # fmt: skip
    for token, score in zip(
        tokens.tolist(), (scaled + gumbel(keys, vocab, DEVICE)).cpu(), strict=True
    ):
        best = max(kept, key=lambda i: (float(score[i]), -i))
        # The logarithms come from two libraries, so a score may differ in its last bits.
        assert token in kept and float(score[best] - score[token]) < 1e-5 * (
            1 + abs(float(score[best]))
        )


@pytest.mark.parametrize("limits", [dict(top_k=5), dict(top_p=0.625), dict(top_k=9, top_p=0.5)])
def test_ties_are_kept_in_the_order_of_ids(limits):
    # 8 equal logits, -30 elsewhere: top-k 5, top-p 0.625 and 0.5 of 9 keep the first 5, 5 and (nearly) 4 of them.
    logits = torch.full((1, 130), -30.0, device=DEVICE)
    at = torch.tensor([3, 10, 63, 64, 65, 66, 100, 129], device=DEVICE)
    logits[0, at] = 2.0
    count = {5: 5, 0.625: 5, 0.5: 4}[limits.get("top_p", limits.get("top_k"))]
    # The ninth has a share of 1e-14, so that 4 ids do not quite reach half of the mass.
    count += "top_p" in limits and count < 5
    tokens = choose(logits.expand(6, -1).contiguous(), **limits)
    assert set(tokens.tolist()) <= set(at[:count].tolist())
    assert len(set(tokens.tolist())) >= 2


@pytest.mark.gpu
def test_draws_follow_the_truncated_softmax():
    logits = draw_rows(1, 80, spread=1.5)
    draws, top_k, top_p = 100_000, 20, 0.9
    tokens = choose(
        logits.expand(draws, -1).contiguous(), 0.8, top_k, top_p, keys=keys_of(draws, 7)
    )
    kept, _ = reference.kept_ids(logits[0].cpu() / 0.8, top_k, top_p, 0.0)
    expected = torch.softmax(logits[0].cpu()[kept] / 0.8, 0) * draws
    observed = torch.bincount(tokens.cpu(), minlength=80)[kept]
    assert observed.sum() == draws
    chi_squared = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(kept) - 1
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_a_row_does_not_depend_on_the_batch():
    logits = draw_rows(6, 150, torch.bfloat16)
    columns = dict(temperature=[0.0, 1.0, 0.5, 1.0, 2.0, 0.9], top_k=[0, 0, 5, 70, 0, 3],
                   top_p=[1.0, 1.0, 0.9, 1.0, 0.95, 0.4], min_p=[0.0, 0.0, 0.0, 0.05, 0.0, 0.2])  # fmt: skip
    keys = keys_of(6, 11)
    whole = choose(logits, **columns, keys=keys)
    for row in range(6):
        alone = {name: values[row : row + 1] for name, values in columns.items()}
        assert choose(logits[row : row + 1], **alone, keys=keys[row : row + 1])[0] == whole[row]
    wide = torch.full((6, 170), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wide[:, :150] = logits
    assert torch.equal(choose(wide[:, :150], **columns, keys=keys), whole)


def test_the_length_of_the_list_changes_no_token():
    logits = draw_rows(2, 150, spread=1.0)
    for limits in (dict(top_k=100), dict(top_p=0.99), dict(min_p=0.01, top_p=0.9)):
        short, long = (
            choose(logits, **limits, config=SamplingConfig(16, 2, slots, 64, 8, 4))
            for slots in (2, 32)
        )
        assert torch.equal(short, long)


def test_unusual_logits_never_give_an_id_that_is_not_allowed():
    nan, inf = float("nan"), float("inf")
    logits = torch.full((6, 70), -inf, device=DEVICE)
    logits[0] = nan
    logits[1, [4, 9]] = torch.tensor([nan, -50.0], device=DEVICE)
    logits[2, [4, 9]] = torch.tensor([inf, 3.0], device=DEVICE)
    logits[3, 66] = -3e38
    logits[5] = 0.0
    allowed = torch.ones(6, 70, dtype=torch.bool)
    allowed[5] = False
    for options in (
        dict(temperature=0.0),
        dict(),
        dict(top_k=3),
        dict(top_p=0.5),
        dict(min_p=0.5),
        dict(temperature=0.01, top_k=9),
    ):
        tokens = choose(logits, mask=packed(allowed), **options)
        assert tokens.tolist() == [NO_TOKEN, 9, 4, 66, NO_TOKEN, NO_TOKEN], options


def test_bad_arguments_are_named():
    logits, limits = torch.zeros(2, 40), torch.zeros(2, 4).int()
    good = dict(logits=logits, limits=limits, noise_keys=torch.zeros(2).long())
    for change, message in (
        (dict(logits=torch.zeros(2, 0)), "vocab: must be between 1"),
        (dict(logits=torch.zeros(40, 2).T), "logits: rows must be contiguous"),
        (dict(limits=limits.float()), "limits: must be one of int32, got torch.float32"),
        (dict(limits=limits[:, :3]), r"limits: must have shape \[2, 4\], got \[2, 3\]"),
        (dict(limits=torch.zeros(2, 8).int()[:, ::2]), "limits: rows must be contiguous"),
        (dict(noise_keys=torch.ones(3).long()), r"noise_keys: must have shape \[2\], got \[3\]"),
        (dict(edited=torch.zeros(1, 40)), "edited, source: must be given together, got one"),
        (
            dict(edited=torch.zeros(1, 41), source=torch.zeros(2).int()),
            r"edited: must have shape \[any, 40\], got \[1, 41\]",
        ),
        (
            dict(workspace=Workspace.allocate(1, 40, logits.device)),
            r"workspace.stats: must be contiguous of at least 2 rows, got \[1, 13\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            sample_tokens(**(good | change))
