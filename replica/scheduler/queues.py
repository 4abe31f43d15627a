"""Queues of requests, and their deadlines."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Set
from typing import Protocol

from quire.protos.wire import ISOLATED_TOKENS
from quire.replica.core.request import Phase, Request
from quire.replica.kv_cache.blocks import IntegrityError


class RequestCollection(Protocol):
    """The requests in one stage (`request_book.Stage`)."""

    def __len__(self) -> int: ...

    def append(self, request: Request) -> None:
        """Add a request."""
        ...

    def remove(self, request: Request) -> None:
        """Take out a request, which must be there."""
        ...

    def keys(self) -> Set[Hashable]:
        """The keys of the requests."""
        ...


class KeyedRequests(dict[Hashable, Request]):
    """Requests by key, in insertion order."""

    def append(self, request: Request) -> None:
        self[request.key] = request

    def remove(self, request: Request) -> None:
        del self[request.key]


class WaitingQueue:
    """Waiting requests, first come, first served. Every operation is O(1), removal by key included."""

    def __init__(self) -> None:
        self._requests: OrderedDict[Hashable, Request] = OrderedDict()
        # Estimated number of tokens that these requests must compute when they start.
        self.num_missing_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def head(self) -> Request:
        return next(iter(self._requests.values()))

    def append(self, request: Request) -> None:
        self._requests[request.key] = request
        self.num_missing_tokens += request.num_missing_tokens

    def push_front(self, request: Request) -> None:
        # Call this class's `append`, because the order of a subclass does not apply to the front.
        WaitingQueue.append(self, request)
        self._requests.move_to_end(request.key, last=False)

    def start(self, request: Request) -> None:
        """Take out the head, because it starts."""
        self.remove(request)

    def remove(self, request: Request) -> None:
        del self._requests[request.key]
        self.num_missing_tokens -= request.num_missing_tokens

    def keys(self) -> Set[Hashable]:
        return self._requests.keys()

    def check(self) -> None:
        """Raise `IntegrityError` unless the missing tokens are counted right."""
        if self.num_missing_tokens != sum(request.num_missing_tokens for request in self):
            raise IntegrityError(
                f"{self.num_missing_tokens} missing tokens are counted, not those of the waiting requests"
            )


class Deadlines:
    """The deadlines of live requests. Deadlines of ended requests are dropped lazily."""

    def __init__(self) -> None:
        # arrival_index is unique, so two requests are never compared.
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: Request, deadline_s: float, num_live: int) -> None:
        """Add a request.

        Parameters
        ----------
        num_live
            Number of live requests; the heap is rebuilt when most of its entries belong to ended requests.
        """
        if len(self._heap) > 2 * num_live + 64:
            self._heap = [entry for entry in self._heap if entry[2].phase is not Phase.FINISHED]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_s, request.arrival_index, request))

    def next_s(self) -> float | None:
        """The earliest deadline of a live request."""
        while self._heap and self._heap[0][2].phase is Phase.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_expired(self, now_s: float) -> Iterator[tuple[float, Request]]:
        """Remove and yield (deadline, request) of each live request with a deadline that has passed."""
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, _, request = heapq.heappop(self._heap)
            if request.phase is not Phase.FINISHED:
                yield deadline_s, request


class BlockedHead:
    """The queue's first request, while it does not fit.

    The scheduler skips it until something changes that could make it fit.
    """

    def __init__(self) -> None:
        # Arrival index of the blocked request; None: no request is known to be blocked.
        self._arrival_index: int | None = None
        # Whether the next request to start lacked blocks in the last plan that checked.
        self.lacks_blocks = False

    def block(self, request: Request) -> None:
        """Skip this request until `unblock`."""
        self._arrival_index = request.arrival_index
        self.lacks_blocks = True

    def unblock(self) -> None:
        """Let the scheduler check the head again: blocks or rows were given back, or the queue has changed."""
        self._arrival_index = None

    def is_blocked(self, request: Request) -> bool:
        return self._arrival_index == request.arrival_index


class IsolatedRequests:
    """The requests that wait to run alone, and the one that does: more than one replica has crashed while they ran.

    Such requests start one at a time. Until a request has generated `ISOLATED_TOKENS` tokens, each step holds that
    request only. The model's output depends on the request alone, so a request that made a replica crash does so again
    at the same token, and no other request is in that step. A request that reaches its `ISOLATED_TOKENS` then runs
    together with the others.
    """

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
