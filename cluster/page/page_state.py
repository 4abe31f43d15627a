"""The state of a router as the live page's script reads it: JSON of bounded size, with short numbers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import orjson

from quire.cluster.auth.keyed_service import shown_payer
from quire.protos.wire import Load
from quire.router.status_types import LiveState, PrefixHits, ReplicaStatus, RoutingRegret
from quire.router.types import Service

# An encoded state is sent to all who ask within this time.
MAX_AGE_S = 0.25
_DIGITS = 6  # of seconds: microseconds


class StateFeed:
    """Encodes the state of the routers, once for all viewers of a tenant.

    Parameters
    ----------
    clock
        Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        # Tenant whose requests are shown (None: all) -> time, and the state.
        self._made: dict[str | None, tuple[float, asyncio.Task[bytes]]] = {}

    async def state(self, service: Service) -> bytes:
        """Return the state that the caller of `service` may see, as JSON."""
        now_s, payer = self._clock(), shown_payer(service)
        self._made = {p: made for p, made in self._made.items() if now_s - made[0] < MAX_AGE_S}
        if payer not in self._made:
            self._made[payer] = now_s, asyncio.ensure_future(_encoded(service))
        # A viewer that leaves does not take the state from the others.
        return await asyncio.shield(self._made[payer][1])


async def _encoded(service: Service) -> bytes:
    return orjson.dumps(page_state(await service.live_state()))


def page_state(state: LiveState) -> dict[str, Any]:
    """Convert a state to plain data."""
    return {
        "router": state.router,
        "routers": state.routers,
        "num_routers": state.num_routers,
        "model": state.model,
        "now": round(state.now, 3),
        "queue": {
            "requests": state.queue.num_requests,
            "prompt_tokens": state.queue.num_prompt_tokens,
            "expected_wait_s": _short(state.queue.expected_wait_s),
        },
        "num_decisions": state.num_decisions,
        "num_deltas": state.num_deltas,
        "num_kept": state.num_kept,
        "ttft_s": [_short(state.ttft_quantile_s(q)) for q in (0.5, 0.95)],
        "replicas": _columns([_replica(status, state.hits) for status in state.replicas]),
        "requests": [_request(decision) for decision in state.decisions],
        "moves": [_move(decision) for decision in state.moves],
        "regrets": [_regret(regret) for regret in state.regrets],
    }


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Turn rows with equal fields into a list for each field, a third of the bytes."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _replica(status: ReplicaStatus, hits: dict[str, PrefixHits]) -> dict[str, Any]:
    load, found = status.load, hits.get(status.replica, PrefixHits())
    return {
        "name": status.replica,
        "state": status.state,
        "age_s": round(status.report_age_s, 2),
        "running": load.num_running,
        "waiting": load.num_waiting,
        "prefill_tokens": load.queued_prefill_tokens,
        "decode_tokens": load.num_decode_tokens,
        "step_s": _short(load.decode_step_s),
        "stalled_s": _short(load.stalled_s),
        "steps": load.num_steps,
        "preemptions": load.num_preemptions,
        "indexed": status.indexed_blocks,
        "answered": found.num_requests,
        "prompt_tokens": found.prompt_tokens,
        "cached_tokens": found.cached_tokens,
        "predicted_tokens": found.predicted_tokens,
        "device": _tier(
            load.blocks_in_use, load.blocks_cached, load.blocks_free, load.blocks_total
        ),
        "host": _host_tier(load),
    }


def _host_tier(load: Load) -> list[int] | None:
    total = load.host_blocks_total
    if not total:
        return None
    return _tier(load.host_blocks_in_use, load.host_blocks_cached, load.host_blocks_free, total)


def _tier(in_use: int, cached: int, free: int, total: int) -> list[int]:
    """Blocks in use, quarantined (they wait for a running step to end), cached and free: their sum is `total`."""
    return [in_use, max(0, total - in_use - cached - free), cached, free]


def _attempt(decision: dict[str, Any]) -> dict[str, Any]:
    """Which attempt of which request a decision was for, and when."""
    names = ("request_id", "answer_id", "attempt")
    return {name: decision[name] for name in names} | {"decided": round(decision["decided"], 2)}


def _request(decision: dict[str, Any]) -> dict[str, Any]:
    return {
        **_attempt(decision),
        "router": decision["router"],
        "policy": decision["policy"],
        "prompt_tokens": decision["prompt_tokens"],
        "num_replicas": decision["num_replicas"],
        "ranking": [_score(score) for score in decision["ranking"]],
        "outcome": _outcome(decision["outcome"]),
    }


def _score(score: dict[str, Any]) -> dict[str, Any]:
    terms = {name: _short(seconds) for name, seconds in score["terms"].items() if seconds}
    return score | {"cost_s": _short(score["cost_s"]), "terms": terms}


def _outcome(outcome: dict[str, Any] | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    return outcome | {"queue_s": _short(outcome["queue_s"]), "ttft_s": _short(outcome["ttft_s"])}


def _move(decision: dict[str, Any]) -> dict[str, Any]:
    return {
        **_attempt(decision),
        "left": decision["left_replica"],
        "replica": decision["ranking"][0]["replica"],
    }


def _regret(regret: RoutingRegret) -> dict[str, Any]:
    return {
        "policy": regret.policy,
        "requests": regret.num_requests,
        "mean_s": _short(regret.mean_s),
        "half_s": _short(regret.half_s) if math.isfinite(regret.half_s) else None,
        "modelled_s": _short(regret.modelled_s),
        "measured_s": _short(regret.measured_s),
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
