"""Whatever the OpenAPI document of a running router lets a client send, or forbids, is answered as it says; real Ray.

`test_malformed_input.py` aims at what Quire does with a field; here the requests are made from the document alone:
every operation that it lists, path and query parameters, headers and bodies, such as fit their schemas and such as do
not. 200 for each operation, 5,000 with
`CHAOS_SIZE=long`.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(3600)]
NUM_EXAMPLES = 5000 if os.environ.get("CHAOS_SIZE") == "long" else 200
# Greater ones are valid and answered in their time: thousands of tokens of 32 choices.
MOST = {"max_tokens": 4, "max_completion_tokens": 4, "n": 3}
Sender = Callable[[Case], Any]
CHECKS = [not_a_server_error, status_code_conformance]
SCHEMA = response_schema_conformance


def shortened(body: Any, random: Random | None) -> Any:
    """A body whose valid answer is short; with `random`, one that is more likely to be valid.

    A dozen fields that fit the schema, each with a value from the edge of its range, seldom go together. And the
    document tells neither the model's name nor that options of a stream are for streams.
    """
    inputs = {"prompt", "messages"}
    if not isinstance(body, dict) or not inputs & body.keys():
        return body
    if random is not None:
        optional = sorted(body.keys() - inputs - {"model", "stream_options"})
        kept = inputs.union(random.sample(optional, min(len(optional), random.randrange(4))))
        body = {name: value for name, value in body.items() if name in kept}
    body = {"max_tokens": 2, **body}
    for name, most in MOST.items():
        if type(body.get(name)) is int and body[name] > most:
            body[name] = most
    return body


def modes(operation: APIOperation) -> tuple[GenerationMode, ...]:
    """A request without a query and without a body cannot be wrong."""
    both = bool(operation.query) or bool(operation.body)
    return tuple(GenerationMode) if both else (GenerationMode.POSITIVE,)


def run_examples(operation: APIOperation, mode: GenerationMode, send: Sender) -> Counter[int]:
    """Check the answers to requests of an operation; how many had which status."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=NUM_EXAMPLES // len(modes(operation)),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), st.randoms())
    def run(case: Case, random: Random) -> None:
        fits = mode is GenerationMode.POSITIVE
        case.body = shortened(case.body, random if fits and random.randrange(4) else None)
        response = send(case)
        statuses[response.status_code] += 1
        # The document's schema of a stream is that of the data of its events, not of their lines.
        is_stream = response.headers["content-type"][0].startswith("text/event-stream")
        case.validate_response(response, checks=CHECKS if is_stream else [*CHECKS, SCHEMA])
        # A stream that fails after its first token says so in its last event.
        assert "server_error" not in response.text, response.text

    run()
    return statuses


def test_every_operation(cluster, subtests):
    schema = schemathesis.openapi.from_url(f"{cluster.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    statuses: dict[str, Counter[int]] = {o.path: Counter() for o in operations}
    with requests.Session() as session:
        send = functools.partial(Case.call, base_url=cluster.url, session=session, timeout=60)
        for operation in operations:
            for mode in modes(operation):
                with subtests.test(operation=operation.label, mode=mode.value):
                    found = run_examples(operation, mode, send)
                    print(f"{operation.label}, {mode.value}: {dict(found)}")
                    statuses[operation.path] += found
    answers = statuses["/v1/completions"] + statuses["/v1/chat/completions"]
    assert answers[200] and answers[400], answers
    answer = cluster.openai().completions.create(
        model="embedded", prompt="A quire is", max_tokens=3, temperature=0
    )
    assert answer.usage.completion_tokens == 3
