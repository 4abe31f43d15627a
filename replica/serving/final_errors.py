"""Failures of a start that would fail again, marked so that Ray Serve does not retry."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator

from quire.replica.checkpoint.checkpoint import DownloadError

MARK = "CannotStart: "  # precedes the reason in the text of a traceback


class CannotStart(Exception):
    """The same start would fail again; the message is the reason, for the user."""


@contextlib.contextmanager
def final_errors(part: str) -> Iterator[None]:
    """Turn errors of configuration, checkpoint and size into `CannotStart`, with the node's name.

    All of these are ValueErrors. So is a failed download, but that may succeed later.
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
