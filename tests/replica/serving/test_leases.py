"""A stream lives as long as its router names it, and an attachment as long as its router speaks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.replica.serving.leases import Leases

LEASE_S = 10.0
ROUTERS = ("r1", "r2")
KEYS = st.tuples(st.sampled_from(ROUTERS), st.integers(0, 3))
EVENTS = st.one_of(
    st.tuples(st.just("begin"), KEYS),
    st.tuples(st.just("end"), KEYS),
    st.tuples(st.just("attach"), st.sampled_from(ROUTERS)),
    st.tuples(st.just("renew"), st.sampled_from(ROUTERS), st.sets(st.integers(0, 3))),
    st.tuples(st.just("wait"), st.sampled_from((0.5, LEASE_S / 2, LEASE_S, LEASE_S + 1))),
)


@given(st.lists(EVENTS, max_size=60))
def test_what_was_not_wanted_for_a_lease_has_expired_and_nothing_else(events):
    """Against the whole history of who was last wanted when."""
    leases, now, heard_s = Leases(LEASE_S), 0.0, 0.0
    streams: dict[tuple[str, int], float] = {}
    routers: dict[str, float] = {}
    for event, *arguments in events:
        if event == "wait":
            now += arguments[0]
        elif event == "begin":
            leases.begin(arguments[0], now)
            streams[arguments[0]] = now
        elif event == "end":
            leases.end(arguments[0])
            streams.pop(arguments[0], None)
        elif event == "attach":
            leases.attach(arguments[0], now)
            routers[arguments[0]] = now
        else:
            router, ids = arguments
            leases.renew(router, ids, now)
            heard_s = now
            streams |= dict.fromkeys(streams.keys() & {(router, i) for i in ids}, now)
            routers |= dict.fromkeys(routers.keys() & {router}, now)
        late = {key for key, at_s in streams.items() if heard_s - at_s > LEASE_S}
        assert set(leases.expired_streams()) == late  # named until they end
        silent = {router for router, at_s in routers.items() if heard_s - at_s > LEASE_S}
        assert set(leases.expire_routers()) == silent  # named once
        for router in silent:
            del routers[router]


def test_who_hears_nobody_ends_nothing():
    """A draining replica: no call reaches it any more."""
    leases = Leases(LEASE_S)
    leases.attach("r1", 0.0)
    leases.begin(("r1", 1), 0.0)
    leases.renew("r1", [1], 1.0)
    leases.begin(("r1", 2), 5.0)
    assert (leases.expired_streams(), leases.expire_routers()) == ([], [])
    leases.renew("r2", [], 1.0 + LEASE_S + 0.1)  # another one is heard: this replica can be reached
    assert leases.expired_streams() == [("r1", 1)]
    assert leases.expire_routers() == ["r1"]
