"""Regret of the recorded decisions: the seconds per request that hindsight would have saved.

Recorded decisions are replayed in a model of the fleet. In it a replica prefills one prompt after the other, at its
newest measured speed:

    delay of a request = wait for the prefill before it + its own prefill

Three plans see the same requests at the same times:

    recorded    each request where it went, with the tokens that its engine really had in its cache
    same        each request where it went, with pooled hits: what any replica held, every replica holds
    greedy      each request where its first token comes soonest, with pooled hits

    regret = mean delay of `recorded` - that of the better one of the others

`recorded` never beats `same`, so regret is not negative. Pooled hits cannot be had in general, so no policy reaches 0:
compare policies, or one policy over time.

The queue of a replica also has requests of other routers, and engines are slower or faster than the model. The policy's
wait at each decision contains that (`Ranking.wait_s`). The difference to the wait of `recorded` is added to the queues
of all plans. Policies without that term are replayed without it.

One *window* is a run of decisions. Delays within it depend on each other through the queues, so the interval comes from
the differences between windows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from quire.router.explain.decisions import RoutingDecision
from quire.router.policy.cost import CostPolicy
from quire.router.policy.fleet_view import prefill_work
from quire.router.status_types import RoutingRegret

# Windows that an estimate consists of, and their greatest age.
MAX_WINDOWS = 60
HORIZON_S = 600.0
# Largest factor by which a speed may have changed since a decision.
_MAX_CHANGE = 10.0
# Two-sided 95% quantiles of Student's t by degrees of freedom, from 1.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
_T95_LATER = 2.0  # right within 5% from 16 degrees on
_RECORDED, _SAME, _GREEDY = range(3)


@dataclass(frozen=True, slots=True)
class Window:
    """Sums over the requests of one run of decisions, in seconds.

    Attributes
    ----------
    recorded_s, best_s
        Delays in the model: as placed, and with hindsight.
    measured_s, num_measured
        Times to the first token of the answered requests, and their number.
    """

    policy: str
    num_requests: int
    recorded_s: float
    best_s: float
    measured_s: float
    num_measured: int


def windows_of(
    decisions: Sequence[RoutingDecision], rest: Callable[[], None] = lambda: None
) -> Iterator[Window]:
    """Replay decisions, in the order of their times: one window for each run under the same policy.

    Parameters
    ----------
    rest
        Called after each decision, to pause.
    """
    for policy, run in groupby(decisions, lambda decision: decision.ranking.policy):
        yield _replayed(policy, list(run), rest)


def _replayed(policy: str, run: list[RoutingDecision], rest: Callable[[], None]) -> Window:
    fleet = _Fleet(run)
    # [plans, replicas] time at which each replica has done its queue.
    free_s = np.full((3, len(fleet.s_per_work)), -math.inf)
    delays_s = np.zeros(3)
    measured_s, num_measured = 0.0, 0
    for decision in run:
        delays_s += _place(decision, fleet, free_s)
        if decision.is_answered:
            measured_s += decision.explain.ttft_s
            num_measured += 1
        rest()
    recorded_s, *others = delays_s.tolist()
    return Window(policy, len(run), recorded_s, min(others), measured_s, num_measured)


class _Fleet:
    """All replicas of a run, and their newest measured speeds.

    Attributes
    ----------
    s_per_work
        [replicas] float64, seconds of a unit of prefill work.
    """

    def __init__(self, run: list[RoutingDecision]):
        self._index: dict[str, int] = {}
        # By identity: decisions share the list of names until the fleet changes, and the speeds for a while.
        self._rows: dict[int, np.ndarray] = {}
        views = [decision.ranking.fleet for decision in run]
        distinct = {(id(view.replicas), id(view.prefill_s_per_work)): view for view in views}
        for view in distinct.values():
            rows = [self._index.setdefault(name, len(self._index)) for name in view.replicas]
            self._rows[id(view.replicas)] = np.array(rows, np.int64)
        self.s_per_work = np.zeros(len(self._index))
        for view in distinct.values():
            known = view.prefill_s_per_work > 0
            rows_known = self._rows[id(view.replicas)][known]
            self.s_per_work[rows_known] = view.prefill_s_per_work[known]
        measured = self.s_per_work[self.s_per_work > 0]
        typical = np.median(measured) if len(measured) else CostPolicy().fallback_prefill_s_per_work
        self.s_per_work[self.s_per_work == 0] = typical

    def rows(self, decision: RoutingDecision) -> np.ndarray:
        """The index of each replica that the decision could choose."""
        return self._rows[id(decision.ranking.fleet.replicas)]


def _place(decision: RoutingDecision, fleet: _Fleet, free_s: np.ndarray) -> np.ndarray:
    """Add a request to the queues of the plans; return its delay in each, [plans] seconds."""
    ranking, view, now_s = decision.ranking, decision.ranking.fleet, decision.decided_s
    rows = fleet.rows(decision)
    s_per_work = fleet.s_per_work[rows]
    waits_s = np.maximum(free_s[:, rows] - now_s, 0.0)
    if ranking.wait_s is not None:
        waits_s += _seen_s(decision, s_per_work) - waits_s[_RECORDED]
        np.maximum(waits_s, 0.0, out=waits_s)
        free_s[:, rows] = now_s + waits_s

    chosen = _chosen_row(decision)
    held = view.gpu_tokens + view.host_tokens
    cached = float(held[chosen])
    if decision.is_answered:
        cached = float(decision.explain.cached_tokens)
    pooled = max(cached, float(held.max()))

    def prefill_s(tokens: float) -> np.ndarray:
        missing = max(1.0, decision.num_prompt_tokens - tokens)
        seconds: np.ndarray = s_per_work * prefill_work(
            missing, tokens, view.attention_context_tokens
        )
        return seconds

    pooled_s = prefill_s(pooled)
    soonest = int((waits_s[_GREEDY] + pooled_s).argmin())
    delays_s = np.array(
        [
            waits_s[_RECORDED, chosen] + prefill_s(cached)[chosen],
            waits_s[_SAME, chosen] + pooled_s[chosen],
            waits_s[_GREEDY, soonest] + pooled_s[soonest],
        ]
    )
    places = (_RECORDED, _SAME, _GREEDY), rows[[chosen, chosen, soonest]]
    free_s[places] = now_s + delays_s
    return delays_s


def _seen_s(decision: RoutingDecision, s_per_work: np.ndarray) -> np.ndarray:
    """The waits that the policy saw, with the speeds that are known now."""
    view = decision.ranking.fleet
    then = np.where(view.prefill_s_per_work > 0, view.prefill_s_per_work, view.prior_s_per_work)
    change = np.divide(s_per_work, then, out=np.ones(len(then)), where=then > 0)
    waits_s: np.ndarray = decision.ranking.wait_s * change.clip(1 / _MAX_CHANGE, _MAX_CHANGE)
    return waits_s


def _chosen_row(decision: RoutingDecision) -> int:
    """The row of the replica that answered, or of the policy's choice."""
    ranking = decision.ranking
    replica, best = decision.explain.replica, int(ranking.rows[0])
    if not decision.is_answered or replica == ranking.fleet.replicas[best]:
        return best
    names = list(ranking.fleet.replicas)
    return names.index(replica) if replica in names else best


class RegretMeter:
    """The windows of the last minutes, by policy."""

    def __init__(self) -> None:
        self._windows: dict[str, deque[tuple[float, Window]]] = {}

    def add(self, window: Window, now_s: float) -> None:
        """Take in a window that ended at `now_s`."""
        kept = self._windows.setdefault(window.policy, deque(maxlen=MAX_WINDOWS))
        kept.append((now_s, window))

    def estimates(self, now_s: float) -> list[RoutingRegret]:
        """Return the regret of each policy of the last `HORIZON_S`."""
        for policy, kept in list(self._windows.items()):
            while kept and now_s - kept[0][0] > HORIZON_S:
                kept.popleft()
            if not kept:
                del self._windows[policy]
        return [_estimate([w for _, w in kept]) for kept in self._windows.values()]


def _estimate(windows: list[Window]) -> RoutingRegret:
    """The quotient of two sums over windows, with the interval of a ratio estimator."""
    sizes = np.array([w.num_requests for w in windows], np.float64)
    saved_s = np.array([w.recorded_s - w.best_s for w in windows])
    num, mean_s = sizes.sum(), saved_s.sum() / sizes.sum()
    half_s = math.inf
    if len(windows) > 1:
        freedom = len(windows) - 1
        spread = np.square(saved_s - mean_s * sizes).sum() * len(windows) / freedom
        t95 = _T95[freedom - 1] if freedom <= len(_T95) else _T95_LATER
        half_s = t95 * math.sqrt(spread) / num
    num_measured = sum(w.num_measured for w in windows)
    return RoutingRegret(
        policy=windows[0].policy,
        num_requests=int(num),
        mean_s=float(mean_s),
        half_s=float(half_s),
        modelled_s=float(sum(w.recorded_s for w in windows) / num),
        measured_s=sum(w.measured_s for w in windows) / max(1, num_measured),
    )


def merged_regrets(of_routers: Iterable[Sequence[RoutingRegret]]) -> list[RoutingRegret]:
    """Return the regret of each policy over all routers, whose estimates are independent."""
    by_policy: dict[str, list[RoutingRegret]] = {}
    for regrets in of_routers:
        for regret in regrets:
            by_policy.setdefault(regret.policy, []).append(regret)
    return [_merged(by_policy[policy]) for policy in sorted(by_policy)]


def _merged(regrets: list[RoutingRegret]) -> RoutingRegret:
    num = sum(regret.num_requests for regret in regrets)

    def mean(value: Callable[[RoutingRegret], float]) -> float:
        return sum(regret.num_requests * value(regret) for regret in regrets) / num

    return RoutingRegret(
        policy=regrets[0].policy,
        num_requests=num,
        mean_s=mean(lambda regret: regret.mean_s),
        half_s=math.hypot(*(regret.num_requests * regret.half_s for regret in regrets)) / num,
        modelled_s=mean(lambda regret: regret.modelled_s),
        measured_s=mean(lambda regret: regret.measured_s),
    )
