"""Bookings: this router's requests on one replica, from the decision to the end of each.

Reports lag behind decisions, so a request's prefill counts as queued from the decision on. The first report that can
contain the request removes it from `_unreported`, and its first token removes it from `_unanswered`.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.router.index.holder_slots import Booking


def exact_work(work: float) -> float:
    """The nearest multiple of 2**-10: sums and differences of such numbers, up to 2**43, have no rounding errors."""
    return round(work * 1024) / 1024


@dataclass(slots=True, eq=False)
class RequestBooking:
    """One request on one replica, from the decision to its end. `ReplicaTable.book` makes it."""

    replica: str
    epoch: str
    prompt_tokens: int
    # Prompt tokens that the replica must prefill, by the router's prediction.
    prefill_tokens: int
    # Work of these tokens (`prefill_work`), as `exact_work` gives it.
    work: float
    booked_s: float
    index_booking: Booking
    answered: bool = False
    ended: bool = False


class ReplicaBookings:
    """The requests of this router that are in flight on one replica.

    Attributes
    ----------
    num_in_flight
        Requests that have not ended.
    num_unreported, num_unanswered
        Number of requests that the last report cannot contain, and of requests without a first token.
    unreported_work, unanswered_work
        Sums of their prefill work.
    unanswered_tokens
        Prompt tokens of the requests without a first token.
    head_s
        Time at which the oldest request without a first token became the oldest.
    """

    def __init__(self) -> None:
        self._unreported: dict[RequestBooking, None] = {}
        self._unanswered: dict[RequestBooking, None] = {}
        self.num_in_flight = 0
        self.unreported_work = 0.0
        self.unanswered_work = 0.0
        self.unanswered_tokens = 0
        self.head_s = 0.0

    @property
    def num_unreported(self) -> int:
        return len(self._unreported)

    @property
    def num_unanswered(self) -> int:
        return len(self._unanswered)

    @property
    def head_work(self) -> float:
        """Prefill work of the oldest request without a first token; 0 if there is none."""
        return next(iter(self._unanswered)).work if self._unanswered else 0.0

    def add(self, booking: RequestBooking) -> None:
        """Add a request. Requests are added in the order of `booked_s`."""
        if not self._unanswered:
            self.head_s = booking.booked_s
        self._unreported[booking] = None
        self._unanswered[booking] = None
        self.num_in_flight += 1
        self.unreported_work += booking.work
        self.unanswered_work += booking.work
        self.unanswered_tokens += booking.prompt_tokens

    def report(self, until_s: float) -> None:
        """Take in a report, which can contain the requests booked until `until_s`."""
        while self._unreported:
            oldest = next(iter(self._unreported))
            if oldest.booked_s > until_s:
                break
            self._remove_unreported(oldest)

    def answer(self, booking: RequestBooking, now_s: float) -> None:
        """Take in a request's first token."""
        if booking in self._unreported:
            self._remove_unreported(booking)
        if booking in self._unanswered:
            del self._unanswered[booking]
            self.unanswered_work -= booking.work
            self.unanswered_tokens -= booking.prompt_tokens
        # The replica prefills one prompt after the other, so the next one starts now.
        self.head_s = now_s

    def end(self) -> None:
        """Count the end of a request after `answer`."""
        self.num_in_flight -= 1

    def clear(self) -> None:
        """Drop all requests, after a restart of the replica's engine."""
        self._unreported.clear()
        self._unanswered.clear()
        self.num_in_flight = 0
        self.unreported_work = self.unanswered_work = 0.0
        self.unanswered_tokens = 0

    def _remove_unreported(self, booking: RequestBooking) -> None:
        del self._unreported[booking]
        self.unreported_work -= booking.work
