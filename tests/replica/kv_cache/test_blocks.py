from collections import Counter
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.replica.config import DemotionOrder
from quire.replica.kv_cache.block_eviction import EVICTION_ORDERS
from quire.replica.kv_cache.blocks import BlockManager, IntegrityError


def test_allocation_is_all_or_nothing():
    blocks = BlockManager(3, on_evict=lambda block: None)
    assert blocks.allocate(4) is None
    assert blocks.num_free == 3
    assert sorted(blocks.allocate(3)) == [0, 1, 2]
    assert blocks.allocate(1) is None
    assert blocks.allocate(0) == []


def test_blocks_with_content_stay_cached_until_the_free_ones_run_out():
    evicted = []
    blocks = BlockManager(4, on_evict=evicted.append)
    chain = blocks.allocate(3)
    for block in chain:
        blocks.mark_contents([block])
    blocks.release(reversed(chain))
    assert (blocks.num_free, blocks.num_cached, blocks.num_in_use) == (1, 3, 0)
    blocks.allocate(1)
    assert evicted == []
    blocks.allocate(2)
    assert evicted == [chain[2], chain[1]]  # the leaf first
    assert (blocks.num_free, blocks.num_cached, blocks.num_in_use) == (0, 1, 3)


def test_the_least_recently_used_chain_goes_first():
    evicted = []
    blocks = BlockManager(4, on_evict=evicted.append)
    first, second = blocks.allocate(2), blocks.allocate(2)
    for block in first + second:
        blocks.mark_contents([block])
    blocks.release(reversed(first))
    blocks.release(reversed(second))
    blocks.add_owner(first)
    blocks.release(reversed(first))
    blocks.allocate(2)
    assert evicted == [second[1], second[0]]


def test_retained_blocks_go_last_and_the_longest_retained_gives_way_to_the_bound():
    evicted = []
    blocks = BlockManager(6, on_evict=evicted.append, max_retained=3)
    first, second, third = (chain_of(blocks, 2) for _ in range(3))
    for chain in (first, second):
        blocks.retain(reversed(chain))
    blocks.release(reversed(first))
    blocks.release(reversed(second))
    blocks.release(reversed(third))
    assert (blocks.num_retained, blocks.num_cached, blocks.num_available) == (3, 6, 6)
    assert blocks.allocate(4, may_evict_retained=False) is None
    assert blocks.allocate(6) is not None
    # `first` has more than its share: its leaf became ordinary when `second` was released, before `third` was.
    assert evicted == [first[1], third[1], third[0], first[0], second[1], second[0]]


def chain_of(blocks, count):
    chain = blocks.allocate(count)
    for block in chain:
        blocks.mark_contents([block])
    return chain


def test_most_recent_gives_up_the_chain_released_last_leaf_first():
    evicted = []
    blocks = BlockManager(6, on_evict=evicted.append, order="most_recent")
    first, second = chain_of(blocks, 3), chain_of(blocks, 3)
    blocks.release(reversed(first))
    blocks.release(reversed(second))
    blocks.allocate(5)
    assert evicted == [*reversed(second), *reversed(first[1:])]


def test_most_recent_keeps_a_shared_prefix_until_all_that_continue_it_are_gone():
    evicted = []
    blocks = BlockManager(6, on_evict=evicted.append, order="most_recent")
    prefix = chain_of(blocks, 2)
    blocks.add_owner(prefix)
    one, other = prefix + chain_of(blocks, 2), prefix + chain_of(blocks, 2)
    blocks.release(reversed(one))
    blocks.release(reversed(other))  # the prefix is released with this one
    blocks.allocate(6)
    assert evicted == [*reversed(other[2:]), *reversed(one)]


def test_most_recent_gives_up_what_fell_out_of_a_window_before_its_chain():
    evicted = []
    blocks = BlockManager(4, on_evict=evicted.append, order="most_recent")
    passed, chain = chain_of(blocks, 2), chain_of(blocks, 2)
    blocks.release(passed, passed=True)
    blocks.release(reversed(chain))
    blocks.allocate(4)
    assert evicted == [*passed, *reversed(chain)]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), order=st.sampled_from(get_args(DemotionOrder)))
def test_no_block_goes_before_one_that_continues_it(data, order):
    """Rows take prefixes of a tree of chains and extend them; whoever owns a block owns those before it."""
    parent, children, evicted = {}, Counter(), []

    def evict(block):
        assert children[block] == 0
        if (before := parent.pop(block)) is not None:
            children[before] -= 1
        evicted.append(block)

    blocks = BlockManager(10, on_evict=evict, order=order)
    rows = []
    for _ in range(data.draw(st.integers(1, 40))):
        if rows and data.draw(st.booleans()):
            blocks.release(reversed(rows.pop(data.draw(st.integers(0, len(rows) - 1)))))
            continue
        chain = []
        if parent and data.draw(st.booleans()):
            block = data.draw(st.sampled_from(sorted(parent)))
            while block is not None:
                chain.insert(0, block)
                block = parent[block]
        blocks.add_owner(chain)
        fresh = blocks.allocate(data.draw(st.integers(0, 4)))
        for block in fresh or ():
            parent[block] = chain[-1] if chain else None
            if chain:
                children[chain[-1]] += 1
            chain.append(block)
            blocks.mark_contents([block])
        rows.append(chain)
        blocks.check([sum(block in row for row in rows) for block in range(10)])


def test_the_heap_of_most_recent_does_not_grow():
    blocks = BlockManager(8, on_evict=lambda block: None, order="most_recent")
    chain = chain_of(blocks, 8)
    blocks.release(reversed(chain))
    for _ in range(500):
        blocks.add_owner(chain)
        blocks.release(reversed(chain))
    assert len(blocks._ordinary._heap) <= 2 * 8 + 64


def test_a_release_too_many_is_an_error():
    blocks = BlockManager(2, on_evict=lambda block: None)
    (block,) = blocks.allocate(1)
    blocks.release([block])
    with pytest.raises(IntegrityError, match=f"block {block} is released more often"):
        blocks.release([block])


def test_a_pool_may_be_empty_but_no_smaller():
    assert BlockManager(0, on_evict=lambda block: None).allocate(1) is None
    with pytest.raises(ValueError, match="num_blocks must be >= 0, got -1"):
        BlockManager(-1, on_evict=lambda block: None)


@pytest.mark.parametrize("owners", [[0, 0, 0], [2, 0, 0], [1, 1, 0]])
def test_the_check_compares_with_the_owners_that_were_walked(owners):
    blocks = BlockManager(3, on_evict=lambda block: None)
    assert blocks.allocate(1) == [0]
    blocks.check([1, 0, 0])
    with pytest.raises(IntegrityError, match="owners and a reference count of"):
        blocks.check(owners)


class BlockMachine(RuleBasedStateMachine):
    """Owners that take and give back at random; eviction is compared with plain lists in LRU order."""

    MAX_RETAINED = 3

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(7, on_evict=self.evicted, max_retained=self.MAX_RETAINED)
        self.held: list[list[int]] = []
        self.ordinary: list[int] = []  # cached, least recently used first
        self.retained: list[int] = []  # the same, of retained blocks
        self.is_retained: set[int] = set()  # those with owners included

    @property
    def known(self):
        return self.ordinary + self.retained

    def evicted(self, block):
        assert (self.ordinary or self.retained).pop(0) == block
        self.is_retained.discard(block)

    def cache(self, block):
        (self.retained if block in self.is_retained else self.ordinary).append(block)
        if len(self.retained) > self.MAX_RETAINED:
            self.ordinary.append(self.retained.pop(0))
            self.is_retained.discard(self.ordinary[-1])

    def uncache(self, pick):
        block = self.known[pick % len(self.known)]
        (self.ordinary if block in self.ordinary else self.retained).remove(block)
        return block

    @rule(pick=st.integers(0, 6), ends=st.booleans())
    def retain(self, pick, ends):
        if not self.manager.has_content(pick):
            return
        is_cached = pick in self.known and not (ends and pick not in self.is_retained)
        if is_cached:
            (self.retained if pick in self.is_retained else self.ordinary).remove(pick)
        if ends:
            self.is_retained.discard(pick)
            self.manager.end_retention([pick])
        else:
            self.is_retained.add(pick)
            self.manager.retain([pick])
        if is_cached:
            self.cache(pick)

    @rule(count=st.integers(1, 3))
    def allocate_sparing_retained(self, count):
        available = self.manager.num_available - len(self.retained)
        blocks = self.manager.allocate(count, may_evict_retained=False)
        assert (blocks is None) == (count > available)
        if blocks is not None:
            self.held.append(blocks)

    @rule(count=st.integers(1, 9))
    def allocate(self, count):
        available = self.manager.num_available
        blocks = self.manager.allocate(count)
        assert (blocks is None) == (count > available)
        if blocks is not None:
            assert len(set(blocks)) == count
            assert not set(blocks) & {block for chain in self.held for block in chain}
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9), share=st.booleans())
    def mark_or_share(self, pick, share):
        chain = self.held[pick % len(self.held)]
        for block in chain:
            self.manager.mark_contents([block])
        if share:
            self.manager.add_owner(chain)
            self.held.append(list(chain))

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 9))
    def take_cached(self, pick):
        block = self.uncache(pick)
        assert self.manager.num_unowned([block]) == 1
        self.manager.add_owner([block])
        self.held.append([block])

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 9))
    def forget(self, pick):
        block = self.uncache(pick)
        self.is_retained.discard(block)
        self.manager.forget_content(block)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9))
    def release(self, pick):
        chain = self.held.pop(pick % len(self.held))
        self.manager.release(reversed(chain))
        others = {block for other in self.held for block in other}
        for block in reversed(chain):
            if block not in others and self.manager.has_content(block):
                self.cache(block)

    @invariant()
    def conserved(self):
        owners = [sum(block in chain for chain in self.held) for block in range(7)]
        self.manager.check(owners)
        assert self.manager.num_cached == len(self.known)
        assert self.manager.num_retained == len(self.retained) <= self.MAX_RETAINED
        assert self.is_retained == {b for b in range(7) if self.manager.is_retained(b)}
        assert self.manager.num_in_use == sum(count > 0 for count in owners)


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_every_order_that_can_be_configured_evicts():
    assert tuple(EVICTION_ORDERS) == get_args(DemotionOrder)
