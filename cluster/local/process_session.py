"""The processes of a session, by Linux' /proc: all that a child process has started, whatever became of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

# Without one of these Ray does nothing more, while `serve run` and the dashboard stay.
RAY_DAEMONS = frozenset({"raylet", "gcs_server"})


def session_pids(session: int) -> list[int]:
    """The processes of a session that have not ended, by Linux' /proc; none are found elsewhere."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command's name, in parentheses, may contain anything; fields from the third on follow.
            state, _, _, of_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it ended meanwhile
            continue
        if int(of_session) == session and state not in "ZX":
            pids.append(int(stat.parent.name))
    return pids


def session_daemons(session: int) -> dict[int, str]:
    """Names of Ray's daemons in a session, by process id."""
    found = {}
    for pid in session_pids(session):
        with contextlib.suppress(OSError):  # it ended meanwhile
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name in RAY_DAEMONS:
                found[pid] = name
    return found
