"""The replica table, with a simulated replica behind a stream that may lose frames."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.routing_hash import ROUTING_BLOCK_TOKENS, state_marks
from quire.protos.wire import CacheEvents, Frame, Load
from quire.router.fleet.event_replay import SNAPSHOT
from quire.router.fleet.replicas import ReplicaTable
from quire.router.fleet.tracked_replica import ReplicaState
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.baselines import LeastLoaded
from quire.router.policy.by_name import make_policy
from quire.router.policy.policy import RouteRequest


def u64(hashes):
    return np.array(list(hashes), dtype=np.uint64)


class FakeReplica:
    """An engine's side of the stream: a cache, numbered batches and snapshots."""

    def __init__(self, epoch="e1", load=None):
        self.epoch, self.load = epoch, load or Load()
        self.held: set[int] = set()
        self.batches: list[CacheEvents] = []

    def frame(self, events=(), **kwargs):
        digest = 0
        for routing_hash in self.held:
            digest ^= routing_hash
        kwargs = {"events_seq": len(self.batches), "digest": digest, "load": self.load} | kwargs
        return Frame.decode(Frame(self.epoch, events=list(events), **kwargs).encode())

    def step(self, stored=(), removed=(), cleared=False):
        if cleared:
            self.held.clear()
        self.held -= set(removed)
        self.held |= set(stored)
        batch = CacheEvents(len(self.batches) + 1, u64(stored), u64(removed), cleared)
        self.batches.append(batch)
        return self.frame([batch])

    def snapshot(self, page=3):
        held = sorted(self.held)
        starts = range(0, max(1, len(held)), page)
        return [
            self.frame(snapshot=u64(held[i : i + page]), snapshot_more=i + page < len(held))
            for i in starts
        ]

    def answer(self, resync_from):
        if resync_from == SNAPSHOT:
            return self.snapshot()
        return [self.frame(self.batches[resync_from:])]


def attached(replica=None, **options):
    replica = replica or FakeReplica()
    table = ReplicaTable(PrefixIndex(), **options)
    table.add("r", replica.epoch)
    for frame in replica.snapshot():
        table.on_frame("r", frame, 0.0)
    return table, replica


def matched(table, chain, now_s=0.0):
    fleet = table.fleet(chain, 1_000_000, now_s)
    blocks = (fleet.gpu_tokens // ROUTING_BLOCK_TOKENS).astype(int).tolist()
    return dict(zip(fleet.replicas, blocks, strict=True))


def book(table, chain, num_prompt_tokens, now_s, session=""):
    fleet = table.fleet(chain, num_prompt_tokens, now_s, session)
    ranking = LeastLoaded().choose(RouteRequest(num_prompt_tokens), fleet, now_s, random.Random(0))
    return table.book(ranking, chain, num_prompt_tokens, now_s, session)


@given(st.data())
def test_the_replay_heals_after_lost_and_late_frames(data):
    replica = FakeReplica()
    table, replica = attached(replica, resync_interval_s=0.0)
    late = []
    hashes = st.lists(st.integers(1, 30), max_size=5)
    for now in range(data.draw(st.integers(1, 20))):
        frame = replica.step(
            data.draw(hashes), data.draw(hashes), data.draw(st.integers(0, 9)) == 0
        )
        if data.draw(st.integers(0, 3)) == 0:
            continue  # lost
        action = table.on_frame("r", frame, float(now))
        if action.resync_from is not None:
            answer = replica.answer(action.resync_from)
            if data.draw(st.booleans()):
                late.append(answer)
            else:
                late.insert(0, answer)
        if late and data.draw(st.booleans()):
            for page in late.pop(0):
                table.on_frame("r", page, float(now))
    # Heartbeats, and an answer to each resync request.
    for turn in range(3):
        action = table.on_frame("r", replica.frame(), 100.0 + turn)
        if action.resync_from is not None:
            for page in replica.answer(action.resync_from):
                table.on_frame("r", page, 100.0 + turn)
    assert table.state("r") is ReplicaState.ATTACHED
    for routing_hash in range(1, 31):
        expected = int(routing_hash in replica.held)
        assert matched(table, [routing_hash], 103.0) == {"r": expected}
    assert table.statuses(103.0)[0].indexed_blocks == len(replica.held)


def test_a_replica_takes_requests_from_its_first_frame_and_syncs_with_the_snapshot():
    replica = FakeReplica()
    replica.step([1, 2, 3, 4, 5])
    table = ReplicaTable(PrefixIndex())
    table.add("r", replica.epoch)
    assert matched(table, [1]) == {} and table.num_ready() == 0
    first = table.on_frame("r", replica.step([6]), 0.0)  # arrives before the snapshot
    # The stream brings a snapshot without a request.
    assert first.became_ready and first.resync_from is None
    assert matched(table, [1]) == {"r": 0} and table.state("r") is ReplicaState.SYNCING
    pages = replica.snapshot()
    for page in pages[:-1]:
        assert not table.on_frame("r", page, 0.0).became_ready
    # Its pages count as they arrive.
    assert matched(table, [1]) == {"r": 1} and table.state("r") is ReplicaState.SYNCING
    table.on_frame("r", pages[-1], 0.0)
    assert matched(table, [1, 2, 6]) == {"r": 3} and table.state("r") is ReplicaState.ATTACHED


def test_batches_that_overtake_the_snapshot_are_replayed_after_it():
    replica = FakeReplica()
    replica.step([1, 2, 3, 4])
    table = ReplicaTable(PrefixIndex())
    table.add("r", replica.epoch)
    pages = replica.snapshot()
    frames = [replica.step([5], removed=[4]), *pages, replica.step([6])]
    for frame in frames:
        table.on_frame("r", frame, 0.0)
    assert matched(table, [1, 2, 3, 5, 6]) == {"r": 5} and matched(table, [4]) == {"r": 0}


def test_a_gap_asks_for_the_missing_batches_once():
    table, replica = attached()
    table.on_frame("r", replica.step([1]), 0.0)
    replica.step([2])  # lost
    action = table.on_frame("r", replica.step([3]), 10.0)
    assert action.resync_from == 1 and "replica is at batch 3" in action.reason
    assert table.state("r") is ReplicaState.SYNCING
    assert matched(table, [1]) == {"r": 1}  # the stale index still answers
    assert table.on_frame("r", replica.frame(), 10.1).resync_from is None
    assert table.on_frame("r", replica.frame(), 11.5).resync_from == 1  # no answer: requested again
    for frame in replica.answer(1):
        table.on_frame("r", frame, 11.6)
    assert matched(table, [1, 2, 3], 11.6) == {"r": 3}
    assert table.state("r") is ReplicaState.ATTACHED


def test_another_digest_asks_for_a_snapshot():
    table, replica = attached()
    table.on_frame("r", replica.step([1, 2]), 0.0)
    replica.held.discard(2)  # the replica lost a block without an event
    action = table.on_frame("r", replica.frame(), 5.0)
    assert action.resync_from == SNAPSHOT and "digest differs at batch 1" in action.reason
    for page in replica.snapshot():
        table.on_frame("r", page, 5.1)
    assert matched(table, [1, 2], 5.1) == {"r": 1}


def test_a_new_epoch_forgets_blocks_and_bookings_at_once():
    table, replica = attached()
    table.on_frame("r", replica.step([1, 2]), 0.0)
    booking = book(table, [7], 64, 0.0)
    restarted = FakeReplica("e2")
    action = table.on_frame("r", restarted.step([9]), 0.1)
    assert action.new_epoch and action.resync_from is None
    assert matched(table, [1]) == matched(table, [7]) == {"r": 0}
    assert matched(table, [9]) == {"r": 1}
    assert table.fleet([], 1, 0.1).columns.unanswered_work.tolist() == [0.0]
    table.end(booking, 0.2)
    assert table.fleet([], 1, 0.2).columns.num_requests.tolist() == [0.0]


def test_a_new_attach_stream_of_a_lost_replica_starts_over():
    table, replica = attached()
    table.on_frame("r", replica.step([1]), 0.0)
    table.set_lost("r")
    assert matched(table, [1]) == {} and table.num_ready() == 0
    replica.step([2])
    table.add("r", replica.epoch)
    assert matched(table, [1], 1.0) == {}
    for page in replica.snapshot():
        action = table.on_frame("r", page, 1.0)
    assert action.became_ready and matched(table, [1, 2], 1.0) == {"r": 2}


def test_draining_takes_no_requests_even_after_its_stream_was_lost():
    table, replica = attached()
    table.set_draining("r")
    assert matched(table, []) == {} and not table.statuses(0.0)[0].attached
    table.set_lost("r")
    table.add("r", replica.epoch)
    table.on_frame("r", replica.frame(), 1.0)
    assert table.state("r") is ReplicaState.DRAINING and matched(table, [], 1.0) == {}
    table.remove("r")
    table.remove("r")
    assert table.statuses(1.0) == []


def test_a_silent_replica_is_lost_and_comes_back_with_a_frame():
    table, replica = attached(lost_after_s=10.0)
    assert table.expire(9.0) == [] and matched(table, [], 9.0) == {"r": 0}
    assert matched(table, [], 10.5) == {}
    assert table.expire(10.5) == ["r"] and table.expire(11.0) == []
    assert table.on_frame("r", replica.frame(), 12.0).became_ready
    assert matched(table, [], 12.0) == {"r": 0}


def test_unknown_replicas_are_ignored():
    table = ReplicaTable(PrefixIndex())
    assert table.on_frame("x", FakeReplica().frame(), 0.0).resync_from is None
    table.set_lost("x")
    table.set_draining("x")
    table.remove("x")


@pytest.mark.parametrize(("startable", "waiting"), [(0, 40), (30, 10), (64, 0)])
def test_requests_that_wait_for_the_next_step_do_not_wait_for_a_row(startable, waiting):
    table, _ = attached(FakeReplica(load=Load(num_waiting=40, num_startable=startable)))
    fleet = table.fleet([], 1, 1.0)
    assert (fleet.columns.num_waiting[0], fleet.columns.num_requests[0]) == (waiting, 40)


def test_load_is_the_report_and_the_bookings_it_cannot_contain():
    load = Load(num_running=2, num_waiting=1, queued_prefill_tokens=500, prefill_s_per_token=1e-4)
    table, replica = attached(
        FakeReplica(load=load), submit_lag_s=0.01, attention_context_tokens=1e9
    )

    def seen(now_s):
        fleet = table.fleet([1, 2], 1000, now_s)
        work = (fleet.columns.booked_work, fleet.columns.unanswered_work, fleet.columns.head_work)
        return [round(column[0]) for column in (*work, fleet.columns.num_requests)]

    early = book(table, [1], 164, 1.0)
    late = book(table, [1, 2], 94, 1.095)  # 64 of its tokens are already booked
    assert seen(1.1) == [194, 194, 164, 5]
    assert matched(table, [1, 2], 1.1) == {"r": 2}
    assert table.fleet([], 1, 1.1).report_age_s[0] == pytest.approx(1.1)
    table.on_frame("r", replica.frame(), 1.1)  # may contain `early`, cannot contain `late`
    assert seen(1.1) == [30, 194, 164, 4] and matched(table, [1, 2], 1.1) == {"r": 2}
    table.answered(early, 1.2)
    assert seen(1.2) == [30, 30, 30, 4] and table.fleet([], 1, 1.3).head_age_s[0] == pytest.approx(
        0.1
    )
    table.end(late, 1.3)
    table.end(late, 1.3)
    table.end(early, 1.3)
    assert seen(1.3) == [0, 0, 0, 3] and matched(table, [1, 2], 1.3) == {"r": 0}


def test_the_places_left_are_those_of_the_report_less_what_was_sent_since():
    table, replica = attached(FakeReplica(load=Load(num_places=2)), submit_lag_s=0.01)
    assert table.fleet([], 1, 1.0).columns.num_places[0] == 2
    booking = book(table, [1], 64, 1.0)
    assert table.fleet([], 1, 1.0).columns.num_places[0] == 1
    table.on_frame("r", replica.frame(), 1.005)  # cannot contain the booking
    assert table.fleet([], 1, 1.0).columns.num_places[0] == 1
    table.on_frame("r", replica.frame(), 1.1)
    assert table.fleet([], 1, 1.1).columns.num_places[0] == 1, (
        "the report may lack it: the replica takes in requests between steps"
    )
    replica.load = Load(num_waiting=1, num_places=1)
    table.on_frame("r", replica.frame(), 1.2)
    assert table.fleet([], 1, 1.2).columns.num_places[0] == 1, "the report contains our own request"
    replica.load = replica.load._replace(num_routers=2)
    table.on_frame("r", replica.frame(), 1.2)
    assert table.fleet([], 1, 1.2).columns.num_places[0] == 0, (
        "our share is half of two, and it is used"
    )
    table.end(booking, 1.2)
    replica.load = Load()
    table.on_frame("r", replica.frame(), 1.3)
    assert table.fleet([], 1, 1.3).columns.num_places[0] == float("inf"), "the engine has no bound"


def test_as_many_routers_share_as_a_replica_has_attached():
    table = ReplicaTable(PrefixIndex())
    assert table.num_routers() == 1
    table, _ = attached(FakeReplica(load=Load(num_routers=3)))
    # A third router has not attached to it yet.
    other = FakeReplica("other", load=Load(num_routers=2))
    table.add("s", "other")
    table.on_frame("s", other.frame(), 0.0)
    assert table.num_routers() == 3


def test_replicas_that_would_refuse_are_left_out_unless_all_would():
    table, _ = attached(FakeReplica(load=Load(num_places=0)))
    other = FakeReplica("other", load=Load(num_places=1))
    table.add("s", "other")
    table.on_frame("s", other.frame(), 0.0)
    assert table.fleet([], 1, 0.0).replicas == ["s"]
    assert table.fleet([], 1, 0.0, avoid={"s"}).replicas == ["r"], (
        "r, which would refuse it, is still better than s, which must be avoided"
    )
    other.load = Load(num_places=0)
    table.on_frame("s", other.frame(), 0.1)
    assert table.fleet([], 1, 0.1).replicas == ["r", "s"]


def test_a_slow_speed_of_long_ago_is_not_held_against_a_replica():
    table, replica = attached(attention_context_tokens=1e9)
    other = FakeReplica("other")
    table.add("s", "other")
    table.on_frame("s", other.frame(), 0.0)
    for which, name, s_per_token in ((replica, "r", 1e-4), (other, "s", 9e-4)):
        which.load = Load(num_steps=1, prefill_s_per_token=s_per_token)
        table.on_frame(name, which.frame(), 1.0)
    assert table.fleet([], 100, 1.0).prefill_s_per_work == pytest.approx([1e-4, 9e-4])
    for second in range(2, 120):
        replica.load = Load(num_steps=second, prefill_s_per_token=1e-4 + 1e-9 * second)
        table.on_frame("r", replica.frame(), second)
        table.on_frame("s", other.frame(), second)  # a heartbeat
    fleet = table.fleet([], 100, 120.0)
    assert fleet.prefill_s_per_work == pytest.approx([1e-4, 1e-4], rel=0.06)
    other.load = Load(num_steps=2, prefill_s_per_token=9e-4 + 1e-9)  # a new slow measurement
    table.on_frame("s", other.frame(), 121.0)
    assert table.fleet([], 100, 121.0).prefill_s_per_work[1] == pytest.approx(9e-4, rel=0.05)


@given(st.data())
def test_every_booking_comes_back(data):
    """After any events, the booked work is that of the unanswered requests, and at the end nothing is booked."""
    table = ReplicaTable(PrefixIndex(), submit_lag_s=0.0)
    replicas = {}
    now, open_, epoch = 0.0, [], 0
    for _ in range(data.draw(st.integers(1, 40))):
        now += 0.01
        event = data.draw(
            st.sampled_from(["add", "remove", "restart", "report", "book", "answer", "end"])
        )
        name = data.draw(st.sampled_from("abc"))
        if event == "add" and name not in replicas:
            epoch += 1
            replicas[name] = FakeReplica(str(epoch))
            table.add(name, str(epoch))
            table.on_frame(name, replicas[name].frame(), now)
        elif event == "remove" and name in replicas:
            del replicas[name]
            table.remove(name)
        elif event == "restart" and name in replicas:
            epoch += 1
            replicas[name] = FakeReplica(str(epoch))
            table.on_frame(name, replicas[name].frame(), now)
        elif event == "report" and name in replicas:
            table.on_frame(name, replicas[name].frame(), now)
        elif event == "book" and replicas:
            open_.append(book(table, [1, 2, 3][: data.draw(st.integers(0, 3))], 500, now))
        elif event == "answer" and open_:
            table.answered(data.draw(st.sampled_from(open_)), now)
        elif event == "end" and open_:
            table.end(open_.pop(), now)
        fleet = table.fleet([1], 500, now)
        assert sorted(fleet.replicas) == sorted(replicas)
        for row, name in enumerate(fleet.replicas):
            epoch_now = replicas[name].epoch
            ours = [
                b for b in open_ if b.replica == name and b.epoch == epoch_now and not b.answered
            ]
            assert fleet.columns.unanswered_work[row] == pytest.approx(sum(b.work for b in ours))
            assert fleet.columns.booked_work[row] <= fleet.columns.unanswered_work[row]
    for booking in open_:
        table.end(booking, now)
    fleet = table.fleet([1], 500, now)
    assert not fleet.columns.num_requests.any() and not fleet.columns.unanswered_work.any()
    assert not fleet.gpu_tokens.any()


def test_removing_a_replica_leaves_the_others_where_they_are():
    table = ReplicaTable(PrefixIndex())
    # More rows than the matrix has at first.
    for i in range(40):
        replica = FakeReplica(load=Load(num_running=i))
        table.add(str(i), replica.epoch)
        table.on_frame(str(i), replica.snapshot()[0], 0.0)
        table.on_frame(str(i), replica.step([1, 100 + i]), 0.0)
    for i in (0, 39, 7):
        table.remove(str(i))
    fleet = table.fleet([1, 105], 1000, 0.0)
    assert len(fleet) == 37
    for name, tokens, running in zip(
        fleet.replicas, fleet.gpu_tokens, fleet.columns.num_requests, strict=True
    ):
        assert running == int(name) and tokens == (128 if name == "5" else 64)


def test_blocks_in_host_memory_are_counted_apart():
    table, replica = attached()
    table.on_frame("r", replica.step([1, 2, 3, 4, 9]), 0.0)

    def tokens(now_s=0.0, num_prompt_tokens=1000):
        fleet = table.fleet([1, 2, 3, 4, 5], num_prompt_tokens, now_s)
        return fleet.gpu_tokens.tolist() + fleet.host_tokens.tolist()

    assert tokens() == [256.0, 0.0]
    moved = CacheEvents(2, u64([]), u64([2, 4, 9]), host_stored=u64([2, 4, 9]))
    table.index.apply("r", "e1", moved)
    assert tokens() == [128.0, 128.0]
    assert tokens(num_prompt_tokens=250) == [121.0, 128.0]
    back = CacheEvents(3, u64([2]), u64([]), host_removed=u64([2]))
    table.index.apply("r", "e1", back)
    assert tokens() == [192.0, 64.0]
    lost = CacheEvents(4, u64([]), u64([]), host_removed=u64([4]))
    table.index.apply("r", "e1", lost)
    assert tokens() == [192.0, 0.0]
    table.index.apply("r", "e1", CacheEvents(5, u64([]), u64([]), cleared=True))
    assert tokens() == [0.0, 0.0]
    table.index.reset("r", "e1", 6, u64([1]), u64([2]))
    assert tokens() == [64.0, 64.0]


def test_a_recurrent_model_has_as_much_as_its_last_snapshot():
    chain = np.arange(1, 6, dtype=np.uint64)
    marks = state_marks(chain).tolist()
    table = ReplicaTable(PrefixIndex())
    for name in "ab":
        table.add(name, "e1", has_states=name == "a")
        table.on_frame(name, FakeReplica().frame(), 0.0)
        held = CacheEvents(1, u64([*chain.tolist(), marks[1], marks[3]]), u64([]))
        table.index.apply(name, "e1", held)
    assert matched(table, chain) == {"a": 4, "b": 5}
    assert table.fleet(chain, 200, 0.0).gpu_tokens.tolist() == [199.0, 199.0]
    table.index.apply("a", "e1", CacheEvents(2, u64([]), u64([marks[3]])))
    assert matched(table, chain) == {"a": 2, "b": 5}
    # The replica attaches again, with a model that is not recurrent.
    table.set_lost("a")
    table.add("a", "e1")
    table.on_frame("a", FakeReplica().frame(events_seq=2), 0.0)
    assert matched(table, chain) == {"a": 5, "b": 5}
    table.remove("b")
    assert not table.index.has_states


def test_a_view_keeps_its_replicas_when_the_table_changes():
    table = ReplicaTable(PrefixIndex())
    for name in "abc":
        table.add(name, "e1")
        table.on_frame(name, FakeReplica().frame(), 0.0)
    fleet = table.fleet([], 1, 0.0)
    table.remove("a")
    table.add("d", "e1")
    table.on_frame("d", FakeReplica().frame(), 0.0)
    assert fleet.replicas == ["a", "b", "c"]
    assert table.fleet([], 1, 0.0).replicas == ["c", "b", "d"]


def test_only_the_blocks_that_a_replica_lacks_are_booked():
    table, _ = attached()
    table.index.apply("r", "e1", CacheEvents(1, u64([1, 2, 3]), u64([])))
    booking = book(table, [1, 2, 3, 4, 5], 321, 0.0)
    assert booking.index_booking.hashes == [4, 5]
    assert matched(table, [1, 2, 3, 4, 5, 6]) == {"r": 5}
    again = book(table, [1, 2, 3, 4, 5, 6], 385, 0.0)
    assert again.index_booking.hashes == [6]
    table.end(booking, 0.1)
    table.end(again, 0.1)
    assert matched(table, [1, 2, 3, 4, 5, 6]) == {"r": 3}


def test_replicas_to_avoid_are_left_out_unless_they_are_all():
    table = ReplicaTable(PrefixIndex())
    for name in "ab":
        table.add(name, "e1")
        table.on_frame(name, FakeReplica().frame(), 0.0)
    assert table.fleet([], 1, 0.0, avoid={"a"}).replicas == ["b"]
    assert table.fleet([], 1, 0.0, avoid={"a", "b"}).replicas == ["a", "b"]
    for name in ("a", "b"):
        table.remove(name)
    assert table.fleet([], 1, 0.0, avoid={"a", "b"}).replicas == []


def test_replicas_with_other_weights_are_no_choice_even_where_no_other_is_left():
    table = ReplicaTable(PrefixIndex())
    for name, weights in (("a", "old"), ("b", "new"), ("c", "old")):
        table.add(name, "e1", weights=weights)
        table.on_frame(name, FakeReplica().frame(), 0.0)
    assert table.is_mixed
    assert table.fleet([], 1, 0.0).replicas == ["a", "b", "c"]
    assert table.fleet([], 1, 0.0, weights="old").replicas == ["a", "c"]
    assert table.fleet([], 1, 0.0, avoid={"a"}, weights="old").replicas == ["c"]
    # A replica to avoid is better than one with other weights.
    assert table.fleet([], 1, 0.0, avoid={"a", "c"}, weights="old").replicas == ["a", "c"]
    table.add("a", "e2", weights="new")  # the same name, started again
    table.on_frame("a", FakeReplica("e2").frame(), 0.0)
    table.remove("c")
    assert not table.is_mixed
    assert table.fleet([], 1, 0.0, weights="old").replicas == []
    assert sorted(table.fleet([], 1, 0.0, weights="new").replicas) == ["a", "b"]


def test_speeds_and_sessions_stay_with_their_replicas_when_others_come_and_go():
    table = ReplicaTable(PrefixIndex())
    speeds = {"a": 1e-4, "b": 3e-4, "c": 5e-4}

    def expect(now_s):
        fleet = table.fleet([], 100, now_s, "s")
        known = [speeds[name] for name in fleet.replicas]
        assert fleet.prefill_s_per_work == pytest.approx(known, rel=0.05)
        assert fleet.replicas[fleet.session_row] == "c"

    for name, speed in speeds.items():
        table.add(name, "e")
        table.on_frame(name, Frame("e", load=Load(prefill_s_per_token=speed)), 0.0)
    fleet = table.fleet([], 100, 0.0, avoid={"a", "b"})
    ranking = LeastLoaded().choose(RouteRequest(100), fleet, 0.0, random.Random(0))
    table.book(ranking, [], 100, 0.0, "s")
    expect(0.01)
    kept = table.fleet([], 100, 0.01).prefill_s_per_work
    # The same array until the next update.
    assert table.fleet([], 100, 0.02).prefill_s_per_work is kept
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1.0
    table.remove("a")  # the last row moves into the gap
    expect(0.03)
    table.set_lost("b")  # a lost replica is left out
    expect(0.04)
    table.add("b", "e")
    table.on_frame("b", Frame("e", load=Load(num_steps=1, prefill_s_per_token=3e-4)), 0.05)
    table.add("d", "e")
    table.on_frame("d", Frame("e", load=Load(prefill_s_per_token=7e-4)), 0.05)
    speeds["d"] = 7e-4
    expect(0.06)
    expect(1.0)


def test_a_sessions_last_replica_is_known_while_it_can_take_requests():
    table, _ = attached(max_sessions=2)
    book(table, [], 10, 0.0, "s1")
    assert table.fleet([], 10, 0.0, "s1").session_row == 0
    assert table.fleet([], 10, 0.0, "s2").session_row == -1
    for session in ("s2", "s3"):
        book(table, [], 10, 0.0, session)
    # The least recently used session is dropped first.
    assert table.fleet([], 10, 0.0, "s1").session_row == -1
    table.set_draining("r")
    assert table.fleet([], 10, 0.0, "s3").session_row == -1


def test_the_time_that_blocks_stay_is_their_number_over_their_eviction_rate():
    table, replica = attached()
    assert table.fleet([], 1, 0.0).columns.cache_age_s[0] == math.inf
    table.on_frame("r", replica.step(range(1, 1001)), 1.0)
    # Each second ten blocks are evicted and ten are stored.
    for second in range(2, 60):
        old, new = (
            range(10 * second, 10 * second + 10),
            range(10_000 * second, 10_000 * second + 10),
        )
        table.on_frame("r", replica.step(new, removed=old), float(second))
    table.on_frame("r", replica.frame(), 60.0)
    assert table.fleet([], 1, 60.0).columns.cache_age_s[0] == pytest.approx(100, rel=0.1)


def test_statuses_show_every_replica():
    table, replica = attached(FakeReplica(load=Load(blocks_free=7)))
    table.on_frame("r", replica.step([1, 2]), 1.0)
    table.add("new", "e9")
    known, new = table.statuses(1.5)
    assert (known.replica, known.epoch, known.load.blocks_free) == ("r", "e1", 7)
    assert (known.report_age_s, known.attached, known.indexed_blocks) == (0.5, True, 2)
    assert (new.replica, new.attached, new.indexed_blocks) == ("new", False, 0)


def test_an_incomplete_index_is_no_reason_for_a_resync():
    replica = FakeReplica()
    table = ReplicaTable(PrefixIndex(max_blocks=2))
    table.add("r", replica.epoch)
    table.on_frame("r", replica.snapshot()[0], 0.0)
    action = table.on_frame("r", replica.step([1, 2, 3]), 5.0)
    assert action.resync_from is None and matched(table, [1, 2, 3], 5.0) == {"r": 2}


def test_the_mean_load_is_that_of_the_last_half_minutes_reports():
    table, replica = attached()

    def report(now_s, kv_tokens):
        load = Load(num_running=1, num_decode_tokens=kv_tokens)
        table.on_frame("r", replica.frame(load=load), now_s)
        return table.fleet([], 1, now_s).columns.mean_kv_tokens[0]

    first = report(0.1, 1000)
    assert first == report(0.1, 1000)  # no time has passed
    # Three minutes of the same load, then one report without load.
    for i in range(1, 200):
        steady = report(0.1 + 0.9 * i, 9000)
    assert steady == pytest.approx(9000, rel=0.01)
    assert 8500 < report(180.0, 0) < 9000
    assert report(360.0, 0) == pytest.approx(0, abs=30)  # 9000 e^-6 = 22
    report(361.0, 9000)
    replica.epoch = "restarted"
    assert report(362.0, 300) < 20, "the load of the former engine does not count"


@pytest.mark.usefixtures("either_library")
@pytest.mark.parametrize("num_replicas", [2, 3, 40])
def test_a_policy_decides_among_those_that_are_left(num_replicas):
    table, chain = ReplicaTable(PrefixIndex()), list(range(1, 11))
    for i in range(num_replicas):
        load = Load(queued_prefill_tokens=1000 * i, prefill_s_per_token=1e-4, num_running=i)
        replica = FakeReplica(load=load)
        table.add(f"r{i}", replica.epoch)
        for frame in (*replica.snapshot(), replica.step(chain[:5] if i == 1 else ())):
            table.on_frame(f"r{i}", frame, 0.1)
    policy, request = make_policy("slo"), RouteRequest(640)
    everybody = policy.choose(request, table.fleet(chain, 640, 0.1), 0.1, random.Random(0))
    assert everybody.names()[0] == "r0"
    left = table.fleet(chain, 640, 0.1, avoid={"r0"})
    ranking = policy.choose(request, left, 0.1, random.Random(0))
    assert len(left) == num_replicas - 1 and ranking.names()[0] == "r1"
    by_name = {score.replica: score for score in everybody}
    for score in ranking:
        if score.replica in by_name:
            assert score.wait_s == by_name[score.replica].wait_s
            assert score.cached_tokens == by_name[score.replica].cached_tokens
