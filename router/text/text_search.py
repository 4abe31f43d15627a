"""Searches in long texts that let other threads run.

`re` holds the interpreter for all of one call: a search through 8 MB takes up to 0.3 s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

SEARCH_CHARS = 64 * 1024  # in one call; at most 3 ms


def search(
    pattern: re.Pattern[str], text: str, start: int, end: int, longest: int
) -> re.Match[str] | None:
    """As `pattern.search(text, start, end)`, for a pattern that looks at `longest` characters at most."""
    while start < end:
        stop = start + SEARCH_CHARS
        match = pattern.search(text, start, min(stop + longest, end))
        if match is not None and match.start() < stop:
            return match
        start = stop
    return None


def matches(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """As `pattern.finditer(text)`, for a pattern that looks at `longest` characters at most."""
    start = 0
    while match := search(pattern, text, start, len(text), longest):
        yield match
        start = max(match.end(), match.start() + 1)
