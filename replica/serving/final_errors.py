"""Failures of a start that another attempt cannot cure, marked so that Ray Serve makes none."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator

from quire.replica.checkpoint.checkpoint import DownloadError

MARK = "CannotStart: "  # begins the reason in the text of a traceback


class CannotStart(Exception):
    """The same start would fail again; the message says why, for the user."""


@contextlib.contextmanager
def final_errors(part: str) -> Iterator[None]:
    """Turn errors of configuration, checkpoint and size into `CannotStart`, with the node's name.

    All of them are ValueErrors. A download that failed is one too, but may succeed later.
    """
    try:
        yield
    except DownloadError:
        raise
    except ValueError as error:
        raise CannotStart(f"{part} on node {platform.node()!r}: {error}") from error


def reason_of(text: str) -> str | None:
    """What a traceback's text says after the mark, or None where it has none."""
    _, mark, reason = text.rpartition(MARK)
    return reason.strip() if mark else None
