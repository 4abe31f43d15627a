"""The order of waiting requests and running prefills, and that nobody waits for ever."""

import functools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.protos.fairness import AGEING, OLDEST_EVERY
from quire.protos.sampling_params import SamplingParams
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepResult
from quire.replica.scheduler.order import (
    PrefillOrder,
    PriorityQueue,
    ShortestFirstQueue,
    urgency,
)
from quire.replica.scheduler.scheduler import Scheduler

CONFIG = dict(
    model_name="m",
    revision="r",
    device="cpu",
    dtype="float32",
    vocab_size=1000,
    eos_token_ids=(2,),
    max_model_len=512,
    block_size=8,
    num_blocks=64,
    max_batch_tokens=32,
    max_running_requests=1,
    max_waiting_requests=6000,
    safety_margin=0.0,
    max_prefill_ms=None,
    resume_margin=0.0,
    prefix_caching=False,
    deterministic=True,
    num_threads=1,
    scheduler="priority",
)


def make_request(key, priority=0, deadline_s=None, prompt=(100,), max_tokens=1):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(key, list(prompt), params, priority=priority, deadline_s=deadline_s)


def waiting_request(i, priority=0, deadline_s=None):
    request = make_request(i, priority, deadline_s)
    request.arrival_index = i
    return request


def commit(scheduler, plan):
    tokens = np.full(len(plan.sampling.token_index), 7)
    return scheduler.commit(plan, StepResult(tokens, 0.01), 0.0)


def foretold_s(request):
    return 0.01 * request.num_missing_tokens


def shortest_first(request):
    return request.arrival_s + AGEING * foretold_s(request), request.arrival_index


class QueueMachine(RuleBasedStateMachine):
    """Against a plain list: those that returned first, else by urgency, and every eighth start the oldest."""

    def __init__(self):
        super().__init__()
        self.queue, self.rank = PriorityQueue(), urgency
        self.returned, self.arrived = [], []
        self.num_passed = 0
        self.num_arrivals = 0

    def expected_head(self):
        if self.returned:
            return self.returned[0]
        if self.rank is urgency and self.num_passed >= OLDEST_EVERY - 1:
            return self.arrived[0]
        return min(self.arrived, key=self.rank)

    @rule(priority=st.integers(-2, 2), deadline_s=st.sampled_from([None, 1.0, 9.0]))
    def arrive(self, priority, deadline_s):
        request = waiting_request(self.num_arrivals, priority, deadline_s)
        request.arrival_s = 0.1 * self.num_arrivals
        request.num_tokens = 7 * (priority + 3)  # the more urgent, the shorter
        request.num_expected_cached = 8 if deadline_s == 9.0 else 0
        self.num_arrivals += 1
        self.queue.append(request)
        self.arrived.append(request)

    @rule(count=st.integers(2, 40))
    def burst(self, count):
        for i in range(count):
            self.arrive(i % 3 - 1, None)

    @precondition(lambda self: self.arrived or self.returned)
    @rule(come_back=st.booleans())
    def start(self, come_back):
        request = self.expected_head()
        assert self.queue.head() is request
        self.queue.start(request)
        if request in self.returned:
            self.returned.remove(request)
        else:
            is_oldest = request is self.arrived[0]
            self.num_passed = 0 if is_oldest else self.num_passed + 1
            self.arrived.remove(request)
        if come_back:
            self.queue.push_front(request)
            self.returned.insert(0, request)

    @precondition(lambda self: self.arrived or self.returned)
    @rule(pick=st.integers(0, 1000), count=st.integers(1, 30))
    def give_up(self, pick, count):
        for _ in range(count):
            waiting = self.returned + self.arrived
            if not waiting:
                return
            request = waiting[pick % len(waiting)]
            self.queue.remove(request)
            (self.returned if request in self.returned else self.arrived).remove(request)

    @invariant()
    def agree(self):
        expected = self.returned + sorted(self.arrived, key=self.rank)
        assert list(self.queue) == expected
        assert len(self.queue) == len(expected)
        assert self.queue.keys() == {request.key for request in expected}
        self.queue.check()
        assert len(self.queue._heap) <= 2 * len(self.arrived) + 64
        if expected:
            assert self.queue.head() is self.expected_head()


class ShortestFirstMachine(QueueMachine):
    """The same by arrival and length, without turns."""

    def __init__(self):
        super().__init__()
        self.queue, self.rank = ShortestFirstQueue(foretold_s), shortest_first


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestShortestFirstMachine = ShortestFirstMachine.TestCase
TestShortestFirstMachine.settings = TestQueueMachine.settings


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, 400), st.integers(0, 500)),
        min_size=2,
        max_size=40,
    )
)
def test_a_prompt_is_passed_only_by_those_that_come_within_the_bound(arrivals):
    """However many short ones come, each for itself may pass a long one for so long and no longer."""
    queue, now_s = ShortestFirstQueue(foretold_s), 0.0
    for i, (pause_s, num_tokens, num_cached) in enumerate(arrivals):
        now_s += pause_s
        request = waiting_request(i)
        request.arrival_s, request.num_tokens, request.num_expected_cached = (
            now_s,
            num_tokens,
            num_cached,
        )
        queue.append(request)
    started = []
    while queue:
        started.append(queue.head())
        queue.start(queue.head())
    for position, request in enumerate(started):
        for passed_by in started[:position]:
            later_s = passed_by.arrival_s - request.arrival_s
            longer_s = foretold_s(request) - foretold_s(passed_by)
            assert later_s <= AGEING * longer_s + 1e-9


def scheduler_that_knows_its_speed(**options):
    config = {**CONFIG, "scheduler": "shortest_first", "max_batch_tokens": 64, **options}
    scheduler = Scheduler(EngineConfig(**config))
    scheduler.speed.observe(50, 0, 0.5, 50 * 51 // 2, end_s=0.5)  # 10 ms a token
    return scheduler


def starts_in_order(scheduler):
    """Keys in the order in which they end, one row at a time and a token each."""
    ended = []
    while scheduler.num_waiting or scheduler.num_running:
        ended += [delta.key for delta in commit(scheduler, scheduler.plan(9.0))]
        scheduler.check()
    return ended


def test_a_short_prompt_passes_a_long_one_that_waits():
    scheduler = scheduler_that_knows_its_speed()
    for key, num_tokens, arrival_s in (("long", 60, 1.0), ("short", 10, 2.9), ("late", 10, 3.1)):
        request = make_request(key, prompt=range(3, 3 + num_tokens))
        request.arrival_s = arrival_s
        scheduler.add(request)
    # 50 tokens more are 0.5 s: four times as much later a short one comes too late.
    assert starts_in_order(scheduler) == ["short", "long", "late"]


def test_what_is_expected_in_the_cache_counts_neither_as_length_nor_as_load():
    scheduler = scheduler_that_knows_its_speed()
    for key, num_tokens, num_cached in (("new", 20, 0), ("follower", 60, 56), ("full", 30, 99)):
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        ids = list(range(3, 3 + num_tokens))
        scheduler.add(Request(key, ids, params, arrival_s=1.0, num_expected_cached=num_cached))
    assert scheduler.load().queued_prefill_tokens == 20 + 4 + 1
    assert starts_in_order(scheduler) == ["full", "follower", "new"]
    assert scheduler.load().queued_prefill_tokens == 0


def test_without_a_speed_the_shortest_first_are_the_first_to_come():
    scheduler = Scheduler(EngineConfig(**{**CONFIG, "scheduler": "shortest_first"}))
    for i, num_tokens in enumerate((30, 4, 20)):
        scheduler.add(make_request(i, prompt=range(3, 3 + num_tokens)))
    assert starts_in_order(scheduler)[0] == 0


def test_priority_then_deadline_then_arrival():
    queue = PriorityQueue()
    given_order = [(0, None), (0, 5.0), (-1, 9.0), (0, 2.0), (-1, None), (0, None)]
    for i, (priority, deadline_s) in enumerate(given_order):
        queue.append(waiting_request(i, priority, deadline_s))
    started = []
    while queue:
        started.append(queue.head().arrival_index)
        queue.start(queue.head())
    assert started == [2, 4, 3, 1, 0, 5]


@settings(max_examples=150, deadline=None)
@given(arrivals=st.lists(st.lists(st.integers(-3, 3), max_size=3), min_size=1, max_size=120))
def test_whoever_finds_w_others_waiting_starts_among_the_next_eight_times_w_plus_one(arrivals):
    queue, bound, num_starts, num_arrivals = PriorityQueue(), {}, 0, 0

    def start():
        nonlocal num_starts
        head = queue.head()
        queue.start(head)
        num_starts += 1
        assert num_starts <= bound[head.key]

    for priorities in arrivals:
        for priority in priorities:
            request = waiting_request(num_arrivals, priority)
            bound[num_arrivals] = num_starts + OLDEST_EVERY * (len(queue) + 1)
            num_arrivals += 1
            queue.append(request)
        if queue:
            start()
    while queue:
        start()
        assert all(num_starts < bound[request.key] for request in queue)


def test_a_flood_of_urgent_requests_does_not_starve_the_others():
    scheduler = Scheduler(EngineConfig(**CONFIG))
    scheduler.add(make_request("patient", priority=5))
    for i in range(3):
        scheduler.add(make_request(("other", i), priority=4))
    ended = []
    for i in range(60):
        scheduler.add(make_request(("urgent", i), priority=-1))
        ended += [delta.key for delta in commit(scheduler, scheduler.plan(0.0))]
        scheduler.check()
    assert ended[:7] == [("urgent", i) for i in range(7)]
    assert ended.index("patient") == 7
    assert [ended.index(("other", i)) for i in range(3)] == [15, 23, 31]


def test_an_urgent_prompt_goes_before_the_rest_of_a_long_one():
    scheduler = Scheduler(EngineConfig(**{**CONFIG, "max_running_requests": 8}))
    scheduler.add(make_request("long", prompt=range(3, 203)))
    commit(scheduler, scheduler.plan(0.0))
    scheduler.add(make_request("later", prompt=range(3, 23)))
    scheduler.add(make_request("urgent", priority=-1, prompt=range(3, 23)))
    plan = scheduler.plan(0.0)
    assert np.diff(plan.cu_q).tolist() == [20, 12]
    assert plan.positions[20] == 32  # the long one goes on with what is left
    assert [delta.key for delta in commit(scheduler, plan)] == ["urgent"]


def test_a_long_prompt_ends_under_a_flood_of_urgent_ones():
    config = {**CONFIG, "max_running_requests": 8, "num_blocks": 512}
    scheduler = Scheduler(EngineConfig(**config))
    scheduler.add(make_request("long", prompt=range(3, 203)))
    ended, num_steps = set(), 0
    commit(scheduler, scheduler.plan(0.0))
    while "long" not in ended:
        scheduler.add(make_request(num_steps, priority=-1, prompt=range(3, 203)))
        ended |= {delta.key for delta in commit(scheduler, scheduler.plan(0.0))}
        scheduler.check()
        num_steps += 1
        # Its own turn comes every eighth step, with a whole step's budget.
        assert num_steps <= OLDEST_EVERY * -(-200 // 32)


def test_prefills_take_turns_in_order_of_admission():
    order = PrefillOrder(by_urgency=True)
    admitted = [waiting_request(0, 1), waiting_request(1, 0)]
    found = [[r.key for r in order.sort(admitted)[0]] for _ in range(2 * OLDEST_EVERY)]
    assert found == ([[1, 0]] * (OLDEST_EVERY - 1) + [[0, 1]]) * 2
    fifo = PrefillOrder(by_urgency=False)
    assert [r.key for r in fifo.sort(admitted)[0]] == [0, 1]
    assert not fifo.sort(admitted)[1]


def test_a_request_that_was_reset_returns_before_more_urgent_ones():
    config = {**CONFIG, "num_blocks": 6, "max_running_requests": 4}
    scheduler = Scheduler(EngineConfig(**config))
    for key in ("old", "new"):
        scheduler.add(make_request(key, prompt=range(100, 115), max_tokens=20))
    commit(scheduler, scheduler.plan(0.0))
    scheduler.add(make_request("urgent", priority=-9, prompt=range(300, 340)))
    while scheduler.book.counters.num_preemptions == 0:
        commit(scheduler, scheduler.plan(0.0))
    snapshot = scheduler.snapshot()
    assert [entry["key"] for entry in snapshot["returning"]] == ["old"]
    assert [entry["key"] for entry in snapshot["waiting"]] == ["urgent"]
    while scheduler.num_waiting == 2:
        commit(scheduler, scheduler.plan(0.0))
    assert [entry["key"] for entry in scheduler.snapshot()["waiting"]] == ["urgent"]


def test_a_waiting_request_meets_its_deadline_under_priority():
    scheduler = Scheduler(EngineConfig(**CONFIG))
    scheduler.add(make_request("a", max_tokens=9))
    scheduler.add(make_request("b", deadline_s=5.0, priority=-1))
    commit(scheduler, scheduler.plan(6.0))
    assert scheduler.num_waiting == 0
    scheduler.check()


def count_calls(action):
    """Python and C calls that `action` makes."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("scheduler_kind", ["shortest_first", "fifo", "prefill_first", "priority"])
def test_a_step_costs_the_same_however_many_wait(scheduler_kind):
    def crowd(num_waiting):
        config = {**CONFIG, "scheduler": scheduler_kind, "max_running_requests": 4}
        scheduler = Scheduler(EngineConfig(**config))
        for i in range(4):
            scheduler.add(make_request(("runs", i), prompt=range(3, 9), max_tokens=60))
        commit(scheduler, scheduler.plan(0.0))
        for i in range(num_waiting):
            scheduler.add(make_request(i, priority=1 + i % 5, deadline_s=1e9 - i))
        return scheduler

    def turn(scheduler, num_waiting):
        # One ends, one starts, one gives up, one comes: and a step without any of it.
        scheduler.abort(("runs", 0))
        scheduler.abort(num_waiting // 2)
        scheduler.add(make_request("comes", priority=3))
        for _ in range(2):
            commit(scheduler, scheduler.plan(0.0))

    found = []
    for num_waiting in (40, 5000):
        scheduler = crowd(num_waiting)
        found.append(count_calls(functools.partial(turn, scheduler, num_waiting)))
        scheduler.check()
    assert found[1] <= found[0] + 10
