"""The questions of a decision: how the model reads each kind, and its answer from the scores of the replies.

| kind | replies of the model | answer |
|---|---|---|
| predicate | yes, no | the probability of yes |
| choice | the values of the choices | the most likely choice, and the probability of each |
| score | the labels of the levels | the mean of the levels' numbers, 0 for the first, and the probability of each |

The probabilities of a question are the softmax of its replies' scores (`router/scoring/question_prompts.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, WithJsonSchema

from quire.cluster.http.http_schema import Strict
from quire.cluster.http.responses_api.response_tools import Objects, parsed
from quire.protos.errors import InvalidRequest, UnsupportedField, described
from quire.protos.field_checks import at_most, invalid
from quire.router.question_types import Question
from quire.router.refused_fields import CONTENT_TYPES
from quire.router.request.params import DEFAULT_LIMITS
from quire.router.scoring.question_prompts import MAX_REPLIES

MAX_JSON_BYTES = 256 * 1024  # OpenAI's bound
_REFERENCE = "#/components/schemas/"
_YES, _NO = "yes", "no"

# Unions are checked here, because pydantic reports one error for each of their members.
# A text, or parts; `_instructions` checks it.
Instructions = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "anyOf": [
                            {"$ref": f"{_REFERENCE}QuestionText"},
                            {"$ref": f"{_REFERENCE}JsonPart"},
                        ]
                    },
                },
            ]
        }
    ),
]


class QuestionText(Strict):
    """A text of a question's instructions."""

    type: Literal["input_text"]
    text: str


class JsonPart(Strict):
    """JSON that the model reads as text, at most 256 KiB."""

    type: Literal["input_json"]
    data: dict[str, Any] | Objects


class PredicateQuestion(Strict):
    """Is a statement about the input true?"""

    type: Literal["predicate"]
    instructions: Instructions
    name: str | None = None


class ChoiceOption(Strict):
    """A choice."""

    # `parse_question` checks it.
    value: Annotated[Any, WithJsonSchema({"type": ["string", "boolean"]})]
    description: str | None = None


class ChoiceQuestion(Strict):
    """Which of some choices fits the input?"""

    type: Literal["choice"]
    instructions: Instructions
    choices: Annotated[list[ChoiceOption], Field(fail_fast=True, min_length=2)] = Field(
        description="2 to 255 choices; each value once. A text and a boolean with the same letters differ."
    )
    name: str | None = None


class ScoreLevel(Strict):
    """A level."""

    label: str
    description: str | None = None


class ScoreQuestion(Strict):
    """Which of some ordered levels fits the input?"""

    type: Literal["score"]
    instructions: Instructions
    levels: Annotated[list[ScoreLevel], Field(fail_fast=True, min_length=2)] = Field(
        description="2 to 255 levels, from the lowest to the highest; each label once."
    )
    name: str | None = None


AnyQuestion = PredicateQuestion | ChoiceQuestion | ScoreQuestion
QUESTIONS: dict[str, type[AnyQuestion]] = {
    "predicate": PredicateQuestion,
    "choice": ChoiceQuestion,
    "score": ScoreQuestion,
}


def parse_question(raw: dict[str, Any], where: str) -> AnyQuestion:
    """Parse a question; `where` is its path in the body.

    Raises
    ------
    InvalidRequest
        A field is missing, unknown, has the wrong type, or too many or equal entries.
    """
    kind = raw.get("type")
    model = QUESTIONS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise InvalidRequest(
            f"{where}.type must be one of {', '.join(QUESTIONS)}, got {described(kind)}",
            field=f"{where}.type",
        )
    for name in ("choices", "levels"):
        if isinstance(raw.get(name), list):
            at_most(f"{where}.{name}", len(raw[name]), MAX_REPLIES, name)
    question = parsed(model, raw, where)
    if question.type == "choice":
        for i, option in enumerate(question.choices):
            if not isinstance(option.value, str | bool):
                raise invalid(f"{where}.choices[{i}].value", "a string or a boolean", option.value)
    for name, texts in _texts(question).items():
        if not all(text.strip() for text in texts):
            raise invalid(f"{where}.{name}", "texts of more than white space", texts)
    values = _values(question)
    if len(set(map(json.dumps, values))) < len(values):
        name = "choices" if question.type == "choice" else "levels"
        raise invalid(f"{where}.{name}", "values that differ from each other", values)
    return question


def router_question(question: AnyQuestion, where: str) -> Question:
    """Return the question as the model reads it, with the replies that are scored.

    Raises
    ------
    InvalidRequest, UnsupportedField
        The instructions are empty, too large, or have a part that is not served.
    """
    text = _instructions(question.instructions, f"{where}.instructions")
    replies = _replies(question)
    if question.type == "predicate":
        asked = f"Statement: {text}\n\nIs the statement true? Reply with yes or no only."
        return Question(asked, replies)
    options: Sequence[ChoiceOption] | Sequence[ScoreLevel]
    if question.type == "choice":
        options, intro = question.choices, "Reply with one of these choices only:"
    else:
        options = question.levels
        intro = "Reply with one of these levels only, from the lowest to the highest:"
    descriptions = [option.description for option in options]
    lines = [
        f"- {reply}: {description}" if description else f"- {reply}"
        for reply, description in zip(replies, descriptions, strict=True)
    ]
    return Question("\n".join([text, "", intro, *lines]), replies)


def _instructions(given: Any, where: str) -> str:
    """Return the text of a question's instructions."""
    if isinstance(given, list):
        at_most(where, len(given), DEFAULT_LIMITS.max_message_parts, "parts")
        given = "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(given))
    if not isinstance(given, str):
        raise invalid(where, "a string or a list of parts", given)
    if not given.strip():
        raise invalid(where, "more than white space", given)
    return given.strip()


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise invalid(where, "an object", part)
    kind = part.get("type")
    if isinstance(kind, str) and kind in CONTENT_TYPES:
        raise UnsupportedField(
            f"{CONTENT_TYPES[kind]}: {where}.type must be input_text or input_json, got {kind!r}",
            field=f"{where}.type",
        )
    if kind == "input_json":
        return json_text(part, where)
    return parsed(QuestionText, part, where).text


def json_text(part: dict[str, Any], where: str) -> str:
    """Return the JSON of a part of type `input_json` as text.

    Raises
    ------
    InvalidRequest
        The part has another form, or its JSON is too large.
    """
    data = part.get("data")
    is_list = isinstance(data, list) and all(isinstance(item, dict) for item in data)
    if not isinstance(data, dict) and not is_list:
        raise invalid(f"{where}.data", "an object or a list of objects", data)
    text = orjson.dumps(data)
    at_most(f"{where}.data", len(text), MAX_JSON_BYTES, "bytes")
    return text.decode()


def decision_answer(question: AnyQuestion, logprobs: Sequence[float]) -> dict[str, Any]:
    """Return the answer to a question from the scores of its replies."""
    probabilities = softmax(logprobs)
    named = {"type": question.type, "name": question.name}
    if question.type == "predicate":
        return {**named, "probability": probabilities[0]}
    certain = confidence(probabilities)
    if question.type == "choice":
        best = probabilities.index(max(probabilities))
        each = [
            {"value": option.value, "probability": probability}
            for option, probability in zip(question.choices, probabilities, strict=True)
        ]
        choice = question.choices[best].value
        return {**named, "choice": choice, "confidence": certain, "probabilities": each}
    levels = [
        {"label": level.label, "value": i, "probability": probability}
        for i, (level, probability) in enumerate(zip(question.levels, probabilities, strict=True))
    ]
    mean = math.fsum(i * probability for i, probability in enumerate(probabilities))
    return {**named, "score": mean, "confidence": certain, "probabilities": levels}


def softmax(logprobs: Sequence[float]) -> list[float]:
    """Return probabilities that sum to 1. Equal input gives equal bits."""
    top = max(logprobs)
    weights = [math.exp(logprob - top) for logprob in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def confidence(probabilities: Sequence[float]) -> float:
    """Return how far the most likely reply stands above a guess: 0 if all are equally likely, 1 if it is certain."""
    num = len(probabilities)
    return min(1.0, max(0.0, (num * max(probabilities) - 1) / (num - 1)))


def _values(question: AnyQuestion) -> list[str | bool]:
    """Return the values or labels of a question, in order."""
    if question.type == "predicate":
        return [_YES, _NO]
    if question.type == "choice":
        return [option.value for option in question.choices]
    return [level.label for level in question.levels]


def _texts(question: AnyQuestion) -> dict[str, list[str]]:
    """Return the values that are texts, by the name of their field."""
    texts = [value for value in _values(question) if isinstance(value, str)]
    return {"choices" if question.type == "choice" else "levels": texts}


def _replies(question: AnyQuestion) -> tuple[str, ...]:
    """Return the replies: the values as text, booleans as true and false.

    If a text and a boolean would read the same, all are written as JSON.
    """
    values = _values(question)
    replies = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if len(set(replies)) < len(replies):
        replies = [json.dumps(value, ensure_ascii=False) for value in values]
    return tuple(replies)
