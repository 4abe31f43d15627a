"""Adapters by row on the CPU: against double precision, every instruction set, bits alone and in a batch."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.adapters.cpu_adapters import (
    AdapterRows,
    PackedAdapter,
    ProductAdapters,
    pieces_of,
)
from quire.kernels.cpu import native_library
from quire.kernels.cpu.cpu_row_ops import AdapterCall

pytestmark = pytest.mark.skipif(native_library.load() is None, reason="not compiled")
LIBRARY = native_library.load()
ISAS = LIBRARY.isas if LIBRARY else ()
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
DEPTH, COLUMNS, NUM_SLOTS = 40, (72, 33, 64), 4


def made(dtype: torch.dtype):
    """Random adapters of all slots; some parts have none, ranks differ."""
    random = torch.Generator().manual_seed(1)
    rows = AdapterRows()
    product = ProductAdapters(DEPTH, COLUMNS, NUM_SLOTS, dtype, rows)
    ranks = {1: (1, 64, 7), 2: (8, None, 8), 3: (None, None, 3), 4: (5, 5, None)}
    parts = {}
    for slot, own in ranks.items():
        parts[slot] = [
            None
            if rank is None
            else (
                torch.randn(rank, DEPTH, generator=random).to(dtype),
                torch.randn(columns, rank, generator=random).to(dtype),
                0.5 + slot,
            )
            for rank, columns in zip(own, COLUMNS, strict=True)
        ]
        product.put(slot, [p and PackedAdapter.pack(*p) for p in parts[slot]])
    return product, rows, parts


def inputs(slots: np.ndarray, dtype: torch.dtype):
    random = torch.Generator().manual_seed(len(slots))
    x = torch.randn(len(slots), DEPTH, generator=random).to(dtype)
    return x, torch.randn(len(slots), sum(COLUMNS), generator=random).to(dtype)


SLOTS = np.repeat([2, 0, 1, 3, 4, 1, 0, 2], [1, 2, 19, 1, 3, 33, 1, 4])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_it_equals_double_precision_and_rows_have_the_same_bits_alone(dtype, isa):
    product, rows, parts = made(dtype)
    x, before = inputs(SLOTS, dtype)
    expected = before.double()
    for t, slot in enumerate(SLOTS):
        first = 0
        for part, columns in zip(parts.get(slot, ()), COLUMNS, strict=bool(slot)):
            if part is not None:
                down, up, scale = part
                added = scale * (up.double() @ (down.double() @ x[t].double()))
                expected[t, first : first + columns] += added
            first += columns
    out = before.clone()
    rows.set(SLOTS)
    product.add(x, out, isa=isa)
    assert (out.double() - expected).abs().max() / expected.abs().max() < TOLERANCES[dtype]
    assert torch.equal(out[SLOTS == 0], before[SLOTS == 0])
    for t in range(0, len(SLOTS), 5):
        alone = before[t : t + 1].clone()
        rows.set(SLOTS[t : t + 1])
        product.add(x[t : t + 1], alone, isa=isa)
        assert torch.equal(alone[0], out[t])


def test_a_slot_can_be_emptied():
    product, rows, _ = made(torch.float32)
    slots = np.array([1, 1])
    x, before = inputs(slots, torch.float32)
    product.put(1, (None, None, None))
    out = before.clone()
    rows.set(slots)
    product.add(x, out)
    assert torch.equal(out, before)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=12))
def test_pieces_cover_each_token_with_an_adapter_once(runs):
    slots = np.array([slot for slot, count in runs for _ in range(count)], np.int32)
    pieces = pieces_of(slots)
    covered = np.zeros(len(slots), np.int32)
    for begin, end, slot in pieces:
        assert 0 < end - begin <= 16 and slot > 0
        assert (slots[begin:end] == slot).all()
        covered[begin:end] += 1
    assert (covered == (slots > 0)).all()


def test_adapters_that_do_not_fit_are_refused():
    product, _, parts = made(torch.float32)
    packed = PackedAdapter.pack(*parts[1][0])
    for wrong in (
        [packed, None],
        [None, packed, None],
        [PackedAdapter(packed.down.half(), packed.up.half(), 1.0), None, None],
    ):
        with pytest.raises(ValueError, match=r"parts|adapter"):
            product.put(1, wrong)


def test_the_structure_has_the_size_of_that_in_c():
    assert ctypes.sizeof(AdapterCall) == LIBRARY.functions.quire_adapter_bytes()
