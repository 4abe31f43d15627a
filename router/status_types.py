"""The types in which a router tells about the model, its replicas and its decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.protos.adapter_ref import AdapterRef
from quire.protos.wire import Hello, Load


@dataclass(slots=True)
class ModelInfo:
    """The model that this application serves."""

    name: str
    created_s: int
    max_model_len: int
    vocab_size: int
    revision: str = ""
    dtype: str = ""
    eos_token_ids: tuple[int, ...] = ()
    block_size: int = 0

    @classmethod
    def of(cls, name: str, created_s: int, hello: Hello) -> ModelInfo:
        """The facts that a replica has reported."""
        return cls(
            name=name,
            created_s=created_s,
            max_model_len=min(hello.max_model_len, hello.max_cache_tokens),
            vocab_size=hello.vocab_size,
            revision=hello.revision,
            dtype=hello.dtype,
            eos_token_ids=tuple(hello.eos_token_ids),
            block_size=hello.block_size,
        )


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """An adapter by its name, as the newest change of the name says."""

    ref: AdapterRef
    version_ns: int  # time of the change, since 1970
    is_removed: bool = False

    @property
    def created_s(self) -> int:
        return self.version_ns // 10**9


@dataclass(slots=True)
class ReplicaStatus:
    """The state of one replica, as this router sees it.

    Attributes
    ----------
    indexed_blocks
        Number of routing blocks (64 tokens each) that the replica holds, by this router's index.
    state
        `fleet.tracked_replica.ReplicaState`: syncing, attached, draining or lost.
    """

    replica: str
    epoch: str
    load: Load
    report_age_s: float
    attached: bool
    indexed_blocks: int
    state: str = "attached"


@dataclass(slots=True)
class Readiness:
    """Whether a request sent now would be served, and the reason if not.

    Attributes
    ----------
    replicas
        Attached replicas that are ready.
    startup_s
        Seconds of each start-up phase of the slowest replica.
    engine
        `protos.engine_facts` of one replica; None if no replica is attached.
    """

    ready: bool
    reason: str
    replicas: int
    startup_s: dict[str, float] = field(default_factory=dict)
    engine: dict[str, Any] | None = None


@dataclass(slots=True)
class Decisions:
    """The recent decisions of all routers.

    Attributes
    ----------
    routers
        Ids of the routers that answered.
    num_silent
        Number of routers that are known not to have answered in time.
    decisions
        Plain data (`explain.decisions.DecisionRing`); the oldest first for one request, else the newest first.
    """

    routers: list[str]
    num_silent: int
    decisions: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The requests that wait at one router.

    Attributes
    ----------
    expected_wait_s
        Seconds to the first token of a request that came after all of them; 0 if none waits.
    """

    num_requests: int
    num_prompt_tokens: int
    expected_wait_s: float


@dataclass(slots=True)
class PrefixHits:
    """The prompts of some answered requests, and how much of them was cached.

    Attributes
    ----------
    predicted_tokens
        The cached tokens that the router had predicted.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RoutingRegret:
    """Seconds per request that a policy's decisions cost, against hindsight (`explain/regret.py`).

    Attributes
    ----------
    mean_s, half_s
        The estimate, and half the length of its 95% interval; inf: unknown, from a single window.
    modelled_s, measured_s
        Mean delay of these requests in the model, and their mean time to the first token: how far the model is right.
    """

    policy: str
    num_requests: int
    mean_s: float
    half_s: float
    modelled_s: float
    measured_s: float

    @property
    def low_s(self) -> float:
        return max(0.0, self.mean_s - self.half_s)

    @property
    def high_s(self) -> float:
        return self.mean_s + self.half_s


@dataclass(frozen=True, slots=True)
class LiveState:
    """What some routers know now, in a size that does not depend on the number of requests or blocks.

    Attributes
    ----------
    router
        The router that sees the replicas as in `replicas`; others see the same within a step.
    routers
        The routers whose queues and decisions are included.
    num_routers
        Routers of the application.
    num_decisions, num_deltas
        Decisions, and deltas of streams after their first one, since the routers' starts.
    num_kept
        Number of decisions that a router keeps.
    hits
        Answered requests among each router's last `explain.live_state.WINDOW` decisions, by replica.
    ttft_s
        Their times to the first token, ascending.
    decisions
        The newest decisions, as `Decisions` has them, with the best two replicas only.
    moves
        Those of these decisions that continued a request of another replica, newest first.
    regrets
        Regret of the recent decisions, by policy.
    """

    router: str
    routers: list[str]
    model: str
    now: float  # seconds since 1970
    num_routers: int
    queue: QueueStatus
    num_decisions: int
    num_deltas: int
    num_kept: int
    replicas: list[ReplicaStatus]
    hits: dict[str, PrefixHits]
    ttft_s: list[float]
    decisions: list[dict[str, Any]]
    moves: list[dict[str, Any]]
    regrets: list[RoutingRegret] = field(default_factory=list)

    def ttft_quantile_s(self, q: float) -> float | None:
        """Return the nearest-rank quantile of `ttft_s`, in seconds; None without values."""
        values = self.ttft_s
        return values[min(len(values) - 1, int(q * len(values)))] if values else None
