"""The state that the page reads: what it says, and that its size has a bound."""

from __future__ import annotations

import asyncio
import json

from page_fleets import FleetService

from quire.cluster.page.page_routes import MAX_BYTES_PER_S, PERIOD_S
from quire.cluster.page.page_state import MAX_AGE_S, StateFeed, page_state
from quire.protos.wire import Frame, Load
from quire.router.explain.live_state import MAX_DECISIONS, MAX_MOVES, WINDOW, merged
from quire.router.status_types import RoutingRegret
from quire.router.types import Explain


def state_of(service: FleetService, payer: str | None = None) -> dict:
    """As the script has it, with a row for each replica."""
    state = json.loads(json.dumps(page_state(asyncio.run(service.live_state(payer)))))
    columns = state["replicas"]
    state["replicas"] = [
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    ]
    return state


def test_a_hundred_replicas_with_a_million_blocks_come_twice_a_second():
    service = FleetService(100, 10_000)
    service.pass_time(2.0, requests_per_s=300)
    state = asyncio.run(StateFeed().state(service))
    blocks = sum(sum(tier) for tier in json.loads(state)["replicas"]["device"])
    assert blocks == 1_000_000
    assert len(state) / MAX_BYTES_PER_S <= PERIOD_S


def test_the_size_does_not_grow_with_requests():
    service = FleetService(3)
    service.pass_time(1.0, requests_per_s=400)
    before = len(asyncio.run(StateFeed().state(service)))
    service.pass_time(3.0, requests_per_s=400)
    for name in list(service.replicas)[:2]:
        service.lose(name)
    state = state_of(service)
    assert len(state["requests"]) == MAX_DECISIONS and len(state["moves"]) <= MAX_MOVES
    assert state["num_decisions"] > WINDOW
    assert len(asyncio.run(StateFeed().state(service))) < 1.5 * before


def test_every_block_has_one_state():
    service = FleetService(1, host=False)
    (name,) = service.replicas
    load = Load(blocks_free=10, blocks_cached=20, blocks_in_use=30, blocks_total=64)
    service.table.on_frame(name, Frame("e", load=load), service.now_s)
    (replica,) = state_of(service)["replicas"]
    assert replica["device"] == [30, 4, 20, 10]  # 4 wait for the end of a step
    assert replica["host"] is None
    load = load._replace(host_blocks_free=1, host_blocks_cached=2, host_blocks_total=3)
    service.table.on_frame(name, Frame("e", load=load), service.now_s)
    (replica,) = state_of(service)["replicas"]
    assert replica["host"] == [0, 0, 2, 1]


def test_a_replica_without_a_report_and_a_router_without_replicas_have_a_state():
    service = FleetService(1)
    service.table.add("new", "e")
    assert [r["state"] for r in state_of(service)["replicas"]][-1] == "syncing"
    for name in ("new", *service.replicas):
        service.table.remove(name)
    state = state_of(service)
    assert state["replicas"] == [] and state["ttft_s"] == [None, None]


def answered(explain: Explain, ttft_s: float, cached_tokens: int) -> None:
    explain.answered_attempt = explain.attempts
    explain.ttft_s, explain.cached_tokens = ttft_s, cached_tokens


def test_hits_and_latencies_are_those_of_answered_requests():
    service = FleetService(1)
    for ttft_s in (0.4, 0.1, 0.3, 0.2):
        answered(service.ask(), ttft_s, 64)
    service.ask()  # not answered yet
    state = state_of(service)
    (replica,) = state["replicas"]
    assert (replica["answered"], replica["cached_tokens"]) == (4, 256)
    told = [request["prompt_tokens"] for request in state["requests"]]
    assert replica["prompt_tokens"] == sum(told[1:])  # the newest comes first
    assert state["ttft_s"] == [0.3, 0.4]
    assert [request["outcome"] is None for request in state["requests"]] == [True] + [False] * 4


def test_the_regret_of_the_policy_is_said():
    service = FleetService(3)
    assert state_of(service)["regrets"] == []
    service.pass_time(1.0, requests_per_s=100)
    service.regret.step()
    (regret,) = state_of(service)["regrets"]
    assert regret["policy"] == "slo" and regret["half_s"] is None  # from one sample
    service.pass_time(1.0, requests_per_s=100)
    service.regret.step()
    (regret,) = state_of(service)["regrets"]
    assert regret["requests"] == 200
    assert 0 <= regret["mean_s"] < regret["modelled_s"] and regret["half_s"] >= 0
    # The simple replicas take 0.9 to 1.4 times the model's time, and 12 ms for the way.
    assert 0.5 * regret["measured_s"] < regret["modelled_s"] < 2 * regret["measured_s"]


def test_a_request_that_was_moved_counts_once_and_says_where_it_came_from():
    service = FleetService(2)
    first, second = service.replicas
    service.ask("chat", attempts=1)
    explain = service.ask("chat", left=first, attempts=2)
    answered(explain, 0.2, 0)
    state = state_of(service)
    (move,) = state["moves"]
    assert (move["request_id"], move["left"], move["replica"]) == ("chat", first, second)
    assert sum(replica["answered"] for replica in state["replicas"]) == 1


def test_the_state_of_a_replica_is_said():
    service = FleetService(3)
    lost, draining, _ = service.replicas
    service.table.set_lost(lost)
    service.table.set_draining(draining)
    found = {replica["name"]: replica["state"] for replica in state_of(service)["replicas"]}
    assert found[lost] == "lost" and found[draining] == "draining"
    service.table.lost_after_s = 1.0
    service.now_s += 2.0  # silent, and not marked yet
    assert {r["state"] for r in state_of(service)["replicas"]} == {"lost"}


def test_viewers_share_one_encoding():
    service, now_s, calls = FleetService(2), [0.0], []
    live_state = service.live_state

    async def slow_state(payer=None):
        calls.append(payer)
        await asyncio.sleep(0.01)  # as for the other routers' answers
        return await live_state(payer)

    service.live_state = slow_state

    async def watch() -> None:
        feed = StateFeed(clock=lambda: now_s[0])
        viewers = [asyncio.ensure_future(feed.state(service)) for _ in range(50)]
        await asyncio.sleep(0)
        viewers[0].cancel()  # a viewer that leaves takes nothing from the others
        states = set(await asyncio.gather(*viewers[1:]))
        assert len(states) == len(calls) == 1
        service.ask()
        now_s[0] += MAX_AGE_S
        assert await feed.state(service) not in states and len(calls) == 2
        assert len(feed._made) == 1

    asyncio.run(watch())


def test_the_states_of_several_routers_are_added():
    services = [FleetService(2, seed=1), FleetService(2, seed=1)]
    services[1].ring.router_id = "router-b"
    for i, service in enumerate(services):
        for n in range(15):
            service.now_s += 1.0
            answered(service.ask(f"r{i}-{n}"), 0.1 * (i + 1), 64)
    services[0].ask("moved", left="elsewhere", attempts=2)
    own, other = (asyncio.run(service.live_state()) for service in services)
    own.regrets.append(RoutingRegret("slo", 10, 0.1, 0.01, 0.5, 0.6))
    other.regrets.append(RoutingRegret("slo", 30, 0.3, 0.01, 0.5, 0.6))
    state = merged(own, [own, other])  # a router also asks itself
    assert [(r.num_requests, round(r.mean_s, 3)) for r in state.regrets] == [(40, 0.25)]
    assert state.routers == sorted([own.router, "router-b"]) and state.router == own.router
    assert state.num_decisions == 31 and len(state.ttft_s) == 30
    assert sum(found.num_requests for found in state.hits.values()) == 30
    assert sum(found.cached_tokens for found in state.hits.values()) == 30 * 64
    shown = [decision["request_id"] for decision in state.decisions]
    assert len(shown) == MAX_DECISIONS and {name[:2] for name in shown} >= {"r0", "r1"}
    times = [decision["decided"] for decision in state.decisions]
    assert times == sorted(times, reverse=True)
    assert [move["request_id"] for move in state.moves] == ["moved"]
    assert merged(own, []).num_decisions == own.num_decisions
    assert sum(f.num_requests for f in own.hits.values()) == 15, "the parts stay as they were"
