"""Routing hashes: the formula, its incremental and batched forms, and the digest of two tiers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos import routing_hash
from quire.protos.routing_hash import RoutingHasher, routing_block_sums, routing_hashes, tier_digest

MASK = 2**64 - 1


def splitmix64(x):
    """The reference: the finaliser in Python's integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_hashes(hasher, token_ids):
    running, hashes = 0, []
    for i, token in enumerate(token_ids):
        running = (running + (splitmix64(i) | 1) * (token + 1)) & MASK
        if i % 64 == 63:
            hashes.append(splitmix64(running ^ int(hasher.chain_seed)))
    return hashes


@pytest.mark.parametrize("num_tokens", [0, 63, 64, 300])
def test_the_hash_is_the_formula(num_tokens):
    hasher = RoutingHasher("m", "r", "t")
    token_ids = np.random.default_rng(num_tokens).integers(0, 200_000, num_tokens)
    expected = plain_hashes(hasher, token_ids.tolist())
    assert hasher.hashes(token_ids.astype(np.int32)).tolist() == expected
    assert hasher.hashes(token_ids).dtype == np.uint64


@given(st.lists(st.integers(0, 3), max_size=6))
def test_a_sum_is_extended_by_any_number_of_blocks_at_a_time(parts):
    hasher = RoutingHasher("m")
    token_ids = np.random.default_rng(0).integers(0, 1000, 64 * sum(parts))
    running, start, hashes = np.uint64(0), 0, []
    for blocks in parts:
        new, running = hasher.extend(running, start, token_ids[start : start + 64 * blocks])
        hashes += new.tolist()
        start += 64 * blocks
    assert hashes == hasher.hashes(token_ids).tolist()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40)), max_size=12))
def test_blocks_of_many_sequences_are_hashed_in_one_pass(picks):
    """Each pick is the block at some depth of the sequence of one tenant."""
    hashers = {tenant: RoutingHasher("m", "r", tenant) for tenant in "ab"}
    token_ids = {"a": np.arange(41 * 64) % 997, "b": np.arange(41 * 64) % 991}
    sums = {}
    for tenant in "ab":
        before = np.zeros(42, np.uint64)
        all_starts = np.arange(41) * 64
        before[1:] = np.cumsum(routing_block_sums(all_starts, token_ids[tenant].reshape(-1, 64)))
        sums[tenant] = before
    starts = np.array([64 * depth for _, depth in picks], np.int64)
    blocks = [token_ids[tenant][64 * depth : 64 * depth + 64] for tenant, depth in picks]
    added = routing_block_sums(starts, np.array(blocks, np.int32).reshape(-1, 64))
    running = np.array([sums[tenant][depth] for tenant, depth in picks], np.uint64) + added
    seeds = np.array([hashers[tenant].chain_seed for tenant, _ in picks], np.uint64)
    expected = [int(hashers[t].hashes(token_ids[t])[depth]) for t, depth in picks]
    assert routing_hashes(running, seeds).tolist() == expected


def test_positions_beyond_the_first_table_have_the_same_weights_in_every_table():
    (first, sums), (second, _) = (
        routing_hash.routing_weights(1 << 15),
        routing_hash.routing_weights((1 << 15) + 1),
    )
    assert (first.size, second.size) == (1 << 15, 1 << 16)
    assert sums.tolist() == [sum(row) & MASK for row in first.tolist()]
    assert (second[: len(first)] == first).all()
    assert second[-1, -1] == splitmix64((1 << 16) - 1) | 1
    assert routing_hash.routing_weights(64)[0] is first  # shared by all hashers


def test_start_must_be_a_whole_number_of_blocks():
    with pytest.raises(ValueError, match="multiple of 64, got 65"):
        RoutingHasher("m").extend(np.uint64(0), 65, np.arange(64))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_the_digest_tells_the_tiers_apart(gpu, host):
    assert tier_digest(gpu, 0) == gpu
    assert 0 <= tier_digest(gpu, host) < 2**64
    # It is linear, so a change of either tier is seen alone; a rotation loses nothing.
    assert tier_digest(gpu, host) ^ gpu == int(f"{host:064b}"[1:] + f"{host:064b}"[0], 2)
