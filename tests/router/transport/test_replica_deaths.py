"""Routers find out from a lost replica's files whether it crashed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from quire.protos.flight_recorder import FlightRecorder
from quire.protos.wire import Hello
from quire.router.transport.replica_deaths import MAX_REMEMBERED, ReplicaDeaths


def hello(replica: str, flight: Path | str) -> Hello:
    return Hello(replica, "e", "m", "", "float32", 10, 10, 10, 8, [], {}, flight=str(flight))


def test_a_crash_counts_for_the_streams_of_its_step(tmp_path):
    async def run() -> None:
        replica_deaths = ReplicaDeaths()
        recorder = FlightRecorder(tmp_path / "a", 4)
        recorder.begin(7, np.array([11, 12]))
        replica_deaths.remember(hello("a", tmp_path / "a"))
        # The replica may only have lost its attach stream, and crash later.
        assert not await replica_deaths.crashed_with("a", 11)
        recorder.report("step 7 hangs")
        assert await replica_deaths.crashed_with("a", 11)
        assert await replica_deaths.crashed_with("a", 12)
        assert not await replica_deaths.crashed_with("a", 13)

    asyncio.run(run())


def test_a_replica_without_a_record_did_not_crash(tmp_path):
    async def run() -> None:
        replica_deaths = ReplicaDeaths()
        assert not await replica_deaths.crashed_with("unknown", 1)
        replica_deaths.remember(hello("a", tmp_path / "absent"))
        replica_deaths.remember(hello("b", ""))
        assert not await replica_deaths.crashed_with("a", 1)
        assert not await replica_deaths.crashed_with("b", 1)
        # On another node, and there is no Ray here to ask it.
        away = Hello("c", "e", "m", "", "float32", 10, 10, 10, 8, [], {}, "node", "/x")
        replica_deaths.remember(away)
        assert not await replica_deaths.crashed_with("c", 1)

    asyncio.run(run())


def test_only_the_newest_are_remembered(tmp_path):
    async def run() -> None:
        replica_deaths = ReplicaDeaths()
        recorder = FlightRecorder(tmp_path / "r", 4)
        recorder.begin(1, np.array([1]))
        recorder.report("crash")
        for i in range(MAX_REMEMBERED + 1):
            replica_deaths.remember(hello(f"r{i}", tmp_path / "r"))
        assert not await replica_deaths.crashed_with("r0", 1)
        assert await replica_deaths.crashed_with("r1", 1)

    asyncio.run(run())
