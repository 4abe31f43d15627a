"""Isolated requests: they run alone, because more than one replica has crashed while they ran.

Such requests start one at a time. Until a request has generated `ISOLATED_TOKENS` tokens, each step holds that request
only. The model's output depends on the request alone, so a request that made a replica crash does so again at the same
token, and no other request is in that step. A request that reaches its `ISOLATED_TOKENS` then runs together with the
others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Set

from quire.protos.wire import ISOLATED_TOKENS
from quire.replica.core.request import Phase, Request


class IsolatedRequests:
    """The requests that wait to run alone, and the one that does."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self.current: Request | None = None

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    @property
    def any(self) -> bool:
        """Whether a request runs alone or waits to. If so, no step is planned while another one is in flight."""
        return len(self._waiting) > 0 or self.current is not None

    def append(self, request: Request) -> None:
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)

    def head(self) -> Request | None:
        """The request that runs alone next; None if one runs alone now or none waits."""
        if self.current is not None or not self._waiting:
            return None
        return self._waiting[0]

    def start(self, request: Request) -> None:
        """Record that the head has a row and runs alone now."""
        self._waiting.remove(request)
        self.current = request

    def update(self, num_new_tokens: int) -> None:
        """End the isolation of the current request if it has enough tokens, has lost its row, or is paused.

        Parameters
        ----------
        num_new_tokens
            Tokens that the current request has generated on this replica.
        """
        request = self.current
        if request is None:
            return
        is_running = request.phase in (Phase.PREFILLING, Phase.DECODING) and not request.is_paused
        if not is_running or num_new_tokens >= ISOLATED_TOKENS:
            request.alone = False
            self.current = None

    def keys(self) -> Set[Hashable]:
        return {request.key for request in self._waiting}
