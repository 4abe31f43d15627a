"""What the live page shows, read from what routers keep anyway.

Nothing here runs for a request: a call reads the last decisions, the queue and the reports of the replicas. It takes
half a millisecond with a hundred replicas.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from quire.router.admission.gate import AdmissionGate
from quire.router.explain.decisions import DecisionRing, RoutingDecision
from quire.router.explain.regret import merged_regrets
from quire.router.fleet.replicas import ReplicaTable
from quire.router.observer import Observer
from quire.router.status_types import LiveState, PrefixHits, QueueStatus, RoutingRegret

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
    regrets: Sequence[RoutingRegret] = (),
) -> LiveState:
    """Return the state of a router.

    Parameters
    ----------
    now_s
        Time of the router's clock.
    payer
        Show only this tenant's requests; None: those of all tenants. Sums always cover all tenants, as in metrics.
    regrets
        Regret of the router's recent decisions.
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
        routers=[ring.router_id],
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
        regrets=list(regrets),
    )


def merged(own: LiveState, others: Sequence[LiveState]) -> LiveState:
    """Return the state of several routers: the replicas as the own router sees them, and the requests of all."""
    states = [own, *(state for state in others if state.router != own.router)]
    hits: dict[str, PrefixHits] = {}
    for state in states:
        for replica, found in state.hits.items():
            all_found = hits.setdefault(replica, PrefixHits())
            for field in dataclasses.fields(PrefixHits):
                total = getattr(all_found, field.name) + getattr(found, field.name)
                setattr(all_found, field.name, total)
    queues = [state.queue for state in states]
    return dataclasses.replace(
        own,
        routers=sorted(state.router for state in states),
        queue=QueueStatus(
            sum(queue.num_requests for queue in queues),
            sum(queue.num_prompt_tokens for queue in queues),
            max(queue.expected_wait_s for queue in queues),
        ),
        num_decisions=sum(state.num_decisions for state in states),
        num_deltas=sum(state.num_deltas for state in states),
        hits=hits,
        ttft_s=sorted(seconds for state in states for seconds in state.ttft_s),
        decisions=_newest([one for state in states for one in state.decisions], MAX_DECISIONS),
        moves=_newest([one for state in states for one in state.moves], MAX_MOVES),
        regrets=merged_regrets(state.regrets for state in states),
    )


def _newest(decisions: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    return sorted(decisions, key=lambda decision: decision["decided"], reverse=True)[:limit]
