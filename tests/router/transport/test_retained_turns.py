"""The retention of a turn ends with the turn that continues it, and with no other."""

from __future__ import annotations

from quire.router.transport.retained_turns import RetainedTurns, Turn
from quire.router.transport.transport import Attempt


class Turns:
    """Sessions, and the attempts whose retention has ended."""

    def __init__(self, **options: int):
        self.turns = RetainedTurns(**options)
        self.dropped: list[int] = []

    def end(
        self,
        number: int,
        session: str,
        hashes: list[int],
        *,
        num_answered: int = 10,
        kept: bool = True,
    ) -> None:
        num_prompt = 64 * len(hashes) + 5
        attempt = Attempt(number, "r", self._cancel) if kept else None
        self.turns.end_turn(session, Turn(hashes, num_prompt, num_prompt + num_answered, attempt))

    def _cancel(self, attempt: Attempt) -> None:
        assert attempt.drops_retained
        self.dropped.append(attempt.stream_id)


def test_the_next_turn_ends_the_retention_of_the_one_before():
    turns = Turns()
    turns.end(1, "s", [7, 8])
    assert turns.dropped == [] and len(turns.turns) == 1
    turns.end(2, "s", [7, 8, 9])
    assert turns.dropped == [1]
    # The session's last turn is not retained.
    turns.end(3, "s", [7, 8, 9, 10], kept=False)
    assert turns.dropped == [1, 2] and len(turns.turns) == 0


def test_a_turn_that_continues_another_conversation_ends_nothing():
    turns = Turns()
    turns.end(1, "s", [7, 8])
    turns.end(2, "other", [7, 8, 9])
    turns.end(3, "", [7, 8, 9])
    # A second answer to the same prompt, a branch with the session's name, a shorter prompt, one without a hash.
    turns.end(4, "s", [7, 8])
    turns.end(5, "s", [7, 6, 5])
    turns.end(6, "s", [7])
    turns.end(7, "s", [])
    turns.end(8, "s", [7, 6, 5])
    assert turns.dropped == []


def test_the_oldest_sessions_are_forgotten():
    turns = Turns(max_sessions=2)
    for number, session in enumerate("abc"):
        turns.end(number, session, [1])
    for number, session in enumerate("abc"):
        turns.end(10 + number, session, [1, 2], kept=False)
    assert turns.dropped == [1, 2]
