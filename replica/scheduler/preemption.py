"""Who gives way when the cache is full, and in which order those return."""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterator
from operator import attrgetter

import numpy as np

from quire.replica.core.request import Request
from quire.replica.kv_cache.blocks import IntegrityError

_arrival_index = attrgetter("arrival_index")


def choose_victim(arrival_index: np.ndarray, paused: np.ndarray, victim_waits: bool) -> int:
    """Which running request gives its blocks up.

    A paused one first, the newest of them: it computes nothing with its blocks. Else the oldest; but while an
    earlier victim waits to return, the newest. So the oldest of those that run is never taken while a victim
    waits: it keeps what it has computed and ends, or the victims return before that, which takes room. Every
    eviction is for a step that computes something, and what was generated is never lost; so some request always
    comes nearer to its end.

    Parameters
    ----------
    arrival_index
        [n] int64, order of submission of the running requests; n > 0.
    paused
        [n] bool.
    victim_waits
        An earlier victim that is not paused waits to return.

    Returns
    -------
    Index in [0, n).
    """
    candidates = np.flatnonzero(paused)
    if len(candidates):
        return int(candidates[np.argmax(arrival_index[candidates])])
    return int(np.argmax(arrival_index) if victim_waits else np.argmin(arrival_index))


class ReturnQueue:
    """Victims that wait to return, the oldest first. There are never more than rows and host blocks make, so
    they are kept sorted."""

    def __init__(self) -> None:
        self._requests: list[Request] = []  # by arrival_index
        self.num_tokens = 0  # that they must compute before they generate again

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def head(self) -> Request:
        return self._requests[0]

    def put(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=_arrival_index)
        self.num_tokens += _num_missing(request)

    def remove(self, request: Request) -> None:
        """Take a request out; what it has parked must still be as when it came."""
        i = bisect.bisect_left(self._requests, request.arrival_index, key=_arrival_index)
        del self._requests[i]
        self.num_tokens -= _num_missing(request)

    def check(self, victims: set[Hashable]) -> None:
        """Raise `IntegrityError` unless exactly the requests of these keys wait, in their order."""
        order = [request.arrival_index for request in self]
        if {request.key for request in self} != victims or order != sorted(order):
            raise IntegrityError(
                "the requests that return are not the victims, in order of arrival"
            )
        if self.num_tokens != sum(map(_num_missing, self)):
            raise IntegrityError(f"{self.num_tokens} returning tokens are counted, not those there")


def _num_missing(request: Request) -> int:
    return request.num_tokens - (request.parked.num_computed if request.parked else 0)
