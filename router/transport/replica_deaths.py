"""Finds out whether a lost replica crashed, from the flight recorder's file on its node.

`protos.flight_recorder` defines the file: it names the requests in the running step. This process reads it on its own
node; a Ray task reads it on another node. If the node is lost too, the cause stays unknown and counts against no
request.
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
# Most replicas whose hello is remembered.
MAX_REMEMBERED = 256


class ReplicaDeaths:
    """Knows where replicas keep their records, and reads the records of lost replicas. For one event loop."""

    def __init__(self) -> None:
        self._hellos: OrderedDict[str, Hello] = OrderedDict()
        self._answers: dict[str, asyncio.Task[FlightRecord | None]] = {}

    def remember(self, hello: Hello) -> None:
        """Keep the hello of a replica that has attached."""
        self._hellos[hello.replica] = hello
        self._answers.pop(hello.replica, None)
        while len(self._hellos) > MAX_REMEMBERED:
            replica, _ = self._hellos.popitem(last=False)
            self._answers.pop(replica, None)

    async def crashed_with(self, replica: str, stream_id: int) -> bool:
        """Return whether a lost replica crashed in a step with this stream, and was not killed from outside."""
        hello = self._hellos.get(replica)
        if hello is None or not hello.flight:
            return False
        task = self._answers.get(replica)
        if task is None:
            task = self._answers[replica] = asyncio.create_task(_read(hello))
        record = await asyncio.shield(task)
        if record is not None and not record.crashed:
            # The replica may have lost only its attach stream. It may crash later, so read the file again then.
            self._answers.pop(replica, None)
        return record is not None and record.crashed and stream_id in record.stream_ids


def _is_here(node: str) -> bool:
    return not node or (ray.is_initialized() and node == ray.get_runtime_context().get_node_id())


async def _read(hello: Hello) -> FlightRecord | None:
    path = Path(hello.flight)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            if _is_here(hello.node):
                record = await asyncio.to_thread(read_flight_record, path)
            # Without Ray in this process, a task would start it.
            elif not ray.is_initialized():
                return None
            else:
                there = NodeAffinitySchedulingStrategy(hello.node, soft=False)
                task = ray.remote(read_flight_record).options(num_cpus=0, scheduling_strategy=there)
                record = await task.remote(path)
    except Exception as error:
        logger.warning("the cause of the loss of %s is not known: %r", hello.replica, error)
        return None
    if record is not None and record.crashed:
        first = record.report.splitlines()[0]
        logger.error(
            "%s crashed with %d requests: %s", hello.replica, len(record.stream_ids), first
        )
    return record
