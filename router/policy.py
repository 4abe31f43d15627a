"""Where a request goes: pure functions from what is known of the replicas to a ranking of them.

The cost of replica i, in seconds, is what the request costs everybody (DESIGN §5):

    cost_i = W_i + P_i + eta * n_i * P_i
    W_i    seconds of prefill queued before it: the last report, less the time since, plus our own
           bookings that the report cannot contain yet
    P_i    seconds to prefill the tokens of the prompt that i does not hold, at i's measured speed
    n_i    requests in flight on i, each of which waits while the new prompt is prefilled

W + P is the request's own time to first token; eta * n * P is the delay that it causes to others.
The smallest cost wins and ties are random, so idle replicas share unrelated requests.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from quire.protos.wire import ROUTING_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a policy may know of a request."""

    num_prompt_tokens: int
    session: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a policy may know of one replica that can take the request."""

    replica: str
    matched_blocks: int = 0  # routing blocks of this prompt that it holds or will hold
    reported_prefill_tokens: int = 0  # queued, by its last report
    booked_prefill_tokens: int = 0  # of our own requests that the report cannot contain
    num_requests: int = 0  # in flight: running and waiting by the report, and those bookings
    prefill_s_per_token: float = 0.0  # measured; 0 = not yet known
    report_age_s: float | None = None  # None: it has never reported


@dataclass(frozen=True, slots=True)
class Score:
    """One replica's cost, with its terms."""

    replica: str
    cost_s: float
    wait_s: float  # W
    prefill_s: float  # P
    interference_s: float  # eta * n * P
    cached_tokens: int  # prompt tokens predicted to be found in its cache


@dataclass(frozen=True, slots=True)
class Ranking:
    """The replicas from best to worst; empty when there was none to choose from."""

    policy: str
    scores: tuple[Score, ...]

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, rank: int) -> Score:
        return self.scores[rank]

    def __iter__(self) -> Iterator[Score]:
        return iter(self.scores)


class Policy(Protocol):
    """The plug-in interface: one method, pure but for the passed generator."""

    def choose(
        self,
        request: RouteRequest,
        replicas: Sequence[ReplicaView],
        now_s: float,
        rng: random.Random,
    ) -> Ranking:
        """Rank the replicas for a request.

        Parameters
        ----------
        now_s
            The router's clock, the one that views were taken at.
        rng
            Breaks ties, and nothing else.
        """
        ...


@dataclass(frozen=True, slots=True)
class SloPolicy:
    """The cost above, weighted for time-to-first-token objectives.

    Attributes
    ----------
    eta
        Weight of the delay caused to requests in flight.
    fallback_prefill_s_per_token
        Speed used while no replica has measured its own.
    speed_noise
        Speeds within this fraction of the median are taken as equal to it. A measured speed moves
        with the lengths of the prompts it was measured on; without this, the luckiest replica would
        get every request that finds the cluster idle.
    max_decay_s
        A reported queue is taken to shrink with time for at most so long: the longest heartbeat
        interval. Longer silence is no evidence of progress.
    """

    eta: float = 0.1
    fallback_prefill_s_per_token: float = 1e-4
    speed_noise: float = 0.25
    max_decay_s: float = 1.0

    def __post_init__(self) -> None:
        if self.fallback_prefill_s_per_token <= 0:
            value = self.fallback_prefill_s_per_token
            raise ValueError(f"fallback_prefill_s_per_token must be > 0, got {value}")
        for name in ("eta", "speed_noise", "max_decay_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")

    def choose(
        self,
        request: RouteRequest,
        replicas: Sequence[ReplicaView],
        now_s: float,
        rng: random.Random,
    ) -> Ranking:
        speeds = self._speeds(replicas)
        scores = [self._score(request, view, speeds[view.replica]) for view in replicas]
        if all(view.report_age_s is None for view in replicas):
            loads = {v.replica: (v.num_requests, v.booked_prefill_tokens) for v in replicas}
            scores.sort(key=lambda s: (loads[s.replica], -s.cached_tokens, rng.random()))
            return Ranking("least_loaded", tuple(scores))
        scores.sort(key=lambda s: (s.cost_s, -s.cached_tokens, rng.random()))
        return Ranking("slo", tuple(scores))

    def _speeds(self, replicas: Sequence[ReplicaView]) -> dict[str, float]:
        """Seconds per token of each replica; one that has not measured its own has the median."""
        measured = [v.prefill_s_per_token for v in replicas if v.prefill_s_per_token > 0]
        median = statistics.median(measured) if measured else self.fallback_prefill_s_per_token
        speeds = {}
        for view in replicas:
            speed = view.prefill_s_per_token
            known = speed > 0 and abs(speed - median) > self.speed_noise * median
            speeds[view.replica] = speed if known else median
        return speeds

    def _score(self, request: RouteRequest, view: ReplicaView, s_per_token: float) -> Score:
        # The last prompt token is always computed: its logits give the first output token.
        cached = min(view.matched_blocks * ROUTING_BLOCK_TOKENS, request.num_prompt_tokens - 1)
        cached = max(cached, 0)
        prefill_s = (request.num_prompt_tokens - cached) * s_per_token
        elapsed_s = min(view.report_age_s or 0.0, self.max_decay_s)
        wait_s = max(0.0, view.reported_prefill_tokens * s_per_token - elapsed_s)
        wait_s += view.booked_prefill_tokens * s_per_token
        interference_s = self.eta * view.num_requests * prefill_s
        cost_s = wait_s + prefill_s + interference_s
        return Score(view.replica, cost_s, wait_s, prefill_s, interference_s, cached)


POLICIES: Mapping[str, Callable[..., Policy]] = MappingProxyType({"slo": SloPolicy})


def make_policy(name: str, **weights: Any) -> Policy:
    """The policy of a name, with its weights.

    Raises
    ------
    ValueError
        No policy has the name, or it has no such weight.
    """
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, got {name!r}")
    try:
        return POLICIES[name](**weights)
    except TypeError as error:
        raise ValueError(f"policy {name!r}: {error}") from error
