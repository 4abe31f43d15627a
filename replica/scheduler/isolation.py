"""Requests that are under suspicion: more than one replica has crashed with them in the step.

Each in its turn starts alone: until it has generated `PROBATION_TOKENS` tokens, the steps hold nobody else. The model
is a function of the request, so what it did before it does again, at the same token; then only the guilty one is in
the step. Whoever comes through runs with the others from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator

from quire.protos.wire import PROBATION_TOKENS
from quire.replica.core.request import Phase, Request


class IsolatedRequests:
    """Who waits for a trial, and who is at it."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self.current: Request | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return any(request is waiting for waiting in self._waiting)

    def append(self, request: Request) -> None:
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)

    def head(self) -> Request | None:
        """Who is tried next, when nobody is at it."""
        if self.current is not None or not self._waiting:
            return None
        return self._waiting[0]

    def start(self, request: Request) -> None:
        """The head has a row now."""
        self._waiting.remove(request)
        self.current = request

    def update(self, num_new_tokens: int) -> None:
        """End the trial of a request that came through it, or has lost its row, or is paused.

        Parameters
        ----------
        num_new_tokens
            That the current one has generated here.
        """
        request = self.current
        if request is None:
            return
        running = request.phase in (Phase.PREFILLING, Phase.DECODING) and not request.is_paused
        if not running or num_new_tokens >= PROBATION_TOKENS:
            request.alone = False
            self.current = None

    def keys(self) -> set[Hashable]:
        return {request.key for request in self._waiting}
