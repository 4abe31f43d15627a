"""The Serve deployment for `faults.py`: a replica with injected faults, for tests only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from quire.protos.wire import Frame, Submit
from quire.replica.serving.actor import Replica
from quire.replica.serving.faults.faults import FaultyEngine, disturbed, parse

logger = logging.getLogger("ray.serve")


class FaultyReplica(Replica):
    """A replica with injected faults."""

    engine_class = FaultyEngine
    _engine: FaultyEngine

    # Ray Serve awaits the constructor.
    async def __init__(  # type: ignore[misc]
        self, engine_args: dict[str, Any], heartbeat_ms: int
    ):
        logger.warning("fault_injection is on: requests can bring this process down")
        await super().__init__(engine_args, heartbeat_ms)

    async def generate(self, submit: bytes, *, route: list[str]) -> bytes:
        fault = parse(Submit.decode(submit))
        if fault is not None:
            self._engine.faults.arm(fault)
        return await super().generate(submit, route=route)

    async def _frames(self, router_id: str) -> AsyncGenerator[bytes, None]:
        before = b""
        async for data in super()._frames(router_id):
            fault = self._engine.faults.of_frame(router_id, Frame.decode(data))
            if fault is None:
                yield data
            else:
                logger.warning("fault: %s %g", fault.kind, fault.number)
                if fault.kind == "delay":
                    await asyncio.sleep(fault.number)
                for frame in disturbed(fault, data, before):
                    yield frame
            before = data
