"""Recognises a poison request: a request whose steps fail, or crash the replica, on every replica that runs it.

An *incident* is a failed step, or a crash of the replica's process, while the request was in the running step. A
replica that was killed from outside, drained, or lost with its node is not an incident.

| incidents | state | next attempt |
|---|---|---|
| 0, 1 | clear | runs together with other requests |
| 2 | suspected | computes its next `ISOLATED_TOKENS` tokens in steps without other requests |
| 3 | confirmed | none: the request fails |

A suspected request that completes these isolated steps is clear again. Requests that only shared a failed step with a
poison request complete their own isolated steps, so they do not reach the third incident.
"""

from __future__ import annotations

import enum

from quire.protos.wire import ISOLATED_TOKENS

# Incidents after which a request is suspected and runs isolated.
SUSPECTED_AFTER = 2


class PoisonState(enum.Enum):
    """The conclusion from a request's incidents; the table above defines the values."""

    CLEAR = "clear"
    SUSPECTED = "suspected"
    CONFIRMED = "confirmed"


class CrashRecord:
    """The incidents of one request."""

    def __init__(self) -> None:
        self.num_incidents = 0
        # Number of output tokens at the start of the isolated attempt; None while the request runs with others.
        self._isolated_from: int | None = None

    @property
    def state(self) -> PoisonState:
        if self.num_incidents < SUSPECTED_AFTER:
            return PoisonState.CLEAR
        is_second = self.num_incidents == SUSPECTED_AFTER
        return PoisonState.SUSPECTED if is_second else PoisonState.CONFIRMED

    @property
    def is_isolated(self) -> bool:
        """Whether the request runs in steps without other requests, until `on_tokens` clears it."""
        return self._isolated_from is not None

    def begin_attempt(self, num_emitted: int) -> bool:
        """Start an attempt after `num_emitted` output tokens; return whether it must run isolated."""
        is_isolated = self.state is not PoisonState.CLEAR
        self._isolated_from = num_emitted if is_isolated else None
        return is_isolated

    def on_tokens(self, num_emitted: int) -> None:
        """Clear the record once an isolated attempt has generated enough tokens."""
        start = self._isolated_from
        if start is not None and num_emitted - start >= ISOLATED_TOKENS:
            self._isolated_from = None
            self.num_incidents = 0

    def on_incident(self) -> None:
        """Count a step that failed or crashed with the request in it."""
        self.num_incidents += 1
