"""Messages of the bus: what is encoded is decoded again, and foreign or damaged bytes are refused."""

import zlib

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.adapter_ref import AdapterRef, adapter_key
from quire.protos.wire import (
    NO_FACTS,
    AdapterReport,
    CacheEvents,
    Facts,
    Frame,
    Load,
    TokenDelta,
    TokenLogprob,
    TokenRecord,
)
from quire.protos.wire_codec import WIRE_VERSION, WireError

DELTAS = [TokenDelta(3, 5, [1, 2], Facts("stop", 4, 0.25)), TokenDelta(9, 0, [], Facts("abort"))]
TOKENS = TokenRecord(
    np.array([2**40, 7], np.int64), np.array([0, 2**31 - 1], np.int32), np.array([151_000, 0])
)


def equal(a, b):
    return a.dtype == b.dtype and a.tolist() == b.tolist()


def test_a_frame_survives_the_wire():
    frame = Frame(
        "epoch",
        *Frame.pack(DELTAS, TOKENS),
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
        host_snapshot=np.array([6], np.uint64),
    )
    back = Frame.decode(frame.encode())
    assert (back.epoch, back.facts, back.load) == (frame.epoch, frame.facts, frame.load)
    assert (back.events_seq, back.digest, back.snapshot_more) == (2, 2**64 - 1, True)
    assert equal(back.snapshot, frame.snapshot)
    assert equal(back.host_snapshot, frame.host_snapshot)
    (events,) = back.events
    assert (events.seq, events.stored.tolist(), events.removed.tolist()) == (2, [2**64 - 1], [])
    assert events.cleared
    assert (events.host_stored.tolist(), events.host_removed.tolist()) == ([3], [4, 5])
    assert list(back.token_deltas()) == [
        *DELTAS,
        TokenDelta(2**40, 0, [151_000]),
        TokenDelta(7, 2**31 - 1, [0]),
    ]
    assert all(type(d.key) is type(d.index) is int for d in back.token_deltas())


HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=5)


@given(HASHES, HASHES, st.integers(1, 9), st.floats(0, 10))
def test_a_report_of_adapters_survives_the_wire(on_device, on_host, slots, seconds):
    arrays = np.array(on_device, np.uint64), np.array(on_host, np.uint64)
    report = AdapterReport(4, *arrays, slots, slots - 1, seconds, seconds / 2)
    back = Frame.decode(Frame("e", adapters=report).encode()).adapters
    assert equal(back.on_device, report.on_device) and equal(back.on_host, report.on_host)
    assert (back.seq, back.slots, back.slots_in_use) == (4, slots, slots - 1)
    assert (back.read_s, back.load_s) == (seconds, seconds / 2)


def test_the_key_of_an_adapter_is_the_first_half_of_its_digest(tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text(name)
    digest = AdapterRef.of_folder("x", str(tmp_path)).digest
    assert adapter_key(digest).to_bytes(8, "big") == bytes.fromhex(digest)[:8]


def test_an_empty_frame_survives_the_wire():
    back = Frame.decode(Frame("e").encode())
    assert (back.tokens, back.facts, back.snapshot, back.load) == (None, [], None, Load())
    assert back.adapters is None
    assert list(back.token_deltas()) == []


IDS = st.integers(0, 2**31 - 1)
STREAMS = st.lists(
    st.tuples(st.integers(0, 2**63 - 1), IDS, st.lists(IDS, max_size=4), st.booleans()), max_size=20
)
FACTS = Facts(num_cached_tokens=3, logprobs=[TokenLogprob(-0.5, [7], [-0.5])])


@given(STREAMS)
def test_a_record_says_what_one_delta_for_each_stream_would(streams):
    deltas = [TokenDelta(i, n, ids, FACTS if rare else NO_FACTS) for i, n, ids, rare in streams]
    with_facts = [delta for delta in deltas if delta.facts is FACTS]
    others = [delta for delta in deltas if delta.facts is NO_FACTS]
    frame = Frame("e", *Frame.pack(with_facts, TokenRecord.of(others)))
    assert list(Frame.decode(frame.encode()).token_deltas()) == with_facts + others


@given(STREAMS, st.data())
def test_a_part_of_a_record_is_the_record_of_a_part(streams, data):
    deltas = [TokenDelta(i, n, ids) for i, n, ids, _ in streams]
    kept = data.draw(st.lists(st.booleans(), min_size=len(deltas), max_size=len(deltas)))
    part = TokenRecord.of(deltas).select(np.array(kept, bool))
    assert list(part.deltas()) == [d for d, is_kept in zip(deltas, kept, strict=True) if is_kept]
    assert (part.cu is None) == all(len(delta.token_ids) == 1 for delta in part.deltas())


def opened(message):
    return msgpack.unpackb(message[:-4])


def sealed(values):
    body = msgpack.packb(values)
    return body + zlib.crc32(body).to_bytes(4, "little")


@pytest.mark.parametrize("column", [0, 1, 2])
def test_columns_of_different_lengths_are_refused(column):
    values = opened(Frame("e", TOKENS).encode())
    values[2][column] += bytes(8)
    with pytest.raises(
        WireError, match=r"TokenRecord: . stream ids, . indices and . tokens, cu: None"
    ):
        Frame.decode(sealed(values))


@pytest.mark.parametrize("cu", [[], [0, 2], [0, 1, 1], [0, 1, 3], [1, 1, 2], [0, 3, 2]])
def test_bounds_that_fit_no_tokens_are_refused(cu):
    values = opened(Frame("e", TOKENS).encode())
    values[2][3] = np.array(cu, "<i4").tobytes()
    with pytest.raises(WireError, match="TokenRecord: 2 stream ids, 2 indices and 2 tokens, cu: "):
        Frame.decode(sealed(values))


def test_facts_without_a_stream_are_refused():
    for frame in (Frame("e", TOKENS, [FACTS] * 3), Frame("e", facts=[FACTS])):
        with pytest.raises(WireError, match=r"Frame: . facts of . streams"):
            Frame.decode(frame.encode())


def test_foreign_messages_are_refused_by_name():
    values = opened(Frame("e").encode())
    with pytest.raises(WireError, match="Frame: 10 fields, expected 11"):
        Frame.decode(sealed(values[:-1]))
    for other in (6, 99):
        expected = f"Frame: wire version {other}, this side speaks {WIRE_VERSION}"
        with pytest.raises(WireError, match=expected):
            Frame.decode(sealed([other, *values[1:]]))
    with pytest.raises(WireError, match="Frame: not msgpack"):
        Frame.decode(
            sealed(values)[:-4]
            + b"\0"
            + zlib.crc32(sealed(values)[:-4] + b"\0").to_bytes(4, "little")
        )


@given(st.integers(0), st.integers(1, 255), st.booleans())
def test_a_damaged_message_is_refused_wherever_it_is_damaged(position, flip, truncated):
    message = Frame("e", *Frame.pack(DELTAS, TOKENS)).encode()
    position %= len(message)
    damaged = bytearray(message)
    damaged[position] ^= flip
    with pytest.raises(WireError, match="Frame: the checksum does not fit"):
        Frame.decode(message[:position] if truncated else bytes(damaged))
