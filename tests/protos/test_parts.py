"""Long messages travel in parts and arrive as they were."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos import wire_codec
from quire.protos.wire_codec import Part, parts_of, whole


def travel(message: bytes) -> bytes:
    sent = iter(list(parts_of(message)))

    async def following():
        return next(sent)

    async def main():
        arrived = await whole(await following(), following)
        assert next(sent, None) is None  # the next message begins where this one ends
        return arrived

    return asyncio.run(main())


@given(st.binary(max_size=70), st.integers(1, 20))
def test_a_message_arrives_as_it_was(message, longest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_codec, "MAX_MESSAGE_BYTES", longest)
        assert travel(message) == message
        sizes = [len(p.data if isinstance(p, Part) else p) for p in parts_of(message)]
        assert max(sizes) <= longest


def test_a_short_message_is_sent_as_it_is():
    (sent,) = parts_of(b"frame")
    assert sent == b"frame" and not isinstance(sent, Part)
