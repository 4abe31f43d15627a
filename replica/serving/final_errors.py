"""Start-up failures that a retry cannot fix, marked in their text so that the deployment is not retried."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator

from quire.replica.checkpoint.checkpoint import DownloadError

MARK = "CannotStart: "  # precedes the reason in the text of a traceback


class CannotStart(Exception):
    """Another start with the same arguments would fail again. The message is the reason, for the user."""


@contextlib.contextmanager
def final_errors(part: str) -> Iterator[None]:
    """Turn errors in the configuration, the checkpoint and their sizes into `CannotStart`, with the node's name.

    These errors are ValueErrors. A failed download is one too, but it is passed on, because a retry may succeed.
    """
    try:
        yield
    except DownloadError:
        raise
    except ValueError as error:
        raise CannotStart(f"{part} on node {platform.node()!r}: {error}") from error


def reason_of(text: str) -> str | None:
    """The reason after the mark in a traceback's text, or None without a mark."""
    _, mark, reason = text.rpartition(MARK)
    return reason.strip() if mark else None
