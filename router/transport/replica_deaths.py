"""How replicas died, asked on the node where they did. Ray shell.

The files are those of `protos.flight_recorder`. Where this process is on the same node it reads them itself, else a
task there does. A node that is gone tells nothing, and that is no fault of any request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quire.protos.flight_recorder import FlightRecord, read_flight_record
from quire.protos.wire import Hello

logger = logging.getLogger("ray.serve")
ANSWER_TIMEOUT_S = 5.0
MAX_REMEMBERED = 256  # replicas


class ReplicaDeaths:
    """Remembers where replicas keep their records, and reads those of the dead. Lives in one event loop."""

    def __init__(self) -> None:
        self._hellos: OrderedDict[str, Hello] = OrderedDict()
        self._answers: dict[str, asyncio.Task[FlightRecord | None]] = {}

    def remember(self, hello: Hello) -> None:
        """A replica has said hello."""
        self._hellos[hello.replica] = hello
        self._answers.pop(hello.replica, None)
        while len(self._hellos) > MAX_REMEMBERED:
            replica, _ = self._hellos.popitem(last=False)
            self._answers.pop(replica, None)

    async def crashed_with(self, replica: str, stream_id: int) -> bool:
        """Whether a dead replica crashed by itself in a step with this stream."""
        hello = self._hellos.get(replica)
        if hello is None or not hello.flight:
            return False
        task = self._answers.get(replica)
        if task is None:
            task = self._answers[replica] = asyncio.create_task(_read(hello))
        record = await asyncio.shield(task)
        if record is not None and not record.crashed:
            self._answers.pop(replica, None)  # it may only have lost its stream, and crash later
        return record is not None and record.crashed and stream_id in record.stream_ids


def _is_here(node: str) -> bool:
    return not node or (ray.is_initialized() and node == ray.get_runtime_context().get_node_id())


async def _read(hello: Hello) -> FlightRecord | None:
    path = Path(hello.flight)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            if _is_here(hello.node):
                record = await asyncio.to_thread(read_flight_record, path)
            elif not ray.is_initialized():  # a task would start one
                return None
            else:
                there = NodeAffinitySchedulingStrategy(hello.node, soft=False)
                task = ray.remote(read_flight_record).options(num_cpus=0, scheduling_strategy=there)
                record = await task.remote(path)
    except Exception as error:
        logger.warning("how %s died is not known: %r", hello.replica, error)
        return None
    if record is not None and record.crashed:
        first = record.report.splitlines()[0]
        logger.error(
            "%s crashed with %d requests: %s", hello.replica, len(record.stream_ids), first
        )
    return record
