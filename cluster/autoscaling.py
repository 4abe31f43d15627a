"""How many replicas the load needs: the policy that Serve asks, and what replicas report to it.

Serve collects from each replica what `record_autoscaling_stats` returns, averages it over `look_back_period_s`
and calls the policy in its controller, ten times a second. The policy says how many replicas would bring each of

    queued_prefill_s    seconds of prefill that wait, there and as its share of what waits at the routers
    kv_in_use           fraction of the KV cache that requests hold
    num_requests        requests, running and waiting

down to its target, and Serve applies the bounds and the delays. Serve's own policy counts calls instead, of which an
attach stream of a router is one, and one request is as good as another.

Serve ships this module to its controller by value: it imports nothing of Quire and no ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

QUEUED_PREFILL_S = "queued_prefill_s"
KV_IN_USE = "kv_in_use"
NUM_REQUESTS = "num_requests"


class Context(Protocol):
    """What the policy reads of Serve's `AutoscalingContext`."""

    current_num_replicas: int  # that run
    target_num_replicas: int  # that were asked for
    aggregated_metrics: Mapping[str, Mapping[Any, float]]  # name -> replica -> average


class ScaleOnEngineLoad:
    """The policy; Serve makes one and calls it.

    Parameters
    ----------
    target_queued_prefill_s, target_kv_in_use, target_requests
        Of one replica. None: this does not count.
    max_growth
        At most so many times the replicas in one decision: a queue is work that came together over some time, not
        what comes from now on.
    headroom
        Replicas are given back only if the others then stay below this fraction of their targets, so that the next
        decision does not fetch them again.
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
        """The number of replicas wanted, and no state."""
        current = context.target_num_replicas
        metrics = context.aggregated_metrics or {}
        sums = {name: sum(metrics[name].values()) for name in self._targets if metrics.get(name)}
        if not sums:
            return current, {}  # nobody has reported yet
        load = max(total / self._targets[name] for name, total in sums.items())
        wanted = math.ceil(load - 1e-9)
        if wanted > current:
            if context.current_num_replicas < current:
                return current, {}  # the last ones that were asked for have yet to take their part
            return min(wanted, max(current + 1, math.floor(current * self._max_growth))), {}
        # Rounded up with the headroom: never below what is needed, never above what there is.
        return min(current, max(1, math.ceil(load / self._headroom - 1e-9))), {}
