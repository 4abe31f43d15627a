"""The order in which grammars are checked: turns of tenants, bounds, deadlines."""

from __future__ import annotations

import pytest

from quire.protos.errors import Overloaded
from quire.replica.grammar.check_queue import MAX_WAITING, MAX_WAITING_PER_TENANT, GrammarQueue


def drain(queue) -> list:
    order = []
    while (turn := queue.pop()) is not None:
        tenant, waiting = turn
        order.append((tenant, waiting.key, [waiter for _, waiter in waiting.waiters]))
    return order


def test_tenants_take_turns():
    queue = GrammarQueue()
    for key in (b"1", b"2", b"3"):
        queue.push("greedy", key, [(9.0, key)])
    queue.push("other", b"x", [(9.0, b"x")])
    assert [(t, k) for t, k, _ in drain(queue)] == [
        ("greedy", b"1"),
        ("other", b"x"),
        ("greedy", b"2"),
        ("greedy", b"3"),
    ]
    assert len(queue) == 0


def test_a_tenant_waits_once_for_a_text():
    queue = GrammarQueue()
    queue.push("a", b"1", [(9.0, "first")])
    queue.push("b", b"1", [(9.0, "another tenant's")])
    queue.push("a", b"1", [(9.0, "second")])
    assert len(queue) == 2
    assert drain(queue) == [
        ("a", b"1", ["first", "second"]),
        ("b", b"1", ["another tenant's"]),
    ]


def test_bounds_name_whose_grammars_wait():
    queue = GrammarQueue()
    for i in range(MAX_WAITING_PER_TENANT):
        queue.push("a", b"%d" % i, [(9.0, i)])
    queue.push("a", b"0", [(9.0, "the same text")])
    with pytest.raises(Overloaded, match=f"at most {MAX_WAITING_PER_TENANT} of this tenant, got"):
        queue.push("a", b"new", [(9.0, 0)])
    for i in range(MAX_WAITING - MAX_WAITING_PER_TENANT):
        queue.push(f"t{i}", b"0", [(9.0, i)])
    with pytest.raises(Overloaded, match=f"at most {MAX_WAITING} of all tenants, got"):
        queue.push("new", b"0", [(9.0, 0)])
    assert len(queue) == MAX_WAITING
    queue.push("new", b"0", [(9.0, 0)], is_bounded=False)
    assert len(queue) == len(drain(queue)) == MAX_WAITING + 1


def test_those_that_waited_too_long_go_and_others_stay():
    queue = GrammarQueue()
    queue.push("a", b"1", [(1.0, "early"), (3.0, "late")])
    queue.push("b", b"1", [(2.0, "b")])
    assert queue.expire(0.5) == []
    assert queue.expire(2.0) == ["early", "b"]
    assert len(queue) == 1
    assert drain(queue) == [("a", b"1", ["late"])]
