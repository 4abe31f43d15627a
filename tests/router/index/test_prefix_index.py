"""The prefix index compared with a model that keeps a set of hashes for each replica."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.routing_hash import state_marks, tier_digest
from quire.protos.wire import CacheEvents
from quire.router import compiled_router
from quire.router.index.prefix_index import PrefixIndex

REPLICAS = ("a", "b", "c")
HASHES = st.integers(0, 24).map(lambda i: i * 0x9E3779B97F4A7C15 % 2**64)

pytestmark = pytest.mark.usefixtures("either_library")


def u64(hashes):
    return np.array(list(hashes), dtype=np.uint64)


def batch(seq, stored=(), removed=(), cleared=False):
    return CacheEvents(seq, u64(stored), u64(removed), cleared)


class Model:
    """The contract of PrefixIndex, with Python sets."""

    def __init__(self):
        self.held = {}
        self.epoch = {}
        self.seq = {}
        self.bookings = []  # (replica, hashes)

    def add(self, replica, epoch="", seq=0, hashes=()):
        if self.epoch.get(replica) != epoch:
            self.bookings = [b for b in self.bookings if b[0] != replica]
        self.held[replica], self.epoch[replica], self.seq[replica] = set(hashes), epoch, seq

    def remove(self, replica):
        for state in (self.held, self.epoch, self.seq):
            state.pop(replica, None)
        self.bookings = [b for b in self.bookings if b[0] != replica]

    def apply(self, replica, epoch, events):
        if self.epoch.get(replica) != epoch or events.seq > self.seq[replica] + 1:
            return False
        if events.seq == self.seq[replica] + 1:
            if events.cleared:
                self.held[replica].clear()
            self.held[replica] -= set(events.removed.tolist())
            self.held[replica] |= set(events.stored.tolist())
            self.seq[replica] = events.seq
        return True

    def match(self, chain):
        depths = {}
        for replica, held in self.held.items():
            known = held.union(*(hashes for name, hashes in self.bookings if name == replica))
            depth = 0
            while depth < len(chain) and chain[depth] in known:
                depth += 1
            if depth:
                depths[replica] = depth
        return depths


def check_equal(index, model, chain):
    assert index.match(chain) == index.match(u64(chain)) == model.match(chain)
    for replica, held in model.held.items():
        assert index.num_blocks(replica) == len(held)
        digest = 0
        for routing_hash in held:
            digest ^= routing_hash
        assert index.digest(replica) == digest
        assert index.seq(replica) == model.seq[replica]


@given(st.data())
def test_index_equals_a_set_per_replica(data):
    index, model, live = PrefixIndex(), Model(), []
    replica_of = st.sampled_from(REPLICAS)
    hash_list = st.lists(HASHES, max_size=12)
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "remove", "reset", "apply", "book", "unbook"]))
        replica = data.draw(replica_of)
        if action == "add" and replica not in model.held:
            index.add_replica(replica)
            model.add(replica)
        elif action == "remove":
            index.remove_replica(replica)
            model.remove(replica)
        elif action == "reset":
            epoch, hashes = data.draw(st.sampled_from("xy")), data.draw(hash_list)
            index.reset(replica, epoch, 5, u64(hashes))
            model.add(replica, epoch, 5, hashes)
        elif action == "apply":
            epoch = data.draw(st.sampled_from([model.epoch.get(replica, "x")] * 4 + ["y"]))
            seq = model.seq.get(replica, 0) + data.draw(st.sampled_from([1, 1, 1, 1, 0, 2]))
            events = batch(
                seq, data.draw(hash_list), data.draw(hash_list), data.draw(st.integers(0, 7)) == 0
            )
            assert index.apply(replica, epoch, events) == model.apply(replica, epoch, events)
        elif action == "book" and replica in model.held:
            hashes = data.draw(hash_list)
            entry = (replica, set(hashes))
            model.bookings.append(entry)
            live.append((index.book(replica, hashes), entry))
        elif action == "unbook" and live:
            booking, entry = live[data.draw(st.integers(0, len(live) - 1))]
            index.unbook(booking)  # may be a second time
            model.bookings = [b for b in model.bookings if b is not entry]
        check_equal(index, model, data.draw(hash_list))
    for replica in REPLICAS:
        index.remove_replica(replica)
    index.reset("last", "x", 0, u64([]))  # each update sweeps dead bits
    assert len(index) == 0 and not index._booked.masks and len(index._booked) == 0


@given(st.data())
def test_long_prompts_match_as_short_ones_do(data):
    """Chains longer than a window, with evicted blocks at any position, and with bookings."""
    length = data.draw(st.integers(500, 1300))
    chain = np.random.default_rng(length).integers(0, 2**64, length, dtype=np.uint64)
    index, model = PrefixIndex(), Model()
    for replica in REPLICAS:
        depth = data.draw(st.sampled_from([length, 512, 513, 511, 30, 0]))
        holes = data.draw(st.lists(st.integers(0, length - 1), max_size=4))
        index.reset(replica, "x", 0, chain[:depth])
        index.apply(replica, "x", batch(1, removed=chain[holes].tolist()))
        model.add(replica, "x", 1, set(chain[:depth].tolist()) - set(chain[holes].tolist()))
        if data.draw(st.booleans()):
            booked = chain[: data.draw(st.integers(0, length))]
            index.book(replica, booked)
            model.bookings.append((replica, set(booked.tolist())))
    check_equal(index, model, chain.tolist())


def test_a_paged_snapshot_replaces_blocks_only_when_complete():
    index = PrefixIndex()
    index.reset("a", "x", 3, u64([1, 2]))
    index.begin_reset("a", "x", 9)
    index.extend_reset("a", u64([1, 2, 3]))
    assert index.match([1, 2, 3]) == {"a": 2} and index.seq("a") == 3
    index.extend_reset("a", u64([4]))
    index.commit_reset("a")
    assert index.match([1, 2, 3, 4]) == {"a": 4} and index.seq("a") == 9


def test_the_pages_of_a_replica_without_blocks_are_seen_as_they_arrive():
    index = PrefixIndex()
    index.add_replica("a")
    booking = index.book("a", [7])
    index.begin_reset("a", "x", 9)
    index.extend_reset("a", u64([1, 2]))
    assert index.match([1, 2, 3]) == {"a": 2}
    index.extend_reset("a", u64([3]), u64([4]))
    index.commit_reset("a")
    assert index.match([1, 2, 3, 4]) == {"a": 4} and index.seq("a") == 9
    index.unbook(booking)  # of the time before the epoch was known: changes nothing
    expected = PrefixIndex()
    expected.reset("a", "x", 9, u64([1, 2, 3]), u64([4]))
    assert index.digest("a") == expected.digest("a")
    assert index.num_blocks("a") == 4 and index.apply("a", "x", batch(10, removed=[1]))


@pytest.mark.parametrize("epoch", ["x", "y"])
def test_a_snapshot_that_starts_again_replaces_the_pages_of_the_first(epoch):
    index = PrefixIndex()
    index.reset("a", "x", 0, u64([]))
    index.book("a", [7])
    index.begin_reset("a", "x", 3)
    index.extend_reset("a", u64([1, 2]))
    index.begin_reset("a", epoch, 5)
    index.extend_reset("a", u64([5]))
    assert index.match([1, 2]) == {"a": 2} and index.match([5]) == {}
    index.commit_reset("a")
    assert index.match([1]) == {} and index.match([5]) == {"a": 1}
    assert index.match([7]) == ({"a": 1} if epoch == "x" else {})
    index.begin_reset("a", epoch, 6)
    index.remove_replica("a")
    index.add_replica("a")
    assert index.match([5]) == {} and index.num_blocks("a") == 0


def test_bookings_survive_a_resync_and_a_clear_but_not_a_restart():
    index = PrefixIndex()
    index.reset("a", "x", 0, u64([]))
    booking = index.book("a", [1, 2])
    index.reset("a", "x", 4, u64([]))
    index.apply("a", "x", batch(5, cleared=True))
    assert index.match([1, 2, 3]) == {"a": 2}
    index.reset("a", "y", 0, u64([]))
    assert index.match([1]) == {}
    again = index.book("a", [1])
    index.unbook(booking)  # of the old epoch: changes nothing
    assert index.match([1, 2]) == {"a": 1}
    index.unbook(again)
    index.unbook(again)
    assert index.match([1]) == {}


def test_slots_are_used_again_and_come_back_clean():
    index = PrefixIndex()
    for round_ in range(200):
        index.reset("a", f"epoch {round_}", 0, u64([round_, round_ + 1]))
        assert index.match([round_ + 1]) == {"a": 1}
        assert index.match([round_ - 1] if round_ else [7]) == {}
    assert index._slots.num_slots < 10 and len(index) < 10


def test_at_the_bound_new_hashes_are_dropped_and_the_replica_is_incomplete():
    index = PrefixIndex(max_blocks=3)
    index.reset("a", "x", 0, u64([1, 2]))
    index.reset("b", "x", 0, u64([1, 2, 3, 4, 5]))
    assert index.is_complete("a") and not index.is_complete("b")
    assert len(index) == 3 and index.num_blocks("b") == 3
    index.apply("a", "x", batch(1, removed=[2]))
    # There is room again; block 2 is missing before 6.
    index.apply("b", "x", batch(1, stored=[6], removed=[2]))
    assert index.match([1, 2, 3, 4, 5, 6]) == {"a": 1, "b": 1}
    index.reset("b", "x", 2, u64([1]))
    assert index.is_complete("b")


def test_a_hole_left_by_the_bound_ends_the_match():
    index = PrefixIndex(max_blocks=3)
    index.reset("a", "x", 0, u64([9]))
    index.reset("b", "x", 0, u64([1, 2, 3]))  # 3 is dropped
    index.apply("a", "x", batch(1, removed=[9]))
    index.apply("b", "x", batch(1, stored=[4]))
    assert index.match([1, 2, 3, 4]) == {"b": 2}


def test_blocks_in_host_memory_are_counted_up_to_where_the_match_ends():
    index = PrefixIndex()
    chain = np.arange(1, 101, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    index.reset("a", "x", 0, chain[:40], chain[40:70])
    index.reset("b", "x", 0, chain[10:], chain[:10])
    index.reset("c", "x", 0, u64([]), chain[1:])  # without the first block
    for row, replica in enumerate("abc"):
        index.set_row(replica, row)
    depths, host = np.zeros(3), np.zeros(3)
    assert index.match_into(chain, depths) == 100
    index.host_blocks_into(chain, depths, host)
    assert depths.tolist() == [70, 100, 0] and host.tolist() == [30, 10, 0]
    assert index.num_host_blocks == 100


@pytest.mark.parametrize("seed", range(6))
def test_matches_are_written_to_the_rows_of_many_replicas(seed):
    """More replicas than a word has bits, which are added, removed, cleared and booked in between."""
    rng = random.Random(seed)
    index, model = PrefixIndex(), Model()
    chains = [[rng.getrandbits(64) for _ in range(num)] for num in (3, 40, 700)]
    row_of, most = {}, 64 * 600 - 1
    num_matched = Counter()
    for step in range(1000):
        name, chain = f"r{rng.randrange(150)}", rng.choice(chains)
        part, action = chain[: rng.randrange(len(chain) + 1)], rng.random()
        if name not in model.held:
            index.add_replica(name)
            model.add(name)
            # Some replicas have no row.
            if rng.random() < 0.9:
                row_of[name] = min({*range(150)} - {*row_of.values()})
                index.set_row(name, row_of[name])
        elif action < 0.7:
            removed = rng.sample(chain, rng.randrange(3))
            events = batch(model.seq[name] + 1, part, removed, cleared=action < 0.1)
            assert index.apply(name, "", events) and model.apply(name, "", events)
        elif action < 0.95:
            index.book(name, part)
            model.bookings.append((name, part))
        else:
            index.remove_replica(name)
            model.remove(name)
            row_of.pop(name, None)
        if step % 25:
            continue
        for chain in chains:
            depths, expected = np.zeros(150), np.zeros(150)
            matches = model.match(chain)
            for name in matches.keys() & row_of.keys():
                expected[row_of[name]] = min(64 * matches[name], most)
            assert index.match_into(u64(chain), depths, 64, most) == max(
                matches.values(), default=0
            )
            assert depths.tolist() == expected.tolist()
            num_matched[len(chain)] += len(set(matches.values())) > 1
    assert min(num_matched.values()) > 10 and len(num_matched) == 3


def branched_chains(rng):
    """Make prompts with shared prefixes."""
    chains = [[rng.getrandbits(64) for _ in range(rng.choice([4, 30, 600]))]]
    for _ in range(3):
        base = rng.choice(chains)
        own = [rng.getrandbits(64) for _ in range(rng.choice([1, 20]))]
        chains.append(base[: rng.randrange(len(base) + 1)] + own)
    return chains


def live_with_bookings(rng):
    """Book and end requests, few at a time. Most begin with the block at which the match of their prompt ends."""
    index = PrefixIndex(max_booked_blocks=rng.choice([10, 10**6, 10**6]))
    model, row_of, live = Model(), {}, []
    names, chains = [f"r{i}" for i in range(rng.choice([2, 70]))], branched_chains(rng)
    for _ in range(80):
        name, chain, action = rng.choice(names), rng.choice(chains), rng.random()
        first, end = sorted(rng.randrange(len(chain) + 1) for _ in range(2))
        part = chain[first * (rng.random() < 0.5) : end]
        if name not in model.held or action < 0.15:
            epoch = model.epoch.get(name, "x") if rng.random() < 0.8 else "y"
            index.reset(name, epoch, 5, u64(part))
            model.add(name, epoch, 5, part)
            if rng.random() < 0.9:
                unused = {*range(len(names))} - {*row_of.values()}
                row_of.setdefault(name, min(unused, default=0))
                index.set_row(name, row_of[name])
        elif action < 0.35:
            removed = rng.sample(chain, min(3, len(chain)))
            events = batch(model.seq[name] + 1, part, removed, cleared=action < 0.18)
            assert index.apply(name, model.epoch[name], events)
            model.apply(name, model.epoch[name], events)
        elif action < 0.37:
            index.remove_replica(name)
            model.remove(name)
            row_of.pop(name, None)
        elif action < 0.7 and len(live) < 6:
            to_come = chain[model.match(chain).get(name, 0) :]
            booking = index.book(name, to_come if rng.random() < 0.7 else part)
            entry = (name, {*booking.hashes})
            model.bookings.append(entry)
            live.append((booking, entry))
        elif live:
            booking, entry = live.pop(rng.randrange(len(live)))
            index.unbook(booking)
            model.bookings = [other for other in model.bookings if other is not entry]
        for chain in chains:
            depths, expected = np.zeros(len(names)), np.zeros(len(names))
            matches = model.match(chain)
            for matching in matches.keys() & row_of.keys():
                expected[row_of[matching]] = matches[matching]
            assert index.match_into(u64(chain), depths) == max(matches.values(), default=0)
            assert depths.tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_matches_continue_in_booked_blocks(seed, monkeypatch):
    """Matches are right with and without the walk with masks, and the test takes both ways."""
    rng, ways = random.Random(seed), Counter()
    booked_beyond = PrefixIndex._booked_beyond

    def counted(self, chain, ends):
        followed = booked_beyond(self, chain, ends)
        ways["walked again" if followed is None else "followed"] += 1
        return followed

    monkeypatch.setattr(PrefixIndex, "_booked_beyond", counted)
    for _ in range(12):
        live_with_bookings(rng)
    if compiled_router.load() is not None:
        assert min(ways["walked again"], ways["followed"]) > 20, ways


def test_a_burst_of_one_prompt_is_not_walked_again(monkeypatch):
    """Requests book the blocks after their match, and the replica has confirmed some of the blocks since."""
    index, rng = PrefixIndex(), random.Random(0)
    chain = u64(rng.getrandbits(64) for _ in range(256))
    index.reset("a", "x", 0, chain[:10])
    index.reset("b", "x", 0, chain[:20])
    for row, replica in enumerate("ab"):
        index.set_row(replica, row)
        index.book(replica, chain[10 * row + 10 :])
    index.apply("b", "x", batch(1, chain[20:100]))
    if compiled_router.load() is not None:
        monkeypatch.delattr(PrefixIndex, "match_masks")
    depths = np.zeros(2)
    # Another prompt with the same first 200 blocks.
    other = np.concatenate([chain[:200], u64([1, 2])])
    assert index.match_into(other, depths) == 200 and depths.tolist() == [200, 200]
    assert index.match_into(chain, depths) == 256 and depths.tolist() == [256, 256]


def test_each_of_many_holds_another_part():
    index, num, rng = PrefixIndex(), 600, random.Random(0)
    chain = u64(rng.getrandbits(64) for _ in range(num))
    for i in range(num):
        index.reset(f"r{i}", "x", 0, chain[: i + 1])
        index.set_row(f"r{i}", i)
    depths = np.zeros(num)
    assert index.match_into(chain, depths) == num and depths.tolist() == [*range(1, num + 1)]


def test_a_booking_copies_its_hashes():
    index, hashes = PrefixIndex(), u64([1, 2])
    index.add_replica("a")
    index.set_row("a", 0)
    index.book("a", hashes)
    hashes[1] = 9
    for last, depth in ((2, 2), (9, 1)):
        depths = np.zeros(1)
        assert index.match_into(u64([1, last]), depths) == depth and depths.tolist() == [depth]


def test_restarted_snapshots_of_many_replicas_find_their_slots():
    """Each snapshot holds a slot until the sweep, so the first to end may have a slot far above the others."""
    index, chain = PrefixIndex(), u64([1, 2])
    for i in range(64):
        index.add_replica(f"r{i}")
        index.set_row(f"r{i}", i)
        index.begin_reset(f"r{i}", "x", 1)
    index.begin_reset("r5", "x", 1)
    index.extend_reset("r5", chain)
    index.commit_reset("r5")
    depths = np.zeros(64)
    assert index.match_into(chain, depths) == 2 and depths.nonzero()[0].tolist() == [5]
    assert index.match(chain) == {"r5": 2}


def test_booked_blocks_are_bounded():
    index = PrefixIndex(max_booked_blocks=3)
    index.add_replica("a")
    first = index.book("a", [1, 2])
    second = index.book("a", [1, 2, 3, 4])
    assert index.match([1, 2, 3, 4]) == {"a": 3}
    index.unbook(second)
    assert index.match([1, 2, 3]) == {"a": 2}
    index.unbook(first)
    assert index.match([1]) == {}


def test_misuse_is_refused():
    index = PrefixIndex()
    index.add_replica("a")
    with pytest.raises(ValueError, match="already"):
        index.add_replica("a")
    with pytest.raises(KeyError):
        index.book("b", [1])
    with pytest.raises(ValueError, match="max_blocks must be >= 1, got 0"):
        PrefixIndex(max_blocks=0)
    assert not index.apply("b", "", batch(1))


def test_a_hash_is_found_in_either_tier_and_the_digest_distinguishes_them():
    index = PrefixIndex()
    index.reset("a", "x", 0, u64([1, 2, 3]), u64([4]))
    assert index.digest("a") == tier_digest(1 ^ 2 ^ 3, 4)
    moved = CacheEvents(1, u64([4]), u64([3]), False, u64([3]), u64([4]))
    assert index.apply("a", "x", moved)
    assert index.match([1, 2, 3, 4]) == {"a": 4}
    assert index.digest("a") == tier_digest(1 ^ 2 ^ 4, 3)
    assert index.num_blocks("a") == 4
    assert index.apply("a", "x", CacheEvents(2, u64([]), u64([]), False, u64([]), u64([3])))
    assert index.match([1, 2, 3, 4]) == {"a": 2}
    assert index.apply("a", "x", CacheEvents(3, u64([9]), u64([]), True, u64([8]), u64([])))
    assert (index.num_blocks("a"), index.digest("a")) == (2, tier_digest(9, 8))


def test_blocks_of_one_hot_prefix_share_their_set():
    index = PrefixIndex()
    rng = random.Random(0)
    chain = [rng.getrandbits(64) for _ in range(300)]
    for i in range(100):
        index.reset(str(i), "x", 0, u64(chain))
    assert index._confirmed.num_sets == 2  # the empty set included
    assert index.match(chain) == {str(i): 300 for i in range(100)}


@given(st.data())
def test_matches_of_recurrent_models_end_at_their_last_snapshot(data):
    """Also those of a prompt on its way, whose prefill ends with a snapshot."""
    chain = np.random.default_rng(0).integers(0, 2**64, 12, dtype=np.uint64)
    marks = state_marks(chain).tolist()
    index, expected = PrefixIndex(), {}
    for row, replica in enumerate(REPLICAS):
        index.add_replica(replica)
        index.set_row(replica, row)
        num_held = data.draw(st.integers(0, 12))
        places = data.draw(st.lists(st.integers(0, 11), max_size=4))
        held = [*chain[:num_held].tolist(), *(marks[i] for i in places)]
        assert index.apply(replica, "", batch(1, held))
        has_states = data.draw(st.booleans())
        index.set_states(replica, has_states)
        num_booked = data.draw(st.integers(0, 12))
        booking = index.book(replica, chain[:num_booked])
        depth = max(num_held, num_booked)
        if has_states:
            ends = [i + 1 for i in places] + [num_booked]
            depth = max((end for end in ends if end <= depth), default=0)
        expected[row] = depth
        if data.draw(st.booleans()):
            index.unbook(booking)
            depth = num_held
            if has_states:
                depth = max((i + 1 for i in places if i < num_held), default=0)
            expected[row] = depth
    depths = np.zeros(len(REPLICAS))
    index.match_into(chain, depths)
    if index.has_states:
        index.cut_to_states(chain, depths)
    assert depths.tolist() == [expected[row] for row in range(len(REPLICAS))]
    for replica in REPLICAS:
        index.remove_replica(replica)
    assert not index._booked.masks
