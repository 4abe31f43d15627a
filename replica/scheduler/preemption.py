"""The choice of the running request to preempt when the cache is full, and the queue of preempted requests.

A preempted request loses its row and blocks. It returns before waiting requests start.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterator, Set
from operator import attrgetter

import numpy as np

from quire.replica.core.request import Request
from quire.replica.kv_cache.blocks import IntegrityError

_arrival_index = attrgetter("arrival_index")


def choose_preempted(arrival_index: np.ndarray, paused: np.ndarray, others_wait: bool) -> int:
    """Choose the running request to preempt.

    If requests are paused, choose the newest paused one, because a paused request computes nothing with its blocks.
    Otherwise choose the oldest request, or, while preempted requests wait to return, the newest one. Then the oldest
    running request keeps its KV until it ends, or until there is room for the preempted requests. Every preemption
    makes room for a step that computes something, and generated tokens are never lost. So some request always gets
    closer to its end.

    Parameters
    ----------
    arrival_index
        [n] int64, order of submission of the running requests; n > 0.
    paused
        [n] bool, whether the request is paused.
    others_wait
        Whether preempted requests, which are not paused, wait to return.

    Returns
    -------
    Index in [0, n).
    """
    candidates = np.flatnonzero(paused)
    if len(candidates):
        return int(candidates[np.argmax(arrival_index[candidates])])
    return int(np.argmax(arrival_index) if others_wait else np.argmin(arrival_index))


class ReturnQueue:
    """Preempted requests that wait to return, the oldest first.

    A sorted list is fast enough, because rows and host blocks limit the number of preempted requests.
    """

    def __init__(self) -> None:
        # Sorted by `arrival_index`.
        self._requests: list[Request] = []
        # Number of tokens that these requests must compute before they generate again.
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def head(self) -> Request:
        return self._requests[0]

    def append(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=_arrival_index)
        self.num_tokens += _num_missing(request)

    def remove(self, request: Request) -> None:
        """Take a request out; `Request.offloaded` must not have changed since `append`."""
        i = bisect.bisect_left(self._requests, request.arrival_index, key=_arrival_index)
        del self._requests[i]
        self.num_tokens -= _num_missing(request)

    def keys(self) -> Set[Hashable]:
        return {request.key for request in self._requests}

    def check(self) -> None:
        """Raise `IntegrityError` unless the requests are in order of arrival and their tokens are counted right."""
        order = [request.arrival_index for request in self]
        if order != sorted(order):
            raise IntegrityError("the preempted requests are not in order of arrival")
        if self.num_tokens != sum(map(_num_missing, self)):
            raise IntegrityError(f"{self.num_tokens} returning tokens are counted, which is wrong")


def _num_missing(request: Request) -> int:
    return request.num_tokens - (request.offloaded.num_computed if request.offloaded else 0)
