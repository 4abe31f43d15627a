"""The types between the front ends (HTTP, gRPC) and the router: requests, deltas, the service.

A `GenerationRequest` holds the values of the client, typed but not checked against the model. None means that the
client gave no value. `router.request.params` resolves it with the checkpoint's defaults and checks every bound, once
for both front ends.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from quire.protos.adapter_ref import AdapterRef
from quire.protos.errors import QuireError
from quire.protos.sampling_params import Grammar
from quire.router.bill import Bill
from quire.router.question_types import Question
from quire.router.scored_token import TokenScores
from quire.router.status_types import (
    AdapterEntry,
    Decisions,
    LiveState,
    ModelInfo,
    Readiness,
    ReplicaStatus,
)
from quire.router.tool_types import Tool, ToolCall, ToolChoice


@dataclass(frozen=True, slots=True)
class Origin:
    """The values that, together with the request, generate the same stream again.

    Attributes
    ----------
    seed
        The sampling seed, unsigned 64 bits.
    fingerprint
        8 bytes of prompt, parameters and model, from `resume.fingerprint_of`.
    answer_id
        The answer's id, 32 hexadecimal digits.
    created_s
        Time of the original request, Unix seconds.
    """

    seed: int
    fingerprint: bytes
    answer_id: str
    created_s: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The part of one choice that the client has.

    Attributes
    ----------
    checksum
        Checksum of these tokens' ids, from `resume.checksum_of`.
    begun
        The client has the event before the first token, for example the role.
    finished
        The client has the finish reason too.
    """

    num_tokens: int = 0
    checksum: int = 0
    begun: bool = False
    finished: bool = False


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A parsed event id: the place where a client resumes.

    Attributes
    ----------
    marks
        One for each choice.
    field
        Name of the request's field with the id, for errors.
    """

    origin: Origin
    marks: tuple[Mark, ...]
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A prompt and the parameters of its answer. Exactly one of `prompt`, `prompts` and `messages` is given.

    Attributes
    ----------
    model
        Name of the model or of an adapter; None: the application's model.
    prompt
        Text or token ids.
    prompts
        Several prompts. Choice j of prompt i is choice i * n + j of the answer.
    messages
        Chat turns for the chat template, in the form of OpenAI's chat completions: assistant turns may have
        `tool_calls` and `reasoning_content`, turns of role `tool` have `tool_call_id`.
    tools
        Functions that the model may call; only with `messages`.
    tool_choice
        None: `auto` if there are tools.
    parallel_tool_calls
        False: at most one call in an answer.
    reasoning_effort
        OpenAI's levels: none, minimal, low, medium, high, xhigh. None: the chat template's default.
    chat_template_kwargs
        Further variables for the chat template.
    add_generation_prompt
        End a rendered conversation with the start of an assistant's turn. None: true unless `continue_final_message`.
    add_special_tokens
        Add BOS and similar tokens. None: to prompts, not to rendered messages.
    max_tokens
        Most output tokens. None: up to the model's length. 0, with `echo`: return only the prompt.
    fit_to_model
        Instead of refusing the request, lower `max_tokens` to what fits, and take the nearest `reasoning_effort` that
        the chat template has, or ignore it if there is none: agents send the same values to every model.
    logit_bias
        Pairs of a token id and the number that is added to its logit.
    allowed_token_ids
        The only token ids to sample from; empty: all.
    logprobs
        Return log-probabilities of the output tokens, and of this many likeliest tokens at each position.
    prompt_logprobs
        Return the same for the prompt's tokens.
    grammar
        The output text must be in the language of this grammar.
    prediction
        The client's guess of the answer, a source of drafts. It changes no token of the answer.
    n
        Number of samples of each prompt; each ends with its own finish reason.
    session
        Name of the conversation: requests of one session prefer the replica of its last request. Empty: only the
        conversation's prefix tells which replica has it.
    retain
        Retain the blocks of the conversation (`Submit.retain_s`) however the answer ends. Without it, they are retained
        if the answer ends with a tool call.
    tenant
        Scope of the request's cache entries: tenants share none.
    bill
        Who pays. None: no keys are configured.
    deadline_s
        Seconds from the request's arrival to its deadline.
    resume_from
        Return only deltas after the part of the answer that the client has.
    adapter
        The adapter that `model` names; the router sets it.
    trace_headers
        The client's `traceparent` and `tracestate`, unchecked. None: it sent none.
    """

    request_id: str
    model: str | None = None
    prompt: str | tuple[int, ...] | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[dict[str, Any], ...] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    max_tokens: int | None = None
    fit_to_model: bool = False
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    prediction: str = ""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    grammar: Grammar | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    tenant: str = ""
    session: str = ""
    retain: bool = False
    priority: int = 0
    deadline_s: float | None = None
    resume_from: ResumePoint | None = None
    bill: Bill | None = None
    adapter: AdapterRef | None = None
    trace_headers: tuple[str, str] | None = None

    @property
    def payer(self) -> str:
        """The tenant that the queue is fair to: that of the key, else the client's own name."""
        return self.tenant if self.bill is None else self.bill.tenant

    @property
    def may_be_retained(self) -> bool:
        """Whether the conversation's blocks are retained at some ends of the answer."""
        may_call = self.tools and (self.tool_choice is None or self.tool_choice.mode != "none")
        return self.retain or bool(may_call)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The part of each choice that the client has."""
        if self.resume_from is not None:
            return self.resume_from.marks
        return (Mark(),) * (self.n * max(1, len(self.prompts)))

    def for_each_prompt(self) -> Iterator[GenerationRequest]:
        """Yield one request with a single prompt for each prompt of the list."""
        if not self.prompts:
            yield self
        for prompt in self.prompts:
            yield replace(self, prompt=prompt, prompts=())


@dataclass(slots=True)
class OutputDelta:
    """New output since the last delta. Only the last delta of a choice has a `finish_reason`.

    Attributes
    ----------
    text
        New text of the answer, without reasoning and calls.
    finish_reason
        stop, length, tool_calls or abort. tool_calls: the answer stopped, and has calls.
    stop_reason
        The stop string or the stop token id that ended the answer; None for EOS.
    logprobs
        The scores of `token_ids`, one for each; None if not asked for.
    choice
        Index of the sample.
    reasoning
        New text of the reasoning before the answer.
    tool_calls
        Calls that became complete.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenScores] | None = None
    choice: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(slots=True)
class Usage:
    """Tokens billed to the request; a migrated request is billed once.

    Attributes
    ----------
    cached_tokens
        Prompt tokens that the replica found in its cache.
    host_cached_tokens
        The part of `cached_tokens` that was restored from the host tier.
    peer_cached_tokens
        The part of `host_cached_tokens` that was pulled from another node for this request.
    reasoning_tokens
        The part of `completion_tokens` that is reasoning.
    accepted_prediction_tokens, rejected_prediction_tokens
        Drafted tokens that steps have verified: those that are part of the answer, and the others.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    peer_cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(slots=True)
class EncodedPrompt:
    """A prompt as a replica would get it.

    Attributes
    ----------
    token_ids
        [tokens] int32.
    text
        The text that was encoded; for messages, the rendered chat template. None for a prompt of token ids.
    max_model_len
        Most tokens of a prompt and its answer together.
    """

    token_ids: np.ndarray
    text: str | None
    max_model_len: int


@dataclass(slots=True)
class Explain:
    """Explains the routing of a request; sent as x-quire-* headers or trailing metadata.

    Attributes
    ----------
    router
        Id of the router that decided.
    predicted_cached_tokens
        Prediction for the last attempt, device and host tier together.
    cached_tokens, queue_s
        Cached prompt tokens and seconds in the replica's queue, of the attempt `answered_attempt`; 0 until `answered`.
    ttft_s
        Time from the request's arrival to the answer's first token; 0 until `answered`.
    answered_attempt
        The last attempt that has brought a token, counted from 1; 0: none has.
    """

    router: str = ""
    replica: str = ""
    predicted_cached_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    runner_up: str = ""
    attempts: int = 0
    answered_attempt: int = 0
    ttft_s: float = 0.0
    num_handovers: int = 0  # attempts after the first that no replica's loss began

    @property
    def answered(self) -> bool:
        """Whether the first token has arrived."""
        return self.answered_attempt > 0


@dataclass(slots=True)
class ReplyScores:
    """The scores of the replies to some questions.

    Attributes
    ----------
    logprobs
        For each question and each of its replies the natural logarithm of the reply's probability, up to a constant of
        the question (`router/scoring/question_prompts.py`).
    usage
        Tokens that several prompts have in common count once.
    explain
        The routing of the first prompt.
    """

    logprobs: list[list[float]]
    usage: Usage
    explain: Explain


@dataclass(slots=True)
class Embeddings:
    """The embeddings of some inputs.

    Attributes
    ----------
    vectors
        [dimensions] float32 for each input.
    explain
        The routing of the first input.
    """

    vectors: list[np.ndarray]
    usage: Usage
    explain: Explain


class GenerationStream(Protocol):
    """The answer to one request: an async iterator of deltas.

    Closing it early (`aclose`, also on cancellation of the consumer) aborts the request on its replica. `usage` and
    `explain` are complete when the iteration has ended; `usage.prompt_tokens` and `explain.replica` already at the
    first delta. With several choices the deltas of all come in one iteration. `prompt_scores` holds the
    log-probabilities of the prompt's tokens and is complete before the first delta; None if not asked for. For a list
    of prompts it is about the first prompt, and `scores_of_prompt` returns those of each prompt. The deltas of a
    resumed stream begin after the part that the client has; `usage` counts the whole answer.
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
    """The interface for HTTP and gRPC. `request.service.RouterService` implements it."""

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Check, tokenise, route and submit a request; return its stream when the first token has arrived.

        Raises
        ------
        QuireError
            The request was refused: invalid, unknown model, too long, overloaded, unavailable. Later errors are raised
            by the stream's iteration.
        """
        ...

    async def score(self, request: GenerationRequest, questions: Sequence[Question]) -> ReplyScores:
        """Score the replies to questions at the end of the request's messages; raises as `generate` does."""
        ...

    async def embed(self, request: GenerationRequest, dimensions: int | None) -> Embeddings:
        """Embed each prompt of a request; raises as `generate` does.

        Parameters
        ----------
        dimensions
            Number of leading values to return; None: all.
        """
        ...

    async def encode(self, request: GenerationRequest) -> EncodedPrompt:
        """Check a request with one prompt and encode the prompt; raises as `generate` does, save for a full queue."""
        ...

    def adapters(self) -> list[AdapterEntry]:
        """The adapters that requests may name as their model."""

    async def load_adapter(self, name: str, path: str) -> AdapterEntry:
        """Load an adapter on all replicas; raises `InvalidRequest` if the name or the folder cannot be used."""

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter; raises `ModelNotFound` if there is none with this name."""

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of some token ids; raises `InvalidRequest` if one is not in the vocabulary."""
        ...

    async def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it; an id without a token is empty."""
        ...

    def model_info(self) -> ModelInfo: ...

    def readiness(self) -> Readiness: ...

    def replicas(self) -> list[ReplicaStatus]: ...

    async def decisions(
        self, request_id: str | None, limit: int, payer: str | None = None
    ) -> Decisions:
        """Return the recent routing decisions of all routers.

        Parameters
        ----------
        request_id
            Decisions for this request only; None: the last `limit` decisions for any request (of `payer`, if given).
        """
        ...

    def refused(self, error: QuireError) -> None:
        """Count a request that a front end refused before it called `generate`."""
        ...

    async def metrics(self) -> bytes:
        """Return the Prometheus page of all routers and replicas of the application."""
        ...

    async def live_state(self, payer: str | None = None) -> LiveState:
        """Return what all routers know now; only the requests of `payer`, if given."""
        ...

    def watch_cache(self, period_s: float) -> AsyncGenerator[list[ReplicaStatus], None]:
        """Yield the status of every replica now, and then after each change, at most once every `period_s`."""
        ...
