"""Whatever the OpenAPI document of a running router lets a client send, or forbids, is answered as it says; real Ray.

`test_malformed_input.py` aims at what Quire does with a field; here the requests are made from the document alone:
every operation that it lists, path and query parameters, headers and bodies, such as fit their schemas and such as do
not. 280 for each operation that can be asked for different things, 5,000 with `CHAOS_SIZE=long` (`make chaos`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live import SIZE, write_bars
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from quire.cluster.bench.results.report import Bar

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.timeout(600 if SIZE == "ci" else 3600),
]
# Of each operation; 16 operations times 280 are what 9 times 500 were.
NUM_EXAMPLES = {"ci": 280, "long": 5000}[SIZE]
# Greater ones are valid and answered in their time: thousands of tokens of 32 choices.
MOST = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 3}
MESSAGES = "/v1/messages"
TOKENIZE, DECISIONS, EMBEDDINGS = "/tokenize", "/v1/decisions", "/v1/embeddings"
Sender = Callable[[Case], Any]
CHECKS = [not_a_server_error, status_code_conformance]
SCHEMA = response_schema_conformance


def shortened(body: Any, path: str, random: Random | None) -> Any:
    """A body whose valid answer is short; with `random`, one that is more likely to be valid.

    A dozen fields that fit the schema, each with a value from the edge of its range, seldom go together. And the
    document tells neither the model's name nor that options of a stream are for streams.
    """
    inputs = {"prompt", "messages", "input", "questions"}
    if not isinstance(body, dict) or not inputs & body.keys():
        return body
    if random is not None:
        optional = sorted(body.keys() - inputs - {"model", "stream_options"})
        # The questions of a decision seldom fit even by themselves.
        most = 0 if path == DECISIONS else random.randrange(4)
        kept = inputs.union(random.sample(optional, min(len(optional), most)))
        body = {name: value for name, value in body.items() if name in kept}
    if path.startswith(MESSAGES) and isinstance(body.get("model", ""), str):
        # Required, and the field `max_tokens` is an integer: for the document 2.0 is one too.
        body = {**body, "model": "embedded"}
        if isinstance(body.get("max_tokens"), float):
            body["max_tokens"] = 2
    if path not in (f"{MESSAGES}/count_tokens", TOKENIZE, DECISIONS, EMBEDDINGS):
        body = {"max_output_tokens" if "input" in body else "max_tokens": 2, **body}
    for name, most in MOST.items():
        if type(body.get(name)) is int and body[name] > most:
            body[name] = most
    return body


def modes(operation: APIOperation) -> tuple[GenerationMode, ...]:
    """A request without a query and without a body cannot be wrong."""
    both = bool(operation.query) or bool(operation.body)
    return tuple(GenerationMode) if both else (GenerationMode.POSITIVE,)


def run_examples(operation: APIOperation, mode: GenerationMode, send: Sender) -> None:
    """Check the answers to requests of an operation."""

    @settings(
        max_examples=NUM_EXAMPLES // len(modes(operation)),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), st.randoms())
    def run(case: Case, random: Random) -> None:
        fits = mode is GenerationMode.POSITIVE
        chooser = random if fits and random.randrange(4) else None
        case.body = shortened(case.body, operation.path, chooser)
        response = send(case)
        # The document's schema of a stream is that of the data of its events, not of their lines.
        is_stream = response.headers["content-type"][0].startswith("text/event-stream")
        case.validate_response(response, checks=CHECKS if is_stream else [*CHECKS, SCHEMA])
        # A stream that fails after its first token says so in its last event.
        assert not {"server_error", "api_error"} & set(response.text.split('"')), response.text

    run()


def test_every_operation(cluster, subtests):
    schema = schemathesis.openapi.from_url(f"{cluster.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    statuses: dict[str, Counter[int]] = {o.path: Counter() for o in operations}
    wrong: list[str] = []
    with requests.Session() as session:
        for operation in operations:

            def send(case: Case, of_operation: Counter[int] = statuses[operation.path]) -> Any:
                response = case.call(base_url=cluster.url, session=session, timeout=60)
                of_operation[response.status_code] += 1
                return response

            for mode in modes(operation):
                with subtests.test(operation=operation.label, mode=mode.value):
                    try:
                        run_examples(operation, mode, send)
                    except Exception:
                        wrong.append(f"{operation.label}, {mode.value}")
                        raise
    write_bars("chaos_openapi.json", bars(operations, statuses, wrong))
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        DECISIONS,
        EMBEDDINGS,
        MESSAGES,
        f"{MESSAGES}/count_tokens",
    ):
        assert min(statuses[path][200], statuses[path][400]) > NUM_EXAMPLES // 10, statuses
    answer = cluster.openai().completions.create(
        model="embedded", prompt="A quire is", max_tokens=3, temperature=0
    )
    assert answer.usage.completion_tokens == 3


def bars(
    operations: list[APIOperation], statuses: dict[str, Counter[int]], wrong: list[str]
) -> list[Bar]:
    asked = [o.path for o in operations if o.query or o.body or o.path_parameters]
    fewest = min(statuses[path].total() for path in asked)
    num_errors = sum(n for s in statuses.values() for status, n in s.items() if status >= 500)
    return [
        Bar(
            "chaos/openapi_requests",
            fewest,
            "of each operation",
            NUM_EXAMPLES,
            at_most=False,
            details={path: dict(sorted(found.items())) for path, found in statuses.items()},
        ),
        Bar("chaos/openapi_server_errors", num_errors, "requests", 0),
        Bar("chaos/openapi_violations", len(wrong), "operations", 0, details={"wrong": wrong}),
    ]
