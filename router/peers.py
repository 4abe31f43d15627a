"""The routers of one application ask one another: who decided a request only one of them knows.

Ray shell. Behind a proxy a client cannot choose the router that answers, so that one asks all of them, itself
included, over Serve. For questions that are asked now and then: it is one call to each router.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from quire.protos.errors import Unavailable
from quire.router.types import Decisions

logger = logging.getLogger("ray.serve")
ANSWER_TIMEOUT_S = 5.0
_RETRY_S = 0.05  # a handle that was just made does not know the routers yet


class Peers:
    """All routers of this application.

    Parameters
    ----------
    routers
        Handle of the routers' own deployment, which has the method `own_decisions`.
    """

    def __init__(self, routers: DeploymentHandle):
        self._routers = routers

    async def decisions(self, request_id: str | None, limit: int) -> Decisions:
        """What the routers remember; see `router.types.Service.decisions`.

        Raises
        ------
        Unavailable
            One of them hangs.
        """
        # In a context of its own: a call made inside a request would carry that request's id.
        asking = asyncio.get_running_loop().create_task(
            self._ask(request_id, limit), context=contextvars.Context()
        )
        try:
            answers = await asyncio.wait_for(asking, ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(
                f"a router did not answer within {ANSWER_TIMEOUT_S:.0f} s", retry_after_s=1.0
            ) from None
        told = sorted(answer for answer in answers if not isinstance(answer, BaseException))
        for error in answers:
            if isinstance(error, BaseException):
                logger.warning("a router did not tell its decisions: %r", error)
        decisions = [decision for _, found in told for decision in found]
        newest_first = request_id is None
        decisions.sort(key=lambda decision: decision["decided"], reverse=newest_first)
        if newest_first:
            del decisions[limit:]
        return Decisions([router for router, _ in told], len(answers) - len(told), decisions)

    async def _ask(self, request_id: str | None, limit: int) -> list[Any]:
        """Of each router (id, decisions), or why it has none."""
        while True:
            try:
                return await self._routers.broadcast(
                    "own_decisions", request_id, limit
                ).results_async(return_exceptions=True)
            except DeploymentUnavailableError:
                await asyncio.sleep(_RETRY_S)
