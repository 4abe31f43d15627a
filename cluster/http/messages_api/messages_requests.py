"""Makes the router's request from the body of a request to the Messages API."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from quire.cluster.api_common import structured_output
from quire.cluster.http.messages_api.messages_schema import (
    CountTokensBody,
    MessagesBody,
    ThinkingOption,
    ToolChoiceOption,
    parse_tools,
)
from quire.cluster.http.messages_api.messages_turns import (
    chat_messages,
    continues_last_turn,
    has_cache_control,
    num_blocks,
)
from quire.protos.errors import InvalidRequest
from quire.protos.sampling_params import Grammar
from quire.router.request.params import DEFAULT_LIMITS
from quire.router.tool_types import Tool, ToolChoice
from quire.router.types import GenerationRequest

# `thinking.budget_tokens` below these numbers mean these efforts; from the last number on it is high.
EFFORT_BY_BUDGET = ((8192, "low"), (16384, "medium"))
# More blocks are converted in a thread: each takes 2 to 10 us.
_MANY_BLOCKS = 512


async def counted_request(body: CountTokensBody, request_id: str) -> GenerationRequest:
    """Make the request whose prompt is counted."""
    return GenerationRequest(request_id=request_id, **await _prompt(body))


async def generation_request(body: MessagesBody, request_id: str) -> GenerationRequest:
    """Make the request that is generated."""
    user_id = body.metadata.user_id if body.metadata is not None else None
    return GenerationRequest(
        request_id=request_id,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=tuple(body.stop_sequences or ()),
        session=_session(user_id or ""),
        retain=has_cache_control(body),
        **await _prompt(body),
    )


def router_names(body: CountTokensBody) -> dict[str, str]:
    """Map from the router's names of fields to those of the body, where they differ."""
    names = {
        "grammar": "output_config.format",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "prompt": "messages",
        "reasoning_effort": "thinking",
        "session": "metadata.user_id",
        "stop": "stop_sequences",
    }
    for i in range(len(getattr(body, "stop_sequences", None) or ())):
        names[f"stop[{i}]"] = f"stop_sequences[{i}]"
    for i in range(len(body.tools or ())):
        for part in ("", ".type"):
            names[f"tools[{i}].parameters{part}"] = f"tools[{i}].input_schema{part}"
    return names


async def _prompt(body: CountTokensBody) -> dict[str, Any]:
    """The fields of the request that decide its prompt; they are those that both endpoints have."""
    num_parts = num_blocks(body.messages) + (
        len(body.system) if isinstance(body.system, list) else 0
    )
    if num_parts > _MANY_BLOCKS:
        messages = await asyncio.to_thread(chat_messages, body.system, body.messages)
    else:
        messages = chat_messages(body.system, body.messages)
    continues = continues_last_turn(messages)
    return {
        "model": body.model,
        "messages": tuple(messages),
        "continue_final_message": continues,
        "tools": tuple(
            Tool(tool.name, tool.description, tool.input_schema, strict=bool(tool.strict))
            for tool in parse_tools(body.tools)
        ),
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": not (
            body.tool_choice and body.tool_choice.disable_parallel_tool_use
        ),
        "reasoning_effort": _reasoning_effort(body),
        "grammar": _grammar(body),
        "fit_to_model": True,
    }


def _tool_choice(option: ToolChoiceOption | None) -> ToolChoice | None:
    if option is None:
        return None
    if (option.name is not None) != (option.type == "tool"):
        raise InvalidRequest(
            f'tool_choice.name must be given with type "tool" and with no other, got type "{option.type}" '
            f"{'with' if option.name is not None else 'without'} a name",
            field="tool_choice.name",
        )
    match option.type:
        case "any":
            return ToolChoice("required")
        case "tool":
            assert option.name is not None
            return ToolChoice("required", (option.name,))
        case mode:
            return ToolChoice(mode)


def _reasoning_effort(body: CountTokensBody) -> str | None:
    """Return the effort in OpenAI's levels; None: the chat template's default."""
    thinking = body.thinking
    if thinking is not None and thinking.type == "disabled":
        return "none"
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is not None:
        return "xhigh" if effort == "max" else effort
    return None if thinking is None else _effort_of_budget(thinking)


def _effort_of_budget(thinking: ThinkingOption) -> str | None:
    if thinking.budget_tokens is None:
        return None
    for bound, effort in EFFORT_BY_BUDGET:
        if thinking.budget_tokens < bound:
            return effort
    return "high"


def _grammar(body: CountTokensBody) -> Grammar | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    schema = body.output_config.format.json_schema
    return structured_output.json_schema(schema, "output_config.format.schema")


def _session(user_id: str) -> str:
    """Return the name of the session, short enough for the router. Claude Code puts the id of its session there."""
    if len(user_id.encode()) <= DEFAULT_LIMITS.max_label_bytes:
        return user_id
    return hashlib.blake2b(user_id.encode(), digest_size=16).hexdigest()
