"""Recurrent layers in C, against the reference and against themselves in other steps."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrence_cases import conv_arguments, make_rows, scan_arguments

from quire.kernels.cpu import native_library
from quire.kernels.recurrence import cpu_recurrence
from tests.kernels import recurrence_reference as reference

pytestmark = pytest.mark.skipif(native_library.load() is None, reason="no compiled library")

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def test_structures_have_the_sizes_of_the_library():
    functions = native_library.installed().functions
    assert ctypes.sizeof(cpu_recurrence._ConvCall) == functions.quire_conv_bytes()
    assert ctypes.sizeof(cpu_recurrence._ScanCall) == functions.quire_scan_bytes()


@settings(max_examples=40, deadline=None)
@given(
    lengths=LENGTHS,
    channels=st.sampled_from([5, 64, 300]),
    taps=st.integers(1, 5),
    silu=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_a_convolution_is_that_of_the_reference(lengths, channels, taps, silu, dtype, seed):
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    rows = make_rows(random, lengths, random.integers(0, 3, len(lengths)).tolist(), num_saves=4)
    x, weight, bias, states = conv_arguments(sum(lengths), channels, taps, dtype)
    bias = bias if silu else None
    expected_states = states.clone()
    expected = reference.short_conv(x.float(), weight, bias, expected_states, rows, silu)
    found = cpu_recurrence.short_conv(x, weight, bias, states, rows, silu)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(states, expected_states)


@settings(max_examples=40, deadline=None)
@given(
    lengths=LENGTHS,
    shape=st.sampled_from([(1, 1, 16, 24), (2, 4, 32, 64), (1, 2, 24, 100), (2, 2, 128, 128)]),
    is_delta=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_scan_is_that_of_the_reference(lengths, shape, is_delta, seed):
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    rows = make_rows(random, lengths, random.integers(0, 3, len(lengths)).tolist(), num_saves=4)
    *given_, beta, states = scan_arguments(sum(lengths), *shape)
    beta = beta if is_delta else None
    expected_states = states.double()
    wide = [x.double() for x in given_]
    wide_beta = None if beta is None else beta.double()
    expected = reference.state_scan(*wide, wide_beta, expected_states, rows)
    found = cpu_recurrence.state_scan(*given_, beta, states, rows)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected_states.float(), rtol=1e-4, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(1, 11), max_size=4), threads=st.sampled_from([1, 2]))
def test_a_tokens_bits_do_not_depend_on_steps_and_other_rows(cuts, threads):
    """One row in one step, and the same row in several steps with strangers."""
    torch.manual_seed(0)
    conv = conv_arguments(12, 64, 4)
    scan = scan_arguments(12, 2, 4, 32, 64)
    random = np.random.default_rng(0)
    alone = make_rows(random, [12], [0])
    x, weight, bias, conv_states = conv
    *given_, scan_states = scan
    expected = (
        cpu_recurrence.short_conv(x, weight, bias, conv_states.clone(), alone, True),
        cpu_recurrence.state_scan(*given_, scan_states.clone(), alone),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ends = sorted({0, 12, *cuts})
        for begin, end in itertools.pairwise(ends):
            count = end - begin
            # The stranger has the same tokens, and a slot of its own.
            rows = make_rows(np.random.default_rng(1), [count, count], [3, begin])
            twice = [torch.cat([part[begin:end]] * 2) for part in (x, *given_)]
            out = (
                cpu_recurrence.short_conv(twice[0], weight, bias, conv_states, rows, True),
                cpu_recurrence.state_scan(*twice[1:], scan_states, rows),
            )
            for found, whole in zip(out, expected, strict=True):
                assert torch.equal(found[count:], whole[begin:end])
    finally:
        torch.set_num_threads(before)


def test_a_state_that_does_not_fit_is_refused():
    *given_, states = scan_arguments(2, 1, 1, 300, 16)
    with pytest.raises(ValueError, match="key_dim: must be between 1 and 256, got 300"):
        cpu_recurrence.state_scan(*given_, states, make_rows(np.random.default_rng(0), [2], [0]))
