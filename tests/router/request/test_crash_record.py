"""Poison requests: two incidents make one suspected, a third in isolation confirms it, isolated tokens clear it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.protos.wire import ISOLATED_TOKENS
from quire.router.request.crash_record import CrashRecord, PoisonState

# What becomes of an attempt: tokens that it adds, and whether it ends in an incident or for another reason.
ATTEMPTS = st.lists(st.tuples(st.integers(0, 3 * ISOLATED_TOKENS), st.booleans()), max_size=12)


@given(ATTEMPTS)
def test_state_follows_from_the_incidents_since_the_last_isolated_success(attempts):
    record, num_emitted, incidents = CrashRecord(), 0, 0
    for num_new, is_incident in attempts:
        if incidents > 2:
            assert record.state is PoisonState.CONFIRMED
            return
        is_isolated = record.begin_attempt(num_emitted)
        assert is_isolated == (incidents == 2) == (record.state is PoisonState.SUSPECTED)
        assert is_isolated == record.is_isolated
        for _ in range(num_new):
            num_emitted += 1
            record.on_tokens(num_emitted)
        if is_isolated and num_new >= ISOLATED_TOKENS:
            incidents = 0
            assert record.state is PoisonState.CLEAR and not record.is_isolated
        if is_incident:
            record.on_incident()
            incidents += 1


@given(st.integers(0, 50))
def test_lost_replicas_without_incidents_never_make_a_request_suspected(num_attempts):
    record = CrashRecord()
    for num_emitted in range(num_attempts):
        assert not record.begin_attempt(num_emitted)
    assert record.state is PoisonState.CLEAR
