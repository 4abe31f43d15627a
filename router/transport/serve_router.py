"""The request router that Serve runs for the replicas: it applies the decision that is part of the call.

Each handle call names its replicas, best first, in the keyword `route`. Serve skips a replica that is full or dead and
takes the next one of the list. This class makes no decision. It does not use Serve's FIFO mix-in, which would give the
chosen replica to the oldest waiting call.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.router.fleet import membership


class DecidedRouter(RequestRouter):
    """Ranks the replicas of `route` first, then all others in any order.

    The other replicas are candidates too, because the ranking may be older than Serve's membership. A replica names
    itself in its reply, so the caller notices that another replica than the first of `route` got the call.
    """

    def initialize_state(self, channel: str) -> None:
        """Join the membership `channel`, which comes from `request_router_kwargs`."""
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
        """Return one group for each replica, in order of preference; Serve takes the first that accepts."""
        route: list[str] = []
        if pending_request is not None:
            # Without this, Serve retries in a busy loop while every replica is full.
            pending_request.routing_context.should_backoff = True
            route = pending_request.kwargs.get("route", [])
        rank = {replica: i for i, replica in enumerate(route)}
        ordered = sorted(
            candidate_replicas, key=lambda r: rank.get(r.replica_id.unique_id, len(rank))
        )
        return [[replica] for replica in ordered]
