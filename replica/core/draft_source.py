"""The seam between the scheduler and a source of drafts (tokens that may come next, verified by one step)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from quire.replica.core.request import Request

# Gives a decoding request blocks for this number of tokens after its newest one, as far as blocks are free. Returns all
# its blocks of the first layer group, [m] int32.
Reserve = Callable[[Request, int], np.ndarray]


class DraftSource(Protocol):
    """Proposes the next tokens of decoding requests."""

    def attach(self, reserve: Reserve) -> None:
        """Called once, before the first `propose`, within which the source may call `reserve` for its requests."""

    def propose(self, requests: Sequence[Request], room: int) -> list[np.ndarray]:
        """For each request the tokens that may follow it, [0 to max_draft_tokens] int32 each; empty: no draft.

        Every token of each request is known: `request.token_ids` is complete. The step verifies `room` drafted tokens
        at most, 1 or more, those of the first requests.
        """

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """A step has verified `num_drafted` tokens of the request, the first `num_accepted` of which were right."""

    def observe_step(self, num_rows: int, num_drafted: int, duration_s: float) -> None:
        """A step of decoding rows only, with this many rows and drafted tokens, took this long."""

    def end(self, request: Request) -> None:
        """The request has ended or left its row (finished, aborted, preempted); forget it."""
