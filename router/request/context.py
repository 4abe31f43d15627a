"""The interface of the router for a request's stream."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from quire.router.admission.failover_budget import FailoverBudget
from quire.router.admission.gate import AdmissionGate
from quire.router.explain.decision_log import DecisionLog
from quire.router.explain.decisions import DecisionRing
from quire.router.explain.regret_worker import RegretWorker
from quire.router.fleet.replicas import ReplicaTable
from quire.router.observer import Observer
from quire.router.policy.policy import Policy
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.token_scores import TokenScorer
from quire.router.scoring.embedding_format import EmbeddingFormat
from quire.router.status_types import Decisions, LiveState
from quire.router.trace.request_trace import RequestTrace
from quire.router.trace.tracer import Tracer
from quire.router.transport.retained_turns import RetainedTurns
from quire.router.transport.transport import Transport
from quire.router.types import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts about the model that do not come from replicas.

    Attributes
    ----------
    name
        The model's name in requests.
    max_prompt_tokens
        Bound on the prompt; None: only the model's length limits it.
    chat_template_kwargs
        The application's variables for the chat template; a request's own take precedence.
    embedding
        How hidden states become embeddings.
    special_tokens_in_messages
        Whether a special token's name in a message's text becomes that token.
    """

    name: str
    created_s: int
    defaults: GenerationDefaults
    limits: Limits
    max_prompt_tokens: int | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    special_tokens_in_messages: bool = False
    embedding: EmbeddingFormat = field(default_factory=EmbeddingFormat)


class Arrived(NamedTuple):
    """When a request arrived.

    Attributes
    ----------
    at_s
        Time of the router's clock.
    trace
        None: the request is not traced.
    """

    at_s: float
    trace: RequestTrace | None = None

    def on_tokenised(
        self, start_s: float, end_s: float, num_tokens: int, answer_id: str = ""
    ) -> None:
        """Record that a prompt has been rendered, tokenised and hashed."""
        if self.trace is not None:
            self.trace.on_tokenised(start_s, end_s, num_tokens, answer_id)


class RouterContext(Protocol):
    """The parts of `service.RouterService` that a `RequestStream` and its parts read and call."""

    facts: ModelFacts
    router_id: str
    clock: Callable[[], float]
    rng: random.Random
    table: ReplicaTable
    policy: Policy
    transport: Transport
    gate: AdmissionGate
    observer: Observer
    ring: DecisionRing
    regret: RegretWorker
    decision_log: DecisionLog | None
    tracer: Tracer | None
    budget: FailoverBudget | None
    max_migrations: int
    max_move_s: float
    # Seconds for which replicas retain the blocks of a conversation that will soon go on.
    retain_s: float
    retained_turns: RetainedTurns
    scorer: TokenScorer


@contextmanager
def observed(
    router: RouterContext, request: GenerationRequest, operation: str
) -> Iterator[Arrived]:
    """Count a request, and its refusal; yields its arrival.

    Parameters
    ----------
    operation
        `gen_ai.operation.name` of the request's trace.
    """
    arrived_s, trace = router.clock(), None
    router.observer.on_request()
    if router.tracer is not None:
        trace = router.tracer.begin(request, operation, router.facts.name, arrived_s)
    try:
        yield Arrived(arrived_s, trace)
    except BaseException as error:
        now_s = router.clock()
        if trace is not None:
            trace.refused(error, now_s)
        if isinstance(error, Exception):
            router.observer.on_refusal(error, now_s - arrived_s)
        raise
    if trace is not None:
        trace.leave(router.clock())


class PeerRouters(Protocol):
    """All routers of the application, the asking one included. `transport.peers.Peers` implements this."""

    async def decisions(
        self, request_id: str | None, limit: int, payer: str | None = None
    ) -> Decisions:
        """Return the last decisions of all routers; raises `Unavailable` if none answered."""
        ...

    async def live_states(self, payer: str | None) -> list[LiveState]:
        """Return the states of the routers that answered; raises `Unavailable` if none did."""
        ...
