"""In which order waiting requests start and running prefills share a step's budget.

| scheduler | waiting requests | running prefills |
|---|---|---|
| fifo, prefill_first | arrival | admission |
| priority | priority, deadline, arrival | the same; a more urgent waiting request starts before them |

After a soft reset a request returns before all others, whatever the scheduler.

Nothing starves under `priority`. Of `OLDEST_TURN` requests that start in a row at least one is the one that has waited
longest; so a request that found w others waiting starts among the next OLDEST_TURN * (w + 1), however many more
urgent ones keep coming. And of as many steps that continue prefills, one serves them in the order of their admission.
An ageing priority would need a rate, which is right for one load only, and makes of a long backlog one queue in
order of arrival; a share of the starts holds for any load.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator

from quire.replica.queues import WaitingQueue
from quire.replica.request import Request

OLDEST_TURN = 8  # every eighth start: 12.5 % of them at least are in order of arrival

Urgency = tuple[int, float, int]


def urgency(request: Request) -> Urgency:
    """Sorts the more urgent request first: priority (smaller is sooner), deadline, arrival."""
    deadline_s = math.inf if request.deadline_s is None else request.deadline_s
    return request.priority, deadline_s, request.arrival_index


class PriorityQueue(WaitingQueue):
    """Pending requests by urgency, with a turn for the one that has waited longest.

    Every operation is O(log n) amortised, removal by key included: an entry of the heap whose request is gone
    stays until it comes to the top or until half of the heap is such entries.
    """

    def __init__(self) -> None:
        super().__init__()  # all of them; in order: those that came back, then arrivals
        self._returned: OrderedDict[Hashable, Request] = OrderedDict()
        self._arrived: OrderedDict[Hashable, tuple[int, Request]] = OrderedDict()  # with its ticket
        self._heap: list[tuple[Urgency, int, Request]] = []  # tickets are unique
        self._num_tickets = 0
        self._num_passed = 0  # starts in a row that left the oldest waiting

    def __iter__(self) -> Iterator[Request]:
        """Those that returned, then the others by urgency."""
        yield from self._returned.values()
        yield from sorted((request for _, request in self._arrived.values()), key=urgency)

    def head(self) -> Request:
        if self._returned:
            return next(iter(self._returned.values()))
        if self._num_passed >= OLDEST_TURN - 1:
            return self._oldest()
        while not self._is_waiting(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def append(self, request: Request) -> None:
        super().append(request)
        ticket, self._num_tickets = self._num_tickets, self._num_tickets + 1
        self._arrived[request.key] = (ticket, request)
        heapq.heappush(self._heap, (urgency(request), ticket, request))

    def push_front(self, request: Request) -> None:
        super().push_front(request)
        self._returned[request.key] = request
        self._returned.move_to_end(request.key, last=False)

    def start(self, request: Request) -> None:
        if request.key in self._arrived:
            self._num_passed = 0 if request is self._oldest() else self._num_passed + 1
        self.remove(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        if self._returned.pop(request.key, None) is None:
            del self._arrived[request.key]
            if len(self._heap) > 2 * len(self._arrived) + 64:
                self._heap = [entry for entry in self._heap if self._is_waiting(entry)]
                heapq.heapify(self._heap)

    def _oldest(self) -> Request:
        return next(iter(self._arrived.values()))[1]

    def _is_waiting(self, entry: tuple[Urgency, int, Request]) -> bool:
        _, ticket, request = entry
        return self._arrived.get(request.key, (-1, None))[0] == ticket


class PrefillOrder:
    """The order in which running prefills get a step's budget.

    Parameters
    ----------
    by_urgency
        The scheduler is `priority`.
    """

    def __init__(self, by_urgency: bool):
        self._by_urgency = by_urgency
        self._num_urgent = 0  # steps in a row that went by urgency

    def sort(self, prefilling: Iterable[Request]) -> tuple[Iterable[Request], bool]:
        """The running prefills of the next step, given in the order of their admission.

        Returns
        -------
        Their order, and whether more urgent waiting requests may start before them.
        """
        if not self._by_urgency:
            return prefilling, False
        running = list(prefilling)
        if self._num_urgent == OLDEST_TURN - 1:
            self._num_urgent = 0
            return running, False
        if running:
            self._num_urgent += 1
        return sorted(running, key=urgency), True
