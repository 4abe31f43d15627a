"""Autoscaling policy: the number of replicas that the engines' load needs.

Each replica reports values to Serve (`record_autoscaling_stats`). Serve averages them over `look_back_period_s` and
calls the policy in its controller ten times a second. The policy returns the number of replicas that would bring each
value down to its target; Serve applies the bounds and the delays.

    queued_prefill_s    seconds of queued prefill: at the replica, and its share of the routers' queues
    kv_in_use           fraction of the KV cache in use by requests
    num_requests        running and waiting requests

Serve's own policy counts calls. It would count the routers' attach streams (one open call of each router at each
replica, which carries tokens and reports) as load, and a short request as much as a long one.

Serve sends this module to its controller by value, so it imports neither Quire nor ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

QUEUED_PREFILL_S = "queued_prefill_s"
KV_IN_USE = "kv_in_use"
NUM_REQUESTS = "num_requests"


class Context(Protocol):
    """The part of Serve's `AutoscalingContext` that the policy reads."""

    current_num_replicas: int  # running replicas
    target_num_replicas: int  # requested replicas
    aggregated_metrics: Mapping[str, Mapping[Any, float]]  # name -> replica -> average


class ScaleOnEngineLoad:
    """The policy; Serve creates an instance and calls it.

    Parameters
    ----------
    target_queued_prefill_s, target_kv_in_use, target_requests
        Targets per replica. None: not considered.
    max_growth
        Maximum factor by which one decision increases the number of replicas. A long queue may have grown over a long
        time and does not show the rate of new work, so it must not multiply the replicas at once.
    headroom
        Remove replicas only if the others then stay below this fraction of their targets, so that the next decision
        does not add them again.
    """

    def __init__(
        self,
        target_queued_prefill_s: float | None,
        target_kv_in_use: float | None,
        target_requests: float | None,
        max_growth: float = 2.0,
        headroom: float = 0.8,
    ):
        targets = {
            QUEUED_PREFILL_S: target_queued_prefill_s,
            KV_IN_USE: target_kv_in_use,
            NUM_REQUESTS: target_requests,
        }
        self._targets = {name: target for name, target in targets.items() if target is not None}
        if not self._targets:
            raise ValueError("at least one target must be given")
        for name, target in self._targets.items():
            if target <= 0:
                raise ValueError(f"the target of {name} must be above 0, got {target}")
        self._max_growth = max_growth
        self._headroom = headroom

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas to run, and the policy's state for the next call, which is empty."""
        current = context.target_num_replicas
        metrics = context.aggregated_metrics or {}
        sums = {name: sum(metrics[name].values()) for name in self._targets if metrics.get(name)}
        if not sums:
            return current, {}  # no replica has reported yet
        load = max(total / self._targets[name] for name, total in sums.items())
        wanted = math.ceil(load - 1e-9)
        if wanted > current:
            if context.current_num_replicas < current:
                return current, {}  # replicas requested earlier have not started yet
            return min(wanted, max(current + 1, math.floor(current * self._max_growth))), {}
        # Scale down: at least the needed number with headroom, at most the current number.
        return min(current, max(1, math.ceil(load / self._headroom - 1e-9))), {}
