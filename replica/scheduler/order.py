"""In which order waiting requests start and running prefills share a step's budget.

| scheduler | waiting requests | running prefills |
|---|---|---|
| shortest_first | arrival + `AGEING` times the seconds of their own prefill | admission |
| fifo, prefill_first | arrival | admission |
| priority | priority, deadline, arrival | the same; a more urgent waiting request starts before them |

After a soft reset a request returns before all others, whatever the scheduler.

Nothing starves. Under `shortest_first` a request is passed only by those that come within `AGEING` times the seconds by
which its prefill takes longer than theirs: shortest processing time first, which has the least mean waiting time of
all orders of one queue (Smith 1956), with an age that bounds what it costs the long ones. In a simulated cluster
(`tests/perf/router/routersim.py`) it takes 6 % off the mean time to first token where long prompts meet short ones, 7 %
where most find their prefix cached, nothing where all are alike, and leaves the 99th percentile or lowers it. Twice
as much age gains 1 % more, half of it 2 % less.

Of `OLDEST_EVERY` requests that start in a row under `priority` at least one is the one that has waited
longest; so a request that found w others waiting starts among the next OLDEST_EVERY * (w + 1), however many more
urgent ones keep coming. And of as many steps that continue prefills, one serves them in the order of their admission.
A priority is no time: to age it would need a rate, which is right for one load only, and makes of a long backlog one
queue in order of arrival; a share of the starts holds for any load.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.protos.fairness import AGEING, OLDEST_EVERY
from quire.replica.core.request import Request
from quire.replica.scheduler.queues import WaitingQueue

# Seconds that a request's missing tokens take.
PrefillSeconds = Callable[[Request], float]
Urgency = tuple[int, float, int]


def urgency(request: Request) -> Urgency:
    """Sorts the more urgent request first: priority (smaller is sooner), deadline, arrival."""
    deadline_s = math.inf if request.deadline_s is None else request.deadline_s
    return request.priority, deadline_s, request.arrival_index


class RankedQueue(WaitingQueue):
    """Pending requests by the rank that each has when it comes, behind those that came back.

    Every operation is O(log n) amortised, removal by key included: an entry of the heap whose request is gone
    stays until it comes to the top or until half of the heap is such entries.

    Parameters
    ----------
    rank
        The smallest starts first; of equal ones the one that came first.
    """

    def __init__(self, rank: Callable[[Request], Urgency | float]):
        super().__init__()  # all of them; in order: those that came back, then arrivals
        self._rank = rank
        self._returned: OrderedDict[Hashable, Request] = OrderedDict()
        # (rank, ticket, request), in order of tickets, which are unique
        self._arrived: OrderedDict[Hashable, tuple[Urgency | float, int, Request]] = OrderedDict()
        self._heap: list[tuple[Urgency | float, int, Request]] = []
        self._num_tickets = 0

    def __iter__(self) -> Iterator[Request]:
        """Those that returned, then the others by rank."""
        yield from self._returned.values()
        yield from (request for _, _, request in sorted(self._arrived.values()))

    def head(self) -> Request:
        if self._returned:
            return next(iter(self._returned.values()))
        while not self._is_waiting(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def append(self, request: Request) -> None:
        super().append(request)
        entry = self._rank(request), self._num_tickets, request
        self._num_tickets += 1
        self._arrived[request.key] = entry
        heapq.heappush(self._heap, entry)

    def push_front(self, request: Request) -> None:
        super().push_front(request)
        self._returned[request.key] = request
        self._returned.move_to_end(request.key, last=False)

    def remove(self, request: Request) -> None:
        super().remove(request)
        if self._returned.pop(request.key, None) is None:
            del self._arrived[request.key]
            if len(self._heap) > 2 * len(self._arrived) + 64:
                self._heap = [entry for entry in self._heap if self._is_waiting(entry)]
                heapq.heapify(self._heap)

    def _is_waiting(self, entry: tuple[Urgency | float, int, Request]) -> bool:
        return self._arrived.get(entry[2].key) is entry


class ShortestFirstQueue(RankedQueue):
    """Pending requests by arrival and `AGEING` times the seconds of their prefill, as they are foretold when they come.

    While the speed is not known that is the order of arrival.

    Parameters
    ----------
    prefill_s
        Seconds that a request's missing tokens take.
    """

    def __init__(self, prefill_s: PrefillSeconds):
        super().__init__(lambda request: (request.arrival_s or 0.0) + AGEING * prefill_s(request))


class PriorityQueue(RankedQueue):
    """Pending requests by urgency, with a turn for the one that has waited longest."""

    def __init__(self) -> None:
        super().__init__(urgency)
        self._num_passed = 0  # starts in a row that left the oldest waiting

    def head(self) -> Request:
        if not self._returned and self._num_passed >= OLDEST_EVERY - 1:
            return self._oldest()
        return super().head()

    def start(self, request: Request) -> None:
        if request.key in self._arrived:
            self._num_passed = 0 if request is self._oldest() else self._num_passed + 1
        super().start(request)

    def _oldest(self) -> Request:
        return next(iter(self._arrived.values()))[2]


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
        if self._num_urgent == OLDEST_EVERY - 1:
            self._num_urgent = 0
            return running, False
        if running:
            self._num_urgent += 1
        return sorted(running, key=urgency), True


@dataclass(frozen=True, slots=True)
class Policy:
    """What distinguishes one `config.scheduler` from the others."""

    make_queue: Callable[[PrefillSeconds], WaitingQueue]
    # Running prefills share a step by urgency, and more urgent requests start before them.
    prefills_by_urgency: bool = False
    # Started prompts come before the decoding rows, see `Chunking.leaves_out_decodes`.
    prefill_first: bool = False


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "shortest_first": Policy(ShortestFirstQueue),
        "fifo": Policy(lambda _: WaitingQueue()),
        "prefill_first": Policy(lambda _: WaitingQueue(), prefill_first=True),
        "priority": Policy(lambda _: PriorityQueue(), prefills_by_urgency=True),
    }
)
