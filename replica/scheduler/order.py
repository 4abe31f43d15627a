"""The order in which waiting requests start, and the order in which running prefills get a step's prefill budget.

| scheduler | waiting requests | running prefills |
|---|---|---|
| shortest_first | arrival time + `AGEING` times the seconds of their prefill | admission |
| fifo, prefill_first | arrival | admission |
| priority | priority, deadline, arrival | the same; a more urgent waiting request starts before them |

With every scheduler, preempted requests return before waiting requests start.

No request starves. `shortest_first` is shortest processing time first, which has the smallest mean waiting time of all
orders of a single queue (Smith 1956), with a bound on the delay of long requests: a request is overtaken only by
requests that arrive within `AGEING` times the seconds by which its prefill is longer. In a simulated cluster
(`tests/perf/router/routersim.py`) the mean time to first token falls by 6 % for a mix of long and short prompts, by 7 %
if most prefixes are cached, and not at all if all requests are alike; the 99th percentile stays or falls. Doubling
`AGEING` gains 1 % more, and halving it gains 2 % less.

Under `priority`, at least one of `OLDEST_EVERY` requests that start in a row is the one that has waited longest. So a
request that finds w others waiting is among the next OLDEST_EVERY * (w + 1) that start, even if more urgent requests
keep arriving. Likewise, one of `OLDEST_EVERY` steps that continue prefills serves them in order of admission.
Priorities do not age: a rate of ageing would be right for one load only, and would turn a long backlog into a queue in
order of arrival. A share of the starts works for any load.
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

# Estimates the seconds that a request's missing tokens take.
PrefillSeconds = Callable[[Request], float]
Urgency = tuple[int, float, int]


def urgency(request: Request) -> Urgency:
    """Sort key, smaller is more urgent: priority (smaller is more urgent), deadline, arrival."""
    deadline_s = math.inf if request.deadline_s is None else request.deadline_s
    return request.priority, deadline_s, request.arrival_index


class RankedQueue(WaitingQueue):
    """Waiting requests by the rank that each got on arrival. Requests that `push_front` returned come before them.

    Every operation is O(log n) amortised, removal included: the heap keeps the entry of a removed request until the
    entry is on top, or until half of the heap are such entries.

    Parameters
    ----------
    rank
        Smaller ranks start first; equal ranks start in order of arrival.
    """

    def __init__(self, rank: Callable[[Request], Urgency | float]):
        # The base class has all requests: first the returned ones, then the others in order of arrival.
        super().__init__()
        self._rank = rank
        self._returned: OrderedDict[Hashable, Request] = OrderedDict()
        # Key to (rank, ticket, request), in the order of tickets; tickets are unique.
        self._arrived: OrderedDict[Hashable, tuple[Urgency | float, int, Request]] = OrderedDict()
        self._heap: list[tuple[Urgency | float, int, Request]] = []
        self._num_tickets = 0

    def __iter__(self) -> Iterator[Request]:
        """The returned requests, then the others by rank."""
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
    """Waiting requests by arrival time plus `AGEING` times the seconds of their prefill, estimated on arrival.

    While the speed is not known, this is the order of arrival.

    Parameters
    ----------
    prefill_s
        Estimates the seconds that a request's missing tokens take.
    """

    def __init__(self, prefill_s: PrefillSeconds):
        super().__init__(lambda request: (request.arrival_s or 0.0) + AGEING * prefill_s(request))


class PriorityQueue(RankedQueue):
    """Waiting requests by urgency. One of `OLDEST_EVERY` starts in a row is the request that has waited longest."""

    def __init__(self) -> None:
        super().__init__(urgency)
        # Number of starts in a row that left the oldest request waiting.
        self._num_passed = 0

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
        Whether the scheduler is `priority`.
    """

    def __init__(self, by_urgency: bool):
        self._by_urgency = by_urgency
        # Number of steps in a row that were ordered by urgency.
        self._num_urgent = 0

    def sort(self, prefilling: Iterable[Request]) -> tuple[Iterable[Request], bool]:
        """Sort the running prefills of the next step, which are passed in order of admission.

        Returns
        -------
        The sorted prefills, and whether more urgent waiting requests may start before them.
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
    """The settings behind one value of `config.scheduler`."""

    make_queue: Callable[[PrefillSeconds], WaitingQueue]
    # Whether running prefills get a step's budget by urgency, and more urgent waiting requests start before them.
    prefills_by_urgency: bool = False
    # Whether a step may leave out the decoding rows to compute started prompts (`Chunking.leaves_out_decodes`).
    prefill_first: bool = False


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "shortest_first": Policy(ShortestFirstQueue),
        "fifo": Policy(lambda _: WaitingQueue()),
        "prefill_first": Policy(lambda _: WaitingQueue(), prefill_first=True),
        "priority": Policy(lambda _: PriorityQueue(), prefills_by_urgency=True),
    }
)
