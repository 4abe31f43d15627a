"""Seconds until an adapter is on each replica's device: from reports, from bookings, and by default."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.protos.adapter_ref import AdapterRef, adapter_key
from quire.protos.wire import AdapterReport, Frame, Load
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.policy.policy import RouteRequest

X, Y = (AdapterRef(name, f"/{name}", digit * 32) for name, digit in (("x", "1"), ("y", "2")))
READ_S, LOAD_S = 0.4, 0.05
# Seconds of a decode step.
STEP_S = 0.01


def report(
    seq: int = 1,
    on_device: tuple[AdapterRef, ...] = (),
    on_host: tuple[AdapterRef, ...] = (),
    slots: int = 2,
    slots_in_use: int = 0,
    read_s: float = READ_S,
    load_s: float = LOAD_S,
) -> AdapterReport:
    arrays = [
        np.array([adapter_key(adapter.digest) for adapter in adapters], np.uint64)
        for adapters in (on_device, on_host)
    ]
    return AdapterReport(seq, *arrays, slots, slots_in_use, read_s, load_s)


def hear(table: ReplicaTable, name: str, adapters: AdapterReport | None, epoch="e", **load) -> None:
    load = {"decode_step_s": STEP_S, "prefill_s_per_token": 1e-4} | load
    frame = Frame.decode(Frame(epoch, load=Load(**load), adapters=adapters).encode())
    table.on_frame(name, frame, 0.0)


def table_of(*reports: AdapterReport | None) -> ReplicaTable:
    table = ReplicaTable(PrefixIndex(), lost_after_s=1e9)
    for name, adapters in zip("abcdef", reports, strict=False):
        table.add(name, "e")
        hear(table, name, adapters)
    return table


def seconds(table: ReplicaTable, adapter: AdapterRef = X, now_s: float = 0.0) -> list[float]:
    return table.fleet([], 1000, now_s, adapter=adapter).adapter_s.tolist()


def chosen(table: ReplicaTable, now_s: float = 0.0, adapter: AdapterRef | None = X) -> set[str]:
    policy, rng = make_policy("slo"), random.Random(5)
    fleet = table.fleet([], 1000, now_s, adapter=adapter)
    rankings = [policy.choose(RouteRequest(1000), fleet, now_s, rng) for _ in range(100)]
    return {ranking[0].replica for ranking in rankings}


def book(table: ReplicaTable, now_s: float, adapter: AdapterRef = X) -> str:
    fleet = table.fleet([], 10, now_s, adapter=adapter)
    ranking = make_policy("slo").choose(RouteRequest(10), fleet, now_s, random.Random(now_s))
    table.end(table.book(ranking, [], 10, now_s, adapter=adapter), now_s)
    return ranking[0].replica


def test_each_place_of_the_adapter_has_its_price():
    table = table_of(report(on_device=(X,), on_host=(X,)), report(on_host=(X, Y)), report())
    assert seconds(table) == pytest.approx([0.0, LOAD_S, READ_S + LOAD_S])
    assert seconds(table, Y) == pytest.approx([READ_S + LOAD_S, LOAD_S, READ_S + LOAD_S])
    assert table.fleet([], 1000, 0.0).adapter_s is None, "a request without an adapter pays nothing"
    left = table.fleet([], 1000, 0.0, avoid={"b"}, adapter=X)
    assert left.adapter_s == pytest.approx([0.0, READ_S + LOAD_S])


def test_the_replica_with_the_adapter_wins_until_its_queue_is_longer_than_the_loading():
    table = table_of(report(), report(on_device=(X,)), report())
    assert chosen(table) == {"b"}
    assert chosen(table, adapter=None) == {"a", "b", "c"}
    hear(table, "b", None, queued_prefill_tokens=int(0.5 * (READ_S + LOAD_S) / 1e-4))
    assert chosen(table) == {"b"}
    hear(table, "b", None, queued_prefill_tokens=int(1.5 * (READ_S + LOAD_S) / 1e-4))
    assert chosen(table) == {"a", "c"}


def test_without_a_free_slot_the_request_waits_for_one_as_well():
    full = report(on_device=(Y,), on_host=(X, Y), slots=2, slots_in_use=2)
    table = table_of(full, report(on_host=(X, Y), slots_in_use=1), report())
    output_tokens = table.fleet([], 1000, 0.0).demand.output_tokens
    slot_s = output_tokens * STEP_S / 2
    assert seconds(table) == pytest.approx([LOAD_S + slot_s, LOAD_S, READ_S + LOAD_S])
    assert seconds(table, Y)[0] == 0.0, "it shares the slot"
    hear(table, "a", report(2, (Y,), (X, Y), slots_in_use=1))
    assert seconds(table)[0] == pytest.approx(LOAD_S)


def test_times_that_a_replica_has_not_measured_are_those_of_the_others():
    unknown = report(read_s=0.0, load_s=0.0)
    table = table_of(unknown, report(read_s=0.1), report(read_s=0.3), report(read_s=0.2), None)
    assert seconds(table) == pytest.approx([0.25, 0.15, 0.35, 0.25, 0.25])
    nothing = seconds(table_of(unknown, None))
    assert nothing[0] == nothing[1] > 0


def test_a_replica_that_was_just_sent_the_adapter_counts_as_having_it():
    table = table_of(report(), report(), report())
    first = book(table, 0.0)
    assert {book(table, 0.1 * i) for i in range(1, 10)} == {first}
    booked = "abc".index(first)
    assert seconds(table, now_s=1.0)[booked] == 0.0
    assert seconds(table, Y, 1.0) == pytest.approx([READ_S + LOAD_S] * 3)
    # A report that the replica sent before the request reached it.
    hear(table, first, report(2, on_host=(Y,)))
    assert seconds(table, now_s=1.0)[booked] == 0.0
    assert seconds(table, now_s=60.0)[booked] > 0.0, "no report has said so"


def test_a_report_ends_a_booking():
    table = table_of(report(), report())
    booked = "ab".index(book(table, 0.0))
    hear(table, "ab"[booked], report(2, on_device=(X,)))
    assert seconds(table, now_s=0.1)[booked] == 0.0
    hear(table, "ab"[booked], report(3, on_host=(X,)))
    assert seconds(table, now_s=0.1)[booked] == pytest.approx(LOAD_S), "another one has the slot"


def test_a_new_engine_has_no_adapters():
    table = table_of(report(on_device=(X,)), report())
    hear(table, "a", None, epoch="later")
    assert seconds(table) == pytest.approx([READ_S + LOAD_S] * 2)
