"""What the front ends hand to the router, and what they get back.

A `GenerationRequest` is what the client said, typed but not yet checked against the model: None means that the
client gave no value. `router.params` resolves it with the checkpoint's defaults and checks every bound, once for
both HTTP and gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from quire.protos.errors import QuireError
from quire.protos.wire import Grammar, Load


@dataclass(frozen=True, slots=True)
class Origin:
    """What it takes, beside the request, to generate a stream again and to continue it as the same."""

    seed: int  # unsigned 64 bits
    fingerprint: bytes  # 8 bytes: see `resume.fingerprint_of`
    answer_id: str  # 32 hexadecimal digits
    created_s: int  # Unix time


@dataclass(frozen=True, slots=True)
class Mark:
    """How much of one choice its client has."""

    num_tokens: int = 0
    checksum: int = 0  # of their ids: see `resume.checksum_of`
    begun: bool = False  # what comes before the first token, the role for instance
    finished: bool = False  # the finish reason, too


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a client wants to go on: an event id, taken apart."""

    origin: Origin
    marks: tuple[Mark, ...]  # one for each choice
    field: str  # where the client gave it, for errors


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to continue, and how. Exactly one of `prompt`, `prompts` and `messages` is given."""

    request_id: str
    model: str | None = None  # None: the application's only model
    prompt: str | tuple[int, ...] | None = None  # text, or token ids
    prompts: tuple[str | tuple[int, ...], ...] = ()  # choice j of prompt i is choice i * n + j
    messages: tuple[dict[str, Any], ...] | None = None  # chat turns for the chat template
    chat_template_kwargs: Mapping[str, Any] | None = None  # more variables for the chat template
    add_generation_prompt: bool | None = None  # None: unless the last message is continued
    continue_final_message: bool = False
    add_special_tokens: bool | None = (
        None  # BOS and the like; None: to a prompt, not to rendered messages
    )
    max_tokens: int | None = (
        None  # None: up to the model's length; 0, with `echo`: nothing but the prompt
    )
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None  # log-probabilities of the tokens, and of so many likeliest ones
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    seed: int | None = None
    grammar: Grammar | None = None  # a language that the text must be in
    n: int = 1  # samples of each prompt; each ends with its own finish reason
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    tenant: str = ""  # cache salt
    session: str = ""
    priority: int = 0
    deadline_s: float | None = None  # seconds left when the request arrived
    resume_from: ResumePoint | None = None  # deltas begin after what the client has

    @property
    def marks(self) -> tuple[Mark, ...]:
        """What the client has of each choice."""
        if self.resume_from is not None:
            return self.resume_from.marks
        return (Mark(),) * (self.n * max(1, len(self.prompts)))

    def for_each_prompt(self) -> list[GenerationRequest]:
        """The same request for each of its prompts alone."""
        if not self.prompts:
            return [self]
        return [replace(self, prompt=prompt, prompts=()) for prompt in self.prompts]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token and its log-probability in the model's own distribution."""

    token_id: int
    logprob: float | None  # None: of a prompt's first token, which nothing comes before
    text: str  # by itself: bytes that are no whole character are U+FFFD
    utf8: bytes  # what it adds to the text, byte by byte


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One token and the likeliest ones in its place, best first."""

    token: ScoredToken
    top: tuple[ScoredToken, ...]
    rank: int | None = None  # of a prompt's token, 1 for the likeliest of all; None: not asked for
    text_offset: int = 0  # characters of the prompt's, or of the answer's, text before it


@dataclass(slots=True)
class OutputDelta:
    """What is new since the last delta. `finish_reason` is set on the last one only."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # stop | length | abort
    stop_reason: str | int | None = (
        None  # the stop string or stop token id that ended it; None for EOS
    )
    logprobs: list[TokenScores] | None = None  # one for each of token_ids, when asked for
    choice: int = 0  # which of the request's n samples this belongs to


@dataclass(slots=True)
class Usage:
    """Tokens billed to the request: over the whole of it, however often it moved."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the replica's cache
    host_cached_tokens: int = 0  # of these, those copied back from its host tier


@dataclass(slots=True)
class Explain:
    """Why the request went where it went; sent as x-quire-* headers or trailing metadata.

    `predicted_cached_tokens` is of the last attempt; `cached_tokens`, `queue_s` and `ttft_s` are of the one
    that gave the first token, and 0 until `answered`.
    """

    router: str = ""  # who decided
    replica: str = ""
    predicted_cached_tokens: int = 0  # on the device and in host memory
    cached_tokens: int = 0
    queue_s: float = 0.0
    runner_up: str = ""
    attempts: int = 0
    answered: bool = False  # the first token is there
    ttft_s: float = 0.0  # from the request's arrival to it


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
    """One replica as this router sees it."""

    replica: str
    epoch: str
    load: Load
    report_age_s: float
    attached: bool
    indexed_blocks: int  # routing blocks this router believes it holds


@dataclass(slots=True)
class Readiness:
    """Whether a request sent now would be served, and the reason when it would not."""

    ready: bool
    reason: str
    replicas: int  # attached
    startup_s: dict[str, float] = field(
        default_factory=dict
    )  # seconds by phase, of the slowest replica
    engine: dict[str, Any] | None = None  # `protos.engine_facts` of one replica; None without any


@dataclass(slots=True)
class Decisions:
    """What routers remember of their decisions.

    Attributes
    ----------
    routers
        Ids of those that were asked and answered.
    num_silent
        At least so many routers did not answer in time.
    decisions
        Plain data (`router.decisions.DecisionRing`): of one request first to last, else the newest first.
    """

    routers: list[str]
    num_silent: int
    decisions: list[dict[str, Any]]


class GenerationStream(Protocol):
    """The answer to one request: an async iterator of deltas.

    Closing it early (`aclose`, also on cancellation of the consumer) aborts the request on its replica.
    `usage` and `explain` are complete when the iteration has ended; `usage.prompt_tokens` and
    `explain.replica` already at the first delta. With several choices the deltas of all come in one iteration.
    `prompt_scores` are the prompt's tokens, complete before the first delta; None unless asked for. Of a list of
    prompts they are those of the first, `scores_of_prompt` has those of each.
    The deltas of a resumed stream begin after what the client has; `usage` counts the whole.
    """

    request_id: str
    model: str
    origin: Origin

    @property
    def usage(self) -> Usage: ...

    @property
    def explain(self) -> Explain: ...

    @property
    def prompt_scores(self) -> list[TokenScores] | None: ...

    def scores_of_prompt(self, index: int) -> list[TokenScores] | None: ...

    def __aiter__(self) -> AsyncIterator[OutputDelta]: ...

    async def aclose(self) -> None: ...


class Service(Protocol):
    """What HTTP and gRPC call; `router.service.RouterService` is the real one."""

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Check, tokenise, route and submit.

        Raises
        ------
        QuireError
            Before anything was generated: invalid, unknown model, too long, overloaded, unavailable.
            Errors after that are raised by the stream's iteration.
        """
        ...

    def model_info(self) -> ModelInfo: ...

    def readiness(self) -> Readiness: ...

    def replicas(self) -> list[ReplicaStatus]: ...

    async def decisions(self, request_id: str | None, limit: int) -> Decisions:
        """Why requests went where they went, as far as it is remembered, on all routers.

        Parameters
        ----------
        request_id
            None: the last `limit` decisions, whatever request they were for.
        """
        ...

    def refused(self, error: QuireError) -> None:
        """Count a generation request that a front end has refused without a call of `generate`."""
        ...

    async def metrics(self) -> bytes:
        """What Prometheus scrapes: of all routers and replicas of the application."""
        ...

    def watch_cache(self, period_s: float) -> AsyncIterator[list[ReplicaStatus]]:
        """The status of every replica, at once and then whenever it changed, at most every `period_s`."""
        ...
