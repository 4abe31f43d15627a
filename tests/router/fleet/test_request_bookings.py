"""The sums over a replica's bookings are those of the bookings that are left, whatever comes and goes."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from quire.router.fleet.request_bookings import ReplicaBookings, RequestBooking, exact_work
from quire.router.index.holder_slots import Booking

NO_BLOCKS = cast(Booking, None)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.floats(0, 1e9)),
        st.tuples(st.just("report"), st.integers(0, 40)),
        st.tuples(st.just("answer"), st.integers(0, 100)),
        st.tuples(st.just("clear"), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS)
def test_sums_are_exact(steps):
    bookings = ReplicaBookings()
    unreported: list[RequestBooking] = []
    unanswered: list[RequestBooking] = []
    for number, (what, value) in enumerate(steps):
        if what == "add":
            work = exact_work(value)
            new = RequestBooking("r", "e", int(value), 0, work, float(number), NO_BLOCKS)
            bookings.add(new)
            unreported.append(new)
            unanswered.append(new)
        elif what == "report":
            bookings.report(float(value))
            unreported = [booking for booking in unreported if booking.booked_s > value]
        elif what == "answer" and unanswered:
            answered = unanswered.pop(value % len(unanswered))
            unreported = [booking for booking in unreported if booking is not answered]
            bookings.answer(answered, float(number))
        elif what == "clear":
            bookings.clear()
            unreported, unanswered = [], []
        assert bookings.num_unreported == len(unreported)
        assert bookings.num_unanswered == len(unanswered)
        assert bookings.unreported_work == sum(booking.work for booking in unreported)
        assert bookings.unanswered_work == sum(booking.work for booking in unanswered)
        assert bookings.unanswered_tokens == sum(booking.prompt_tokens for booking in unanswered)
