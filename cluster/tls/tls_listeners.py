"""Keeps a TLS listener on every node of the cluster; each router of an application with the section `tls` does."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quire.cluster.config.tls_section import TlsArgs
from quire.cluster.tls.listener_actor import TlsListener
from quire.cluster.tls.listener_process import ListenerError

logger = logging.getLogger("ray.serve")

KEEP_S = 5.0
_ANSWER_TIMEOUT_S = 30.0
_NAMESPACE = "serve"


class TlsListeners:
    """The listeners of one application, one on each node: a client may reach any node.

    Parameters
    ----------
    application
        Name of the Serve application.
    """

    def __init__(self, args: TlsArgs, application: str):
        self._args = args.model_dump()
        self._application = application
        self._since_s = time.time()
        self._problems: dict[str, str | None] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the listener of this node, and keep all nodes' from now on.

        Raises
        ------
        ListenerError
            The listener of this node does not run; the message names the field.
        """
        problem = await self._keep(ray.get_runtime_context().get_node_id())
        if problem is not None:
            raise ListenerError(problem)
        self._task = asyncio.create_task(self._keep_all())

    async def close(self) -> None:
        """Keep no listener any more. Other routers keep them, or they end."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_all(self) -> None:
        while True:
            nodes = await asyncio.to_thread(ray.nodes)
            alive = {node["NodeID"]: node["NodeManagerHostname"] for node in nodes if node["Alive"]}
            problems = await asyncio.gather(*map(self._keep, alive))
            for node, problem in zip(alive, problems, strict=True):
                if problem is not None and problem != self._problems.get(node):
                    logger.error("no TLS listener on node %r: %s", alive[node], problem)
                self._problems[node] = problem
            await asyncio.sleep(KEEP_S)

    async def _keep(self, node: str) -> str | None:
        """Keep the listener of a node; return why it does not run, or None."""
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                listener = await asyncio.to_thread(self._listener, node)
                return await listener.keep.remote(self._args, self._since_s)
        except TimeoutError:
            return f"no answer within {_ANSWER_TIMEOUT_S:g} s"
        except (ValueError, ray.exceptions.RayError) as error:
            # The next call finds a listener that Ray has started again.
            return str(error)

    def _listener(self, node: str) -> ActorHandle:
        """The listener's actor; it is made if the node has none."""
        return (
            ray.remote(TlsListener)
            .options(
                name=f"quire-tls:{self._application}:{node}",
                namespace=_NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(self._application, str(_folder(self._application, node)))
        )


def _folder(application: str, node: str) -> Path:
    """A folder in Ray's session. Its name is short, because the path of a socket has at most 107 bytes."""
    name = hashlib.sha256(f"{application}/{node}".encode()).hexdigest()[:12]
    session = ray._private.worker.global_worker.node.get_session_dir_path()
    return Path(session, f"quire-tls-{name}")
