"""Which graphs there are: sizes, the search for one, wishes and who gives way."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart
from quire.replica.runner.graphs.graph_policy import (
    LEAST_WISHES,
    GraphPolicy,
    GraphUse,
    decode_sizes,
)

WHOLE, FORWARD = GraphPart.WHOLE, GraphPart.FORWARD


def shelf_of(max_rows: int, *sizes: int, max_graphs: int = 32) -> GraphPolicy:
    policy = GraphPolicy(max_rows, max_graphs)
    for size in sizes:
        policy.add(GraphKey(size, WHOLE))
    return policy


@given(st.integers(1, 4096))
def test_sizes_rise_to_the_largest_step_and_waste_little(max_rows):
    sizes = decode_sizes(max_rows)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1 and sizes[-1] == max_rows
    for smaller, size in itertools.pairwise(sizes):
        assert size - smaller <= max(1, smaller, 8) and (smaller < 64 or size <= 1.25 * smaller)


@given(st.integers(1, 2048), st.data())
def test_what_is_captured_at_start_serves_every_step_with_less_than_twice_its_rows(max_rows, data):
    policy = GraphPolicy(max_rows, 32)
    first = policy.first()
    assert first[0].num_rows == max_rows and first == sorted(
        first, reverse=True, key=lambda k: k[0]
    )
    for key in first:
        policy.add(key)
    num_rows = data.draw(st.integers(1, max_rows))
    found = policy.find(num_rows, WHOLE)
    assert num_rows <= found.num_rows < 2 * num_rows or found.num_rows == num_rows == 1


def test_no_more_is_captured_at_start_than_may_be_kept():
    assert [key.num_rows for key in GraphPolicy(256, 3).first()] == [256, 128, 64]


def test_a_graph_of_another_part_or_of_twice_the_rows_does_not_serve():
    policy = shelf_of(64, 64)
    assert policy.find(33, FORWARD) is None
    assert policy.find(32, WHOLE) is None
    assert policy.find(33, WHOLE) == GraphKey(64, WHOLE)
    assert policy.decodes == GraphUse(num_hits=1, num_misses=2, num_items=33, num_padding=31)


def test_what_steps_missed_most_often_is_wished_for_first_but_not_for_a_few():
    policy = shelf_of(64, 64)
    for _ in range(LEAST_WISHES - 1):
        policy.find(20, WHOLE)
    assert policy.wish() is None
    policy.find(20, WHOLE)
    assert policy.wish() == GraphKey(24, WHOLE)
    for _ in range(LEAST_WISHES + 1):
        policy.find(33, WHOLE)  # served by 64, but 40 would do
    assert policy.wish() == GraphKey(40, WHOLE)
    policy.add(GraphKey(40, WHOLE))
    assert policy.wish() == GraphKey(24, WHOLE)
    policy.refuse(GraphKey(24, WHOLE))
    policy.find(20, WHOLE)
    assert policy.wish() is None


def test_the_graph_used_longest_ago_gives_way():
    policy = shelf_of(64, 64, 8, 1, max_graphs=3)
    policy.find(60, WHOLE)
    policy.find(1, WHOLE)
    assert policy.victim() == GraphKey(8, WHOLE)
    policy.remove(GraphKey(8, WHOLE))
    assert policy.victim() is None
    assert policy.find(7, WHOLE) is None


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9, 64])
def test_a_step_takes_the_smallest_that_fits(num_rows):
    policy = shelf_of(64, *decode_sizes(64))
    expected = min(size for size in decode_sizes(64) if size >= num_rows)
    assert policy.find(num_rows, WHOLE) == GraphKey(expected, WHOLE)
