"""`quire drain-node`: takes a node out of a cluster so that no client notices.

    request ──▶ GCS: no new actor comes to this node
                 Serve's controller sees the node drain: it starts replacements on other nodes, then stops the routers
                 and replicas of this one, each within its grace, and at last the node's proxy
    wait    ──▶ until none of them is left, or the deadline

`ray drain-node` sends the same request and returns at once. A `preStop` hook must wait: when it returns, Kubernetes
ends Ray.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Callable
from typing import Protocol

POLL_S = 0.5
RPC_TIMEOUT_S = 5.0
# Classes of the actors that clients' streams pass through. `TlsListener` is Quire's: on a node that drains it ends
# within about 95 s, of which its streams have 60 s.
_STREAM_CLASSES = ("ServeReplica:", "HAProxyManager", "ProxyActor", "TlsListener")


class DrainError(Exception):
    """The node could not be drained."""


class RayNodes(Protocol):
    """What the command asks of Ray."""

    def request(self, message: str, deadline_ms: int) -> None:
        """Ask the GCS to drain the node; raises `DrainError` if it refuses, and other errors if it does not answer."""

    def left(self) -> list[str]:
        """Return the classes of the living actors on the node through which streams pass."""


def add_drain_node(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `quire`."""
    parser = commands.add_parser(
        "drain-node",
        help="move everything of Serve off a node of a Ray cluster, and wait until it is gone",
        description="Asks Ray to drain a node. Ray Serve then starts replacements of its replicas and routers on other "
        "nodes and stops those of this one; open streams end or migrate. Waits until none is left. Exit status: 0 if "
        "none is left, 1 if the deadline came first or the node cannot be drained. Needs Ray's token "
        "(RAY_AUTH_MODE, RAY_AUTH_TOKEN) if the cluster has one.",
    )
    parser.add_argument(
        "--address", help="host:port of the GCS (default: RAY_ADDRESS, or this machine's Ray)"
    )
    parser.add_argument(
        "--node-id", help="id of the node (default: the only one with this machine's address)"
    )
    parser.add_argument(
        "--deadline-s",
        type=int,
        default=150,
        help="seconds after which the node ends in any case (default: %(default)s)",
    )
    parser.add_argument("--message", default="quire drain-node", help="the reason, for Ray's log")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        nodes = _GcsNodes(arguments.address, arguments.node_id)
        return 0 if drain(nodes, arguments.message, arguments.deadline_s, _say) else 1
    except DrainError as error:
        print(f"quire drain-node: {error}", file=sys.stderr)
        return 1


def _say(line: str) -> None:
    print(line, flush=True)


def drain(
    nodes: RayNodes,
    message: str,
    deadline_s: float,
    say: Callable[[str], None],
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Drain and wait; return whether nothing was left before the deadline.

    A GCS that does not answer may be one that restarts. Streams run on without it, so the command tries again instead
    of giving up, after which Kubernetes would end the node at once.
    """
    began_s, end_s = now_s(), now_s() + deadline_s
    requested, shown = False, ""
    while True:
        try:
            if not requested:
                deadline_ms = int((time.time() + end_s - now_s()) * 1000)
                nodes.request(message, deadline_ms)
                requested = True
            left = nodes.left()
        except DrainError:
            raise
        # Ray raises several classes of its own and gRPC's for a GCS that does not answer.
        except Exception as error:
            line = f"the GCS does not answer: {error}"
        else:
            if not left:
                say(f"{now_s() - began_s:.0f} s: nothing is left on the node")
                return True
            counts = collections.Counter(left)
            line = "left: " + ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
        if line != shown:
            say(f"{now_s() - began_s:.0f} s: {line}")
            shown = line
        if now_s() + POLL_S > end_s:
            say(f"{now_s() - began_s:.0f} s: the deadline has come")
            return False
        sleep(POLL_S)


class _GcsNodes:
    """A node, through clients of the GCS alone: a driver would be one more process on the node that ends.

    Raises
    ------
    DrainError
        The node is unknown.
    """

    def __init__(self, address: str | None, node_id: str | None):
        from ray._private import services
        from ray._private.state import GlobalState
        from ray._raylet import GcsClient, GcsClientOptions  # type: ignore[attr-defined]

        try:
            gcs = services.canonicalize_bootstrap_address_or_die(address)
        except ConnectionError as error:
            raise DrainError(str(error)) from None
        self._client = GcsClient(address=gcs)
        self._state = GlobalState()
        self._state._initialize_global_state(
            GcsClientOptions.create(
                gcs, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
            )
        )
        self._node_id = node_id
        self._gcs = gcs

    def request(self, message: str, deadline_ms: int) -> None:
        from ray.core.generated import autoscaler_pb2

        self._node_id = self._resolved()
        is_accepted, why = self._client.drain_node(
            self._node_id,
            autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
            message,
            deadline_ms,
            timeout=RPC_TIMEOUT_S,
        )
        if not is_accepted:
            raise DrainError(f"Ray does not drain node {self._node_id}: {why}")

    def _resolved(self) -> str:
        import ray
        from ray.core.generated import gcs_pb2

        infos = self._client.get_all_node_info(timeout=RPC_TIMEOUT_S)
        alive = {
            node_id.hex(): info.node_manager_address
            for node_id, info in infos.items()
            if info.state == gcs_pb2.GcsNodeInfo.ALIVE
        }
        if self._node_id is not None:
            if self._node_id not in alive:
                raise DrainError(f"the Ray at {self._gcs} has no living node {self._node_id}")
            return self._node_id
        own = ray.util.get_node_ip_address()
        found = [node_id for node_id, address in alive.items() if address == own]
        if len(found) != 1:
            raise DrainError(
                f"{len(found)} nodes of the Ray at {self._gcs} have this machine's address {own}; give one with "
                f"--node-id: {', '.join(found or alive)}"
            )
        return found[0]

    def left(self) -> list[str]:
        actors = self._state.actor_table(None, None, "ALIVE").values()
        classes = [a["ActorClassName"] for a in actors if a["Address"]["NodeID"] == self._node_id]
        return [name for name in classes if name.startswith(_STREAM_CLASSES)]
