"""The request router that Serve runs for the replicas: it applies the decision that is part of the call.

Each handle call names its replicas, best first, in the keyword `route`. Serve skips a replica that is full or dead and
takes the next one of the list. This class makes no decision. It does not use Serve's FIFO mix-in, which would give the
chosen replica to the oldest waiting call.

Serve no longer lists a replica that drains, though such a replica still accepts calls. Its streams need them: a stream
without further credit would pause, and its blocks could not be published. So this class keeps such a replica, for calls
that are meant for it alone.

Serve asks a replica that it has not called yet for its load, and passes it over if it does not answer within 0.1 s. A
replica that starts on a busy machine needs longer, so this class tells Serve that a new one has nothing to do. A reply
corrects this.
"""

from __future__ import annotations

import time

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.router.fleet import membership

# How long a replica that Serve no longer lists is kept: `drain_timeout_s` is at most an hour.
KEPT_S = 2 * 3600.0


class DecidedRouter(RequestRouter):
    """Ranks the replicas of `route` first, then all others that Serve lists, in any order.

    The other replicas are candidates too, because the ranking may be older than Serve's membership. A replica names
    itself in its reply, so the caller notices that another replica than the first of `route` got the call.
    """

    def initialize_state(self, channel: str) -> None:
        """Join the membership `channel`, which comes from `request_router_kwargs`."""
        self._membership = membership.channel(channel)
        # The replicas that Serve no longer lists, and until when each is kept.
        self._unlisted: dict[ReplicaID, float] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        now_s = time.monotonic()
        listed = {replica.replica_id for replica in replicas}
        new = listed - self.curr_replicas.keys()
        unlisted = {r_id: r for r_id, r in self.curr_replicas.items() if r_id not in listed}
        kept_until = {r_id: self._unlisted.get(r_id, now_s + KEPT_S) for r_id in unlisted}
        self._unlisted = {r_id: until_s for r_id, until_s in kept_until.items() if until_s > now_s}
        super().update_replicas([*replicas, *(unlisted[r_id] for r_id in self._unlisted)])
        for replica_id in new:
            self.on_new_queue_len_info(replica_id, 0)
        self._membership.update(frozenset(replica_id.unique_id for replica_id in listed))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._unlisted.pop(replica_id, None)
        self._membership.discard(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return one group for each replica, in order of preference; Serve takes the first that accepts.

        A replica that Serve no longer lists is among them only if `route` names it and no other.
        """
        route: list[str] = []
        if pending_request is not None:
            # Without this, Serve retries in a busy loop while every replica is full.
            pending_request.routing_context.should_backoff = True
            route = pending_request.kwargs.get("route", [])
        rank = {replica: i for i, replica in enumerate(route)}
        candidates = [
            replica
            for replica in candidate_replicas
            if replica.replica_id not in self._unlisted or route == [replica.replica_id.unique_id]
        ]
        candidates.sort(key=lambda r: rank.get(r.replica_id.unique_id, len(rank)))
        return [[replica] for replica in candidates]
