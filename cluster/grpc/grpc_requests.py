"""Converts gRPC request messages to the router's requests."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from quire.cluster.api_common import structured_output
from quire.cluster.api_common.front_end import (
    is_label,
    request_label,
    served_role,
    with_headers,
)
from quire.cluster.grpc.grpc_tools import tool_fields, turn_calls
from quire.protos import control_pb2 as control
from quire.protos import generation_pb2 as generation
from quire.protos.errors import InvalidRequest
from quire.protos.field_checks import at_most
from quire.protos.sampling_params import MAX_ALLOWED_TOKEN_IDS, Grammar
from quire.router.request.params import DEFAULT_LIMITS
from quire.router.scoring.embedder import MAX_INPUTS
from quire.router.text.template_kwargs import parse_template_kwargs
from quire.router.types import GenerationRequest

# The router's names of the inputs of `Embed`, and those of this API.
INPUT_NAMES = {"prompt": "inputs", "prompt[]": "inputs[]", "prompt[][]": "inputs[].token_ids[]"}
MIN_PERIOD_MS, DEFAULT_PERIOD_MS, MAX_PERIOD_MS = 100, 1000, 60_000


class Context(Protocol):
    """The part of Serve's `RayServegRPCContext` that is used here, so that this module does not import Ray."""

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None: ...

    def invocation_metadata(self) -> Any: ...

    def peer(self) -> str: ...


def generation_request(request: generation.GenerateRequest, context: Context) -> GenerationRequest:
    """Make the router's request. The router checks all other bounds.

    Raises
    ------
    InvalidRequest
        The input is missing, a request id is not printable, a role is unknown, or a list is too long.
    """
    options = request.sampling
    given = {field.name: value for field, value in options.ListFields()}
    for name in ("allowed_token_ids", "bad_words"):
        given[name] = _bounded(name, getattr(options, name))
    given["logit_bias"] = tuple(sorted(options.logit_bias.items()))
    asked = GenerationRequest(
        request_id=_request_id(request, context),
        model=request.model or None,
        **_input(request),
        **given,
        n=request.n if request.HasField("n") else 1,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        grammar=_grammar(request),
        stop=_bounded("stop", request.stop),
        stop_token_ids=_bounded("stop_token_ids", request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=(
            request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        ),
        add_special_tokens=(
            request.add_special_tokens if request.HasField("add_special_tokens") else None
        ),
        tenant=request.cache_salt,
        session=request.session,
        priority=request.priority,
        prediction=request.prediction,
    )
    return with_headers(asked, dict(context.invocation_metadata()))[0]


def _bounded(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Convert a repeated field to a tuple. Check its length first, because each value becomes a Python object.

    The router has smaller bounds for most fields and checks them later.
    """
    at_most(name, len(values), MAX_ALLOWED_TOKEN_IDS, "values")
    return tuple(values)


def period_s(request: control.WatchCacheRequest | control.WatchRouterRequest) -> float:
    period_ms = request.period_ms if request.HasField("period_ms") else DEFAULT_PERIOD_MS
    if not MIN_PERIOD_MS <= period_ms <= MAX_PERIOD_MS:
        raise InvalidRequest(
            f"period_ms must be in [{MIN_PERIOD_MS}, {MAX_PERIOD_MS}], got {period_ms}",
            field="period_ms",
        )
    return period_ms / 1000


def _input(request: generation.GenerateRequest) -> dict[str, Any]:
    kind = request.WhichOneof("input")
    if kind == "prompt":
        return {"prompt": request.prompt}
    if kind == "token_ids":
        ids = request.token_ids.ids
        at_most("token_ids", len(ids), DEFAULT_LIMITS.max_prompt_ids, "token ids")
        return {"prompt": tuple(ids)}
    if kind == "messages":
        return _chat(request.messages)
    raise InvalidRequest("input is required: one of prompt, token_ids and messages", field="input")


def _chat(chat: generation.ChatMessages) -> dict[str, Any]:
    """The messages, the tools and the options of the chat template."""
    at_most("messages", len(chat.messages), DEFAULT_LIMITS.max_messages, "messages")
    options: dict[str, Any] = {
        "messages": tuple(map(_turn, range(1 << 31), chat.messages)),
        "continue_final_message": chat.continue_final_message,
        **tool_fields(chat),
    }
    if chat.HasField("add_generation_prompt"):
        options["add_generation_prompt"] = chat.add_generation_prompt
    if chat.chat_template_kwargs:
        options["chat_template_kwargs"] = parse_template_kwargs(chat.chat_template_kwargs)
    return options


def _grammar(request: generation.GenerateRequest) -> Grammar | None:
    if not request.HasField("structured_output"):
        return None
    asked = request.structured_output
    kind = asked.WhichOneof("kind")
    field = f"structured_output.{kind}"
    if kind == "json_schema":
        return structured_output.json_schema(asked.json_schema, field)
    if kind == "json_object" and asked.json_object:
        return structured_output.json_object(field)
    if kind == "choice":
        return structured_output.choice(list(asked.choice.texts), field)
    if kind == "regex":
        return Grammar("regex", asked.regex, field)
    if kind == "grammar":
        return Grammar("lark", asked.grammar, field)
    raise InvalidRequest(
        "structured_output must have one of json_schema, json_object, regex, choice and grammar, got none",
        field="structured_output",
    )


def _turn(i: int, message: generation.ChatMessage) -> dict[str, Any]:
    role = served_role(message.role, f"messages[{i}].role")
    turn: dict[str, Any] = {"role": role, "content": message.content}
    if message.name:
        turn["name"] = message.name
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = turn_calls(message)
    return turn


def tokenize_request(request: generation.TokenizeRequest, context: Context) -> GenerationRequest:
    """Make the router's request for the tokens of an input.

    Raises
    ------
    InvalidRequest
        The input is missing, or the router cannot read it.
    """
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input is required: one of prompt and messages", field="input")
    given = {"prompt": request.prompt} if kind == "prompt" else _chat(request.messages)
    return GenerationRequest(
        request_id=_metadata_id(context),
        model=request.model or None,
        add_special_tokens=(
            request.add_special_tokens if request.HasField("add_special_tokens") else None
        ),
        **given,
    )


def embed_request(request: generation.EmbedRequest, context: Context) -> GenerationRequest:
    """Make the router's request for the embeddings of inputs.

    Raises
    ------
    InvalidRequest
        There is no input, an input is empty, or there are too many inputs or ids.
    """
    inputs = request.inputs
    if not inputs:
        raise InvalidRequest("inputs must have at least 1 input, got 0", field="inputs")
    at_most("inputs", len(inputs), MAX_INPUTS, "inputs")
    num_ids = sum(len(item.token_ids.ids) for item in inputs)
    at_most("inputs", num_ids, DEFAULT_LIMITS.max_prompt_ids, "token ids in all")
    asked = GenerationRequest(
        request_id=_request_id(request, context),
        model=request.model or None,
        prompts=tuple(map(_embed_input, range(1 << 31), inputs)),
        add_special_tokens=(
            request.add_special_tokens if request.HasField("add_special_tokens") else None
        ),
        max_tokens=1,
        tenant=request.cache_salt,
        session=request.session,
        priority=request.priority,
    )
    return with_headers(asked, dict(context.invocation_metadata()))[0]


def _embed_input(i: int, item: generation.EmbedInput) -> str | tuple[int, ...]:
    given = item.text if item.WhichOneof("input") == "text" else tuple(item.token_ids.ids)
    if not given:
        raise InvalidRequest(
            f"inputs[{i}] must have a text of at least 1 character, or at least 1 token id, got none",
            field=f"inputs[{i}]",
        )
    return given


def _request_id(
    request: generation.GenerateRequest | generation.EmbedRequest, context: Context
) -> str:
    if request.request_id:
        return request_label(request.request_id, "request_id")
    return _metadata_id(context)


def _metadata_id(context: Context) -> str:
    for key, value in context.invocation_metadata():
        # An id that cannot be logged is replaced, as the HTTP front end does.
        if key == "x-request-id" and is_label(value):
            return value
    return uuid.uuid4().hex
