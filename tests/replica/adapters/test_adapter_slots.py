"""Slots of adapters: random starts and ends of requests against a model of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.adapter_ref import AdapterRef, cache_namespace
from quire.replica.core.adapter import Adapter, AdapterSlots

ROWS = 6


def adapters(count: int) -> list[Adapter]:
    return [Adapter(AdapterRef(str(i), f"/{i}", f"digest{i}"), None) for i in range(count)]


EVENTS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, ROWS - 1)), max_size=80)


@given(st.integers(1, 4), EVENTS)
def test_each_row_reads_the_slot_into_which_its_adapter_was_loaded(num_slots, events):
    known, slots = adapters(7), AdapterSlots(num_slots, ROWS)
    rows: dict[int, Adapter | None] = {}
    device: dict[int, Adapter] = {}
    for number, row in events:
        adapter = known[number] if number < 7 else None
        if row in rows:
            slots.release(row)
            del rows[row]
        in_use = {a for a in rows.values() if a is not None}
        assert slots.fits(adapter) == (
            adapter is None or adapter in in_use or len(in_use) < num_slots
        )
        if slots.fits(adapter):
            slots.take(adapter, row)
            rows[row] = adapter
        # The slots of a plan: loads come before the step.
        device |= {slot: loaded for slot, loaded in slots.take_loads()}
        found = slots.of(np.arange(ROWS))
        assert len(found) == (ROWS if any(rows.values()) else 0)
        for r, own in rows.items():
            if own is not None:
                assert device[found[r]] is own
            elif len(found):
                assert found[r] == 0
        slots.check()
    for row in rows:
        slots.release(row)
    slots.check()
    assert slots.num_used == 0 and len(slots) <= num_slots


@given(st.integers(1, 4), EVENTS)
def test_the_listing_is_what_was_loaded_and_its_changes_are_counted(num_slots, events):
    known, slots = adapters(7), AdapterSlots(num_slots, ROWS)
    rows: dict[int, Adapter] = {}
    device: dict[int, Adapter] = {}
    seen, num_changes = (set(), 0), 0
    assert slots.num_slots == num_slots
    for number, row in events:
        if row in rows:
            slots.release(row)
            del rows[row]
        elif number < 7 and slots.fits(known[number]):
            slots.take(known[number], row)
            rows[row] = known[number]
        elif number == 7:
            slots.forget(f"digest{row}")
            used = {adapter.ref.digest for adapter in rows.values()}
            device = {
                slot: adapter
                for slot, adapter in device.items()
                if adapter.ref.digest != f"digest{row}" or adapter.ref.digest in used
            }
        device |= {slot: loaded for slot, loaded in slots.take_loads()}
        listed = slots.digests(), slots.num_used
        assert listed[0] == {adapter.ref.digest for adapter in device.values()}
        assert listed[1] == len(set(rows.values()))
        assert listed == seen or slots.num_changes > num_changes
        seen, num_changes = listed, slots.num_changes


def test_an_unused_adapter_stays_until_its_slot_is_needed():
    (a, b, c), slots = adapters(3), AdapterSlots(2, ROWS)
    for row, adapter in enumerate((a, b)):
        slots.take(adapter, row)
        slots.release(row)
    assert [load.adapter for load in slots.take_loads()] == [a, b]
    slots.take(a, 0)
    assert slots.take_loads() == (), "it is still in its slot"
    slots.take(c, 1)
    assert [(slot, x) for slot, x in slots.take_loads()] == [(2, c)], "b was unused longest"
    assert not slots.fits(b) and slots.fits(a) and slots.fits(None)


def test_after_a_failed_step_all_slots_are_loaded_again():
    (a, b, _), slots = adapters(3), AdapterSlots(3, ROWS)
    slots.take(a, 0)
    slots.take(b, 1)
    slots.take_loads()
    slots.report_again()
    assert {load.adapter for load in slots.take_loads()} == {a, b}


def test_a_forgotten_adapter_frees_its_slot_unless_a_row_uses_it():
    (a, b, _), slots = adapters(3), AdapterSlots(2, ROWS)
    slots.take(a, 0)
    slots.take(b, 1)
    slots.release(1)
    slots.forget("digest0")
    slots.forget("digest1")
    slots.check()
    assert len(slots) == 1


@given(
    st.text(max_size=6),
    st.text(max_size=6),
    st.sampled_from(["", "d1", "d2"]),
    st.sampled_from(["", "d1", "d2"]),
)
def test_namespaces_are_equal_only_for_equal_tenants_and_digests(
    tenant, other, digest, other_digest
):
    def namespace(tenant: str, digest: str) -> str:
        return cache_namespace(tenant, AdapterRef("n", "/p", digest) if digest else None)

    for a, b in ((tenant, other), (f"\0d1\0{tenant}", tenant), (f"\0\0{tenant}", other)):
        same = namespace(a, digest) == namespace(b, other_digest)
        assert same == ((a, digest) == (b, other_digest))
