"""The limits of a router's queue, and the gate that applies them."""

from __future__ import annotations

import asyncio
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from routing_fleets import fleet_of, idle

from quire.protos.errors import DeadlineExceeded, Overloaded, Unavailable
from quire.router.admission.fair_queue import FairQueue, Ticket
from quire.router.admission.gate import AdmissionGate, AdmittedRequest, Arrival
from quire.router.admission.wait_bounds import (
    MAX_RETRY_AFTER_S,
    AdmissionLimits,
    DrainRate,
    Shortfall,
    Turnover,
    expected_wait_s,
    refusal,
)
from quire.router.policy.by_name import make_policy
from quire.router.policy.policy import Ranking, RouteRequest

LIMITS = AdmissionLimits(max_wait_s=10, max_queued_requests=90, max_queued_tokens=9000)
SPEED = 1e-3  # seconds a token


def ask(
    queue: FairQueue,
    tenant: str,
    tokens: int = 10,
    prefill_s: float = 0.01,
    queued_s: float = 0.0,
    rate: float = 1.0,
    limits: AdmissionLimits = LIMITS,
) -> Overloaded | None:
    ticket = Ticket(tenant, tokens, prefill_s)
    wait_s = expected_wait_s(queue, ticket, queued_s=queued_s, rate=rate)
    return refusal(limits, queue, ticket, wait_s=wait_s, queued_s=queued_s)


def test_a_request_that_would_wait_too_long_gets_a_time_to_retry():
    queue = FairQueue()
    for _ in range(15):
        queue.push(Ticket("a", 100, 1.0))
    error = ask(queue, "a", prefill_s=1.0, queued_s=0.5)
    assert error.retry_after_s == pytest.approx(16.5 - 10)
    assert "16.5 s" in error.message and "10 s (router.max_wait_s)" in error.message
    assert error.reason == "max_wait_s"
    assert ask(queue, "a", prefill_s=1.0, queued_s=0.5, rate=2.0) is None
    assert ask(queue, "b", prefill_s=1.0, queued_s=0.5) is None, "the others are not punished"


def test_a_short_prompt_does_not_wait_for_long_ones_that_it_passes():
    queue = FairQueue()
    for _ in range(15):
        queue.push(Ticket("a", 1000, 1.0, arrived_s=0.0))
    late = Ticket("a", 10, 0.01, arrived_s=3.5)
    assert expected_wait_s(queue, late, queued_s=0.5, rate=1.0) == pytest.approx(0.51)
    later = Ticket("a", 10, 0.01, arrived_s=4.0)
    assert expected_wait_s(queue, later, queued_s=0.5, rate=1.0) == pytest.approx(15.51)


def test_a_prompt_that_takes_longer_than_the_bound_comes_again_when_it_can_go_at_once():
    error = ask(FairQueue(), "a", prefill_s=40.0, queued_s=1.5)
    assert error.retry_after_s == pytest.approx(1.5 - LIMITS.dispatch_window_s)


@settings(max_examples=80, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 3000)), min_size=1, max_size=300
    )
)
def test_the_queue_keeps_its_bounds_and_has_room_for_newcomers(arrivals):
    limits = AdmissionLimits(max_wait_s=1e9, max_queued_requests=90, max_queued_tokens=9000)
    queue = FairQueue()
    for tenant, tokens in arrivals:
        error = ask(queue, tenant, tokens, limits=limits)
        if error is None:
            queue.push(Ticket(tenant, tokens, tokens * SPEED))
        else:
            assert 0 < error.retry_after_s <= MAX_RETRY_AFTER_S
            assert "router.max_queued_" in error.message
            assert f"(router.{error.reason})" in error.message
        assert len(queue) <= limits.max_queued_requests
        assert queue.tokens <= limits.max_queued_tokens
    tenants = {t.tenant for t in queue}
    for tenant in tenants:
        requests, tokens = queue.of_tenant(tenant)
        assert requests <= limits.max_queued_requests // 2
    # With k tenants at least 1 / (k + 1) is free.
    free = limits.max_queued_requests - len(queue)
    assert free >= limits.max_queued_requests // (len(tenants) + 1)
    assert ask(queue, "new", 0, limits=limits) is None


def test_the_rate_starts_as_the_number_of_replicas_and_becomes_the_measured_one():
    rate = DrainRate()
    assert rate.rate(4) == 4
    for _ in range(1000):  # 0.2 s of prefill in a second
        rate.on_release(0.02)
        rate.on_time(0.1)
    assert rate.rate(4) == pytest.approx(0.2, rel=0.05)


def test_a_queue_that_nothing_leaves_for_hours_has_a_rate():
    rate = DrainRate()
    for _ in range(24 * 60):
        rate.on_time(60.0)
    assert 0 < rate.rate(4) < 1e-6
    assert 0 < rate.request_rate(2.0) < 1e-6


def test_requests_leave_as_fast_as_the_time_so_far_has_not_refuted():
    rate = DrainRate()
    assert rate.request_rate() == float("inf")
    rate.on_time(0.5)
    assert rate.request_rate() == 2
    for _ in range(1000):
        rate.on_release(1)
        rate.on_time(0.25)
    assert rate.request_rate() == pytest.approx(4, rel=0.05)


def test_before_anybody_has_waited_the_rate_is_that_of_little():
    turnover, rate = Turnover(), DrainRate()
    assert turnover.rate() is None
    turnover.num_held = 10
    for held_s in (3.0, 5.0):
        turnover.on_end(held_s)
    assert turnover.rate() == 8 / 4.0
    rate.on_time(0.1)
    assert rate.request_rate(turnover.rate()) == pytest.approx(2, rel=0.1)
    for _ in range(1000):
        rate.on_release(1)
        rate.on_time(0.25)
    assert rate.request_rate(turnover.rate()) == pytest.approx(4, rel=0.05), "what was measured"
    turnover.num_held = 0
    assert turnover.rate() > 0
    assert turnover.rate(num_starting=20.0) == 20 / 4.0, "they hold places, though none has a token"


class Fleet:
    """Replicas with queues that the test sets; records the requests that were sent."""

    def __init__(self, *queued_tokens: float):
        self.rows = [self.row(tokens) for tokens in queued_tokens]
        self.sent: list[object] = []
        self.policy = make_policy("slo")
        self.rng = random.Random(1)
        self.now_s = 0.0

    @staticmethod
    def row(queued_tokens: float = 0.0, **columns) -> dict:
        return idle(reported_work=queued_tokens, prefill_s_per_work=SPEED, **columns)

    def rank(self, tokens: int) -> Ranking:
        if not self.rows:
            raise Unavailable("no replica is ready to serve the model")
        fleet = fleet_of(self.rows, tokens)
        return self.policy.choose(RouteRequest(tokens), fleet, self.now_s, self.rng)

    def arrival(self, name: object, tenant="a", tokens=100, **fields) -> Arrival:
        def send(ranking: Ranking) -> None:
            self.sent.append(name)

        fields = {"priority": 0, "deadline_s": None, "send": send} | fields
        return Arrival(tenant=tenant, tokens=tokens, rank=lambda: self.rank(tokens), **fields)

    def gate(self, **limits) -> AdmissionGate:
        return AdmissionGate(AdmissionLimits(**limits), lambda: self.now_s, max_away_s=30)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_nothing_waits_while_a_replica_is_open():
    async def run() -> None:
        fleet = Fleet(5000, 0)
        gate = fleet.gate()
        for i in range(3):
            await gate.enter(fleet.arrival(i))
        assert fleet.sent == [0, 1, 2]
        assert not gate.queue

    asyncio.run(run())


@pytest.mark.parametrize(
    "full",
    [Fleet.row(5000), Fleet.row(num_waiting=33), Fleet.row(num_places=0)],
    ids=["W", "waiting", "places"],
)
def test_requests_wait_until_a_replica_is_open_and_then_go_by_turns(full):
    async def run() -> None:
        fleet = Fleet()
        fleet.rows = [full, full]
        gate = fleet.gate(quantum_tokens=1)

        def arrive(tenant: str, i: int) -> asyncio.Task:
            def send(ranking: Ranking) -> None:
                fleet.sent.append((tenant, i))
                gate.charge(tenant, 1)

            return asyncio.create_task(gate.enter(fleet.arrival(i, tenant, send=send)))

        tasks = [*(arrive("flood", i) for i in range(4)), arrive("small", 0), arrive("small", 1)]
        await asyncio.sleep(0.05)
        assert len(gate.queue) == 6 and not fleet.sent
        fleet.rows[1] = Fleet.row(0)
        await asyncio.gather(*tasks)
        assert [tenant for tenant, _ in fleet.sent[:4]].count("small") == 2
        assert [i for tenant, i in fleet.sent if tenant == "flood"] == [0, 1, 2, 3]

    asyncio.run(run())


def test_without_free_rows_the_wait_is_for_requests_to_end():
    """Short prompts with long answers: by the waiting prefill alone, every request could start at once."""

    async def run() -> None:
        fleet = Fleet()
        fleet.rows = [Fleet.row(num_places=0)]
        gate = fleet.gate(max_wait_s=10.0, max_queued_requests=10_000)
        tasks, refused = [], []

        def send(ranking: Ranking) -> None:
            fleet.sent.append(len(fleet.sent))
            fleet.rows[0] = Fleet.row(num_places=0)

        def arrive() -> None:
            async def enter() -> None:
                try:
                    admitted = await gate.enter(fleet.arrival(len(tasks), tokens=10, send=send))
                except Overloaded as error:
                    refused.append(error)
                else:
                    admitted.answered(is_usual=False)
                    admitted.left()

            tasks.append(asyncio.create_task(enter()))

        for second in range(40):  # Two arrive each second, and one is sent.
            fleet.now_s = float(second)
            for _ in range(2):
                arrive()
            await turns()
            fleet.rows[0] = Fleet.row(num_places=1)
            await until(lambda second=second: len(fleet.sent) > second)
        # One a second, as measured: for the 99th percentile n + 2.33 sqrt(n) has to be 10 at most.
        assert 4 <= len(gate.queue) <= 7
        assert refused and all("router.max_wait_s" in error.message for error in refused)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_a_burst_that_finds_the_places_empty_does_not_wait_for_as_long_as_one_request_takes_each():
    """Requests came one at a time, of 5 s each; then 60 at once start on 60 rows, and 40 wait for these."""

    async def run() -> list[AdmittedRequest]:
        fleet = Fleet()
        fleet.rows = [Fleet.row()]
        gate = fleet.gate(max_wait_s=20.0)
        for _ in range(20):
            admitted = await gate.enter(fleet.arrival(0, tokens=10))
            admitted.answered()
            fleet.now_s += 5.0
            admitted.left()
        burst = [await gate.enter(fleet.arrival(i, tokens=10)) for i in range(100)]
        fleet.rows = [Fleet.row(num_waiting=40)]
        waiting = asyncio.create_task(gate.enter(fleet.arrival(0, tokens=10)))
        await turns()
        assert len(gate.queue) == 1, "it was let wait: 12 places come free in a second"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return burst

    assert len(asyncio.run(run())) == 100


def test_the_margin_covers_the_error_of_estimates():
    """Answers that began together end together: by the mean rate a place is near, by the burst it is not."""
    num_rows, num_places, answer_s, bound_s = 8, 4, 4.0, 5.0

    async def run() -> tuple[list[float], int]:
        fleet = Fleet()
        gate = fleet.gate(max_wait_s=bound_s, max_queued_requests=10_000)
        running: list[tuple[float, AdmittedRequest]] = []  # when they end
        waiting: list[tuple[AdmittedRequest, float]] = []  # at the replica, since when here
        waits_s: list[tuple[float, float]] = []  # begin, and until the first token
        tasks, num_sent = [], 0

        def send(ranking: Ranking) -> None:
            nonlocal num_sent
            num_sent += 1
            see()

        def see() -> None:
            """The replica's report with what was sent since."""
            free = num_places - num_sent + len(waits_s)
            fleet.rows = [Fleet.row(num_places=free, num_waiting=num_places - free)]

        async def enter() -> None:
            began_s = fleet.now_s
            try:
                admitted = await gate.enter(fleet.arrival(0, tokens=10, send=send))
            except Overloaded:
                return
            waiting.append((admitted, began_s))

        see()
        for tick in range(1200):  # of 0.1 s, and 20 requests come each second where 2 can be served
            fleet.now_s = tick / 10
            for end_s, admitted in running:
                if end_s <= fleet.now_s:
                    admitted.left()
            running = [(end_s, admitted) for end_s, admitted in running if end_s > fleet.now_s]
            while waiting and len(running) < num_rows:
                admitted, began_s = waiting.pop(0)
                running.append((fleet.now_s + answer_s, admitted))
                waits_s.append((began_s, fleet.now_s - began_s))
                admitted.answered()
            see()
            gate.notify()
            tasks += [asyncio.create_task(enter()) for _ in range(2)]
            await turns(8)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [wait_s for began_s, wait_s in waits_s if began_s > 20], len(waits_s)

    waits_s, num_served = asyncio.run(run())
    assert sum(wait_s > bound_s for wait_s in waits_s) <= 0.02 * len(waits_s)
    assert max(waits_s) > 1.0, "that was no queue"
    assert num_served >= 0.95 * 120 / answer_s * num_rows, "no place stays empty for it"


def test_a_shortfall_is_forgotten():
    shortfall = Shortfall()
    for second in range(50):
        shortfall.on_wait(1.0, 1.0 - second / 100, float(second))
    assert shortfall.margin_s(50.0) == 0, "estimates were too long"
    shortfall.on_wait(1.0, 4.0, 50.0)
    assert shortfall.margin_s(100.0) == 3.0
    assert shortfall.margin_s(110.1) == 0


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), median_s=st.floats(0.01, 10.0))
def test_of_waits_like_the_last_one_in_a_hundred_exceeds_its_margin(seed, median_s):
    rng, shortfall = random.Random(seed), Shortfall()
    num_late = 0
    for i in range(1200):
        wait_s, now_s = rng.lognormvariate(0, 1) * median_s, i / 10
        num_late += i >= 200 and wait_s > 1.0 + shortfall.margin_s(now_s)
        shortfall.on_wait(1.0, wait_s, now_s)
    assert num_late <= 30, "10 expected of 1000"


def test_a_new_request_does_not_overtake_waiting_ones():
    async def run() -> None:
        fleet = Fleet(5000)
        gate = fleet.gate()
        first = asyncio.create_task(gate.enter(fleet.arrival("first")))
        await turns()
        fleet.rows[0] = Fleet.row(0)
        await gate.enter(fleet.arrival("second"))
        await first
        assert fleet.sent == ["first", "second"]

    asyncio.run(run())


def test_a_request_whose_deadline_passes_is_never_sent():
    async def run() -> None:
        fleet = Fleet(5000)
        gate = fleet.gate()
        late = asyncio.create_task(gate.enter(fleet.arrival("late", deadline_s=5.0)))
        patient = asyncio.create_task(gate.enter(fleet.arrival("patient", deadline_s=500.0)))
        await turns()
        fleet.now_s = 6.0
        with pytest.raises(DeadlineExceeded, match="while it waited to be sent"):
            await late
        fleet.rows[0] = Fleet.row(0)
        await patient
        assert fleet.sent == ["patient"]

    asyncio.run(run())


def test_a_request_of_a_disconnected_client_is_not_sent_and_leaves_nothing():
    async def run() -> None:
        fleet = Fleet(5000)
        gate = fleet.gate()
        gone = [asyncio.create_task(gate.enter(fleet.arrival(i))) for i in range(10)]
        stays = asyncio.create_task(gate.enter(fleet.arrival("stays")))
        await turns()
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        assert len(gate.queue) == 1
        fleet.rows[0] = Fleet.row(0)
        await stays
        assert fleet.sent == ["stays"]
        assert not gate.queue and not gate._waiters

    asyncio.run(run())


def test_a_refusal_comes_before_the_prompt_is_looked_at():
    async def run() -> None:
        fleet = Fleet(5000)
        gate = fleet.gate(max_wait_s=7.0)
        waiting = []
        for i in range(2):  # 5 s at the replica and 1.5 s each
            waiting.append(asyncio.create_task(gate.enter(fleet.arrival(i, tokens=1500))))
            await turns()
        assert len(gate.queue) == 1, "5 + 1.5 + 1.5 s is beyond the bound"
        with pytest.raises(Overloaded, match=r"router\.max_wait_s"):
            await waiting[1]
        waiting.append(asyncio.create_task(gate.enter(fleet.arrival("small", tokens=400))))
        await turns()
        gate.check("a", 0)
        fleet.rows[0] = Fleet.row(
            7500
        )  # a prompt may be short and pass those that wait, but not these
        await asyncio.sleep(0.05)  # the queue sees it
        with pytest.raises(Overloaded, match=r"router\.max_wait_s") as caught:
            gate.check("a", 0)
        assert caught.value.retry_after_s > 0
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        gate.check("a", 0)

    asyncio.run(run())


def test_waiting_requests_survive_a_short_time_without_replicas_but_not_a_long_one():
    async def run() -> None:
        fleet = Fleet(5000)
        gate = fleet.gate()
        first = asyncio.create_task(gate.enter(fleet.arrival("first")))
        await turns()
        fleet.rows = []
        await asyncio.sleep(0.05)
        fleet.rows = [Fleet.row(0)]
        await first
        fleet.rows = [Fleet.row(5000)]
        second = asyncio.create_task(gate.enter(fleet.arrival("second")))
        await turns()
        fleet.rows = []
        await asyncio.sleep(0.05)
        fleet.now_s += 31
        with pytest.raises(Unavailable):
            await second
        with pytest.raises(Unavailable):
            await gate.enter(fleet.arrival("third"))
        assert fleet.sent == ["first"]

    asyncio.run(run())


def test_a_submit_that_fails_fails_its_own_request_only():
    async def run() -> None:
        fleet = Fleet(5000)
        gate = fleet.gate()

        def fail(ranking: Ranking) -> None:
            raise ValueError("broken")

        bad = asyncio.create_task(gate.enter(fleet.arrival("bad", send=fail)))
        good = asyncio.create_task(gate.enter(fleet.arrival("good")))
        await turns()
        fleet.rows[0] = Fleet.row(0)
        await good
        with pytest.raises(ValueError, match="broken"):
            await bad

    asyncio.run(run())


def test_new_limits_apply_to_new_requests_and_to_the_order_of_sending():
    async def run() -> None:
        fleet = Fleet(2000)  # two seconds
        gate = fleet.gate(quantum_tokens=1)
        assert gate.wait_behind_all_s() == 0.0
        waiting = [asyncio.create_task(gate.enter(fleet.arrival(i))) for i in range(3)]
        await turns()
        assert len(gate.queue) == 3
        gate.reconfigure(AdmissionLimits(max_queued_requests=3), max_away_s=30)
        with pytest.raises(Overloaded, match=r"free of 3 \(router.max_queued_requests\)"):
            await gate.enter(fleet.arrival("late"))
        gate.reconfigure(AdmissionLimits(max_wait_s=1.0), max_away_s=30)
        with pytest.raises(Overloaded, match=r"1 s \(router.max_wait_s\)"):
            await gate.enter(fleet.arrival("late"))
        assert len(gate.queue) == 3 and not fleet.sent, "a waiting request was removed"
        gate.reconfigure(AdmissionLimits(dispatch_window_s=5.0), max_away_s=30)
        await asyncio.gather(*waiting)
        assert fleet.sent == [0, 1, 2]

    asyncio.run(run())


def test_a_new_max_away_s_applies_to_waiting_requests():
    async def run() -> None:
        fleet = Fleet(5000)
        gate = fleet.gate()
        waiting = asyncio.create_task(gate.enter(fleet.arrival(0)))
        await turns()
        fleet.rows = []
        fleet.now_s = 20.0  # of 30
        await asyncio.sleep(0.05)
        assert not waiting.done()
        gate.reconfigure(AdmissionLimits(), max_away_s=10)
        fleet.now_s = 40.0
        with pytest.raises(Unavailable):
            await waiting

    asyncio.run(run())


@pytest.mark.parametrize("lacking", ["time", "places"])
def test_the_reported_wait_is_that_of_a_request_at_the_end_of_the_queue(lacking):
    async def run() -> None:
        fleet = Fleet()
        fleet.rows = [Fleet.row(2000, num_places=0 if lacking == "places" else 9)] * 2
        gate = fleet.gate()
        waiting = [asyncio.create_task(gate.enter(fleet.arrival(i, f"t{i}"))) for i in range(4)]
        await turns()
        assert (len(gate.queue), gate.queue.tokens) == (4, 400)
        if (
            lacking == "time"
        ):  # 0.4 s of prefill leave at two replicas' speed, none was measured yet
            assert gate.wait_behind_all_s() == pytest.approx(2.0 + 0.4 / 2)
        else:  # nothing left for half a second: two may leave in a second
            fleet.now_s = 0.5
            await until(lambda: gate.wait_behind_all_s() > 1.0)
            assert gate.wait_behind_all_s() == pytest.approx(4 / 2)
        fleet.rows = [Fleet.row(0)]
        await asyncio.gather(*waiting)
        assert gate.wait_behind_all_s() == 0.0

    asyncio.run(run())
