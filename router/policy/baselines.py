"""Policies that other routers use, for comparison with the cost policy of `router/policy/cost.py`."""

from __future__ import annotations

import random

import numpy as np

from quire.router.policy.fleet_view import FleetView
from quire.router.policy.policy import Ranking, RouteRequest, rank


class RoundRobin:
    """Choose each replica in turn."""

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
    """Choose the replica with the fewest requests in flight."""

    def choose(
        self, request: RouteRequest, fleet: FleetView, now_s: float, rng: random.Random
    ) -> Ranking:
        return rank("least_loaded", fleet, fleet.columns.num_requests.copy(), rng)


class PowerOfTwo:
    """Choose the less loaded of two random replicas (Mitzenmacher 2001), as Ray Serve does."""

    def choose(
        self, request: RouteRequest, fleet: FleetView, now_s: float, rng: random.Random
    ) -> Ranking:
        n = len(fleet)
        if n <= 2:
            return rank("power_of_two", fleet, fleet.columns.num_requests.copy(), rng)
        drawn = rng.sample(range(n), 2)
        # The other replicas rank behind these two, as fall-backs if both refuse the request.
        cost = fleet.columns.num_requests + (1.0 + fleet.columns.num_requests.max())
        cost[drawn] = fleet.columns.num_requests[drawn]
        return rank("power_of_two", fleet, cost, rng)


class PrefixAffinity:
    """Choose the replica with the longest prefix on its device; among equals, the one with the fewest requests."""

    def choose(
        self, request: RouteRequest, fleet: FleetView, now_s: float, rng: random.Random
    ) -> Ranking:
        held = fleet.gpu_tokens
        below_a_token = 1.0 + (fleet.columns.num_requests.max() if len(fleet) else 0.0)
        cost = fleet.columns.num_requests / below_a_token - held
        return rank("prefix_affinity", fleet, cost, rng)
