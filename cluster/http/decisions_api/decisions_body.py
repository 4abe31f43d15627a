"""Request body of POST /v1/decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from quire.cluster.http.decisions_api.decision_questions import (
    QUESTIONS,
    AnyQuestion,
    ChoiceOption,
    JsonPart,
    QuestionText,
    ScoreLevel,
    json_text,
    parse_question,
    router_question,
)
from quire.cluster.http.http_schema import RoutedBody, Strict
from quire.cluster.http.responses_api.input_items import (
    InputCall,
    InputCallOutput,
    InputMessage,
    InputText,
    to_messages,
)
from quire.cluster.http.responses_api.response_tools import Objects
from quire.protos.errors import InvalidRequest
from quire.protos.field_checks import at_most
from quire.router.question_types import Question
from quire.router.refused_fields import Refused
from quire.router.request.params import DEFAULT_LIMITS
from quire.router.scoring.question_prompts import MAX_QUESTIONS, MAX_REPLIES_IN_ALL
from quire.router.types import GenerationRequest

_REFERENCE = "#/components/schemas/"
# Questions to read before other tasks of the event loop may run: 255 choices each take 1 ms.
_READ_AT_ONCE = 4


def _any_of(*models: type[Strict]) -> list[dict[str, Any]]:
    return [{"$ref": _REFERENCE + model.__name__} for model in models]


_ITEMS = (InputMessage, InputCall, InputCallOutput)
_INPUT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": _any_of(*_ITEMS)}, "minItems": 1},
    ]
}
_QUESTIONS_SCHEMA: dict[str, Any] = {
    "items": {"anyOf": _any_of(*QUESTIONS.values())},
    "minItems": 1,
    "maxItems": MAX_QUESTIONS,
}
# What the schema of a request refers to, besides the types of its fields.
REFERENCES: tuple[type[Strict], ...] = (
    *_ITEMS,
    InputText,
    *QUESTIONS.values(),
    ChoiceOption,
    ScoreLevel,
    QuestionText,
    JsonPart,
)


class DecisionsRequest(RoutedBody):
    """Body of POST /v1/decisions."""

    path: ClassVar[str] = "/v1/decisions"
    refused: ClassVar[Mapping[str, Refused]] = {
        "stream": Refused("decisions are not streamed", (False,)),
        "temperature": Refused("the probabilities are those of the model", (1,)),
        "tools": Refused("decisions call no tools", ([],)),
    }

    input: str | Objects = Field(
        description="What the questions are about: a text, or the items of a conversation, oldest first. Parts of type "
        "`input_json` are read as text.",
        json_schema_extra=_INPUT_SCHEMA,
    )
    questions: Objects = Field(
        description=f"1 to {MAX_QUESTIONS} questions, with at most {MAX_REPLIES_IN_ALL} allowed answers in all. The "
        "answers have their order.",
        json_schema_extra=_QUESTIONS_SCHEMA,
    )

    def router_names(self) -> dict[str, str]:
        """Map from the router's names of fields to those of this body, where they differ."""
        return {
            "deadline_s": "timeout",
            "messages": "input",
            "prompt": "input",
            "session": "prompt_cache_key",
            "tenant": "cache_salt",
        }

    async def to_request(self, request_id: str) -> GenerationRequest:
        """Make the router's request, without the questions.

        Raises
        ------
        InvalidRequest, UnsupportedField
            A value is not valid or not served; `parse_body` has checked the types.
        """
        given = self.input if isinstance(self.input, str) else _with_texts(self.input)
        return GenerationRequest(
            request_id=request_id,
            model=self.model,
            messages=tuple(await to_messages(given, None)),
            # The replies are answers without reasoning.
            reasoning_effort="none",
            fit_to_model=True,
            tenant=self.cache_salt or "",
            session=self.prompt_cache_key or "",
            priority=self.priority or 0,
            deadline_s=self.timeout,
        )

    async def parsed_questions(self) -> tuple[list[AnyQuestion], list[Question]]:
        """Parse the questions; other tasks run meanwhile.

        Raises
        ------
        InvalidRequest, UnsupportedField
            A question is not valid; the error has its path in the body.
        """
        if not self.questions:
            raise InvalidRequest(
                "questions must have at least 1 question, got 0", field="questions"
            )
        at_most("questions", len(self.questions), MAX_QUESTIONS, "questions")
        own: list[AnyQuestion] = []
        asked: list[Question] = []
        for i, raw in enumerate(self.questions):
            own.append(parse_question(raw, f"questions[{i}]"))
            asked.append(router_question(own[-1], f"questions[{i}]"))
            if i % _READ_AT_ONCE == _READ_AT_ONCE - 1:
                await asyncio.sleep(0)
        return own, asked


def _with_texts(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items with the JSON of parts and the refusals of an assistant as texts."""
    at_most("input", len(items), DEFAULT_LIMITS.max_messages, "items")
    num_parts, read = 0, []
    for i, item in enumerate(items):
        content = item.get("content")
        if isinstance(content, list):
            num_parts += len(content)
            at_most("input", num_parts, DEFAULT_LIMITS.max_message_parts, "parts in all")
            parts = [_with_text(part, f"input[{i}].content[{j}]") for j, part in enumerate(content)]
            item = {**item, "content": parts}
        read.append(item)
    return read


def _with_text(part: Any, where: str) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_json":
        return {"type": "input_text", "text": json_text(part, where)}
    if kind == "refusal" and part.keys() == {"type", "refusal"}:
        return {"type": "output_text", "text": part["refusal"]}
    return part
