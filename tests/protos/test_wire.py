"""Messages of the bus: what is encoded is decoded again, and foreign or damaged bytes are refused."""

import zlib

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.wire import CacheEvents, Frame, Load, TokenColumns, TokenDelta
from quire.protos.wire_codec import WIRE_VERSION, WireError

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
