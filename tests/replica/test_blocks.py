import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.replica.blocks import BlockManager, IntegrityError


def test_allocation_is_all_or_nothing():
    blocks = BlockManager(3, on_demote=lambda block: None)
    assert blocks.allocate(4) is None
    assert blocks.num_free == 3
    assert sorted(blocks.allocate(3)) == [0, 1, 2]
    assert blocks.allocate(1) is None
    assert blocks.allocate(0) == []


def test_blocks_with_content_stay_cached_until_the_free_ones_run_out():
    demoted = []
    blocks = BlockManager(4, on_demote=demoted.append)
    chain = blocks.allocate(3)
    for block in chain:
        blocks.mark_content(block)
    blocks.release(reversed(chain))
    assert (blocks.num_free, blocks.num_cached, blocks.num_in_use) == (1, 3, 0)
    blocks.allocate(1)
    assert demoted == []
    blocks.allocate(2)
    assert demoted == [chain[2], chain[1]]  # the leaf first
    assert (blocks.num_free, blocks.num_cached, blocks.num_in_use) == (0, 1, 3)


def test_the_least_recently_used_chain_goes_first():
    demoted = []
    blocks = BlockManager(4, on_demote=demoted.append)
    first, second = blocks.allocate(2), blocks.allocate(2)
    for block in first + second:
        blocks.mark_content(block)
    blocks.release(reversed(first))
    blocks.release(reversed(second))
    blocks.retain(first)
    blocks.release(reversed(first))
    blocks.allocate(2)
    assert demoted == [second[1], second[0]]


def test_a_release_too_many_is_an_error():
    blocks = BlockManager(2, on_demote=lambda block: None)
    (block,) = blocks.allocate(1)
    blocks.release([block])
    with pytest.raises(IntegrityError, match=f"block {block} is released more often"):
        blocks.release([block])


def test_a_pool_may_be_empty_but_no_smaller():
    assert BlockManager(0, on_demote=lambda block: None).allocate(1) is None
    with pytest.raises(ValueError, match="num_blocks must be >= 0, got -1"):
        BlockManager(-1, on_demote=lambda block: None)


@pytest.mark.parametrize("owners", [[0, 0, 0], [2, 0, 0], [1, 1, 0]])
def test_the_check_compares_with_the_owners_that_were_walked(owners):
    blocks = BlockManager(3, on_demote=lambda block: None)
    assert blocks.allocate(1) == [0]
    blocks.check([1, 0, 0])
    with pytest.raises(IntegrityError, match="owners and a reference count of"):
        blocks.check(owners)


class BlockMachine(RuleBasedStateMachine):
    """Owners that take and give back at random; demotion is judged against a plain list in LRU order."""

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(7, on_demote=self.demoted)
        self.held: list[list[int]] = []
        self.known: list[int] = []  # cached, least recently used first

    def demoted(self, block):
        assert self.known.pop(0) == block

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
            self.manager.mark_content(block)
        if share:
            self.manager.retain(chain)
            self.held.append(list(chain))

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 9))
    def take_cached(self, pick):
        block = self.known.pop(pick % len(self.known))
        assert self.manager.num_unowned([block]) == 1
        self.manager.retain([block])
        self.held.append([block])

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 9))
    def forget(self, pick):
        self.manager.forget_content(self.known.pop(pick % len(self.known)))

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9))
    def release(self, pick):
        chain = self.held.pop(pick % len(self.held))
        self.manager.release(reversed(chain))
        others = {block for other in self.held for block in other}
        self.known += [
            block
            for block in reversed(chain)
            if block not in others and self.manager.has_content(block)
        ]

    @invariant()
    def conserved(self):
        owners = [sum(block in chain for chain in self.held) for block in range(7)]
        self.manager.check(owners)
        assert self.manager.num_cached == len(self.known)
        assert self.manager.num_in_use == sum(count > 0 for count in owners)


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
