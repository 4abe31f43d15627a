"""Scattered rows: each row is written to its target, and nothing else is written."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.cpu import cpu_scatter, native_library
from quire.kernels.cpu.cpu_scatter import scatter_rows

LAYOUTS = {
    "dense": lambda x: x,
    "head first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "strided": lambda x: x.repeat_interleave(2, dim=2)[..., ::2],
}


@given(
    tokens=st.integers(0, 100),
    heads=st.integers(1, 5),
    head_dim=st.sampled_from([1, 7, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layout=st.sampled_from(list(LAYOUTS)),
    threads=st.sampled_from([1, 2]),
    native=st.booleans(),
)
def test_equals_index_copy(tokens, heads, head_dim, dtype, layout, threads, native):
    target = torch.randn(tokens * heads + 5, head_dim).to(dtype)
    rows = torch.randperm(len(target))[: tokens * heads]
    source = LAYOUTS[layout](torch.randn(tokens, heads, head_dim).to(dtype))
    expected = target.clone()
    expected[rows] = source.reshape(-1, head_dim)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if native:
            scatter_rows(target, rows, source)
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(native_library, "load", lambda: None)
                scatter_rows(target, rows, source)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_outside_is_refused(row):
    if native_library.load() is None:
        pytest.skip("installed without a C compiler")
    target = torch.zeros(3, 4)
    with pytest.raises(IndexError, match="rows: 1 are not between 0 and 2"):
        scatter_rows(target, torch.tensor([0, row]), torch.ones(2, 1, 4))


def test_misfits_are_refused_by_name():
    target, rows, source = torch.zeros(3, 4), torch.tensor([0, 1]), torch.ones(2, 1, 4)
    for arguments, message in [
        ((target, rows[:1], source), r"rows must be \[tokens \* heads\]"),
        ((target[:, :3], rows, source), r"target \[num_rows, head_dim\]"),
        ((target, rows, source.half()), "target is torch.float32, source torch.float16"),
        ((target, rows.int(), source), "rows must be torch.int64, got torch.int32"),
    ]:
        with pytest.raises(ValueError, match=message):
            scatter_rows(*arguments)


def test_python_and_c_agree_on_the_arguments():
    library = native_library.load()
    if library is None:
        pytest.skip("installed without a C compiler")
    assert ctypes.sizeof(cpu_scatter._Call) == library.functions.quire_scatter_bytes()
