"""The route of OpenAI's Decisions API.

```
POST /v1/decisions    a probability for each allowed answer to questions about an input; no text is generated
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.cluster.api_common.front_end import (
    counting_refusals,
    explain_headers,
    renamed,
    with_headers,
)
from quire.cluster.http.answer_response import until_disconnect
from quire.cluster.http.decisions_api.decision_questions import AnyQuestion, decision_answer
from quire.cluster.http.decisions_api.decisions_body import REFERENCES, DecisionsRequest
from quire.cluster.http.http_answers import json_response
from quire.cluster.http.http_body import describe_route, parse_body
from quire.cluster.http.http_schema import IGNORED_FIELDS
from quire.cluster.http.json_body import read_json
from quire.cluster.http.responses_api.response_object import ResponsesUsage
from quire.protos.errors import QuireError
from quire.router.question_types import Question
from quire.router.types import GenerationRequest, Service

_BODY = DecisionsRequest
_Probability = Annotated[float, Field(ge=0, le=1)]
_Confidence = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="How far the most likely answer stands above a guess: (n p - 1) / (n - 1) for n answers.",
    ),
]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PredicateAnswer(_Shape):
    """The answer to a predicate."""

    type: Literal["predicate"]
    name: str | None
    probability: _Probability = Field(description="That the statement is true.")


class ChoiceProbability(_Shape):
    """A choice and its probability."""

    value: str | bool
    probability: _Probability


class ChoiceAnswer(_Shape):
    """The answer to a choice."""

    type: Literal["choice"]
    name: str | None
    choice: str | bool = Field(description="The most likely choice; the first of equal ones.")
    confidence: _Confidence
    probabilities: list[ChoiceProbability]


class LevelProbability(_Shape):
    """A level and its probability."""

    label: str
    value: int = Field(description="The level's number, 0 for the first.")
    probability: _Probability


class ScoreAnswer(_Shape):
    """The answer to a score."""

    type: Literal["score"]
    name: str | None
    score: float = Field(description="The mean of the levels' numbers by their probabilities.")
    confidence: _Confidence
    probabilities: list[LevelProbability]


class DecisionObject(_Shape):
    """The answers to the questions, in their order."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: ResponsesUsage = Field(
        description="Tokens that the prompts of several answers have in common count once. No output tokens."
    )


class DecisionResponse(Response):
    """Scores the answers of a request. A client that leaves ends it.

    Parameters
    ----------
    request
        The router's request.
    questions, asked
        The questions of the body, and of the router.
    names
        Map from the router's names of fields to the client's names.
    """

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        questions: Sequence[AnyQuestion],
        asked: Sequence[Question],
        names: Mapping[str, str],
    ):
        super().__init__()
        self._service = service
        self._request = request
        self._questions = questions
        self._asked = asked
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scores = await self._service.score(self._request, self._asked)
        except QuireError as error:
            raise renamed(error, self._names) from None
        usage = scores.usage
        content = {
            "model": self._request.model or self._service.model_info().name,
            "answers": [
                decision_answer(question, logprobs)
                for question, logprobs in zip(self._questions, scores.logprobs, strict=True)
            ],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens,
            },
        }
        headers = explain_headers(scores.explain, complete=True)
        await json_response(content, headers=headers)(scope, receive, send)


def add_routes(
    app: FastAPI, get_service: Callable[[], Service], max_body_bytes: int, keepalive_s: float
) -> None:
    """Add the route to the application; the parameters are those of `http_api.build_app`."""

    async def prepared(request: Request) -> DecisionResponse:
        body = parse_body(_BODY, await read_json(request, max_body_bytes))
        questions, asked = await body.parsed_questions()
        router_request = await body.to_request(request.state.request_id)
        router_request, header_names = with_headers(router_request, request.headers)
        names = body.router_names() | header_names
        return DecisionResponse(get_service(), router_request, questions, asked, names)

    @app.post(
        _BODY.path,
        **describe_route(
            _BODY,
            DecisionObject,
            "Answer questions about an input with a probability for each allowed answer, in the form of OpenAI's "
            "Decisions API. No text is generated.",
            ignored=IGNORED_FIELDS - _BODY.refused.keys() - _BODY.model_fields.keys(),
            refused=_BODY.refused,
        ),
    )
    async def decide(request: Request) -> Response:
        with counting_refusals(get_service()):
            return await prepared(request)

    app.state.body_models += [_BODY, *REFERENCES]
