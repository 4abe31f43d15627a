"""The JSON answers of the HTTP API: OpenAI's shapes, with a few extensions that vLLM has, too.

The models are what the documentation pages show and what the tests hold the answers to. The
functions build the same shapes as plain dictionaries: validating what we made ourselves costs time
and finds nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from quire.cluster.api_common.front_end import retry_after_ms
from quire.protos.errors import DecisionNotFound, QuireError
from quire.router.types import Decisions, ModelInfo, ScoredToken, TokenScores, Usage


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_Answer):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(description="Found in the replica's cache, not computed again.")
    host_cached_tokens: int = Field(description="Of these, copied back from its host tier.")


class UsageAnswer(_Answer):
    """Tokens of the whole request, however often it moved between replicas."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class _Choice(_Answer):
    index: int
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = Field(
        None, description="The stop string or stop token id that ended the answer; null for EOS."
    )
    token_ids: list[int] | None = Field(None, description="With `return_token_ids`.")


class CompletionLogprobs(_Answer):
    """Log-probabilities of the model's own distribution, whatever shaped the one that was sampled."""

    tokens: list[str] = Field(description="`bytes:\\\\x..` where a token is no whole character.")
    token_logprobs: list[float | None] = Field(
        description="null of an echoed prompt's first token."
    )
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Characters before each token.")


class PromptLogprob(_Answer):
    """What the model thought of one id at a place in the prompt."""

    logprob: float
    rank: int = Field(description="1 for the likeliest id of all.")
    decoded_token: str


# Of each prompt token, by token id: its own and the likeliest in its place; null of the first.
PromptLogprobsAnswer = list[dict[str, PromptLogprob] | None]


class TokenLogprobAnswer(_Answer):
    """One token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprobAnswer):
    """A token of the answer and the likeliest ones in its place."""

    top_logprobs: list[TokenLogprobAnswer]


class ChatLogprobs(_Answer):
    """Log-probabilities of the model's own distribution, whatever shaped the one that was sampled."""

    content: list[ContentLogprob]
    refusal: None


class CompletionChoice(_Choice):
    """The continuation."""

    logprobs: CompletionLogprobs | None

    text: str
    prompt_logprobs: PromptLogprobsAnswer | None = Field(
        None, description="With `prompt_logprobs`."
    )


class AssistantMessage(_Answer):
    """The turn that was generated."""

    role: Literal["assistant"]
    content: str


class ChatChoice(_Choice):
    """The answer."""

    logprobs: ChatLogprobs | None

    message: AssistantMessage


class ChatDelta(_Answer):
    """What is new: the role in the first chunk, then text."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Choice):
    """One delta of the answer."""

    logprobs: ChatLogprobs | None

    delta: ChatDelta


class _Envelope(_Answer):
    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    system_fingerprint: str = Field(description="Names model, revision and number format.")


class Completion(_Envelope):
    """Answer of /v1/completions, and each chunk of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = None


class ChatCompletion(_Envelope):
    """Answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptLogprobsAnswer | None = Field(
        None, description="With `prompt_logprobs`."
    )


class ChatCompletionChunk(_Envelope):
    """One server-sent event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | None = None
    prompt_logprobs: PromptLogprobsAnswer | None = Field(
        None, description="With `prompt_logprobs`, in the first chunk."
    )


class ModelCard(_Answer):
    """One model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="Most tokens of prompt and answer together.")


class ModelList(_Answer):
    """The models of this application: one."""

    object: Literal["list"]
    data: list[ModelCard]


class ErrorDetail(_Answer):
    """What is wrong: the field, its bound and the value."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(_Answer):
    """Every answer that is not 2xx, and the last event of a stream that failed."""

    error: ErrorDetail


class EngineFacts(_Answer):
    """One replica's engine; all replicas of an application are alike."""

    model: str
    dtype: str
    device: str
    threads: int = Field(description="Of matrix products on the CPU; 0 on a GPU.")
    max_model_len: int = Field(description="Tokens of prompt and output together.")
    kv_cache_tokens: int
    request_tokens: int = Field(description="Length of the requests that are counted next.")
    concurrent_requests: int = Field(description="Requests of that length that run at a time.")


class ReadyAnswer(_Answer):
    """Whether a request sent now would be served."""

    ready: bool
    reason: str
    replicas: int = Field(description="Attached replicas.")
    startup: dict[str, float] = Field(
        description="Seconds by phase of start-up, of the slowest replica."
    )
    engine: EngineFacts | None = Field(description="null while no replica is attached.")


class ReplicaCost(_Answer):
    """What a request would have cost on one replica."""

    replica: str
    cost_s: float = Field(
        description="What was compared, smallest first: seconds, or the policy's own unit."
    )
    terms: dict[str, float] = Field(
        description="Seconds that add up to the cost; empty for a policy that does not price."
    )
    cached_tokens: int = Field(description="Prompt tokens predicted in its device's cache.")
    host_cached_tokens: int = Field(description="Further ones predicted in its host memory.")


class Outcome(_Answer):
    """What came of a decision."""

    replica: str = Field(description="Who answered: another one if Serve passed the best over.")
    cached_tokens: int = Field(description="Prompt tokens that were in its cache, host included.")
    queue_s: float = Field(description="Seconds that the request waited there.")
    ttft_s: float = Field(description="Seconds from arrival to first token, moves included.")


class Decision(_Answer):
    """Where one attempt of a request was sent, and why."""

    request_id: str
    answer_id: str = Field(description="The answer's `id`, without its `cmpl-` or `chatcmpl-`.")
    router: str
    policy: str
    attempt: int = Field(description="1 for the first; a request that moves is decided again.")
    decided: float = Field(description="Seconds since 1970.")
    prompt_tokens: int
    num_replicas: int = Field(description="Replicas that could take it.")
    ranking: list[ReplicaCost] = Field(description="The best 16, best first.")
    outcome: Outcome | None = Field(
        description="null before the first token and of an attempt that another one followed."
    )


class DecisionList(_Answer):
    """Decisions that the routers remember."""

    object: Literal["list"]
    routers: list[str] = Field(description="Those that answered.")
    silent_routers: int = Field(
        description="At least so many did not: what they decided is missing."
    )
    data: list[Decision] = Field(
        description="Of one request, first to last; without one, the newest first."
    )


# --------------------------------------------------------------------------------------------------
# Building them
# --------------------------------------------------------------------------------------------------


def usage_answer(usage: Usage) -> dict[str, Any]:
    """A `UsageAnswer`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "host_cached_tokens": usage.host_cached_tokens,
        },
    }


def chat_logprobs(scores: list[TokenScores] | None) -> dict[str, Any] | None:
    """A `ChatLogprobs`."""
    if scores is None:
        return None
    content = [
        {**_token_logprob(of_token.token), "top_logprobs": list(map(_token_logprob, of_token.top))}
        for of_token in scores
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(scores: list[TokenScores] | None) -> dict[str, Any] | None:
    """A `CompletionLogprobs`."""
    if scores is None:
        return None
    return {
        "tokens": [_token_name(of_token.token) for of_token in scores],
        "token_logprobs": [of_token.token.logprob for of_token in scores],
        # The token itself is among them, likely or not, as with OpenAI.
        "top_logprobs": [
            None
            if of_token.token.logprob is None
            else {_token_name(token): token.logprob for token in (*of_token.top, of_token.token)}
            for of_token in scores
        ],
        "text_offset": [of_token.text_offset for of_token in scores],
    }


def shifted(scores: list[TokenScores], num_chars: int) -> list[TokenScores]:
    """The scores of an answer that follows so many characters of echoed prompt."""
    if not num_chars:
        return scores
    return [replace(of_token, text_offset=of_token.text_offset + num_chars) for of_token in scores]


def prompt_logprobs(scores: list[TokenScores], num_top: int) -> list[dict[str, Any] | None]:
    """A `PromptLogprobsAnswer` with the `num_top` likeliest ids of each place."""

    def entry(token: ScoredToken, rank: int | None) -> dict[str, Any]:
        return {"logprob": token.logprob, "rank": rank, "decoded_token": token.text}

    return [
        None
        if of_token.token.logprob is None
        else {
            **{
                str(token.token_id): entry(token, rank)
                for rank, token in enumerate(of_token.top[:num_top], 1)
            },
            # Last: among equal ones its rank is the best of them.
            str(of_token.token.token_id): entry(of_token.token, of_token.rank),
        }
        for of_token in scores
    ]


def with_top(scores: list[TokenScores], num_top: int) -> list[TokenScores]:
    """The same with at most so many of the likeliest."""
    return [replace(of_token, top=of_token.top[:num_top]) for of_token in scores]


def _token_logprob(token: ScoredToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}


def _token_name(token: ScoredToken) -> str:
    """The token's text, or its bytes where that would not tell it from others."""
    if token.text.encode() == token.utf8:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.utf8)


def model_card(info: ModelInfo) -> dict[str, Any]:
    """A `ModelCard`."""
    return {
        "id": info.name,
        "object": "model",
        "created": info.created_s,
        "owned_by": "quire",
        "max_model_len": info.max_model_len,
    }


def decisions_answer(request_id: str | None, found: Decisions) -> dict[str, Any]:
    """A `DecisionList`.

    Raises
    ------
    DecisionNotFound
        Nobody who answered remembers the request.
    """
    if request_id is not None and not found.decisions:
        silent = f"; {found.num_silent} more did not answer" if found.num_silent else ""
        raise DecisionNotFound(
            f"request_id: none of the {len(found.routers)} routers remembers {request_id!r}{silent}. "
            "Each remembers its last router.max_explained_decisions decisions.",
            field="request_id",
        )
    return {
        "object": "list",
        "routers": found.routers,
        "silent_routers": found.num_silent,
        "data": found.decisions,
    }


def error_answer(error: QuireError) -> dict[str, Any]:
    """An `ErrorAnswer`."""
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.field,
            "code": error.code,
        }
    }


def error_headers(error: QuireError) -> dict[str, str]:
    """When to try again: whole seconds for everyone, milliseconds for OpenAI's client."""
    if error.retry_after_s is None:
        return {}
    return {
        "retry-after": str(max(1, math.ceil(error.retry_after_s))),
        "retry-after-ms": str(retry_after_ms(error.retry_after_s)),
    }


def json_response(
    content: Any, status_code: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """`content`, encoded by orjson."""
    return Response(
        orjson.dumps(content),
        status_code=status_code,
        headers=headers,
        media_type="application/json",
    )
