"""Layer groups: how layers are grouped, what a group needs, and what the scheduler does with its blocks."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_config import small_config

from quire.protos.routing_hash import RoutingHasher
from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepResult
from quire.replica.kv_cache.groups import (
    FULL_ATTENTION,
    LayerGroup,
    LayerKind,
    group_layers,
    max_sequence_tokens,
    sequence_blocks,
)
from quire.replica.scheduler.scheduler import Scheduler

WINDOW = LayerGroup(window=20)
CONFIG = small_config(
    max_model_len=1024,
    max_batch_tokens=32,
)


def kind(**changes):
    return LayerKind(**{"num_kv_heads": 2, "head_dim": 16} | changes)


def layout(windows):
    kinds = [kind(window=w) for w in windows]
    return [(group.window, len(group.layers)) for group in group_layers(kinds)]


def test_layers_of_one_kind_are_one_group():
    (group,) = group_layers([kind(window=7)] * 5)
    assert group == LayerGroup((0, 1, 2, 3, 4), num_kv_heads=2, head_dim=16, window=7)


def test_kinds_of_equal_number_are_two_groups_full_attention_first():
    assert layout([9, None] * 12) == [(None, 12), (9, 12)]


def test_a_rare_kind_sets_the_width():
    """Gemma 3 4B: 5 of 34 layers are full; 6 wide, two of 36 places stay empty."""
    sizes = layout([None if (i + 1) % 6 == 0 else 1024 for i in range(34)])
    assert sizes == [(None, 5), *[(1024, 6)] * 4, (1024, 5)]


def test_layers_of_different_shape_are_in_different_groups():
    groups = group_layers([kind(), kind(num_kv_heads=4), kind(chunk=32), kind(value_dim=8)])
    assert [(g.layers, g.num_kv_heads, g.chunk) for g in groups] == [
        ((0,), 2, None),
        ((1,), 4, None),
        ((3,), 2, None),
        ((2,), 2, 32),
    ]


def test_larger_layers_are_fewer_in_a_block():
    """Gemma 4 26B: 25 sliding layers of 8 heads of 256, 5 full ones of 2 heads of 512, half as large."""
    full = kind(num_kv_heads=2, head_dim=512)
    kinds = [kind(window=1024, num_kv_heads=8, head_dim=256)] * 5 + [full]
    groups = group_layers(kinds * 5)
    assert [(g.head_dim, len(g.layers)) for g in groups] == [(512, 5), *[(256, 5)] * 5]


def test_a_layer_that_reads_another_takes_no_room():
    kinds = [kind(window=9), kind(), kind(window=9, source=0), kind(source=1), kind(source=1)]
    full, sliding = group_layers(kinds)
    assert (full.layers, full.readers) == ((1,), ((3, 1), (4, 1)))
    assert (sliding.layers, sliding.readers) == ((0,), ((2, 0),))


@pytest.mark.parametrize("source", [0, 2])
def test_a_layer_cannot_read_another_kind_or_a_layer_that_stores_nothing(source):
    kinds = [kind(), kind(window=9), kind(window=9, source=1), kind(window=9, source=source)]
    with pytest.raises(ValueError, match=r"layer 3 is .*, but layer .* that it reads is"):
        group_layers(kinds)


@st.composite
def mixed_kinds(draw):
    """Kinds of up to 40 layers; each may read an earlier layer of its kind."""
    shapes = draw(
        st.lists(
            st.builds(
                kind,
                window=st.sampled_from([None, 9]),
                num_kv_heads=st.sampled_from([1, 2, 8]),
                head_dim=st.sampled_from([64, 80, 256, 512]),
                value_dim=st.sampled_from([None, 64]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    kinds = []
    for shape in draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=40)):
        possible = [layer for layer, other in enumerate(kinds) if other == shape]
        source = draw(st.sampled_from([None, None, *possible]))
        kinds.append(dataclasses.replace(shape, source=source))
    return kinds


@given(kinds=mixed_kinds())
def test_groups_hold_each_layer_once_and_pad_little(kinds):
    groups = group_layers(kinds)
    stored = [layer for group in groups for layer in group.layers]
    assert sorted(stored) == [layer for layer, k in enumerate(kinds) if k.source is None]
    readers = {layer: source for group in groups for layer, source in group.readers}
    assert readers == {i: k.source for i, k in enumerate(kinds) if k.source is not None}
    for group in groups:
        assert {source for _, source in group.readers} <= set(group.layers)
        shape = {field.name: getattr(group, field.name) for field in dataclasses.fields(LayerKind)}
        assert all(kinds[layer] == LayerKind(**shape) for layer in group.layers)
    assert [g.is_full for g in groups] == sorted((g.is_full for g in groups), reverse=True)
    needed = sum(kinds[layer].token_elements for layer in stored)
    block = max(len(group.layers) * group.token_elements for group in groups)
    # The bound, or no worse than blocks that hold one layer of the largest kind.
    assert block * len(groups) <= max(
        needed * 9 / 8, len(stored) * max(kinds[layer].token_elements for layer in stored)
    )


@given(
    window=st.one_of(st.none(), st.integers(1, 40)),
    chunk=st.one_of(st.none(), st.integers(1, 40)),
    steps=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    block_size=st.sampled_from([1, 4, 8, 32]),
)
def test_max_blocks_bounds_every_growth_and_is_reached_within_a_block(
    window, chunk, steps, block_size
):
    group = LayerGroup(window=window, chunk=chunk)
    bound = group.max_blocks(sum(steps), max(steps), block_size)
    start = 0
    for count in steps:
        first = int(group.first_key(start)) // block_size
        assert -(-(start + count) // block_size) - first <= bound
        start += count
    if group.is_full:
        assert bound == -(-sum(steps) // block_size)


@given(
    groups=st.lists(
        st.one_of(st.just(FULL_ATTENTION), st.builds(LayerGroup, window=st.integers(1, 60))),
        min_size=1,
        max_size=3,
    ),
    num_blocks=st.integers(1, 60),
)
def test_the_longest_sequence_is_the_longest_that_fits(groups, num_blocks):
    longest = max_sequence_tokens(groups, num_blocks, 8, 400)
    if len(groups) == 1 and groups[0].is_full:
        assert longest == num_blocks * 8
        return
    assert sequence_blocks(groups, longest, 1, 8) <= num_blocks
    assert longest == 400 or sequence_blocks(groups, longest + 8, 1, 8) > num_blocks


@pytest.mark.parametrize("groups", [(), (WINDOW, FULL_ATTENTION)])
def test_a_configuration_has_groups_and_full_attention_comes_first(groups):
    with pytest.raises(ValueError, match="full attention first"):
        dataclasses.replace(CONFIG, groups=groups)


def test_a_reach_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        LayerGroup(window=0)


# -- the scheduler ---------------------------------------------------------------------------------------


def make_scheduler(*groups, **changes):
    return Scheduler(dataclasses.replace(CONFIG, groups=groups, **changes))


def submit(scheduler, key, prompt, max_tokens=4):
    request = Request(key, list(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return scheduler.add(request)


def run(scheduler, token=7):
    """Steps to the end: {key: last delta}, and the most blocks in use at once."""
    last, peak = {}, 0
    while (plan := scheduler.plan(0.0)) is not None:
        peak = max(peak, scheduler.memory.blocks.num_in_use)
        scheduler.check()
        result = StepResult(np.full(len(plan.sampling.token_index), token), 0.01)
        last |= {delta.key: delta for delta in scheduler.commit(plan, result, 0.0)}
        scheduler.check()
    return last, peak


def test_a_long_prompt_on_a_sliding_model_fits_a_small_cache():
    scheduler = make_scheduler(WINDOW, num_blocks=9)
    assert submit(scheduler, "long", np.arange(1000) % 900, max_tokens=20) is None
    last, peak = run(scheduler)
    assert last["long"].finish_reason == "length"
    # 19 keys before the chunk of 32, from the end of a block on; trimmed a step later.
    assert peak <= WINDOW.max_blocks(1020, 32, 8) <= 9
    assert scheduler.book.counters.num_preemptions == 0


def test_a_full_group_still_needs_the_whole_prompt():
    scheduler = make_scheduler(FULL_ATTENTION, WINDOW, num_blocks=20)
    longest = scheduler.config.max_cache_tokens
    assert longest == (20 - WINDOW.max_blocks(1024, 1, 8)) * 8 == 128
    refusal = submit(scheduler, "long", range(longest), max_tokens=1)
    assert "the bound is 127" in refusal.facts.error.message
    assert submit(scheduler, "fits", range(longest - 4)) is None
    assert run(scheduler)[0]["fits"].finish_reason == "length"


def test_a_request_that_does_not_fit_all_groups_gets_nothing():
    scheduler = make_scheduler(FULL_ATTENTION, WINDOW, num_blocks=24)
    submit(scheduler, "first", range(64), max_tokens=8)
    scheduler.commit(*planned(scheduler), 0.0)
    free, owned = scheduler.memory.blocks.num_available, scheduler.memory.blocks.num_in_use
    assert free >= 8  # enough for the prompt's full attention alone
    submit(scheduler, "second", range(500, 564))
    plan, result = planned(scheduler)
    assert plan.num_rows == 1 and scheduler.num_waiting == 1
    assert scheduler.memory.blocks.num_in_use <= owned + 4  # the first one's own next chunk
    scheduler.commit(plan, result, 0.0)
    last, _ = run(scheduler)
    assert {key: d.finish_reason for key, d in last.items()} == dict.fromkeys(
        ("first", "second"), "length"
    )


def planned(scheduler):
    plan = scheduler.plan(0.0)
    return plan, StepResult(np.full(len(plan.sampling.token_index), 7), 0.01)


@pytest.mark.parametrize("groups", [(WINDOW,), (FULL_ATTENTION, WINDOW), (LayerGroup(chunk=64),)])
def test_a_hit_needs_only_the_windows_last_blocks(groups):
    scheduler = make_scheduler(*groups, num_blocks=200)
    prompt = np.arange(160)
    submit(scheduler, "cold", prompt)
    run(scheduler)
    # As if the pool had run low: all but the last 24 tokens' sliding blocks go.
    chain = scheduler.memory.prefix.match(np.arange(161)).entries
    assert len(chain) == 20
    for entry in chain[:16] if groups[-1].chunk else chain[:17]:
        block = entry.blocks[-1]
        scheduler.memory.prefix.forget(block)
        scheduler.memory.blocks.forget_content(block)
    scheduler.check()
    submit(scheduler, "warm", [*prompt, 999])
    last, _ = run(scheduler)
    assert last["warm"].facts.num_cached_tokens == 160
    # A shorter prompt ends where the window's blocks are gone.
    submit(scheduler, "short", [*prompt[:128], 999])
    last, _ = run(scheduler)
    assert last["short"].facts.num_cached_tokens == (128 if groups[-1].chunk else 0)


def test_a_chain_without_old_blocks_is_still_held_and_told():
    scheduler = make_scheduler(WINDOW, num_blocks=200)
    prompt = np.arange(160).astype(np.int32)
    submit(scheduler, "cold", prompt)
    run(scheduler)
    hashes = set(RoutingHasher("m", "r", "").hashes(prompt[:128]).tolist())
    chain = scheduler.memory.prefix.match(np.arange(161)).entries
    for entry in chain[:-1]:
        scheduler.memory.prefix.forget(entry.blocks[0])
    assert scheduler.events.held() == hashes
    scheduler.memory.prefix.forget(chain[-1].blocks[0])
    assert scheduler.events.held() == set()
    assert len(scheduler.memory.prefix) == 0


def test_under_pressure_what_fell_out_of_the_window_is_demoted_first():
    scheduler = make_scheduler(FULL_ATTENTION, WINDOW, num_blocks=46)
    submit(scheduler, "cold", np.arange(160))
    run(scheduler)
    # 21 blocks of each group were written; another request takes what is oldest.
    submit(scheduler, "other", np.arange(500, 572))
    run(scheduler)
    submit(scheduler, "warm", [*range(160), 999])
    last, _ = run(scheduler)
    assert last["warm"].facts.num_cached_tokens == 160


def test_prefills_that_wait_for_each_others_sliding_blocks_all_end():
    scheduler = make_scheduler(
        LayerGroup(window=64), num_blocks=14, max_batch_tokens=32, prefix_caching=False
    )
    for key in range(4):
        submit(scheduler, key, np.arange(key * 200, key * 200 + 190), max_tokens=30)
    last, peak = run(scheduler)
    assert {d.finish_reason for d in last.values()} == {"length"} and len(last) == 4
    assert peak <= 14
