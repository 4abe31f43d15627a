"""Which replicas only compute prompts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.wire import Frame
from quire.router.fleet.block_peers import BlockPeers
from quire.router.fleet.prefill_pool import PrefillPool
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from tests.router.fleet.test_block_peers import hello_of

NAMES = st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=40)
SHARES = st.floats(0.01, 0.99)


def members(share, names):
    pool = PrefillPool(BlockPeers())
    pool.share = share
    return pool.members(names)


@given(NAMES, SHARES, st.randoms())
def test_all_routers_choose_the_same_ones_and_no_pool_is_empty(names, share, chance):
    chosen = members(share, names)
    assert chosen == members(share, chance.sample(names, len(names)))
    assert chosen == set() if len(names) < 2 else 0 < len(chosen) < len(names)
    assert members(0.0, names) == set()
    if len(names) >= 4:
        assert abs(len(chosen) - share * len(names)) <= 1


@given(NAMES.filter(lambda names: len(names) > 2), SHARES, st.data())
def test_a_replica_that_leaves_changes_few_roles(names, share, data):
    before = members(share, names)
    left = data.draw(st.sampled_from(names))
    after = members(share, [name for name in names if name != left])
    assert len((before - {left}) ^ after) <= 1


def table_of(share, **nodes) -> ReplicaTable:
    table = ReplicaTable(PrefixIndex())
    table.prefill_pool.share = share
    for name, node in nodes.items():
        hello = hello_of(name, node.strip("-"), exports="-" not in node)
        table.add(name, "e", weights=hello.weights)
        table.peers.add(name, hello)
        table.on_frame(name, Frame("e"), 0.0)
    return table


def prefill(table, **facts) -> dict[str, float]:
    fleet = table.fleet([], 1000, 0.0, **facts)
    if fleet.prefill is None:
        return {}
    columns = zip(*(getattr(fleet.prefill, c) for c in ("is_prefill", "s_per_token")), strict=True)
    found = zip(fleet.replicas, columns, strict=True)
    return {name: seconds for name, (is_prefill, seconds) in found if is_prefill}


def test_a_replica_that_drains_gives_its_role_to_another():
    names = [f"r{i}" for i in range(4)]
    table = table_of(0.25, **dict.fromkeys(names, "1"))
    (chosen,) = prefill(table)
    # A request that avoids it finds no other one: its prompt is computed where it decodes.
    assert prefill(table, avoid={chosen}) == {}
    table.set_draining(chosen)
    (successor,) = prefill(table)
    assert successor != chosen
    table.set_lost(successor)
    assert len(prefill(table)) == 1
    assert prefill(table, weights="others") == {}
    table.prefill_pool.share = 0.0
    assert prefill(table) == {}


@pytest.mark.parametrize(
    ("nodes", "is_near"),
    [(("1", "1"), True), (("1-", "1-"), True), (("1", "2"), False), (("1-", "2"), None)],
)
def test_blocks_have_to_reach_a_replica_that_decodes(nodes, is_near):
    names = random.Random(0).sample("abcdef", 2)
    found = prefill(table_of(0.5, **dict(zip(names, nodes, strict=True))))
    assert len(found) == (is_near is not None)
    assert all((seconds == 0) == is_near for seconds in found.values())
