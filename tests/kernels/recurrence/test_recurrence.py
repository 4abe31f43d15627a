"""Triton kernels of recurrent layers, against the reference and against themselves in other steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrence_cases import conv_arguments, make_rows, scan_arguments

from quire.kernels.recurrence import short_conv, state_chunks, state_scan
from quire.kernels.recurrence.recurrent_rows import RecurrentRows
from tests.kernels import recurrence_reference as reference
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=3)


def draw_rows(lengths, seed, num_saves=3):
    random = np.random.default_rng(seed)
    return make_rows(random, lengths, random.integers(0, 3, len(lengths)).tolist(), num_saves)


def on_device(*values):
    """Copies on the kernels' device; the host's tensors keep their strides there."""
    moved = []
    for value in values:
        if isinstance(value, RecurrentRows):
            tensors = (value.cu_q, value.slots, value.kv_len, value.saves, value.first_save)
            value = RecurrentRows(*(x.to(DEVICE) for x in tensors), value.is_decode)
        elif value is not None:
            value = value.to(DEVICE) if DEVICE != "cpu" else value
        moved.append(value)
    return moved


@settings(max_examples=12, deadline=None)
@given(
    lengths=LENGTHS,
    channels=st.sampled_from([5, 130]),
    taps=st.integers(1, 4),
    silu=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_a_convolution_is_that_of_the_reference(lengths, channels, taps, silu, dtype, seed):
    torch.manual_seed(seed)
    rows = draw_rows(lengths, seed)
    x, weight, bias, states = conv_arguments(sum(lengths), channels, taps, dtype)
    bias = bias if silu else None
    expected_states = states.clone()
    expected = reference.short_conv(x.float(), weight, bias, expected_states, rows, silu)
    moved = on_device(x, weight, bias, states, rows)
    found = short_conv.short_conv(*moved, silu)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float().cpu(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(moved[3].cpu(), expected_states)


@settings(max_examples=12, deadline=None)
@given(
    lengths=LENGTHS,
    shape=st.sampled_from([(1, 1, 16, 24), (2, 4, 24, 40)]),
    is_delta=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_scan_is_that_of_the_reference(lengths, shape, is_delta, seed):
    torch.manual_seed(seed)
    rows = draw_rows(lengths, seed)
    *given_, beta, states = scan_arguments(sum(lengths), *shape)
    beta = beta if is_delta else None
    expected_states = states.clone()
    expected = reference.state_scan(*given_, beta, expected_states, rows)
    moved = on_device(*given_, beta, states, rows)
    found = state_scan.state_scan(*moved)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(moved[-2].cpu(), expected_states, rtol=1e-4, atol=1e-4)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=2),
    shape=st.sampled_from([(1, 1, 16, 24), (1, 2, 24, 40)]),
    is_delta=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_scan_by_chunks_is_that_of_the_reference(lengths, shape, is_delta, seed):
    torch.manual_seed(seed)
    rows = draw_rows(lengths, seed)
    *given_, beta, states = scan_arguments(sum(lengths), *shape)
    beta = beta if is_delta else None
    expected_states = states.clone()
    expected = reference.state_scan(*given_, beta, expected_states, rows)
    moved = on_device(*given_, beta, states, rows)
    found = state_chunks.chunk_scan(*moved)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(moved[-2].cpu(), expected_states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ends", [(0, 1, 2, 11), (0, 5, 11)])
def test_a_tokens_bits_do_not_depend_on_steps_and_other_rows(ends):
    """One row in one step, and the same row in several steps with strangers."""
    torch.manual_seed(0)
    conv = on_device(*conv_arguments(11, 64, 4))
    scan = on_device(*scan_arguments(11, 1, 2, 16, 16))
    (alone,) = on_device(make_rows(np.random.default_rng(0), [11], [0]))
    x, weight, bias, conv_states = conv
    *given_, scan_states = scan
    expected = (
        short_conv.short_conv(x, weight, bias, conv_states.clone(), alone, True),
        state_scan.state_scan(*given_, scan_states.clone(), alone),
    )
    for begin, end in itertools.pairwise(ends):
        count = end - begin
        (rows,) = on_device(make_rows(np.random.default_rng(1), [count, count], [3, begin]))
        twice = [torch.cat([part[begin:end]] * 2) for part in (x, *given_)]
        out = (
            short_conv.short_conv(twice[0], weight, bias, conv_states, rows, True),
            state_scan.state_scan(*twice[1:], scan_states, rows),
        )
        for found, whole in zip(out, expected, strict=True):
            assert torch.equal(found[count:], whole[begin:end])
