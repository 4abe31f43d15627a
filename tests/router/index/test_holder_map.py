"""Sets of holders by hash, and the table below, compared with a dict of masks."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from quire.router.index import holder_map
from quire.router.index.block_table import BlockTable
from quire.router.index.holder_map import HolderMap

pytestmark = pytest.mark.usefixtures("either_library")


def u64(hashes):
    return np.array(list(hashes), dtype=np.uint64)


class Model:
    """hash -> mask, for at most `max_blocks` hashes."""

    def __init__(self, max_blocks):
        self.masks, self.max_blocks = {}, max_blocks

    def store(self, bit, hashes):
        xor, num_changed, has_room = 0, 0, True
        for h in hashes:
            mask = self.masks.get(h, 0)
            if not mask and len(self.masks) >= self.max_blocks:
                has_room = False
            elif not mask & bit:
                self.masks[h] = mask | bit
                xor, num_changed = xor ^ h, num_changed + 1
        return xor, num_changed, has_room

    def remove(self, bit, hashes):
        xor, num_changed = 0, 0
        for h in hashes:
            if self.masks.get(h, 0) & bit:
                xor, num_changed = xor ^ h, num_changed + 1
                self.masks[h] ^= bit
                if not self.masks[h]:
                    del self.masks[h]
        return xor, num_changed, True

    def sweep(self, dead):
        self.masks = {h: mask & ~dead for h, mask in self.masks.items() if mask & ~dead}


def universe(rng):
    """Make hashes, 0 included; some have the same low bits, which without mixing would be the same buckets."""
    crowded = rng.random() < 0.5
    hashes = [rng.getrandbits(64) for _ in range(rng.choice([40, 3000]))]
    return [0, *(h & (0xFFFF << 48 if crowded and h % 4 == 0 else -1) & 2**64 - 1 for h in hashes)]


@pytest.mark.parametrize("few", [0, 16, 10_000], ids=["arrays", "both", "one_by_one"])
@pytest.mark.parametrize("seed", range(8))
def test_a_map_equals_a_dict_of_masks(seed, few, monkeypatch):
    monkeypatch.setattr(holder_map, "_FEW", few)
    rng = random.Random(seed)
    hashes = universe(rng)
    max_blocks = rng.choice([50, 1000, 10_000])
    subject, model = HolderMap(max_blocks), Model(max_blocks)
    for _ in range(60):
        bit = 1 << rng.randrange(70)
        batch = [rng.choice(hashes) for _ in range(rng.choice([0, 1, 5, 40, 400]))]
        action = rng.random()
        if action < 0.55:
            assert subject.store(bit, u64(batch)) == model.store(bit, batch)
        elif action < 0.95:
            assert subject.remove(bit, u64(batch)) == model.remove(bit, batch)
        else:
            while not subject.sweep(bit):
                pass
            model.sweep(bit)
        found = [subject.masks[number] for number in subject.numbers(u64(hashes)).tolist()]
        assert found == [model.masks.get(h, 0) for h in hashes]
        assert len(subject) == len(model.masks)
        assert subject.num_sets == 1 + len(set(model.masks.values()))


def test_a_set_without_blocks_leaves_nothing_behind():
    subject = HolderMap(10_000)
    for i in range(200):
        batch = np.arange(1, 40, dtype=np.uint64) + np.uint64(i * 40)
        subject.store(1 << i, batch)
        subject.remove(1 << i, batch)
    assert len(subject) == 0 and subject.num_sets == 1 and len(subject.masks) < 5


def test_the_sets_as_bits_are_those_of_the_masks():
    rng = random.Random(5)
    subject = HolderMap(10_000, with_sets=True)
    for _ in range(300):
        batch = u64(rng.getrandbits(64) % 500 for _ in range(rng.choice([1, 30])))
        rng.choice([subject.store, subject.store, subject.remove])(1 << rng.randrange(300), batch)
    assert subject.num_sets > 200
    for number in {*subject.numbers(np.arange(500, dtype=np.uint64)).tolist()}:
        words = subject.sets[number]
        assert int.from_bytes(words.tobytes(), "little") == subject.masks[number]


def test_a_sweep_continues_while_the_map_grows():
    rng = np.random.default_rng(0)
    subject = HolderMap(100_000)
    old = rng.integers(1, 2**64, 10_000, dtype=np.uint64)
    subject.store(1, old)
    subject.store(2, old[:5000])
    steps = 0
    while not subject.sweep(1):
        steps += 1
        subject.store(2, rng.integers(1, 2**64, 500, dtype=np.uint64))
    assert steps > 10
    assert len(subject) == 5000 + 500 * steps
    assert {subject.masks[number] for number in subject.numbers(old).tolist()} == {0, 2}


def test_most_entries_fit_into_their_buckets_and_the_rest_is_found():
    rng = np.random.default_rng(1)
    hashes = rng.integers(1, 2**64, 50_000, dtype=np.uint64)
    ids = np.arange(1, 50_001, dtype=np.int32)
    table = BlockTable(50_000)
    for start in range(0, 50_000, 700):
        table.insert(hashes[start : start + 700], ids[start : start + 700])
        assert table.num_links <= 0.05 * len(table) + 8
    assert 0 < table.num_links
    # 1.5 entries per bucket, also at the bound.
    assert table.num_buckets == 33_333
    assert (table.find(hashes)[1] == ids).all()
    assert [table.locate(int(h))[1] for h in hashes[:1000]] == ids[:1000].tolist()
    assert not table.find(rng.integers(1, 2**64, 1000, dtype=np.uint64))[1].any()


def test_many_are_found_as_one_by_one_and_in_runs():
    rng = np.random.default_rng(2)
    known = rng.integers(1, 2**64, 20_000, dtype=np.uint64)
    table = BlockTable(20_000)
    table.insert(known, np.arange(1, 20_001, dtype=np.int32))
    assert table.num_links
    for has_zero in (False, True):
        # 0 marks an empty place.
        if has_zero:
            place, _ = table.locate(0)
            table.add(0, place, 20_001)
            known = np.append(known, np.uint64(0))
        for num_known in (0, 1, 3, 60, 250):
            for num_absent in (0, 1, 30):
                asked = np.concatenate(
                    [
                        rng.choice(known, num_known),
                        rng.integers(1, 2**64, num_absent, dtype=np.uint64),
                        known[-1:],
                    ]
                )
                rng.shuffle(asked)
                expected = [table.locate(int(h))[1] for h in asked]
                assert table.find(asked)[1].tolist() == expected
                # Most neighbours in a chain have the same holders.
                asked = asked.repeat(rng.integers(1, 4, len(asked)))
                expected = [table.locate(int(h))[1] for h in asked]
                starts, ids = table.runs(asked)
                assert starts[0] == 0 and all(a < b for a, b in pairwise(starts))
                lengths = np.diff([*starts, len(asked)])
                assert np.repeat(ids, lengths).tolist() == expected


def test_an_empty_chain_finds_nothing():
    table, nothing = BlockTable(100), np.empty(0, np.uint64)
    assert table.runs(nothing) == ([], [])
    assert [column.size for column in table.find(nothing)] == [0, 0]
    assert table.runs(np.arange(3, dtype=np.uint64)) == ([0], [0])
    assert table.find(np.arange(3, dtype=np.uint64))[1].tolist() == [0, 0, 0]


def test_a_chain_of_the_same_holders_is_one_run():
    chain = np.random.default_rng(3).integers(1, 2**64, 20_000, dtype=np.uint64)
    table = BlockTable(20_000)
    table.insert(chain, np.full(20_000, 7, np.int32))
    assert table.num_links
    assert table.runs(chain) == ([0], [7])


def test_no_choice_of_hashes_crowds_into_a_few_buckets():
    """Hashes with equal low bits, equal high bits, equal halves, or multiples of a number, with any secret."""
    few, many = (np.arange(1, num + 1, dtype=np.uint64) for num in (5000, 400_000))
    shifted = [few << np.uint64(shift) for shift in (0, 16, 32, 40, 48) for _ in range(3)]
    for hashes in (
        *shifted,
        *(half ^ half >> np.uint64(32) for half in shifted[3:]),
        few * np.uint64(2**40 + 15),
        (many << np.uint64(44)) | np.uint64(12345),
    ):
        table, ids = BlockTable(len(hashes)), np.arange(1, len(hashes) + 1, dtype=np.int32)
        table.insert(hashes, ids)
        assert table.num_links <= 0.05 * len(table)
        assert (table.find(hashes)[1] == ids).all()


def test_lines_behind_a_bucket_are_used_again():
    """After any sequence of additions and removals, every empty line is free."""
    rng = np.random.default_rng(4)
    for one_by_one in (False, True):
        table = BlockTable(3000)
        for _ in range(8):
            hashes = rng.integers(0, 2**64, 3000, dtype=np.uint64)
            table.insert(hashes, np.arange(1, 3001, dtype=np.int32))
            assert 0 < table.num_links
            places, ids = table.find(hashes)
            assert ids.tolist() == [*range(1, 3001)]
            if one_by_one:
                for routing_hash in hashes.tolist():
                    table.delete(routing_hash, table.locate(routing_hash)[0])
            else:
                table.remove(hashes, places)
            assert len(table) == table.num_links == 0 and not table.find(hashes)[1].any()
            assert not any(column.size for column in table.scan(0, table.num_buckets))
