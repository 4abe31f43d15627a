"""Keeps a TLS listener on every node of the cluster; each router of an application with the section `tls` does."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quire.cluster.config.tls_section import TlsArgs
from quire.cluster.tls.listener_actor import TlsListener
from quire.cluster.tls.listener_process import ListenerError

logger = logging.getLogger("ray.serve")

KEEP_S = 5.0
# Ray may have to start a process for the actor, on a machine that starts many others.
_START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 30.0
_GCS_TIMEOUT_S = 5.0
_NAMESPACE = "serve"


class TlsListeners:
    """The listeners of one application, one on each node that does not drain: a client may reach any node.

    Parameters
    ----------
    application
        Name of the Serve application.
    """

    def __init__(self, args: TlsArgs, application: str):
        self._actor_class = ray.remote(TlsListener)
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
            The arguments cannot be used on this node; the message names the field.
        TimeoutError, RayError
            The listener does not answer; another attempt may succeed.
        """
        node = ray.get_runtime_context().get_node_id()
        problem = await self._keep(node, _START_TIMEOUT_S)
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
            try:
                await self._keep_once()
            except Exception as error:
                # Ray does not answer. The listeners run on.
                logger.warning("TLS listeners were not reached: %r", error)
            await asyncio.sleep(KEEP_S)

    async def _keep_once(self) -> None:
        nodes = kept_nodes(*await asyncio.to_thread(_nodes))
        problems = await asyncio.gather(*map(self._try_to_keep, nodes))
        for node, problem in zip(nodes, problems, strict=True):
            if problem is not None and problem != self._problems.get(node):
                logger.error("no TLS listener on node %r: %s", nodes[node], problem)
        self._problems = dict(zip(nodes, problems, strict=True))

    async def _try_to_keep(self, node: str) -> str | None:
        """Keep the listener of a node; return why it does not run, or None."""
        try:
            return await self._keep(node, _ANSWER_TIMEOUT_S)
        except TimeoutError:
            return f"no answer within {_ANSWER_TIMEOUT_S:g} s"
        except (ValueError, ray.exceptions.RayError) as error:
            # The next call finds a listener that Ray has started again.
            return str(error)

    async def _keep(self, node: str, timeout_s: float) -> str | None:
        async with asyncio.timeout(timeout_s):
            listener = await asyncio.to_thread(self._listener, node)
            return await listener.keep.remote(self._args, self._since_s)

    def _listener(self, node: str) -> ActorHandle:
        """The listener's actor; it is made if the node has none."""
        return self._actor_class.options(
            name=f"quire-tls:{self._application}:{node}",
            namespace=_NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(self._application, str(_folder(self._application, node)))


def kept_nodes(nodes: Iterable[Mapping[str, Any]], draining: Container[str]) -> dict[str, str]:
    """Return the names of the nodes that need a listener, by id.

    A node that drains needs none: its listener, which no router keeps any longer, lets its streams finish and ends. So
    `quire drain-node`, which waits for it, returns.
    """
    return {
        node["NodeID"]: node["NodeManagerHostname"]
        for node in nodes
        if node["Alive"] and node["NodeID"] not in draining
    }


def _nodes() -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return all nodes, and the deadlines of those that drain by their ids."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    return ray.nodes(), gcs.get_draining_nodes(timeout=_GCS_TIMEOUT_S)


def _folder(application: str, node: str) -> Path:
    """A folder in Ray's session. Its name is short, because the path of a socket has at most 107 bytes."""
    name = hashlib.sha256(f"{application}/{node}".encode()).hexdigest()[:12]
    session = ray._private.worker.global_worker.node.get_session_dir_path()
    return Path(session, f"quire-tls-{name}")
