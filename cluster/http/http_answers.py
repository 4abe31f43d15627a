"""The JSON answers of the HTTP API: OpenAI's shapes, with some of vLLM's extensions.

The models document the answers (OpenAPI), and tests validate answers with them. At run time functions build the same
shapes as plain dictionaries, because validating our own answers would cost time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from quire.cluster.http.http_tools import ToolCallAnswer, ToolCallDelta
from quire.protos.errors import DecisionNotFound
from quire.router.scored_token import ScoredToken, TokenScores
from quire.router.status_types import AdapterEntry, Decisions, ModelInfo
from quire.router.types import Usage


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_Answer):
    """How the prompt's tokens were computed."""

    cached_tokens: int = Field(
        description="Tokens found in the replica's cache, not computed again."
    )
    host_cached_tokens: int = Field(
        description="Those of `cached_tokens` that were restored from host memory."
    )
    peer_cached_tokens: int = Field(
        description="Those of `host_cached_tokens` that were copied from another node for this request."
    )


class CompletionTokensDetails(_Answer):
    """What the generated tokens are."""

    reasoning_tokens: int = Field(description="Tokens of the reasoning before the answer.")
    accepted_prediction_tokens: int = Field(
        description="Tokens that were drafted by speculative decoding, from `prediction` or another source, and are "
        "part of the answer."
    )
    rejected_prediction_tokens: int = Field(
        description="Drafted tokens that are not part of the answer. They are not counted in `completion_tokens`."
    )


class UsageAnswer(_Answer):
    """Tokens of the whole request, also if it continued on other replicas."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class _Choice(_Answer):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = Field(
        None, description="The stop string or stop token id that ended the answer; null for EOS."
    )
    token_ids: list[int] | None = Field(None, description="With `return_token_ids`.")


class CompletionLogprobs(_Answer):
    """Log-probabilities from the model's own distribution, before sampling parameters are applied."""

    tokens: list[str] = Field(
        description="Texts of the tokens; `bytes:\\\\x..` for incomplete characters."
    )
    token_logprobs: list[float | None] = Field(
        description="null for the first token of an echoed prompt."
    )
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Characters before each token.")


class PromptLogprob(_Answer):
    """Log-probability of one token id at a position of the prompt."""

    logprob: float
    rank: int = Field(description="1 for the most likely id.")
    decoded_token: str


# For each prompt token a map by token id, with the token itself and the most likely ones; null for the first token.
PromptLogprobsAnswer = list[dict[str, PromptLogprob] | None]


class TokenLogprobAnswer(_Answer):
    """One token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprobAnswer):
    """A token of the answer, and the most likely tokens at its position."""

    top_logprobs: list[TokenLogprobAnswer]


class ChatLogprobs(_Answer):
    """Log-probabilities from the model's own distribution, before sampling parameters are applied."""

    content: list[ContentLogprob]
    refusal: None


class CompletionChoice(_Choice):
    """One continuation of a prompt."""

    logprobs: CompletionLogprobs | None

    text: str
    prompt_logprobs: PromptLogprobsAnswer | None = Field(
        None, description="With `prompt_logprobs`."
    )


class AssistantMessage(_Answer):
    """The generated message."""

    role: Literal["assistant"]
    content: str | None = Field(description="null if the request has tools and the answer no text.")
    reasoning_content: str | None = Field(
        None, description="The reasoning before the answer, if there is any."
    )
    tool_calls: list[ToolCallAnswer] | None = Field(None, description="Calls, if there are any.")


class ChatChoice(_Choice):
    """One answer of a chat."""

    logprobs: ChatLogprobs | None

    message: AssistantMessage


class ChatDelta(_Answer):
    """The new part of the message: the role in the first chunk, then reasoning, text and calls."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = Field(None, description="Calls that became complete.")


class ChatChunkChoice(_Choice):
    """One delta of the answer."""

    logprobs: ChatLogprobs | None

    delta: ChatDelta


class _Envelope(_Answer):
    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    system_fingerprint: str = Field(description="Identifies model, revision and dtype.")


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
    parent: str | None = Field(description="Of an adapter: the model that it adapts.")


class ModelList(_Answer):
    """The model of this application, and its adapters."""

    object: Literal["list"]
    data: list[ModelCard]


class ErrorDetail(_Answer):
    """The error; the message names the field, its bound and the value."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(_Answer):
    """Body of every response that is not 2xx, and the last event of a failed stream."""

    error: ErrorDetail


class EngineFacts(_Answer):
    """The engine of one replica; all replicas of an application have the same configuration."""

    model: str
    dtype: str
    device: str
    threads: int = Field(description="Threads of matrix products on the CPU; 0 on a GPU.")
    max_model_len: int = Field(description="Tokens of prompt and output together.")
    kv_cache_tokens: int
    request_tokens: int = Field(
        description="Request length for which `concurrent_requests` is given."
    )
    concurrent_requests: int = Field(
        description="Requests of this length that run at the same time."
    )


class ReadyAnswer(_Answer):
    """Whether a request sent now would be served."""

    ready: bool
    reason: str = Field(default="", description="Only for those who may observe, as all below.")
    replicas: int = Field(default=0, description="Attached replicas.")
    startup: dict[str, float] = Field(
        default={}, description="Seconds of each phase of start-up, for the slowest replica."
    )
    engine: EngineFacts | None = Field(
        default=None, description="null while no replica is attached."
    )


class ReplicaCost(_Answer):
    """Cost of a request on one replica."""

    replica: str
    cost_s: float = Field(
        description="The compared number, smallest is best: seconds, or the policy's own unit."
    )
    terms: dict[str, float] = Field(
        description="Seconds that add up to the cost; empty for policies without a cost model."
    )
    cached_tokens: int = Field(description="Prompt tokens predicted in the replica's device cache.")
    host_cached_tokens: int = Field(description="Further tokens predicted in its host memory.")
    pulled_tokens: int = Field(description="Further tokens that it would copy from another node.")
    pull_from: str = Field(description="The replica that holds these tokens; empty: none does.")


class Outcome(_Answer):
    """Outcome of a routing decision."""

    replica: str = Field(
        description="Replica that answered; not the best one if Serve skipped that."
    )
    cached_tokens: int = Field(
        description="Prompt tokens that were in its cache, host memory included."
    )
    queue_s: float = Field(description="Seconds that the request waited in its queue.")
    ttft_s: float = Field(description="Seconds from arrival to first token, retries included.")


class Decision(_Answer):
    """Routing decision for one attempt of a request."""

    request_id: str
    answer_id: str = Field(description="The answer's `id`, without its `cmpl-` or `chatcmpl-`.")
    router: str
    policy: str
    attempt: int = Field(
        description="1 for the first; each retry on another replica is a new decision."
    )
    decided: float = Field(description="Seconds since 1970.")
    prompt_tokens: int
    left_replica: str = Field(
        description="The replica of the attempt before, which the request left; empty for the first."
    )
    num_replicas: int = Field(description="Replicas among which the policy chose.")
    ranking: list[ReplicaCost] = Field(description="The best 16 replicas, best first.")
    outcome: Outcome | None = Field(
        description="null before the first token, and for an attempt that was retried."
    )


class DecisionList(_Answer):
    """Recent routing decisions of all routers."""

    object: Literal["list"]
    routers: list[str] = Field(description="Routers that answered.")
    silent_routers: int = Field(
        description="At least this many routers did not answer; their decisions are missing."
    )
    data: list[Decision] = Field(
        description="With `request_id` the attempts of this request in order, else the newest decisions first."
    )


# --------------------------------------------------------------------------------------------------
# Building them
# --------------------------------------------------------------------------------------------------


def prompt_tokens_details(usage: Usage) -> dict[str, int]:
    """Build a `PromptTokensDetails`."""
    return {
        "cached_tokens": usage.cached_tokens,
        "host_cached_tokens": usage.host_cached_tokens,
        "peer_cached_tokens": usage.peer_cached_tokens,
    }


def usage_answer(usage: Usage) -> dict[str, Any]:
    """Build a `UsageAnswer`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": prompt_tokens_details(usage),
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def chat_logprobs(scores: list[TokenScores] | None) -> dict[str, Any] | None:
    """Build a `ChatLogprobs`."""
    if scores is None:
        return None
    content = [
        {**_token_logprob(of_token.token), "top_logprobs": list(map(_token_logprob, of_token.top))}
        for of_token in scores
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(scores: list[TokenScores] | None) -> dict[str, Any] | None:
    """Build a `CompletionLogprobs`."""
    if scores is None:
        return None
    return {
        "tokens": [_token_name(of_token.token) for of_token in scores],
        "token_logprobs": [of_token.token.logprob for of_token in scores],
        # As with OpenAI, the token itself is always included.
        "top_logprobs": [
            None
            if of_token.token.logprob is None
            else {_token_name(token): token.logprob for token in (*of_token.top, of_token.token)}
            for of_token in scores
        ],
        "text_offset": [of_token.text_offset for of_token in scores],
    }


def shifted(scores: list[TokenScores], num_chars: int) -> list[TokenScores]:
    """Add the length of the echoed prompt, in characters, to the scores' text offsets."""
    if not num_chars:
        return scores
    return [replace(of_token, text_offset=of_token.text_offset + num_chars) for of_token in scores]


def prompt_logprobs(scores: list[TokenScores], num_top: int) -> list[dict[str, Any] | None]:
    """Build a `PromptLogprobsAnswer` with the `num_top` most likely ids at each position."""

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
            # The token itself comes last, to replace its entry from `top`: its own rank is right among equal values.
            str(of_token.token.token_id): entry(of_token.token, of_token.rank),
        }
        for of_token in scores
    ]


def with_top(scores: list[TokenScores], num_top: int) -> list[TokenScores]:
    """Keep at most `num_top` of the most likely tokens in each score."""
    return [replace(of_token, top=of_token.top[:num_top]) for of_token in scores]


def _token_logprob(token: ScoredToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}


def _token_name(token: ScoredToken) -> str:
    """The token's text, or its bytes if the text is ambiguous because of incomplete characters."""
    if token.text.encode() == token.utf8:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.utf8)


def model_card(info: ModelInfo) -> dict[str, Any]:
    """Build a `ModelCard`."""
    return {
        "id": info.name,
        "object": "model",
        "created": info.created_s,
        "owned_by": "quire",
        "max_model_len": info.max_model_len,
        "parent": None,
    }


def adapter_card(entry: AdapterEntry, info: ModelInfo) -> dict[str, Any]:
    """Build the `ModelCard` of an adapter."""
    own = {"id": entry.ref.name, "created": entry.created_s, "parent": info.name}
    return {**model_card(info), **own}


def decisions_answer(request_id: str | None, found: Decisions) -> dict[str, Any]:
    """Build a `DecisionList`.

    Raises
    ------
    DecisionNotFound
        No router that answered has a decision for the request.
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


def json_response(
    content: Any, status_code: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Make a response with `content` encoded by orjson."""
    return Response(
        orjson.dumps(content),
        status_code=status_code,
        headers=headers,
        media_type="application/json",
    )
