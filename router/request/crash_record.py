"""Which request brings its replicas down: the poison rule.

An *incident* of a request is a step that it was in and that failed, or in which the process crashed. A process that
was killed from outside, or drained, or whose node was lost, is none. Up to two incidents the request simply moves.
Then it is suspected, and the next replica computes its next tokens in steps of their own. An incident there convicts
it. Coming through acquits it; the others, who shared its steps, never get that far.
"""

from __future__ import annotations

import enum

from quire.protos.wire import ISOLATED_TOKENS

MAX_INCIDENTS = 2  # before a request has to be alone


class Standing(enum.Enum):
    """How a request may run next."""

    FREE = "free"
    ALONE = "alone"
    CONVICTED = "convicted"


class CrashRecord:
    """The incidents of one request."""

    def __init__(self) -> None:
        self.num_incidents = 0
        self._alone_from: int | None = None  # output tokens when its trial began

    @property
    def standing(self) -> Standing:
        if self.num_incidents < MAX_INCIDENTS:
            return Standing.FREE
        return Standing.ALONE if self.num_incidents == MAX_INCIDENTS else Standing.CONVICTED

    @property
    def on_trial(self) -> bool:
        """Whether it runs alone, and `progress` may acquit it."""
        return self._alone_from is not None

    def begin(self, num_emitted: int) -> bool:
        """An attempt begins; whether it has to be alone."""
        alone = self.standing is not Standing.FREE
        self._alone_from = num_emitted if alone else None
        return alone

    def progress(self, num_emitted: int) -> None:
        """The request has so many output tokens now."""
        if self._alone_from is not None and num_emitted - self._alone_from >= ISOLATED_TOKENS:
            self._alone_from = None
            self.num_incidents = 0

    def incident(self) -> None:
        """A step with the request in it has failed or crashed."""
        self.num_incidents += 1
