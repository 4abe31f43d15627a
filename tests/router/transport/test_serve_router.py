"""The ranking that Serve gets; the base class is Ray's own."""

from __future__ import annotations

import asyncio
import inspect
import random
import uuid
from types import SimpleNamespace

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.request_router import FIFOMixin, RequestRouter

from quire.router.fleet import membership
from quire.router.transport import serve_router
from quire.router.transport.serve_router import DecidedRouter

DEPLOYMENT = DeploymentID(name="Replica", app_name="default")


def replica(name: str) -> SimpleNamespace:
    return SimpleNamespace(replica_id=ReplicaID(name, DEPLOYMENT))


def request(**kwargs: object) -> PendingRequest:
    async def make() -> PendingRequest:  # it makes a future
        return PendingRequest(args=[], kwargs=kwargs, metadata=None)

    return asyncio.run(make())


@pytest.fixture
def router(monkeypatch) -> DecidedRouter:
    """Without what the base class needs of a running Serve."""

    def update(self: RequestRouter, replicas: list) -> None:
        self._replicas = {replica.replica_id: replica for replica in replicas}

    def died(self: RequestRouter, replica_id: ReplicaID) -> None:
        self._replicas.pop(replica_id)

    monkeypatch.setattr(RequestRouter, "update_replicas", update)
    monkeypatch.setattr(RequestRouter, "on_replica_actor_died", died)
    router = object.__new__(DecidedRouter)
    router._replicas = {}
    router.told = []
    monkeypatch.setattr(
        RequestRouter,
        "on_new_queue_len_info",
        lambda self, replica_id, length: self.told.append((replica_id.unique_id, length)),
    )
    router.initialize_state(channel=f"test-{uuid.uuid4().hex}")
    return router


def ranked(router: DecidedRouter, candidates: list, pending: PendingRequest | None) -> list[str]:
    groups = asyncio.run(router.choose_replicas(candidates, pending))
    assert all(len(group) == 1 for group in groups)
    return [group[0].replica_id.unique_id for group in groups]


def test_candidates_come_as_the_route_says_and_all_others_after(router):
    candidates = [replica(name) for name in "abcdef"]
    for seed in range(10):
        random.Random(seed).shuffle(candidates)
        names = ranked(router, candidates, request(route=["d", "gone", "b"]))
        assert names[:2] == ["d", "b"]
        assert sorted(names) == list("abcdef")


@pytest.mark.parametrize("kwargs", [{}, {"route": []}], ids=["absent", "empty"])
def test_without_a_route_all_are_offered(router, kwargs):
    candidates = [replica(name) for name in "abc"]
    assert sorted(ranked(router, candidates, request(**kwargs))) == list("abc")
    assert sorted(ranked(router, candidates, None)) == list("abc")
    assert ranked(router, [], request(**kwargs)) == []


def test_serve_backs_off_when_all_are_full(router):
    pending = request(route=["a"])
    assert not pending.routing_context.should_backoff
    ranked(router, [replica("a")], pending)
    assert pending.routing_context.should_backoff


def test_a_call_gets_its_own_replica_not_the_oldest_waiting_calls(router):
    assert not issubclass(DecidedRouter, FIFOMixin)


def test_the_membership_hears_of_replicas_and_of_dead_actors(router):
    heard: list[frozenset[str]] = []
    assert router._membership.listen(heard.append) == frozenset()
    router.update_replicas([replica("a"), replica("b")])
    router.on_replica_actor_died(replica("a").replica_id)
    router.update_replicas([])
    assert heard == [frozenset("ab"), frozenset("b"), frozenset()]


def test_serve_asks_no_new_replica_for_its_load(router):
    router.update_replicas([replica("a")])
    router.update_replicas([replica("a"), replica("b")])
    router.update_replicas([replica("b")])
    assert router.told == [("a", 0), ("b", 0)]


def test_a_replica_that_serve_no_longer_lists_gets_only_calls_for_it_alone(router):
    router.update_replicas([replica("a"), replica("b")])
    router.update_replicas([replica("b"), replica("c")])
    candidates = list(router.curr_replicas.values())
    assert ranked(router, candidates, request(route=["a"])) == ["a", "b", "c"]
    assert ranked(router, candidates, request(route=["a", "c", "b"])) == ["c", "b"]
    assert sorted(ranked(router, candidates, request())) == ["b", "c"]
    assert sorted(ranked(router, candidates, None)) == ["b", "c"]
    router.update_replicas([replica("a")])
    candidates = list(router.curr_replicas.values())
    assert ranked(router, candidates, request(route=["b", "a"])) == ["a"], "it is listed again"
    assert ranked(router, candidates, request(route=["b"])) == ["b", "a"]


def test_a_replica_that_serve_no_longer_lists_is_kept_until_it_dies_or_for_a_while(
    router, monkeypatch
):
    router.update_replicas([replica("a"), replica("b"), replica("c")])
    router.update_replicas([replica("c")])
    router.on_replica_actor_died(replica("a").replica_id)
    router.update_replicas([replica("c"), replica("d")])
    assert {r.unique_id for r in router.curr_replicas} == set("bcd")
    assert {r.unique_id for r in router._unlisted} == {"b"}
    # For those that Serve no longer lists from now on.
    monkeypatch.setattr(serve_router, "KEPT_S", 0.0)
    router.update_replicas([replica("d")])
    assert {r.unique_id for r in router.curr_replicas} == set("bd")
    at_s = router._unlisted[replica("b").replica_id]
    monkeypatch.setattr(serve_router.time, "monotonic", lambda: at_s)
    router.update_replicas([replica("d")])
    assert {r.unique_id for r in router.curr_replicas} == set("d") and not router._unlisted


def test_the_channel_of_the_application_is_the_buss():
    """Serve makes the instance itself and hands it `request_router_kwargs`: only the name is shared."""
    name = f"test-{uuid.uuid4().hex}"
    router = object.__new__(DecidedRouter)
    router.initialize_state(**{"channel": name})
    assert router._membership is membership.channel(name)
    assert list(inspect.signature(DecidedRouter.initialize_state).parameters) == ["self", "channel"]
