"""The shapes that mixed steps are padded to."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart
from quire.replica.runner.graphs.graph_policy import LEAST_WISHES, GraphPolicy, GraphUse
from quire.replica.runner.graphs.mixed_shapes import (
    CHEAP_TOKENS,
    GRAPH_TOKENS,
    LEAST_TOKENS,
    ROW_FACTOR,
    MixedShapes,
)

WHOLE = GraphPart.WHOLE


@st.composite
def shapes(draw) -> MixedShapes:
    max_tokens = draw(st.integers(LEAST_TOKENS, 4096))
    max_kv = draw(st.integers(LEAST_TOKENS, 8192))
    return MixedShapes(
        max_rows=draw(st.integers(1, 300)),
        max_tokens=max_tokens,
        max_kv_tokens=max_kv,
        q_padding=draw(st.integers(LEAST_TOKENS, min(max_tokens, max_kv))),
        kv_padding=draw(st.none() | st.integers(1, 512)),
    )


@st.composite
def steps(draw) -> tuple[MixedShapes, int, int, int]:
    """Shapes, and rows, tokens and the longest row of a step."""
    made = draw(shapes())
    num_rows = draw(st.integers(1, min(made.max_rows, made.max_tokens)))
    most = min(made.max_tokens, num_rows * made.max_kv_tokens)
    num_tokens = draw(st.integers(num_rows, most))
    kv_len = draw(st.integers(-(-num_tokens // num_rows), made.max_kv_tokens))
    return made, num_rows, num_tokens, kv_len


@given(steps())
def test_every_step_fits_its_shape_with_a_row_for_the_padding(case):
    made, num_rows, num_tokens, kv_len = case
    key = made.pad(num_rows, num_tokens, kv_len, WHOLE)
    assert made.fits(key, num_rows, num_tokens, kv_len)
    assert 0 <= key.num_tokens - num_tokens < made.q_padding
    assert key.num_tokens % made.q_padding == 0 or key.num_tokens == made.max_tokens
    assert num_rows + 1 <= key.num_rows <= min(ROW_FACTOR * (num_rows + 1), made.max_rows + 1)
    assert kv_len <= key.kv_tokens <= made.max_kv_tokens
    if made.kv_padding is not None:
        assert key.kv_tokens - max(kv_len, made.q_padding) < made.kv_padding
    assert key.num_tokens <= key.num_rows * key.kv_tokens  # a capture of padding alone fits too


@given(steps(), st.integers(0, 4096), st.integers(0, 300), st.integers(0, 8192))
def test_a_graph_that_is_too_small_in_anything_does_not_fit(case, tokens, rows, kv):
    made, num_rows, num_tokens, kv_len = case
    fits = made.fits(GraphKey(rows, WHOLE, tokens, kv), num_rows, num_tokens, kv_len)
    assert fits == (
        tokens >= num_tokens and rows > num_rows and kv >= kv_len and kv >= tokens - num_tokens
    )


@given(steps())
def test_a_graph_that_serves_has_little_padding_and_the_best_one_serves(case):
    made, num_rows, num_tokens, kv_len = case
    best = made.pad(num_rows, num_tokens, kv_len, WHOLE)
    assert made.serves(best, num_rows, num_tokens, kv_len)
    least = max(made.q_padding, CHEAP_TOKENS)
    for tokens, rows in itertools.product((0, least - 1, least), (0, 3 * best.num_rows)):
        key = best._replace(num_tokens=num_tokens + tokens, num_rows=num_rows + 1 + rows)
        serves = made.serves(key, num_rows, num_tokens, kv_len)
        is_small = tokens < least and key.num_rows <= ROW_FACTOR * (num_rows + 1)
        assert serves == (is_small and made.fits(key, num_rows, num_tokens, kv_len))


@given(steps())
def test_each_step_of_few_tokens_finds_a_graph_at_start(case):
    made, num_rows, num_tokens, kv_len = case
    if num_tokens > made.max_graph_tokens:
        return
    serving = [key for key in made.first() if made.serves(key, num_rows, num_tokens, kv_len)]
    # Of rows so short, a graph of more tokens is none that can be run on padding alone.
    assert serving or num_tokens > made.max_kv_tokens


@given(shapes())
def test_what_is_captured_first_is_of_shapes_that_steps_have(made):
    first = made.first()
    assert first[0].num_tokens == made.max_graph_tokens or (
        made.max_graph_tokens > 2 * made.max_kv_tokens
    )
    assert made.max_graph_tokens <= max(GRAPH_TOKENS, made.q_padding)
    assert first == sorted(first, key=lambda key: (key.num_tokens, key.num_rows), reverse=True)
    for key in first:
        num_rows = key.num_rows - 1
        padded = made.pad(num_rows, max(num_rows, key.num_tokens), made.max_kv_tokens, WHOLE)
        assert padded == key or num_rows > key.num_tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(q_padding=3), r"q_padding must be in \[4, 64\].*got 3"),
        (dict(q_padding=65), r"q_padding must be in \[4, 64\].*got 65"),
        (dict(kv_padding=0), "kv_padding must be at least 1, got 0"),
    ],
)
def test_bounds_are_named(changes, message):
    values = dict(max_rows=8, max_tokens=128, max_kv_tokens=64, q_padding=16)
    with pytest.raises(ValueError, match=message):
        MixedShapes(**{**values, **changes})


# -- on the policy --------------------------------------------------------------------------------------------

MIXED = MixedShapes(max_rows=16, max_tokens=2048, max_kv_tokens=1024, q_padding=32)


def shelf_of(*keys: GraphKey, max_graphs: int = 32) -> GraphPolicy:
    policy = GraphPolicy(16, max_graphs, MIXED)
    for key in keys:
        policy.add(key)
    return policy


def test_a_step_takes_the_smallest_graph_with_little_padding():
    small = GraphKey(16, WHOLE, 64, 1024)
    wide = GraphKey(16, WHOLE, 96, 1024)
    large = GraphKey(16, WHOLE, 384, 1024)
    policy = shelf_of(large, wide, small)
    assert policy.find_mixed(5, 60, 300, WHOLE) == small
    assert policy.find_mixed(5, 65, 300, WHOLE) == wide
    assert policy.find_mixed(5, 129, 300, WHOLE) == large
    assert policy.find_mixed(5, 128, 300, WHOLE) is None  # 256 tokens of padding
    assert policy.find_mixed(2, 60, 300, WHOLE) is None  # 12 rows would do
    assert policy.find_mixed(5, 60, 300, GraphPart.FORWARD) is None
    assert policy.find_mixed(5, 385, 300, WHOLE) is None
    assert policy.mixed == GraphUse(
        num_hits=3, num_misses=4, num_items=60 + 65 + 129, num_padding=4 + 31 + 255
    )
    assert policy.decodes == GraphUse()


def test_a_step_that_keeps_the_device_busy_has_no_graph_and_asks_for_none():
    policy = shelf_of(GraphKey(17, WHOLE, GRAPH_TOKENS, 1024))
    for _ in range(2 * LEAST_WISHES):
        assert policy.find_mixed(5, GRAPH_TOKENS + 1, 300, WHOLE) is None
    assert policy.wish() is None and policy.mixed.num_misses == 2 * LEAST_WISHES


def test_what_a_gpu_captures_at_start_by_default():
    mixed = MixedShapes(max_rows=256, max_tokens=8192, max_kv_tokens=131_072, q_padding=256)
    first = GraphPolicy(256, 32, mixed).first()
    shapes = [(key.num_tokens, key.num_rows) for key in first if key.is_mixed]
    rows = (257, 64, 16, 4)
    assert shapes == [(tokens, n) for tokens in (1024, 768, 512, 256) for n in rows]
    assert len(first) == 16 + 9


def test_decodes_come_first_and_mixed_steps_get_what_is_left_of_the_cache():
    policy = GraphPolicy(16, 8, MIXED)
    first = policy.first()
    assert len(first) == 8
    decodes = [key.num_rows for key in first if not key.is_mixed]
    assert decodes == [16, 8, 4, 2, 1]
    assert [key.num_tokens for key in first if key.is_mixed] == [1024, 1024, 768]
    assert first[0] == GraphKey(17, WHOLE, 1024, 1024)
    assert not any(key.is_mixed for key in GraphPolicy(16, 5, MIXED).first())


def test_a_mixed_graph_can_give_way_to_a_decode_and_the_other_way():
    mixed, decode = GraphKey(8, WHOLE, 64, 1024), GraphKey(8, WHOLE)
    policy = shelf_of(mixed, decode, max_graphs=2)
    assert policy.victim() == mixed
    policy.find_mixed(5, 60, 300, WHOLE)
    assert policy.victim() == decode
