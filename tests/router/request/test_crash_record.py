"""The poison rule: two incidents make a suspect, a third one alone convicts, coming through acquits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.protos.wire import ISOLATED_TOKENS
from quire.router.request.crash_record import CrashRecord, Standing

# What becomes of an attempt: tokens that it adds, and whether it ends in an incident or by somebody else's fault.
ATTEMPTS = st.lists(st.tuples(st.integers(0, 3 * ISOLATED_TOKENS), st.booleans()), max_size=12)


@given(ATTEMPTS)
def test_standing(attempts):
    record, num_emitted, incidents = CrashRecord(), 0, 0
    for num_new, is_incident in attempts:
        if incidents > 2:
            assert record.standing is Standing.CONVICTED
            return
        alone = record.begin(num_emitted)
        assert alone == (incidents == 2) == (record.standing is Standing.ALONE)
        for _ in range(num_new):
            num_emitted += 1
            record.progress(num_emitted)
        if alone and num_new >= ISOLATED_TOKENS:
            incidents = 0
            assert record.standing is Standing.FREE
        if is_incident:
            record.incident()
            incidents += 1


@given(st.integers(0, 50))
def test_deaths_that_are_nobodys_fault_never_make_a_suspect(num_moves):
    record = CrashRecord()
    for i in range(num_moves):
        assert not record.begin(i)
    assert record.standing is Standing.FREE
