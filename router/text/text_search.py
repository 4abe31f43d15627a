"""Searches long texts with regular expressions, in pieces, so that other threads can run in between.

`re` holds the GIL during a call, and a search through 8 MB takes up to 0.3 s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Characters that one call of `re` searches; it takes at most 3 ms.
SEARCH_CHARS = 64 * 1024


def search(
    pattern: re.Pattern[str], text: str, start: int, end: int, longest: int
) -> re.Match[str] | None:
    """Search as `pattern.search(text, start, end)` does, for a pattern that looks at up to `longest` characters."""
    while start < end:
        stop = start + SEARCH_CHARS
        match = pattern.search(text, start, min(stop + longest, end))
        if match is not None and match.start() < stop:
            return match
        start = stop
    return None


def matches(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """Find as `pattern.finditer(text)` does, for a pattern that looks at up to `longest` characters."""
    start = 0
    while match := search(pattern, text, start, len(text), longest):
        yield match
        start = max(match.end(), match.start() + 1)
