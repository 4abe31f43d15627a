"""Finds stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Ends a text at the first stop string, however the text is cut into pieces.

    The stop string that ends first in the text matches; of several that end at the same character, the longest. The
    matcher holds back exactly the text that may still become a stop string: the longest suffix that is a proper prefix
    of a stop string.

    Parameters
    ----------
    stops
        Non-empty stop strings, or none.
    include_stop
        Keep the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False):
        if "" in stops:
            raise ValueError("stop strings must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add a piece of text.

        Returns
        -------
        The text that has become final, and the stop string that ended the text, or None. After a match, further text is
        dropped.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return text, None
        text = self._held + text
        end, stop = self._first_match(text)
        if stop is not None:
            self._matched, self._held = stop, ""
            return text[: end if self._include_stop else end - len(stop)], stop
        keep = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """Return the text that was held back; no more text follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str | None]:
        best: tuple[int, int] | None = None  # (end, -length)
        best_stop = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), -len(stop)) < best):
                best, best_stop = (start + len(stop), -len(stop)), stop
        return (best[0] if best else 0), best_stop


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
