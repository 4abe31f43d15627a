"""Policies that other routers use, for comparison with the cost of `router/policy/cost.py`."""

from __future__ import annotations

import random

import numpy as np

from quire.router.policy.fleet_view import FleetView
from quire.router.policy.policy import Ranking, RouteRequest, rank


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, request: RouteRequest, fleet: FleetView, now_s: float, rng: random.Random
    ) -> Ranking:
        n = len(fleet)
        cost = (np.arange(n, dtype=np.float64) - self._turn) % max(n, 1)
        self._turn += 1
        return rank("round_robin", fleet, cost, rng)


class LeastLoaded:
    """Fewest requests in flight."""

    def choose(
        self, request: RouteRequest, fleet: FleetView, now_s: float, rng: random.Random
    ) -> Ranking:
        return rank("least_loaded", fleet, fleet.num_requests.copy(), rng)


class PowerOfTwo:
    """The less loaded of two at random (Mitzenmacher 2001), which is Ray Serve's own rule."""

    def choose(
        self, request: RouteRequest, fleet: FleetView, now_s: float, rng: random.Random
    ) -> Ranking:
        n = len(fleet)
        if n <= 2:
            return rank("power_of_two", fleet, fleet.num_requests.copy(), rng)
        drawn = rng.sample(range(n), 2)
        # The rest are fall-backs for when both refuse.
        cost = fleet.num_requests + (1.0 + fleet.num_requests.max())
        cost[drawn] = fleet.num_requests[drawn]
        return rank("power_of_two", fleet, cost, rng)


class PrefixAffinity:
    """The longest prefix held on the device, whatever the load; among equals the least loaded."""

    def choose(
        self, request: RouteRequest, fleet: FleetView, now_s: float, rng: random.Random
    ) -> Ranking:
        held = fleet.gpu_tokens
        below_a_token = 1.0 + (fleet.num_requests.max() if len(fleet) else 0.0)
        cost = fleet.num_requests / below_a_token - held
        return rank("prefix_affinity", fleet, cost, rng)
