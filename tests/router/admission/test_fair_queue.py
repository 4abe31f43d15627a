"""Deficit round robin: no tenant starves, no tenant gets far ahead, and the queue never idles."""

from __future__ import annotations

import math
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.protos.fairness import AGEING, OLDEST_EVERY
from quire.router.admission.fair_queue import FairQueue, Ticket

TENANTS = "abcdef"
QUANTUM = 100


def ticket(tenant: str = "a", tokens: int = 10, **fields) -> Ticket:
    return Ticket(tenant, tokens, tokens / 1000, **fields)


def take(queue: FairQueue) -> Ticket:
    first = queue.next()
    assert first is not None
    queue.take(first)
    return first


class Machine(RuleBasedStateMachine):
    """Any sequence of operations against a plain list of what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(QUANTUM)
        self.waiting: list[Ticket] = []
        self.now_s = 0.0

    @rule(
        tenant=st.sampled_from(TENANTS),
        tokens=st.integers(0, 1000),
        priority=st.integers(-2, 2),
        in_s=st.none() | st.integers(1, 20),
    )
    def push(self, tenant, tokens, priority, in_s):
        deadline_s = None if in_s is None else self.now_s + in_s
        fields = {"priority": priority, "deadline_s": deadline_s, "arrived_s": self.now_s}
        new = ticket(tenant, tokens, **fields)
        self.queue.push(new)
        self.waiting.append(new)

    @precondition(lambda self: self.waiting)
    @rule(cost=st.integers(0, 5000))
    def take_next(self, cost):
        """Work conservation: some request is next for any balances."""
        first = self.queue.next()
        assert first in self.waiting
        assert self.queue.next() is first
        self.queue.take(first)
        self.waiting.remove(first)
        self.queue.charge(first.tenant, cost)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        gone = data.draw(st.sampled_from(self.waiting))
        self.queue.remove(gone)
        self.waiting.remove(gone)

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.integers(-500, 20_000))
    def charge(self, tenant, tokens):
        self.queue.charge(tenant, tokens)

    @rule(by_s=st.integers(1, 10))
    def pass_time(self, by_s):
        self.now_s += by_s
        expired = self.queue.expire(self.now_s)
        late = [t for t in self.waiting if t.deadline_s is not None and t.deadline_s <= self.now_s]
        assert set(map(id, expired)) == set(map(id, late))
        self.waiting = [t for t in self.waiting if t not in late]

    @invariant()
    def counts_what_waits(self):
        assert len(self.queue) == len(self.waiting)
        assert set(map(id, self.queue)) == set(map(id, self.waiting))
        assert self.queue.tokens == sum(t.tokens for t in self.waiting)
        for tenant in TENANTS:
            own = [t for t in self.waiting if t.tenant == tenant]
            assert self.queue.of_tenant(tenant) == (len(own), sum(t.tokens for t in own))
            new = ticket(tenant, 0, priority=10, arrived_s=self.now_s)
            ahead_s = self.queue.prefill_s_ahead(new)
            assert ahead_s <= sum(t.prefill_s for t in self.waiting) + 1e-9
            assert self.queue.num_ahead(new) <= len(self.waiting)
        if not self.waiting:
            assert self.queue.next() is None


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tenants_that_always_wait_get_the_same_within_the_stated_bound(data):
    """Whatever single requests cost, and although most of the cost is charged long after they went."""
    queue = FairQueue(QUANTUM)
    tenants = TENANTS[: data.draw(st.integers(2, 5))]
    most = {t: data.draw(st.integers(1, 3000), label=f"largest of {t}") for t in tenants}
    charged: Counter[str] = Counter()
    late: list[tuple[str, int]] = []
    history = [Counter(charged)]
    for tenant in tenants:
        for _ in range(2):
            queue.push(ticket(tenant))
    for _ in range(data.draw(st.integers(50, 200))):
        first = take(queue)
        queue.push(ticket(first.tenant))
        cost = data.draw(st.integers(1, most[first.tenant]))
        at_once = cost // 3
        queue.charge(first.tenant, at_once)
        charged[first.tenant] += at_once
        late.append((first.tenant, cost - at_once))
        if len(late) > 2:  # three run at a time
            tenant, rest = late.pop(0)
            queue.charge(tenant, rest)
            charged[tenant] += rest
        history.append(Counter(charged))
    # A tenant that may go can have four requests' costs charged before it is below zero and stops.
    bound = 3 * QUANTUM + 2 * 4 * max(most.values())
    begin = data.draw(st.integers(0, len(history) - 1))
    served = {t: history[-1][t] - history[begin][t] for t in tenants}
    assert max(served.values()) - min(served.values()) <= bound


def test_the_share_is_equal_although_one_tenant_sends_ten_times_as_much_and_larger():
    queue = FairQueue(QUANTUM)
    for _ in range(1000):
        queue.push(ticket("greedy", 50))
    for _ in range(100):
        queue.push(ticket("modest", 10))
    served = Counter()
    while queue.of_tenant("modest")[0]:
        first = take(queue)
        queue.charge(first.tenant, first.tokens)
        served[first.tenant] += first.tokens
    assert abs(served["greedy"] - served["modest"]) <= 2 * QUANTUM + 50


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.integers(1, 2000), min_size=1, max_size=5), debt=st.integers(0, 5000))
def test_a_wait_is_bounded_by_the_service_of_others_before_the_turn(costs, debt):
    queue = FairQueue(QUANTUM)
    others = [f"other{i}" for i in range(len(costs))]
    for name in others:
        for _ in range(3):
            queue.push(ticket(name))
    queue.push(ticket("x"))
    queue.charge("x", debt)
    rounds = debt // QUANTUM + 1
    served = 0
    while True:
        first = take(queue)
        if first.tenant == "x":
            break
        queue.push(ticket(first.tenant))
        cost = costs[others.index(first.tenant)]
        queue.charge(first.tenant, cost)
        served += cost
    assert served <= len(costs) * ((rounds + 1) * QUANTUM + max(costs))


def test_priority_rules_within_a_tenant_and_not_beyond_it():
    queue = FairQueue(1)
    for priority in (3, 1, 2):
        queue.push(ticket("a", priority=priority))
    queue.push(ticket("b", priority=100))
    order = []
    while len(queue):
        first = take(queue)
        queue.charge(first.tenant, 1)
        order.append((first.tenant, first.priority))
    assert [p for tenant, p in order if tenant == "a"] == [1, 2, 3]
    assert ("b", 100) in order[:2]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 3000)), min_size=2, max_size=40))
def test_the_short_pass_the_long_but_only_as_far_as_their_age_allows(arrivals):
    queue, waiting, now_s = FairQueue(), [], 0.0
    for after_s, tokens in arrivals:
        now_s += after_s
        waiting.append(ticket(tokens=tokens, arrived_s=now_s))
        queue.push(waiting[-1])
    taken = [take(queue) for _ in waiting]
    for i, first in enumerate(taken):
        for passed in taken[i + 1 :]:
            if passed.number < first.number:  # it came before, and goes later
                earlier_s = first.arrived_s - passed.arrived_s
                assert earlier_s <= AGEING * (passed.prefill_s - first.prefill_s) + 1e-9
            elif (i + 1) % OLDEST_EVERY:  # in order of arrival: it was not so much shorter
                later_s = passed.arrived_s - first.arrived_s
                assert later_s >= AGEING * (first.prefill_s - passed.prefill_s) - 1e-9


def test_the_short_start_sooner_than_in_order_of_arrival():
    queue = FairQueue()
    tickets = [ticket(tokens=4000 if i % 8 == 0 else 100, arrived_s=0.1 * i) for i in range(80)]
    for one in tickets:
        queue.push(one)

    def mean_start_s(order):
        now_s, starts_s = 8.0, []
        for one in order:
            if one.tokens == 100:
                starts_s.append(now_s)
            now_s += one.prefill_s
        return sum(starts_s) / len(starts_s)

    assert mean_start_s([take(queue) for _ in tickets]) < 0.9 * mean_start_s(tickets)


def test_a_deadline_decides_among_equal_priorities():
    queue = FairQueue()
    queue.push(ticket(deadline_s=None))
    queue.push(ticket(deadline_s=9.0))
    queue.push(ticket(deadline_s=5.0))
    assert [take(queue).deadline_s for _ in range(3)] == [5.0, 9.0, None]


def test_a_patient_request_goes_although_more_urgent_ones_keep_coming():
    queue = FairQueue()
    patient = ticket(priority=5)
    queue.push(patient)
    for i in range(OLDEST_EVERY):
        queue.push(ticket(priority=0))
        if take(queue) is patient:
            assert i == OLDEST_EVERY - 1
            return
    pytest.fail("the patient request was never the oldest")


def test_debt_is_paid_by_the_rounds_that_pass_while_its_tenant_is_away():
    queue = FairQueue(QUANTUM)
    for _ in range(100):
        queue.push(ticket("b", 10))
    queue.push(ticket("a"))
    queue.charge("a", 10 * QUANTUM)
    queue.remove(next(t for t in queue if t.tenant == "a"))
    for _ in range(12 * QUANTUM // 10):  # twelve rounds of b
        if queue.of_tenant("b")[0] < 2:
            queue.push(ticket("b", 10))
        take(queue)
        queue.charge("b", 10)
        queue.push(ticket("b", 10))
    queue.push(ticket("a"))
    ahead = 0
    while take(queue).tenant != "a":
        queue.push(ticket("b", 10))
        queue.charge("b", 10)
        ahead += 10
    assert ahead <= 2 * QUANTUM


def test_an_empty_queue_clears_debts():
    queue = FairQueue(QUANTUM)
    queue.push(ticket("a"))
    queue.charge("a", 1e9)
    take(queue)
    queue.charge("a", 1e9)  # No effect while the queue is empty.
    queue.push(ticket("a"))
    queue.push(ticket("b"))
    assert {take(queue).tenant, take(queue).tenant} == {"a", "b"}


def test_of_the_others_only_as_much_is_ahead_as_the_rounds_give_them():
    queue = FairQueue()
    for _ in range(100):
        queue.push(Ticket("flood", 1000, 1.0))
    queue.push(Ticket("small", 100, 0.1))
    flood, urgent = Ticket("flood", 1000, 1.0), Ticket("flood", 1000, 1.0, priority=-1)
    new, small = Ticket("new", 500, 0.5), Ticket("small", 100, 0.1)
    assert queue.prefill_s_ahead(flood) == pytest.approx(100.1)
    assert queue.prefill_s_ahead(new) == pytest.approx(0.5 + 0.1)
    assert queue.prefill_s_ahead(small) == pytest.approx(0.1 + 0.2)
    assert queue.prefill_s_ahead(urgent) == pytest.approx(1.0 * 0 + 0.1)
    assert queue.num_ahead(flood) == len(queue)
    assert queue.num_ahead(new) == 2
    assert queue.num_ahead(urgent) == 1


def test_a_deep_debt_costs_no_loop():
    queue = FairQueue(1)
    for tenant in TENANTS:
        queue.push(ticket(tenant))
        queue.charge(tenant, 1e12)
    assert queue.next() is not None  # One by one these would be 10^12 rounds.
    assert math.isfinite(queue.tokens)


def test_a_quantum_must_be_positive():
    with pytest.raises(ValueError, match="quantum_tokens must be at least 1, got 0"):
        FairQueue(0)


def test_another_quantum_holds_from_the_next_turn_and_leaves_no_tenant_ahead():
    queue = FairQueue(10_000)

    def serve(count):
        """Each one that goes costs 100 tokens and is followed by another of its tenant."""
        served = Counter()
        for _ in range(count):
            first = take(queue)
            queue.charge(first.tenant, 100)
            queue.push(ticket(first.tenant))
            served[first.tenant] += 1
        return served

    for tenant in "ab":
        for _ in range(2):
            queue.push(ticket(tenant))
    assert serve(50)["a"] in (0, 50)  # One tenant has the turn for 100 requests.
    queue.set_quantum(100)
    for _ in range(10):
        counts = serve(20)
        assert abs(counts["a"] - counts["b"]) <= 2
    with pytest.raises(ValueError, match="quantum_tokens must be at least 1, got 0"):
        queue.set_quantum(0)
    assert serve(20)["a"] in range(9, 12)
