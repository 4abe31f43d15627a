"""Batch preparation: the same results as a row-by-row computation on the host, for any batch and padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.rows.batch_prep import (
    BLOCK,
    apply_differences,
    gather_last_tokens,
    prepare_batch,
)
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
UNTOUCHED = -77


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def outputs(rows, tokens, width):
    return dict(
        positions=torch.full((tokens,), UNTOUCHED, dtype=torch.int32, device=DEVICE),
        kv_len=torch.full((rows,), UNTOUCHED, dtype=torch.int32, device=DEVICE),
        slots=torch.full((tokens,), UNTOUCHED, dtype=torch.int64, device=DEVICE),
        batch_tables=torch.full((rows, width), UNTOUCHED, dtype=torch.int32, device=DEVICE),
    )


@settings(max_examples=25)
@given(data=st.data())
def test_prepared_arrays_equal_the_host(data):
    table_rows, block_size = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([16, 64]))
    width = data.draw(st.sampled_from([3, 40]))
    room = width * block_size
    tables = torch.randint(0, 2**31 - 1, (table_rows, width + 2), dtype=torch.int32)[:, :width].to(
        DEVICE
    )
    rows = data.draw(st.permutations(range(table_rows)))[: data.draw(st.integers(0, table_rows))]
    computed = [data.draw(st.integers(0, room - 1)) for _ in range(table_rows)]
    counts = [data.draw(st.integers(0, min(room - computed[r], BLOCK + 30))) for r in rows]
    padding_rows = data.draw(st.integers(0, 2))
    cu_q = [0]
    for count in (*counts, *[0] * padding_rows):
        cu_q.append(cu_q[-1] + count)
    tokens = cu_q[-1] + data.draw(st.sampled_from([0, 1, BLOCK + 1]))
    got = outputs(len(rows) + padding_rows, tokens, width)
    prepare_batch(
        ints([*rows, *[-1] * padding_rows]), ints(cu_q), ints(computed), tables, block_size, **got
    )

    expected = outputs(len(rows) + padding_rows, tokens, width)
    expected["positions"][:], expected["slots"][:], expected["kv_len"][:] = 0, -1, 0
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        position = torch.arange(computed[row], computed[row] + count, device=DEVICE)
        part = slice(cu_q[i], cu_q[i + 1])
        expected["positions"][part] = position
        expected["slots"][part] = (
            tables[row].long()[position // block_size] * block_size + position % block_size
        )
        if count:
            expected["kv_len"][i] = computed[row] + count
            used = -(-(computed[row] + count) // block_size)
            expected["batch_tables"][i, :used] = tables[row, :used]
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def test_missing_blocks_and_foreign_rows_have_no_slot():
    tables = ints([[5, -1, 7]])
    got = outputs(2, 50, 3)
    prepare_batch(ints([0, 9]), ints([0, 45, 47]), ints([10]), tables, 16, **got)
    assert got["slots"][:6].tolist() == [90, 91, 92, 93, 94, 95]
    assert (got["slots"][6:22] == -1).all()
    assert got["slots"][22:38].tolist() == list(range(112, 128))
    assert (got["slots"][38:] == -1).all()  # beyond the table, of another row, of no row
    assert got["kv_len"].tolist() == [55, 0]


@settings(max_examples=20)
@given(data=st.data())
def test_last_tokens_reach_the_rows_that_decode(data):
    n, table_rows = data.draw(st.integers(0, 300)), 310
    rows = torch.randperm(table_rows)[:n].int().to(DEVICE)
    decodes = (torch.rand(n) < 0.5).to(DEVICE)
    cu_q = torch.arange(n + 1, dtype=torch.int32, device=DEVICE) * 2
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    last = torch.randint(0, 150_000, (table_rows,), dtype=dtype).to(DEVICE)
    input_ids = torch.full((2 * n + 3,), UNTOUCHED, dtype=torch.int64, device=DEVICE)
    expected = input_ids.clone()
    expected[cu_q[:-1][decodes].long()] = last[rows[decodes].long()].long()
    gather_last_tokens(input_ids, last, rows, cu_q, decodes)
    assert torch.equal(input_ids, expected)


def test_foreign_rows_and_tokens_are_left_alone():
    input_ids = ints([1, 2, 3])
    gather_last_tokens(
        input_ids, ints([9]), ints([0, 1, -1, 0]), ints([0, 1, 2, 3, 4]), ints([1] * 4)
    )
    assert input_ids.tolist() == [9, 2, 3]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_differences_are_scattered_and_nothing_else(dtype):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(0, 1000, (40, 30), generator=generator).to(dtype).to(DEVICE)
    table, before = wide[:, 3:20], wide.clone()
    flat = torch.randperm(40 * 17, generator=generator)[:300].to(DEVICE)
    rows, columns = (flat // 17).int(), (flat % 17).int()
    values = torch.randint(0, 1000, (300,), generator=generator).to(dtype).to(DEVICE)
    expected = before.clone()
    expected[:, 3:20][rows.long(), columns.long()] = values
    rows[-3:], values[-3:] = ints([-1, 40, 2**30]), -5
    expected[:, 3:20][(flat // 17)[-3:], (flat % 17)[-3:]] = table[
        (flat // 17)[-3:], (flat % 17)[-3:]
    ]
    apply_differences(table, rows, columns, values)
    assert torch.equal(wide, expected)


def test_sampled_tokens_are_stored_into_a_column():
    last_token = ints([0] * 6)
    apply_differences(last_token, ints([4, 0, 7]), None, ints([11, 12, 13], torch.int64))
    assert last_token.tolist() == [12, 0, 0, 0, 11, 0]
    apply_differences(ints([[0]]), ints([]), None, ints([]))


def test_bad_arguments_are_named():
    good = dict(rows=ints([0]), cu_q=ints([0, 1]), num_computed=ints([0]), block_tables=ints([[0]]), block_size=16,
                **outputs(1, 1, 1))  # fmt: skip
    for change, message in (
        (dict(cu_q=ints([0])), r"cu_q: must have shape \[2\], got \[1\]"),
        (dict(block_size=24), "block_size: must be one of"),
        (dict(block_tables=ints([[0], [1]])), r"block_tables: must have shape \[1, any\]"),
        (dict(slots=ints([0])), "slots: must be one of int64"),
        (
            dict(batch_tables=ints([[0, 0]])),
            r"batch_tables: must have shape \[1, 1\], got \[1, 2\]",
        ),
        (dict(rows=ints([0], torch.int64)), "rows: must be one of int32"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_batch(**(good | change))
    with pytest.raises(ValueError, match="values: must be integers exactly if the table's are"):
        apply_differences(ints([0]), ints([0]), None, torch.zeros(1, device=DEVICE))
    with pytest.raises(ValueError, match=r"columns: must have shape \[1\], got \[2\]"):
        apply_differences(ints([[0]]), ints([0]), ints([0, 0]), ints([1]))
    with pytest.raises(ValueError, match="decodes: must be one of bool, uint8, int32"):
        gather_last_tokens(
            ints([0]), ints([0]), ints([0]), ints([0, 1]), torch.zeros(1, device=DEVICE)
        )
