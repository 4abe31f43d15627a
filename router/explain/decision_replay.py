"""Replay logged decisions with another policy, and report the differences.

The other policy makes each decision from the logged state of the fleet, which the recorded decisions produced. If it
had routed all requests, queues and caches would have been different, and so would its later choices. So the numbers
are estimates: they compare the policies decision by decision. They do not predict how a cluster would behave with the
other policy; `python -m tests.perf routersim` simulates that.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from quire.router.explain.decision_log import LoggedDecision
from quire.router.policy.cost import CostPolicy
from quire.router.policy.fleet_view import FleetView
from quire.router.policy.policy import Policy, RouteRequest

_TTFT_TERMS = ("wait_s", "prefill_s", "host_copy_s", "pull_s", "adapter_s")
# Costs that differ by at most this many seconds count as equal; the default of `CostPolicy.tie_s`.
_TIE = 1e-6


@dataclass(frozen=True, slots=True)
class Placement:
    """One request on one replica, with the predictions of the cost policy.

    Attributes
    ----------
    cached_tokens
        Prompt tokens that the replica holds on its device and in host memory, by the router's index.
    ttft_s
        Predicted time to the first token: the wait for queued prefill and for the adapter, the prefill and the copies.
    """

    replica: str
    cached_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Redecision:
    """A recorded decision, and the choice of the replayed policy from the same inputs.

    Attributes
    ----------
    is_tie
        The replayed policy chose another replica, and gave it the same cost as the recorded one. Such a decision does
        not count as changed.
    """

    decision: LoggedDecision
    recorded: Placement
    replayed: Placement
    is_tie: bool

    @property
    def is_changed(self) -> bool:
        return self.recorded.replica != self.replayed.replica and not self.is_tie


@dataclass(slots=True)
class ReplayResult:
    """The logged decisions, each replayed with the policy named `policy`."""

    policy: str
    redecisions: list[Redecision] = field(default_factory=list)

    @property
    def num_changed(self) -> int:
        return sum(one.is_changed for one in self.redecisions)

    @property
    def num_ties(self) -> int:
        return sum(one.is_tie for one in self.redecisions)

    def largest_changes(self, limit: int) -> list[Redecision]:
        """Return at most `limit` changed decisions, sorted by the difference of the predicted TTFT, largest first."""
        changed = [one for one in self.redecisions if one.is_changed]
        changed.sort(key=lambda one: -abs(one.replayed.ttft_s - one.recorded.ttft_s))
        return changed[:limit]


def replay(
    decisions: Iterable[LoggedDecision], policy: Policy, name: str, seed: int = 0
) -> ReplayResult:
    """Replay recorded decisions with a policy.

    Parameters
    ----------
    policy
        The policy to compare, from `router.policy.by_name.make_policy`. If it is a `CostPolicy`, it also predicts
        cached tokens and TTFT for both placements. Other policies predict no times, so the preset `slo` is used for
        them.
    seed
        Seed of the policy's random choices, such as those between equal costs.
    """
    rng = random.Random(seed)
    pricing = policy if isinstance(policy, CostPolicy) else CostPolicy()
    result = ReplayResult(name)
    for decision in decisions:
        fleet, request = decision.fleet, decision.request
        ranking = policy.choose(request, fleet, decision.now_s, rng)
        then, now = fleet.replicas.index(decision.chosen), ranking.rows[0]
        placement = functools.partial(_placement, pricing, request, fleet)
        is_tie = then != now and abs(ranking.cost_s[then] - ranking.cost_s[now]) <= _TIE
        result.redecisions.append(
            Redecision(decision, placement(then), placement(now), bool(is_tie))
        )
    return result


def report(result: ReplayResult, limit: int = 10) -> str:
    """Format the result as text, with the `limit` decisions that changed the predicted TTFT most."""
    ones = result.redecisions
    if not ones:
        return "no decisions in the log"
    routers = {one.decision.router for one in ones}
    policies = ", ".join(sorted({one.decision.policy for one in ones}))
    times_s = [one.decision.time_s for one in ones]
    lines = [
        f"{len(ones)} decisions of {len(routers)} routers under {policies}, "
        f"{max(times_s) - min(times_s):.1f} s",
        "",
        f"{'':34}{'recorded':>14}{result.policy:>18}",
        f"{'placements changed':34}{'':>14}{_share(result.num_changed, len(ones)):>18}",
        f"{'  another one of equal cost':34}{'':>14}{_share(result.num_ties, len(ones)):>18}",
    ]
    figures: tuple[tuple[str, Callable[[Placement], float], int], ...] = (
        ("predicted cached tokens", lambda placement: placement.cached_tokens, 0),
        ("predicted TTFT in ms", lambda placement: 1000 * placement.ttft_s, 1),
    )
    for what, value, width in figures:
        columns = [
            np.array([value(getattr(one, side)) for one in ones], np.float64)
            for side in ("recorded", "replayed")
        ]
        reductions: tuple[tuple[str, Callable[[np.ndarray], float]], ...] = (
            ("mean", np.mean),
            ("p50", np.median),
            ("p99", _p99),
        )
        for name, reduced in reductions:
            cells = (f"{reduced(column):,.{width}f}" for column in columns)
            lines.append("{:34}{:>14}{:>18}".format(f"{what}, {name}", *cells))
    outcomes = [one.decision.outcome for one in ones if one.decision.outcome is not None]
    if outcomes:
        ttft_ms = 1000 * np.mean([outcome["ttft_s"] for outcome in outcomes])
        cached = np.mean([outcome["cached_tokens"] for outcome in outcomes])
        known = f"(of {len(outcomes)} answered)"
        lines.append(f"{'measured cached tokens, mean':34}{cached:>14,.0f}  {known}")
        lines.append(f"{'measured TTFT in ms, mean':34}{ttft_ms:>14,.1f}  {known}")
    changes = result.largest_changes(limit)
    if changes:
        lines += ["", "largest changes in predicted TTFT"]
        lines += [
            f"  prompt {one.decision.request.num_prompt_tokens:>7} tokens: "
            f"{_described(one.recorded)} -> {_described(one.replayed)}"
            for one in changes
        ]
    lines += [
        "",
        "These are estimates: each decision is made in the state that the recorded decisions led to,",
        "and predictions are the terms of the cost. Later effects of a changed decision are not included.",
    ]
    return "\n".join(lines)


def _placement(pricing: CostPolicy, request: RouteRequest, fleet: FleetView, row: int) -> Placement:
    (score,) = pricing.choose(request, fleet.only(row), fleet.now_s, random.Random(0))
    return Placement(
        score.replica,
        score.held_tokens,
        sum(score.terms[name] for name in _TTFT_TERMS),
    )


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.1f} %)"


def _p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99))


def _described(placement: Placement) -> str:
    return (
        f"{placement.replica} ({placement.cached_tokens} cached, {1000 * placement.ttft_s:.1f} ms)"
    )
