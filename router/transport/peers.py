"""Asks all routers of the application for their decisions and metrics, over Serve.

Only the router that decided a request has its decision. Behind a proxy a client cannot choose its router, so the router
that it reaches asks all routers, itself included. Use it for rare questions only: each is one call to every router.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from quire.protos.errors import Unavailable
from quire.protos.metric_families import Page
from quire.router.status_types import Decisions, LiveState
from quire.router.transport.calls import answer_of

logger = logging.getLogger("ray.serve")
ANSWER_TIMEOUT_S = 5.0
# The live page asks twice a second: a router that hangs may not hold the others' states up for long.
_STATE_TIMEOUT_S = 0.8
# Time between attempts while a new handle does not know the routers yet.
_RETRY_S = 0.05


class Peers:
    """All routers of this application.

    Parameters
    ----------
    routers
        Handle of the routers' deployment; it has the methods `own_decisions`, `own_metrics`, `own_state` and
        `own_adapters`.
    """

    def __init__(self, routers: DeploymentHandle):
        self._routers = routers

    async def decisions(
        self, request_id: str | None, limit: int, payer: str | None = None
    ) -> Decisions:
        """Return the last decisions of all routers, for one request id or (None) for any request.

        `payer`: only those of this tenant; None: of all tenants.

        Raises
        ------
        Unavailable
            No router answered.
        """
        answers, num_silent = await self._ask("own_decisions", request_id, limit, payer)
        answers.sort()
        decisions = [decision for _, found in answers for decision in found]
        newest_first = request_id is None
        decisions.sort(key=lambda decision: decision["decided"], reverse=newest_first)
        if newest_first:
            del decisions[limit:]
        return Decisions([router for router, _ in answers], num_silent, decisions)

    async def metrics(self, timeout_s: float) -> tuple[dict[str, Page], int]:
        """Return the metrics by router id, and how many routers did not answer in time.

        Raises
        ------
        Unavailable
            No router answered.
        """
        answers, num_silent = await self._ask("own_metrics", timeout_s=timeout_s)
        return dict(answers), num_silent

    async def exchange_adapters(
        self, entries: list[tuple[str, str, str, int]]
    ) -> list[list[tuple[str, str, str, int]]]:
        """Send adapters to all routers and return theirs (`adapter_registry.PlainEntry`).

        Raises
        ------
        Unavailable
            No router answered.
        """
        answers, _ = await self._ask("own_adapters", entries)
        return answers

    async def live_states(self, payer: str | None) -> list[LiveState]:
        """Return the states of the routers that answered.

        `payer`: with only this tenant's requests; None: with those of all tenants.

        Raises
        ------
        Unavailable
            No router answered.
        """
        states, _ = await self._ask("own_state", payer, timeout_s=_STATE_TIMEOUT_S)
        return states

    async def _ask(
        self, method: str, *args: Any, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> tuple[list[Any], int]:
        """Return the answers that came within `timeout_s`, and the number of routers without one."""
        # Use an empty context: a call from a request's context would carry that request's id.
        asking = asyncio.get_running_loop().create_task(
            self._broadcast(method, args, timeout_s), context=contextvars.Context()
        )
        answers, num_silent = await asking
        if not answers:
            raise Unavailable(f"no router answered within {timeout_s:g} s", retry_after_s=1.0)
        return answers, num_silent

    async def _broadcast(
        self, method: str, args: tuple[Any, ...], timeout_s: float
    ) -> tuple[list[Any], int]:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                results = await self._call_all(method, args)
        except TimeoutError:
            return [], 0
        # Not `results_async`: it returns all answers or none, so one router that hangs would hide the others.
        tasks = [asyncio.ensure_future(answer_of(result.get_async())) for result in results]
        left_s = max(0.0, timeout_s - (time.monotonic() - began_s))
        done, silent = await asyncio.wait(tasks, timeout=left_s)
        for task, result in zip(tasks, results, strict=True):
            if task in silent:
                task.cancel()
                result.cancel()
        answers = []
        for task in done:
            if (error := task.exception()) is None:
                answers.append(task.result())
            else:
                logger.warning("a router did not answer %s: %r", method, error)
        return answers, len(results) - len(answers)

    async def _call_all(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """Send one call to each router; return the calls."""
        while True:
            try:
                call = self._routers.broadcast(method, *args)
                return await call._fetch_replica_results_async()
            except DeploymentUnavailableError:
                await asyncio.sleep(_RETRY_S)
