"""The items of a request's `input`, as the messages of a chat.

```
instructions, system and developer messages   ─▶  {role: system}      those at the beginning become one message
message of the user                           ─▶  {role: user}
reasoning, message, function_call, ...        ─▶  {role: assistant, reasoning_content, content, tool_calls}
function_call_output                          ─▶  {role: tool, tool_call_id}
```

The items of one assistant's turn become one message, because chat templates write them as one turn.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, WithJsonSchema

from quire.cluster.api_common.front_end import ROLES
from quire.cluster.http.http_schema import Strict
from quire.cluster.http.responses_api.response_tools import (
    PARSED_AT_ONCE,
    model_name,
    parsed,
)
from quire.protos.errors import InvalidRequest, UnsupportedField, described
from quire.protos.field_checks import at_most
from quire.router.refused_fields import CONTENT_TYPES
from quire.router.request.params import DEFAULT_LIMITS

# Between texts that become one message.
_PARAGRAPH = "\n\n"


class InputText(Strict):
    """A text of a message, or of a function's output."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, description="Accepted and ignored.")
    logprobs: list[Any] | None = Field(None, description="Accepted and ignored.")
    prompt_cache_breakpoint: dict[str, Any] | None = Field(
        None, description="Accepted and ignored."
    )


Texts = Annotated[list[InputText], Field(fail_fast=True)]
# A text, or parts; `_in_parts` makes parts of it before it is parsed.
Content = Annotated[
    Texts,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"$ref": "#/components/schemas/InputText"}},
            ]
        }
    ),
]


class InputItem(Strict):
    """The fields that every item has, accepted and ignored."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(InputItem):
    """A message; an item without a `type` is one."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None


class DirectCaller(Strict):
    """The model has called the function itself."""

    type: Literal["direct"]


class InputCall(InputItem):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    namespace: str | None = None
    arguments: str
    caller: DirectCaller | None = None


class InputCallOutput(InputItem):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: Content
    name: str | None = None
    namespace: str | None = None
    caller: DirectCaller | None = None


class ReasoningText(Strict):
    """A text of the reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningTexts = Annotated[list[ReasoningText], Field(fail_fast=True)]


class InputReasoning(InputItem):
    """The reasoning of an earlier answer: its `content`, or its `summary` where there is no content."""

    type: Literal["reasoning"]
    summary: ReasoningTexts | None = None
    content: ReasoningTexts | None = None
    encrypted_content: str | None = Field(
        None, description="Accepted and ignored: it comes from another server."
    )


ITEMS: dict[str, type[InputItem]] = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
    "reasoning": InputReasoning,
}


async def to_messages(
    given: str | list[dict[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """Make the messages of a chat from `input` and `instructions`; other tasks run meanwhile.

    Raises
    ------
    UnsupportedField
        An item or a part of its content is not served.
    InvalidRequest
        A field is missing or has the wrong type, or there are too many items or parts.
    """
    conversation = _Conversation()
    if instructions is not None:
        conversation.message("system", instructions)
    if isinstance(given, str):
        conversation.message("user", given)
        return conversation.messages()
    at_most("input", len(given), DEFAULT_LIMITS.max_messages, "items")
    num_parts = 0
    for i, raw in enumerate(given):
        for name in ("content", "output", "summary"):
            if isinstance(parts := raw.get(name), list):
                num_parts += len(parts)
        at_most("input", num_parts, DEFAULT_LIMITS.max_message_parts, "parts in all")
        _add(conversation, raw, f"input[{i}]")
        if i % PARSED_AT_ONCE == PARSED_AT_ONCE - 1:
            await asyncio.sleep(0)
    return conversation.messages()


def _add(conversation: _Conversation, raw: dict[str, Any], where: str) -> None:
    """Add one item to the conversation."""
    match _parse(raw, where):
        case InputMessage(role=role, content=content):
            conversation.message(ROLES[role], _joined(content))
        case InputReasoning(content=content, summary=summary):
            conversation.reasoning(_PARAGRAPH.join(part.text for part in content or summary or ()))
        case InputCall() as call:
            _check_arguments(call.arguments, f"{where}.arguments")
            conversation.call(call.call_id, model_name(call.namespace, call.name), call.arguments)
        case InputCallOutput(call_id=call_id, output=output):
            if call_id not in conversation.call_ids:
                raise InvalidRequest(
                    f"{where}.call_id must be the call_id of an earlier function_call, got {described(call_id)}",
                    field=f"{where}.call_id",
                )
            conversation.output(call_id, _joined(output))


def _check_arguments(text: str, field: str) -> None:
    """Refuse arguments that the router would refuse, but by the client's name of the field."""
    try:
        is_object = not text or isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        is_object = False
    if not is_object:
        raise InvalidRequest(
            f"{field} must be the JSON text of an object, got {described(text)}", field=field
        )


def _parse(raw: dict[str, Any], where: str) -> InputItem:
    kind = raw.get("type")
    if kind is None:
        # As OpenAI does: an item with an id alone is a reference.
        kind = "message" if "role" in raw or "content" in raw else "item_reference"
    model = ITEMS.get(kind) if isinstance(kind, str) else None
    if model is None:
        sentence = "no items are stored" if kind == "item_reference" else "this item is not served"
        raise UnsupportedField(
            f"{sentence}: {where}.type must be one of {', '.join(ITEMS)}, got {described(kind)}",
            field=f"{where}.type",
        )
    return parsed(model, _in_parts(raw, where), where)


def _in_parts(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the item with its text as a list of one part; check the types of other parts."""
    for name in ("content", "output"):
        content = raw.get(name)
        if isinstance(content, str):
            return {**raw, name: [{"type": "input_text", "text": content}]}
        if isinstance(content, list):
            for i, part in enumerate(content):
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind in CONTENT_TYPES:
                    field = f"{where}.{name}[{i}].type"
                    raise UnsupportedField(
                        f"{CONTENT_TYPES[kind]}: {field} must be input_text or output_text, got {kind!r}",
                        field=field,
                    )
    return raw


def _joined(parts: list[InputText]) -> str:
    """The text of some parts; line breaks between them, as the chat endpoint has for templates without parts."""
    return "\n".join(part.text for part in parts)


class _Conversation:
    """The messages so far, in the form of OpenAI's chat completions.

    Attributes
    ----------
    call_ids
        Ids of all calls so far.
    """

    def __init__(self) -> None:
        self.call_ids: set[str] = set()
        # Some templates take a system message only at the beginning, and only one.
        self._system: list[str] = []
        self._turns: list[dict[str, Any]] = []

    def messages(self) -> list[dict[str, Any]]:
        """All messages."""
        if not self._system:
            return self._turns
        return [{"role": "system", "content": _PARAGRAPH.join(self._system)}, *self._turns]

    def message(self, role: str, text: str) -> None:
        """Add a message."""
        if role == "assistant":
            self._assistant({"content", "tool_calls"})["content"] = text
        elif role == "system" and not self._turns:
            self._system.append(text)
        else:
            self._turns.append({"role": role, "content": text})

    def reasoning(self, text: str) -> None:
        """Add reasoning, with which an assistant's turn begins."""
        if text:
            turn = self._assistant({"reasoning_content", "content", "tool_calls"})
            turn["reasoning_content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call; `name` is the model's name of the function."""
        self.call_ids.add(call_id)
        function = {"name": name, "arguments": arguments}
        calls = self._assistant(set()).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def output(self, call_id: str, text: str) -> None:
        """Add what a function returned."""
        self._turns.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _assistant(self, without: set[str]) -> dict[str, Any]:
        """Return the assistant's open turn, or begin one if there is none without these fields."""
        last = self._turns[-1] if self._turns else None
        if last is not None and last["role"] == "assistant" and not without & last.keys():
            return last
        self._turns.append({"role": "assistant"})
        return self._turns[-1]
