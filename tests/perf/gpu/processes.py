"""Child processes with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess


def hear_interrupts() -> None:
    """Restore SIGINT in a child (`preexec_fn`): a shell's background job ignores it, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_or_interrupt(
    process: subprocess.Popen[bytes], limit_s: float, grace_s: float
) -> int | None:
    """Wait for a process; returns its status, or None if the limit has passed.

    After SIGINT the process has `grace_s` seconds to write its results. Then all processes of its group are killed.

    Parameters
    ----------
    process
        Leader of its own process group (`start_new_session=True`).
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
