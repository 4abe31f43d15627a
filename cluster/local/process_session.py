"""Processes of a session, from Linux' /proc: every process that a child process has started, orphans included."""

from __future__ import annotations

import contextlib
from pathlib import Path

# If one of these ends, Ray stops working, but `serve run` and the dashboard keep running.
RAY_DAEMONS = frozenset({"raylet", "gcs_server"})


def session_pids(session: int) -> list[int]:
    """Ids of a session's running processes, from Linux' /proc; empty on other systems."""
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if is_in_session(pid, session)]


def is_in_session(pid: int, session: int) -> bool:
    """Whether a process runs, and belongs to the session."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # the process has ended
        return False
    # The command's name, in parentheses, may contain any character; the third field follows it.
    state, _, _, of_session = stat.rpartition(")")[2].split()[:4]
    return int(of_session) == session and state not in "ZX"


def session_daemons(session: int) -> dict[int, str]:
    """Names of Ray's daemons in a session, by process id."""
    found = {}
    for pid in session_pids(session):
        with contextlib.suppress(OSError):  # the process has ended
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name in RAY_DAEMONS:
                found[pid] = name
    return found


def ray_session(session: int) -> str | None:
    """Name of the Ray session with processes in a session of the operating system; None: no such process runs."""
    for pid in session_pids(session):
        with contextlib.suppress(OSError):  # the process has ended
            for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                name, _, value = word.partition(b"=")
                if name in (b"--session-name", b"--session_name"):
                    return value.decode()
    return None
