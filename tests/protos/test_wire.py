import zlib

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos import routing_hash
from quire.protos.routing_hash import RoutingHasher, routing_block_sums, routing_hashes, tier_digest
from quire.protos.wire import CacheEvents, Frame, Load, TokenColumns, TokenDelta
from quire.protos.wire_codec import WIRE_VERSION, WireError

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


# -- routing hash ----------------------------------------------------------------------------------------


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


# -- frames ----------------------------------------------------------------------------------------------

COLUMNS = TokenColumns(
    np.array([2**40, 7], np.int64), np.array([0, 2**31 - 1], np.int32), np.array([151_000, 0])
)


def equal(a, b):
    return a.dtype == b.dtype and a.tolist() == b.tolist()


def test_a_frame_survives_the_wire():
    frame = Frame(
        "epoch",
        [TokenDelta(3, 5, [1, 2], "stop", 4, 0.25), TokenDelta(9, 0, [8])],
        [
            CacheEvents(
                2,
                np.array([2**64 - 1], np.uint64),
                np.array([], np.uint64),
                True,
                host_stored=np.array([3], np.uint64),
                host_removed=np.array([4, 5], np.uint64),
            )
        ],
        events_seq=2,
        digest=2**64 - 1,
        load=Load(num_running=1, prefill_s_per_token=0.5, num_preemptions=7),
        snapshot=np.array([1, 2], np.uint64),
        snapshot_more=True,
        columns=COLUMNS,
        host_snapshot=np.array([6], np.uint64),
    )
    back = Frame.decode(frame.encode())
    assert (back.epoch, back.deltas, back.load) == (frame.epoch, frame.deltas, frame.load)
    assert (back.events_seq, back.digest, back.snapshot_more) == (2, 2**64 - 1, True)
    assert equal(back.snapshot, frame.snapshot)
    assert equal(back.host_snapshot, frame.host_snapshot)
    (events,) = back.events
    assert (events.seq, events.stored.tolist(), events.removed.tolist()) == (2, [2**64 - 1], [])
    assert events.cleared
    assert (events.host_stored.tolist(), events.host_removed.tolist()) == ([3], [4, 5])
    assert list(back.token_deltas()) == [
        *frame.deltas,
        TokenDelta(2**40, 0, [151_000]),
        TokenDelta(7, 2**31 - 1, [0]),
    ]
    assert all(type(d.stream_id) is type(d.index) is int for d in back.token_deltas())


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_the_digest_tells_the_tiers_apart(gpu, host):
    assert tier_digest(gpu, 0) == gpu
    assert 0 <= tier_digest(gpu, host) < 2**64
    # It is linear, so a change of either tier is seen alone; a rotation loses nothing.
    assert tier_digest(gpu, host) ^ gpu == int(f"{host:064b}"[1:] + f"{host:064b}"[0], 2)


def test_an_empty_frame_survives_the_wire():
    back = Frame.decode(Frame("e").encode())
    assert (back.columns, back.snapshot, back.load) == (None, None, Load())
    assert list(back.token_deltas()) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1)),
        max_size=20,
    ),
    st.sampled_from([np.int32, np.int64]),
)
def test_columns_say_what_one_delta_for_each_token_would(rows, dtype):
    ids, index, tokens = (list(column) for column in zip(*rows, strict=True)) if rows else ([],) * 3
    columns = TokenColumns(np.array(ids, np.int64), np.array(index, dtype), np.array(tokens, dtype))
    frame = Frame.decode(Frame("e", columns=columns).encode())
    assert list(frame.token_deltas()) == [TokenDelta(i, n, [t]) for i, n, t in rows]


def opened(message):
    return msgpack.unpackb(message[:-4])


def sealed(values):
    body = msgpack.packb(values)
    return body + zlib.crc32(body).to_bytes(4, "little")


def test_columns_of_different_lengths_are_refused():
    values = opened(Frame("e", columns=COLUMNS).encode())
    values[9][2] += b"\0\0\0\0"
    with pytest.raises(WireError, match="2 stream ids, 2 indices and 3 tokens"):
        Frame.decode(sealed(values))


def test_foreign_messages_are_refused_by_name():
    values = opened(Frame("e").encode())
    with pytest.raises(WireError, match="Frame: 9 fields, expected 10"):
        Frame.decode(sealed(values[:-1]))
    with pytest.raises(WireError, match=f"Frame: wire version 99, this side speaks {WIRE_VERSION}"):
        Frame.decode(sealed([99, *values[1:]]))
    with pytest.raises(WireError, match="Frame: not msgpack"):
        Frame.decode(
            sealed(values)[:-4]
            + b"\0"
            + zlib.crc32(sealed(values)[:-4] + b"\0").to_bytes(4, "little")
        )


@given(st.integers(0), st.integers(1, 255), st.booleans())
def test_a_damaged_message_is_refused_wherever_it_is_damaged(position, flip, truncated):
    message = Frame("e", [TokenDelta(3, 5, [1, 2])], columns=COLUMNS).encode()
    position %= len(message)
    damaged = bytearray(message)
    damaged[position] ^= flip
    with pytest.raises(WireError, match="Frame: the checksum does not fit"):
        Frame.decode(message[:position] if truncated else bytes(damaged))
