"""What the live page shows of one router, read from what the router keeps anyway.

Nothing here runs for a request: a call reads the last decisions, the queue and the reports of the replicas. It takes
about a millisecond with a hundred replicas.
"""

from __future__ import annotations

import time

from quire.router.admission.gate import AdmissionGate
from quire.router.explain.decisions import DecisionRing, RoutingDecision
from quire.router.fleet.replicas import ReplicaTable
from quire.router.observer import Observer
from quire.router.status_types import LiveState, PrefixHits, QueueStatus

# Newest decisions that hit rates, latencies and moves are taken from.
WINDOW = 256
MAX_DECISIONS = 20
MAX_MOVES = 8


def live_state(
    ring: DecisionRing,
    gate: AdmissionGate,
    table: ReplicaTable,
    observer: Observer,
    model: str,
    now_s: float,
    payer: str | None = None,
) -> LiveState:
    """Return the state of a router.

    Parameters
    ----------
    now_s
        Time of the router's clock.
    payer
        Show only this tenant's requests; None: those of all tenants. Sums always cover all tenants, as in metrics.
    """
    hits: dict[str, PrefixHits] = {}
    ttft_s: list[float] = []
    shown: list[RoutingDecision] = []
    moved: list[RoutingDecision] = []
    for decision in ring.newest(WINDOW):
        explain = decision.explain
        if decision.is_answered:
            found = hits.setdefault(explain.replica, PrefixHits())
            found.num_requests += 1
            found.prompt_tokens += decision.num_prompt_tokens
            found.cached_tokens += explain.cached_tokens
            found.predicted_tokens += explain.predicted_cached_tokens
            ttft_s.append(explain.ttft_s)
        if payer in (None, decision.payer):
            if len(shown) < MAX_DECISIONS:
                shown.append(decision)
            if decision.left_replica and len(moved) < MAX_MOVES:
                moved.append(decision)
    return LiveState(
        router=ring.router_id,
        model=model,
        now=time.time(),
        num_routers=table.num_routers(),
        queue=QueueStatus(len(gate.queue), gate.queue.tokens, gate.wait_behind_all_s()),
        num_decisions=ring.num_added,
        num_deltas=observer.num_deltas(),
        num_kept=ring.size,
        replicas=table.statuses(now_s),
        hits=hits,
        ttft_s=sorted(ttft_s),
        decisions=[ring.describe(decision, num_ranked=2) for decision in shown],
        moves=[ring.describe(decision, num_ranked=1) for decision in moved],
    )
