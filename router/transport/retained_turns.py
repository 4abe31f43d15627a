"""Remembers the turn of each session whose blocks a replica retains, until the session's next turn has ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.router.transport.transport import Attempt


class Turn(NamedTuple):
    """A turn that has ended.

    Attributes
    ----------
    hashes
        Routing hashes of its prompt.
    num_prompt_tokens, num_tokens
        Tokens of its prompt, and those of prompt and answer.
    attempt
        Its attempt, if the replica retains the blocks.
    """

    hashes: Sequence[int] | np.ndarray
    num_prompt_tokens: int
    num_tokens: int
    attempt: Attempt | None

    def continues(self, other: Turn) -> bool:
        """Whether the prompt begins with the other turn's prompt and is longer than that turn."""
        num_hashes = len(other.hashes)
        if not num_hashes or self.num_prompt_tokens < other.num_tokens:
            return False
        return int(self.hashes[num_hashes - 1]) == int(other.hashes[num_hashes - 1])


class RetainedTurns:
    """The last turn of each session, if its replica retains its blocks.

    The turn that continues it has the same blocks and more, perhaps on another replica. Retained any longer, the old
    ones would take the room of sessions that go on.

    Parameters
    ----------
    max_sessions
        Beyond it, the oldest turns are forgotten; the replica's own time ends their retention.
    """

    def __init__(self, max_sessions: int = 16_384):
        self._max_sessions = max_sessions
        self._turns: OrderedDict[str, Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def end_turn(self, session: str, turn: Turn) -> None:
        """Take in a turn that has ended, and end the retention of the one that it continues.

        Parameters
        ----------
        session
            Empty: the request belongs to no session.
        """
        if not session:
            return
        before = self._turns.pop(session, None)
        # Two conversations may have one session's name: the other one's turn is left to its time.
        if before is not None and before.attempt is not None and turn.continues(before):
            before.attempt.drops_retained = True
            before.attempt.cancel()
        if turn.attempt is not None:
            self._turns[session] = turn
            if len(self._turns) > self._max_sessions:
                self._turns.popitem(last=False)
