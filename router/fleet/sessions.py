"""Remembers the replica of each session's last request. A session is a conversation of several requests."""

from __future__ import annotations

from collections import OrderedDict

from quire.router.policy.policy import Ranking


class Sessions:
    """Maps a session to the replica of its last request. Beyond `max_sessions`, the oldest ones are dropped."""

    def __init__(self, max_sessions: int):
        self._max_sessions = max_sessions
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def replica(self, session: str) -> str | None:
        """Return the replica of the session's last request; None: not known."""
        return self._replicas.get(session)

    def set_replica(self, session: str, replica: str) -> None:
        self._replicas[session] = replica
        self._replicas.move_to_end(session)
        if len(self._replicas) > self._max_sessions:
            self._replicas.popitem(last=False)


def session_outcome(ranking: Ranking) -> str:
    """Return where a session's request goes, one of `SESSION_OUTCOMES`."""
    last = ranking.fleet.session_row
    if last < 0:
        return "unknown"
    return "same" if last == ranking.rows[0] else "other"
