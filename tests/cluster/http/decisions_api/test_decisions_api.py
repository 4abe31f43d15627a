"""`POST /v1/decisions` with openai's own client: every kind of question, the input, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_app import serving
from openai.types.decision import Decision

from quire.cluster.http.decisions_api.decision_questions import confidence, softmax
from quire.cluster.http.decisions_api.decisions_routes import DecisionObject, add_routes
from quire.protos.errors import Overloaded

PREDICATE = {"type": "predicate", "instructions": "The user is angry."}
CHOICE = {
    "type": "choice",
    "name": "topic",
    "instructions": "What is it about?",
    "choices": [{"value": "bill", "description": "Money"}, {"value": "router"}, {"value": True}],
}
SCORE = {
    "type": "score",
    "instructions": [
        {"type": "input_text", "text": "How urgent is it?"},
        {"type": "input_json", "data": {"deadline": [1, None]}},
    ],
    "levels": [{"label": "low"}, {"label": "middle"}, {"label": "high", "description": "Today"}],
}
ASKED: dict[str, Any] = {
    "model": "acme/tiny",
    "input": "Help!",
    "questions": [PREDICATE, CHOICE, SCORE],
}


@pytest.fixture
def http(service) -> Iterator[httpx.Client]:
    with serving(service, apis=[add_routes]) as client:
        yield client


@pytest.fixture
def client(http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, timeout=30)


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/decisions", json={**ASKED, **fields})


# The service scores a reply by minus its length.
def shares(*lengths: int) -> list[float]:
    weights = [math.exp(-length) for length in lengths]
    return [pytest.approx(weight / sum(weights)) for weight in weights]


def test_each_kind_of_question_has_its_answer(client: openai.OpenAI, service) -> None:
    response = client.decisions.with_raw_response.create(**ASKED)
    DecisionObject.model_validate(json.loads(response.content), strict=True)
    decision = response.parse()
    Decision.model_validate(json.loads(response.content), strict=True)
    assert decision.model == "acme/tiny"
    predicate, choice, score = decision.answers
    assert (predicate.type, predicate.name) == ("predicate", None)
    assert predicate.probability == shares(3, 2)[0]
    assert (choice.type, choice.name, choice.choice) == ("choice", "topic", "bill")
    assert [entry.value for entry in choice.probabilities] == ["bill", "router", True]
    assert [entry.probability for entry in choice.probabilities] == shares(4, 6, 4)
    assert choice.confidence == pytest.approx((3 * choice.probabilities[0].probability - 1) / 2)
    each = [(entry.label, entry.value) for entry in score.probabilities]
    assert each == [("low", 0), ("middle", 1), ("high", 2)]
    low, middle, high = (entry.probability for entry in score.probabilities)
    assert [low, middle, high] == shares(3, 6, 4)
    assert score.score == pytest.approx(middle + 2 * high)
    assert score.confidence == pytest.approx((3 * low - 1) / 2)
    usage = decision.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (120, 48)
    assert (usage.output_tokens, usage.total_tokens) == (0, 120)
    assert response.headers["x-quire-replica"] == "replica-a"
    assert [question.replies for question in service.questions] == [
        ("yes", "no"),
        ("bill", "router", "true"),
        ("low", "middle", "high"),
    ]
    texts = [question.text.split("\n") for question in service.questions]
    assert texts[0][0] == "Statement: The user is angry."
    assert texts[1][0] == "What is it about?" and texts[1][-3:] == [
        "- bill: Money",
        "- router",
        "- true",
    ]
    assert texts[2][:2] == ["How urgent is it?", '{"deadline":[1,null]}']


def test_a_text_and_a_boolean_with_the_same_letters_are_told_apart(http, service) -> None:
    choices = [{"value": "true"}, {"value": True}, {"value": "ä"}]
    answer = post(http, questions=[{**CHOICE, "choices": choices}]).json()["answers"][0]
    assert service.questions[0].replies == ('"true"', "true", '"ä"')
    assert answer["choice"] == "ä"
    assert [entry["value"] for entry in answer["probabilities"]] == ["true", True, "ä"]


def test_the_input_is_a_conversation(client: openai.OpenAI, service) -> None:
    client.decisions.create(
        **ASKED
        | {
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "input_text",
                            "text": "Look:",
                            "prompt_cache_breakpoint": {"mode": "explicit"},
                        },
                        {"type": "input_json", "data": [{"a": "ü"}]},
                    ],
                },
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "done"},
            ]
        },
        prompt_cache_key="k",
        prompt_cache_options={"mode": "explicit", "ttl": "30m"},
        safety_identifier="someone",
        extra_body={"cache_salt": "s", "priority": 2},
        extra_headers={"X-Request-Timeout-Seconds": "9"},
    )
    (request,) = service.requests
    assert [message["role"] for message in request.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert request.messages[1]["content"] == 'Look:\n[{"a":"ü"}]'
    assert request.messages[2]["content"] == "No."
    assert (request.session, request.tenant, request.priority, request.deadline_s) == (
        "k",
        "s",
        2,
        9,
    )
    assert (request.reasoning_effort, request.fit_to_model) == ("none", True)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"questions": []}, "questions", "at least 1 question"),
    ({"questions": [PREDICATE] * 401}, "questions", "at most 400 questions, got 401"),
    ({"questions": None}, "questions", "required"),
    ({"questions": ["x"]}, "questions[0]", "object"),
    ({"questions": [PREDICATE, {"type": "box"}]}, "questions[1].type", "predicate, choice, score"),
    ({"questions": [{"type": "predicate"}]}, "questions[0].instructions", "required"),
    ({"questions": [{**PREDICATE, "instructions": " "}]}, "questions[0].instructions", "white space"),
    ({"questions": [{**PREDICATE, "instructions": 3}]}, "questions[0].instructions", "a string or"),
    ({"questions": [{**PREDICATE, "levels": []}]}, "questions[0].levels", "unknown"),
    ({"questions": [{**CHOICE, "choices": CHOICE["choices"][:1]}]}, "questions[0].choices", "2 items"),
    (
        {"questions": [{**CHOICE, "choices": [{"value": str(i)} for i in range(256)]}]},
        "questions[0].choices",
        "at most 255 choices, got 256",
    ),
    ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]}, "questions[0].choices", "differ"),
    ({"questions": [{**CHOICE, "choices": [{"value": 1}] * 2}]}, "questions[0].choices[0].value", "a boolean"),
    ({"questions": [{**SCORE, "levels": [{"label": "a"}, {"label": " "}]}]}, "questions[0].levels", "white space"),
    (
        {"questions": [{**PREDICATE, "instructions": [{"type": "input_image", "image_url": "data:,"}]}]},
        "questions[0].instructions[0].type",
        "images are not served",
    ),
    (
        {"questions": [{**PREDICATE, "instructions": [{"type": "input_json", "data": [1]}]}]},
        "questions[0].instructions[0].data",
        "an object or a list of objects",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "images"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "input": ""}]}, "input[0].type", "not served"),
    ({"input": 5}, "input", "a string or a list of objects"),
    ({"model": "other"}, "model", "other"),
    ({"stream": True}, "stream", "not streamed"),
    ({"temperature": 0.5}, "temperature", "those of the model"),
    ({"question": []}, "question", "did you mean 'questions'"),
]  # fmt: skip


def test_a_refusal_names_the_field(http, service) -> None:
    for fields, field, message in REFUSED:
        response = post(http, **fields)
        error = response.json()["error"]
        assert response.status_code in (400, 404), error
        assert error["param"] == field, error
        assert message in error["message"], error
    assert len(service.refused_by_front_end) == len(REFUSED) - 1, (
        "the router counts the others itself"
    )


def test_an_error_of_the_router_has_its_status_and_the_clients_name(http, service) -> None:
    service.refusal = Overloaded("full", retry_after_s=3.0)
    response = post(http)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    service.refusal = None
    error = post(http, timeout=-1.0).json()["error"]
    assert (error["code"], error["param"]) == ("deadline_exceeded", "timeout")


def test_a_client_that_leaves_ends_its_decision(http, service) -> None:
    service.generate_s = 30.0
    for timeout_s in (0.3, 3.0, 20.0):  # the service may get the first one too late
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/decisions", json=ASKED, timeout=timeout_s)
        if service.requests:
            break
    assert service.cancelled_in_generate.wait(30)


def test_openapi_describes_the_endpoint(http) -> None:
    document = http.get("/openapi.json").json()
    operation = document["paths"]["/v1/decisions"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["$ref"].endswith("/DecisionsRequest")
    names = document["components"]["schemas"]
    references = set(json.dumps(document).split('"#/components/schemas/')[1:])
    assert {text.partition('"')[0] for text in references} <= names.keys()
    assert {
        "PredicateQuestion",
        "ChoiceQuestion",
        "ScoreQuestion",
        "DecisionObject",
    } <= names.keys()


@given(st.lists(st.floats(-1e5, 0), min_size=2, max_size=20))
def test_probabilities_sum_to_one_and_keep_the_order_of_scores(logprobs: list[float]) -> None:
    probabilities = softmax(logprobs)
    assert math.fsum(probabilities) == pytest.approx(1)
    assert probabilities[logprobs.index(max(logprobs))] == max(probabilities)
    assert softmax(logprobs) == probabilities
    assert 0 <= confidence(probabilities) <= 1
    assert confidence([0.25] * 4) == 0 and confidence([0.0, 1.0]) == 1
