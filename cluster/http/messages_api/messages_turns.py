"""Converts Anthropic's turns to chat messages in OpenAI's form, as the router takes them.

```
user       text, tool_result, text      ─▶  user, tool, user
assistant  thinking, text, tool_use     ─▶  assistant with reasoning_content, content and tool_calls
```
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from pydantic import BaseModel

from quire.cluster.http.http_body import MAX_ENTRIES
from quire.cluster.http.messages_api.messages_schema import (
    CountTokensBody,
    MessageTurn,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    parse_part,
)
from quire.protos.errors import InvalidRequest, UnsupportedField, described
from quire.protos.field_checks import at_most
from quire.router.refused_fields import CONTENT_TYPES

# Claude Code begins its system prompt with a block of this name. Its text differs in every request, so the prompt of no
# request would begin as another's, and no request would find its prefix in a cache.
CHANGING_BLOCK = "x-anthropic-billing-header"
ERROR_PREFIX = "Error: "  # before the text of a tool's result with `is_error`

_TEXT: Mapping[str, type[BaseModel]] = {"text": TextBlock}
_BLOCKS: Mapping[str, Mapping[str, type[BaseModel]]] = {
    "user": {**_TEXT, "tool_result": ToolResultBlock},
    "assistant": {
        **_TEXT,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
    },
    "system": _TEXT,
}


def chat_messages(system: Any, turns: Any) -> list[dict[str, Any]]:
    """Convert a system prompt and turns.

    Raises
    ------
    InvalidRequest, UnsupportedField
        A turn or a block is not valid or not served.
    """
    if not isinstance(turns, list) or not turns:
        raise InvalidRequest(
            f"messages must be a list of at least 1 message, got {described(turns)}",
            field="messages",
        )
    at_most("messages", num_blocks(turns), MAX_ENTRIES, "blocks in all")
    messages = []
    if (text := _system_content(system)) is not None:
        messages.append({"role": "system", "content": text})
    for i, turn in enumerate(turns):
        messages += _of_turn(
            parse_part(MessageTurn, turn, f"messages[{i}]"), f"messages[{i}].content"
        )
    return messages


def num_blocks(turns: Any) -> int:
    """Count the blocks of turns, which need not be checked yet."""
    return sum(
        len(turn["content"])
        for turn in (turns if isinstance(turns, list) else ())
        if isinstance(turn, dict) and isinstance(turn.get("content"), list)
    )


def has_cache_control(body: CountTokensBody) -> bool:
    """Whether the request, a tool, or a block of a turn or of the system prompt has `cache_control`."""
    turns = body.messages if isinstance(body.messages, list) else ()
    contents = (turn.get("content") for turn in turns if isinstance(turn, dict))
    lists = (part for part in (body.system, body.tools, *contents) if isinstance(part, list))
    return body.cache_control is not None or any(
        isinstance(block, dict) and block.get("cache_control") is not None
        for block in itertools.chain.from_iterable(lists)
    )


def continues_last_turn(messages: list[dict[str, Any]]) -> bool:
    """Whether the answer continues the last turn, which is the assistant's.

    Raises
    ------
    InvalidRequest
        The last turn has calls, to which there are no results.
    """
    if messages[-1]["role"] != "assistant":
        return False
    if "tool_calls" in messages[-1]:
        raise InvalidRequest(
            "the last turn has tool_use blocks: messages must end with a turn of the user that has a tool_result for "
            "each",
            field="messages",
        )
    return True


def _system_content(system: Any) -> str | list[dict[str, str]] | None:
    """Return the system prompt as a message's content, without the block that always changes; None if it is empty."""
    if system is None or isinstance(system, str):
        return system or None
    texts = [block.text for block in _texts(system, "system")]
    return _content([text for text in texts if not text.startswith(CHANGING_BLOCK)]) or None


def _of_turn(turn: MessageTurn, where: str) -> Iterator[dict[str, Any]]:
    """Convert one turn; a turn of the user gives a message for each result and each run of texts."""
    role, content = turn.role, turn.content
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks = _blocks(content, _BLOCKS[role], where)
    if role == "assistant":
        yield _of_assistant(blocks)
        return
    texts: list[str] = []
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
            continue
        assert isinstance(block, ToolResultBlock)
        if texts:
            yield {"role": role, "content": _content(texts)}
            texts = []
        result = _result_text(block, f"{where}[{i}].content")
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
    if texts or not blocks:
        yield {"role": role, "content": _content(texts)}


def _of_assistant(blocks: list[BaseModel]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls := [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]:
        message["tool_calls"] = calls
    return message


def _call(block: ToolUseBlock) -> dict[str, Any]:
    try:
        arguments = orjson.dumps(block.input).decode()
    except orjson.JSONEncodeError as error:
        # The input is nested too deeply.
        raise InvalidRequest(
            f"messages: the input of {block.id!r}: {error}", field="messages"
        ) from None
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }


def _result_text(block: ToolResultBlock, where: str) -> str:
    text = block.content
    if text is None:
        text = ""
    elif not isinstance(text, str):
        text = "\n".join(part.text for part in _texts(text, where))
    return ERROR_PREFIX + text if block.is_error else text


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    """Return texts as the content of a message: several are parts, which the chat template joins."""
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _texts(blocks: Any, where: str) -> list[TextBlock]:
    return [block for block in _blocks(blocks, _TEXT, where) if isinstance(block, TextBlock)]


def _blocks(blocks: Any, served: Mapping[str, type[BaseModel]], where: str) -> list[BaseModel]:
    """Parse blocks of the `served` types."""
    if not isinstance(blocks, list):
        raise InvalidRequest(
            f"{where} must be a string or a list of blocks, got {described(blocks)}", field=where
        )
    at_most(where, len(blocks), MAX_ENTRIES, "blocks")
    parsed = []
    for i, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        model = served.get(kind) if isinstance(kind, str) else None
        if model is None:
            raise _wrong_type(block, kind, list(served), f"{where}[{i}]")
        parsed.append(parse_part(model, block, f"{where}[{i}]"))
    return parsed


def _wrong_type(block: Any, kind: Any, served: list[str], where: str) -> InvalidRequest:
    if not isinstance(kind, str):
        return InvalidRequest(
            f"{where} must be an object with a string `type`, got {described(block)}", field=where
        )
    known = " or ".join(map(json.dumps, served))
    message = f"{where}.type must be {known}, got {described(kind)}"
    if kind in CONTENT_TYPES and kind not in ("tool_use", "tool_result"):
        return UnsupportedField(f"{CONTENT_TYPES[kind]}: {message}", field=f"{where}.type")
    return UnsupportedField(message, field=f"{where}.type")
