"""What routers learn of a replica that is gone, from the files that it left on this node."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from quire.protos.flight import FlightRecorder
from quire.protos.wire import Hello
from quire.router.transport.witness import MAX_REMEMBERED, Witness


def hello(replica: str, flight: Path | str) -> Hello:
    return Hello(replica, "e", "m", "", "float32", 10, 10, 10, 8, [], {}, flight=str(flight))


def test_a_crash_counts_for_those_in_the_step(tmp_path):
    async def run() -> None:
        witness = Witness()
        recorder = FlightRecorder(tmp_path / "a", 4)
        recorder.begin(7, np.array([11, 12]))
        witness.remember(hello("a", tmp_path / "a"))
        # It may only have lost its stream: it lives, and crashes later.
        assert not await witness.crashed_with("a", 11)
        recorder.report("step 7 hangs")
        assert await witness.crashed_with("a", 11)
        assert await witness.crashed_with("a", 12)
        assert not await witness.crashed_with("a", 13)

    asyncio.run(run())


def test_who_left_nothing_is_innocent(tmp_path):
    async def run() -> None:
        witness = Witness()
        assert not await witness.crashed_with("unknown", 1)
        witness.remember(hello("a", tmp_path / "absent"))
        witness.remember(hello("b", ""))
        assert not await witness.crashed_with("a", 1)
        assert not await witness.crashed_with("b", 1)
        # On another node, and there is no Ray here to ask it.
        away = Hello("c", "e", "m", "", "float32", 10, 10, 10, 8, [], {}, "node", "/x")
        witness.remember(away)
        assert not await witness.crashed_with("c", 1)

    asyncio.run(run())


def test_only_the_newest_are_remembered(tmp_path):
    async def run() -> None:
        witness = Witness()
        recorder = FlightRecorder(tmp_path / "r", 4)
        recorder.begin(1, np.array([1]))
        recorder.report("crash")
        for i in range(MAX_REMEMBERED + 1):
            witness.remember(hello(f"r{i}", tmp_path / "r"))
        assert not await witness.crashed_with("r0", 1)
        assert await witness.crashed_with("r1", 1)

    asyncio.run(run())
