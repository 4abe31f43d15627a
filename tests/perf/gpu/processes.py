"""Child processes with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess


def hear_interrupts() -> None:
    """For `preexec_fn`: a shell's background job ignores SIGINT, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_or_interrupt(
    process: subprocess.Popen[bytes], limit_s: float, grace_s: float
) -> int | None:
    """The status of a process; None when the limit is over.

    After SIGINT the process has `grace_s` seconds to write what it knows. At the end no process of its group is left.

    Parameters
    ----------
    process
        Leads a process group of its own: `start_new_session=True`.
    """
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        return None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
