"""Members shared by Serve's router and the bus, from several threads."""

from __future__ import annotations

import itertools
import sys
import threading
import uuid

import pytest

from quire.router.fleet.membership import Membership, channel


def test_a_listener_hears_changes_only():
    membership = Membership()
    membership.update(frozenset("a"))
    heard: list[frozenset[str]] = []
    assert membership.listen(heard.append) == frozenset("a")
    membership.update(frozenset("a"))
    membership.update(frozenset("ab"))
    membership.discard("a")
    membership.discard("a")
    assert heard == [frozenset("ab"), frozenset("b")]


def test_a_second_listener_takes_the_place_of_the_first():
    membership = Membership()
    first: list[frozenset[str]] = []
    second: list[frozenset[str]] = []
    membership.listen(first.append)
    membership.listen(second.append)
    membership.unlisten(first.append)  # it is not the current listener
    membership.update(frozenset("a"))
    membership.unlisten(second.append)
    membership.update(frozenset("b"))
    assert (first, second) == ([], [frozenset("a")])


def test_a_channel_is_one_for_each_name():
    name = uuid.uuid4().hex
    assert channel(name) is channel(name)
    assert channel(name) is not channel(name + "x")


@pytest.fixture
def many_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_threads_lose_no_change_and_the_last_one_heard_holds(many_switches):
    """Each thread adds and removes its own member; no other thread may undo that."""
    membership = Membership()
    heard: list[frozenset[str]] = []
    membership.listen(heard.append)
    names = [f"replica-{i}" for i in range(200)]
    membership.update(frozenset(names))

    def discard(part: list[str]) -> None:
        for name in part:
            membership.discard(name)

    threads = [threading.Thread(target=discard, args=(names[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert membership.listen(heard.append) == frozenset()
    assert [len(members) for members in heard] == list(range(200, -1, -1))
    assert all(later < earlier for earlier, later in itertools.pairwise(heard))


def test_nothing_is_missed_between_the_answer_of_listen_and_the_first_call(many_switches):
    for i in range(100):
        membership = Membership()
        heard: list[frozenset[str]] = []
        thread = threading.Thread(target=membership.update, args=(frozenset({str(i)}),))
        thread.start()
        now = membership.listen(heard.append)
        thread.join()
        assert [now, *heard][-1] == frozenset({str(i)})
