"""The types in which a router tells about the model, its replicas and its decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.protos.wire import Load


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


@dataclass(slots=True)
class ReplicaStatus:
    """The state of one replica, as this router sees it.

    Attributes
    ----------
    indexed_blocks
        Number of routing blocks (64 tokens each) that the replica holds, by this router's index.
    """

    replica: str
    epoch: str
    load: Load
    report_age_s: float
    attached: bool
    indexed_blocks: int


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
