"""Differences of an engine's telemetry, and their text."""

from __future__ import annotations

import pytest

from quire.cluster.bench.engines import step_times


def reading(steps: int, plan_ms: float, gaps: int, gap_us: float, padding: int) -> dict:
    return {
        "host": {"num_steps": steps, "plan_ms": plan_ms, "wait_ms": 1.0},
        "device": {
            "num_steps": steps,
            "busy_ms": 2.0,
            "num_gaps": gaps,
            "gap_us": gap_us,
            "max_gap_us": 90.0,
            "num_holds": 0,
            "hold_us": 0.0,
        },
        "graphs": {
            "off_because": None,
            "num_cached": 4,
            "num_captures": 4,
            "num_hits": steps,
            "num_misses": 0,
            "num_items": 10 * steps,
            "num_padding": padding,
            "padding": padding / (10 * steps + padding),
            "mixed": dict(num_hits=0, num_misses=3, num_items=0, num_padding=0, padding=0.0),
        },
        "uploads": {"num_copies": steps, "num_bytes": 1000 * steps},
        "downloads": {"num_copies": steps, "num_bytes": 80 * steps},
        "tiers": {
            "num_saved": 5,
            "num_restored": 2 * steps,
            "block_bytes": 10**6,
            "restore_s": 1e-3 * steps,
            "restore_gb_per_s": 2.0,
            "num_copied": 1,
            "num_computed": 0,
        },
    }


def test_means_are_those_of_the_steps_in_between():
    found = step_times.since(reading(10, 1.0, 9, 30.0, 0), reading(40, 2.5, 29, 20.0, 60))
    assert found["host"]["num_steps"] == 30
    assert found["host"]["plan_ms"] == pytest.approx((40 * 2.5 - 10 * 1.0) / 30)
    assert found["device"]["gap_us"] == pytest.approx((29 * 20 - 9 * 30) / 20)
    assert found["graphs"]["padding"] == pytest.approx(60 / 360)
    assert found["graphs"]["num_hits"] == 30 and found["graphs"]["mixed"]["num_misses"] == 0
    assert found["uploads"] == {"num_copies": 30, "num_bytes": 30_000}
    assert found["tiers"]["restore_gb_per_s"] == pytest.approx(2.0)


def test_from_nothing_a_reading_is_itself():
    now = reading(40, 2.5, 29, 20.0, 60)
    found = step_times.since({}, now)
    assert found["host"] == pytest.approx(now["host"])
    assert found["device"] == pytest.approx(now["device"])


def test_every_fact_is_printed():
    text = "\n".join(step_times.lines(reading(40, 2.5, 29, 20.0, 60)))
    for fact in (
        "40 steps, ms each: plan 2.500, wait 1.000",
        "29 gaps of 20.0 us, at most 90.0",
        "decodes: 40 hits, 0 misses, 13.0% padding; mixed: 0 hits, 3 misses",
        "uploads 40 of 0.04 MB",
        "restored 80 at 2.00 GB/s; copied back 1 times, computed again 0",
    ):
        assert fact in text
    assert "off:" not in text


def test_a_reading_of_the_cpu_is_printed_too():
    now = reading(40, 2.5, 29, 20.0, 60)
    told = {"host": now["host"], "tiers": now["tiers"]}
    assert len(step_times.lines(step_times.since({}, told))) == 2
