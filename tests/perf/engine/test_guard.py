"""The guard detects a real regression, tolerates load on the machine, and runs in CI."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from quire.cluster.bench.engines.compare import Comparison, Turn
from tests.perf.engine.guard import FLOORS, Verdict, judge


def verdict(*ratios, floor=2.0):
    return Verdict("w", floor, ratios)


def test_a_median_below_the_floor_by_more_than_the_spread_fails():
    assert verdict(2.5, 2.6, 2.4, 2.5, 2.5).holds
    assert not verdict(1.5, 1.6, 1.4, 1.5, 1.5).holds
    assert "FAILED" in str(verdict(1.5, 1.5, 1.5))
    # Below the floor by less than this run's spread.
    assert verdict(1.8, 1.9, 1.95, 2.4, 2.6).holds


def test_a_turn_in_which_a_neighbour_had_the_core_decides_nothing():
    assert verdict(2.5, 0.3, 2.4, 2.6, 2.5).holds
    assert not verdict(1.5, 9.0, 1.4, 1.6, 1.5).holds


def test_ratios_are_taken_within_a_turn():
    found = Comparison({"quire": {}, "transformers": {}})
    for repetition, (own, peer) in enumerate([(1.0, 3.0), (10.0, 20.0), (1.0, 4.0)]):
        found.turns += [
            Turn("quire", "w", repetition, 0, own, 0, 0),
            Turn("transformers", "w", repetition, 0, peer, 0, 0),
        ]
    (one,) = judge(found, {"w": 2.5})
    assert one.ratios == (3.0, 2.0, 4.0) and one.median == 3.0
    with pytest.raises(RuntimeError, match="v: no turns"):
        judge(found, {"v": 1.0})
    found.failures["quire"] = "quire: out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        judge(found, {"w": 2.5})


def guard(*arguments):
    command = [sys.executable, "-m", "tests.perf", "guard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.alone
def test_no_regression_against_the_committed_floors():
    done = guard()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": holds") == len(json.loads(FLOORS.read_text())["floors"])


def test_an_engine_that_lost_its_batch_fails(tmp_path):
    """A real regression: the same engine, one request at a time. It is found on a busy machine as well."""
    floors = tmp_path / "floors.json"
    committed = json.loads(FLOORS.read_text())["floors"]
    name = next(iter(committed))  # a decode workload
    floors.write_text(json.dumps({"floors": {name: committed[name]}}))
    options = json.dumps({"max_running_requests": 1})
    done = guard("--turns", "1", "--floors", str(floors), "--quire-options", options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout
