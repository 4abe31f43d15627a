"""Serve's request router for the replicas: it applies the decision that the call already carries.

Each handle call names its replicas, best first, in the keyword `route`. Serve keeps its own machinery: a replica
that is full or dead is passed over for the next in the list. Nothing is decided here, and nothing is FIFO: Serve's
FIFO mix-in would hand the chosen replica to the oldest waiting call instead.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.router.fleet import membership


class DecidedRouter(RequestRouter):
    """Ranks the candidates as `route` says, then all others in any order.

    The others are offered too: the ranking may be older than Serve's membership. A replica that gets a call meant
    for another one says so in its answer.
    """

    def initialize_state(self, channel: str) -> None:
        """`channel` comes from `request_router_kwargs` and names the membership to report to."""
        self._membership = membership.channel(channel)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._membership.update(frozenset(r.replica_id.unique_id for r in replicas))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._membership.discard(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One group for each replica, in the order of preference; Serve takes the first that accepts."""
        route: list[str] = []
        if pending_request is not None:
            # Without this Serve asks again at once, in a busy loop, when every replica is full.
            pending_request.routing_context.should_backoff = True
            route = pending_request.kwargs.get("route", [])
        rank = {replica: i for i, replica in enumerate(route)}
        ordered = sorted(
            candidate_replicas, key=lambda r: rank.get(r.replica_id.unique_id, len(rank))
        )
        return [[replica] for replica in ordered]
