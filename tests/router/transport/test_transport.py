"""An attempt's events: its end arrives in two ways, in either order."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.errors import Overloaded
from quire.protos.wire import Completion, Facts, TokenDelta
from quire.router.transport.transport import Attempt, AttemptEvent, Lost

ERROR = Overloaded("full").to_wire()


def completion(reason: str) -> Completion:
    return Completion(reason, 4, 2, 0, error=ERROR if reason == "error" else None)


def drain(*events: AttemptEvent) -> tuple[list[AttemptEvent], Attempt]:
    """What a reader gets, and the attempt."""
    attempt = Attempt(1, "a", on_cancel=lambda attempt: None)

    async def run() -> list[AttemptEvent]:
        for event in events:
            attempt.put(event)
        seen = []
        with pytest.raises(TimeoutError):
            while True:
                async with asyncio.timeout(0):
                    seen.append(await attempt.next())
        return seen

    return asyncio.run(run()), attempt


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("completion_at", [0, 1, 2, 3])
def test_a_good_end_is_the_last_delta_wherever_the_completion_comes(reason, completion_at):
    deltas: list[AttemptEvent] = [TokenDelta(1, i, [i]) for i in range(2)] + [
        TokenDelta(1, 2, [2], Facts(reason))
    ]
    events = [*deltas]
    events.insert(completion_at, completion(reason))
    seen, attempt = drain(*events)
    assert seen == deltas
    assert attempt.finished and not attempt.needs_abort


@pytest.mark.parametrize("reason", ["error", "abort"])
@pytest.mark.parametrize("delta_first", [True, False])
def test_a_bad_end_is_the_completion_which_says_why(reason, delta_first):
    end = [TokenDelta(1, 1, [8], Facts(reason)), completion(reason)]
    seen, attempt = drain(TokenDelta(1, 0, [7]), *(end if delta_first else end[::-1]))
    assert seen[0] == TokenDelta(1, 0, [7])
    assert seen[-1] == completion(reason)
    assert all(event.finish_reason is None for event in seen[:-1])
    assert attempt.finished and not attempt.needs_abort


def test_a_lost_replica_may_still_be_at_work():
    seen, attempt = drain(Lost("a", "the attach stream ended"), completion("error"))
    assert seen == [Lost("a", "the attach stream ended")]
    assert attempt.finished and attempt.needs_abort


def test_an_attempt_without_an_end_needs_an_abort():
    _, attempt = drain(TokenDelta(1, 0, [7]), completion("stop"))
    assert not attempt.finished and attempt.needs_abort


EVENTS = st.one_of(
    st.builds(
        TokenDelta,
        st.just(1),
        st.integers(0, 9),
        st.lists(st.integers(0, 9), max_size=2),
        st.sampled_from([None, None, "stop", "length", "abort", "error"]).map(Facts),
    ),
    st.sampled_from(["stop", "length", "abort", "error"]).map(completion),
    st.just(Lost("a", "gone")),
)


def ends(event: AttemptEvent) -> bool:
    return not isinstance(event, TokenDelta) or event.finish_reason is not None


@given(st.lists(EVENTS, max_size=12))
def test_exactly_one_end_is_seen_and_nothing_after_it(events):
    seen, attempt = drain(*events)
    assert not any(ends(event) for event in seen[:-1])
    assert attempt.finished == bool(seen and ends(seen[-1]))
    in_time = [e for e in events if isinstance(e, TokenDelta)]
    tokens = [(e.index, e.token_ids) for e in seen if isinstance(e, TokenDelta)]
    assert tokens == [(e.index, e.token_ids) for e in itertools.islice(in_time, len(tokens))]
    if not attempt.finished:
        assert len(tokens) == len(in_time)


def test_an_event_wakes_the_reader_and_cancel_reaches_the_callback():
    cancelled: list[Attempt] = []
    attempt = Attempt(3, "a", on_cancel=cancelled.append)

    async def run() -> None:
        reading = asyncio.create_task(attempt.next())
        await asyncio.sleep(0)
        assert not reading.done()
        attempt.put(TokenDelta(3, 0, [1]))
        assert await reading == TokenDelta(3, 0, [1])

    asyncio.run(run())
    attempt.cancel()
    assert cancelled == [attempt]


def test_output_that_arrived_together_is_unread_while_the_reader_is_away():
    attempt = Attempt(4, "a", on_cancel=lambda attempt: None)

    async def run() -> None:
        reading = asyncio.create_task(attempt.next())
        await asyncio.sleep(0)
        for i in range(3):
            attempt.put(TokenDelta(4, i, [i]))
        await reading
        await asyncio.sleep(0.05)
        assert attempt.unread_s() >= 0.05
        attempt.take()
        attempt.take()
        unread_s = attempt.unread_s()
        await asyncio.sleep(0.05)
        assert attempt.unread_s() == unread_s, "nothing is unread"

    asyncio.run(run())


def test_an_attempt_moves_though_its_preparation_fails():
    async def main() -> None:
        attempt = Attempt(1, "replica", on_cancel=lambda attempt: None)

        async def fails() -> None:
            raise RuntimeError("on purpose")

        attempt.before_move = fails
        with pytest.raises(RuntimeError):
            await attempt.move("it drains")
        assert await attempt.next() == Lost("replica", "it drains", planned=True)

    asyncio.run(main())
