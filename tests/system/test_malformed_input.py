"""Whatever a client puts into a field, the answer is 200 or a refusal that names what is wrong; real Ray.

Bodies and messages are made from the APIs' own descriptions: each field gets something plausible, something at the edge
of a number's range, or something of another type. 500 of each endpoint, 5,000 with `CHAOS_SIZE=long`
(`make chaos`).
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live import SIZE, Cluster, write_bars

from quire.cluster.bench.results.report import Bar
from quire.cluster.http.http_chats import ChatCompletionRequest
from quire.cluster.http.http_completions import CompletionRequest
from quire.cluster.http.http_schema import IGNORED_FIELDS
from quire.protos import generation_pb2, generation_pb2_grpc

pytestmark = [pytest.mark.system, pytest.mark.chaos, pytest.mark.timeout(1800)]
NUM_EXAMPLES = {"ci": 500, "long": 5000}[SIZE]
EXAMPLES = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)

# No number in between: an answer of thousands of tokens is a valid one, and takes its time.
EDGES = [-(2**70), -(2**31) - 1, -1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**63, 2**64, 10**40]
TEXT = st.text(max_size=12) | st.sampled_from(
    ["", "\x00", "😀" * 5, "\ud7ff", "<|im_end|>", "../x"]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(EDGES),
    st.floats(allow_nan=True),
    st.sampled_from([1e308, -0.0, 1e-320]),
    TEXT,
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
TOKEN_IDS = st.lists(st.integers(-2, 1030), max_size=6)
GRAMMARS = st.sampled_from(["[a-c]{1,3}", "(", "a{99999}", "\\p{Greek}+", "(?=a)b", "start: 'a'"])
SCHEMAS = st.sampled_from(
    [
        {},
        True,
        {"type": "string", "maxLength": 4},
        {"type": "nothing"},
        {"$ref": "#/x"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 10**9},
        {"enum": []},
        {"pattern": "("},
    ]
)
FUNCTION_NAMES = st.sampled_from(["weather", "", "a b"]) | TEXT
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": TEXT | JUNK,
            "type": st.just("function") | JUNK,
            "function": st.fixed_dictionaries(
                {"name": FUNCTION_NAMES, "arguments": st.just('{"city": "Oslo"}') | TEXT | JUNK}
            ),
        }
    ),
    max_size=2,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function") | JUNK,
            "function": st.fixed_dictionaries(
                {"name": FUNCTION_NAMES},
                optional={
                    "description": TEXT | JUNK,
                    "parameters": SCHEMAS,
                    "strict": st.booleans() | JUNK,
                },
            ),
        }
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "developer", "tool", "x", ""]),
            "content": TEXT
            | st.lists(st.fixed_dictionaries({"type": TEXT | st.just("text"), "text": TEXT}))
            | JUNK,
            "name": TEXT,
            "tool_calls": CALLS | JUNK,
            "tool_call_id": TEXT | JUNK,
            "reasoning_content": TEXT | JUNK,
        },
    ),
    max_size=4,
)
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["embedded", "other", ""]),
    "prompt": TEXT | TOKEN_IDS | st.lists(TEXT, max_size=2) | st.lists(TOKEN_IDS, max_size=2),
    "messages": MESSAGES,
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["auto", "none", "required", "x"])
    | st.just({"type": "function", "function": {"name": "weather"}}),
    "reasoning_effort": st.sampled_from(["none", "low", "high", "max", "x"]),
    "max_tokens": st.integers(-1, 6),
    "max_completion_tokens": st.integers(-1, 6),
    "n": st.integers(-1, 4),
    "stop": TEXT | st.lists(TEXT, max_size=20),
    "stop_token_ids": TOKEN_IDS,
    "allowed_token_ids": TOKEN_IDS,
    "bad_words": st.lists(TEXT, max_size=4),
    "logit_bias": st.dictionaries(TEXT | st.just("5"), st.floats(-200, 200), max_size=3),
    "logprobs": st.integers(-1, 25) | st.booleans(),
    "top_logprobs": st.integers(-1, 25),
    "prompt_logprobs": st.integers(-1, 25),
    "best_of": st.integers(-1, 4),
    "chat_template_kwargs": st.dictionaries(
        TEXT | st.sampled_from(["enable_thinking", "messages", "style"]), JUNK, max_size=3
    ),
    "stream_options": st.fixed_dictionaries(
        {"include_usage": st.booleans()}, optional={"include_event_ids": st.booleans()}
    ),
    "structured_outputs": st.fixed_dictionaries(
        {},
        optional={
            "regex": GRAMMARS,
            "json": SCHEMAS,
            "choice": st.lists(TEXT, max_size=3),
            "grammar": GRAMMARS,
        },
    ),
    "response_format": st.one_of(
        st.just({"type": "json_object"}),
        st.builds(
            lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            SCHEMAS,
        ),
    ),
}
NUMBERS = st.floats(-3, 3) | st.integers(-2, 3)


def bodies(model: type, valid: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Bodies of an endpoint: a valid one with up to four fields set to something else.

    Most of it is plausible, so that a good part gets as far as the engine.
    """
    served = st.sampled_from(sorted(model.model_fields))
    others = st.sampled_from(sorted({*IGNORED_FIELDS, *model.refused, "unheard_of"}))

    def change(name: str) -> st.SearchStrategy[tuple[str, Any]]:
        plausible = PLAUSIBLE.get(name, NUMBERS)
        return st.tuples(st.just(name), st.one_of(plausible, plausible, plausible, JUNK))

    names = st.one_of(served, served, served, others)
    changes = st.lists(names.flatmap(change), max_size=4)
    return changes.map(lambda given: json.dumps({**valid, **dict(given)}).encode())


class Tally:
    """How the requests of each endpoint were answered."""

    def __init__(self) -> None:
        self.answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.alive: list[str] = []  # after whose requests the engine answered a plain one
        self.num_wrong = 0

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Around a request and what is asserted of its answer."""
        try:
            yield
        except Exception:
            self.num_wrong += 1
            raise

    def check_http(self, client: httpx.Client, path: str, body: bytes) -> None:
        with self.checking():
            response = client.post(path, content=body)
            text = response.text
            self.answers[path][str(response.status_code)] += 1
            assert response.status_code < 500, (response.status_code, text, body)
            if response.status_code != 200:
                assert json.loads(text)["error"]["message"], (text, body)
            # A stream that fails after its first token says so in its last event.
            assert "server_error" not in text, (text, body)

    def check_alive(self, cluster: Cluster, requests: str) -> None:
        answer = cluster.openai().completions.create(
            model="embedded", prompt="A quire is", max_tokens=3, temperature=0
        )
        assert answer.usage.completion_tokens == 3
        self.alive.append(requests)


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    answers = {name: dict(found) for name, found in sorted(tally.answers.items())}
    fewest = min((found.total() for found in tally.answers.values()), default=0)
    bars = [
        Bar(
            "chaos/malformed_requests",
            fewest,
            "of each endpoint",
            NUM_EXAMPLES,
            at_most=False,
            details=answers,
        ),
        Bar("chaos/malformed_wrong_answers", tally.num_wrong, "requests", 0),
        Bar("chaos/malformed_alive_after", len(tally.alive), "tests", 5, at_most=False),
    ]
    write_bars("chaos_malformed.json", bars)


@pytest.fixture(scope="module")
def http(cluster: Cluster):
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=cluster.url, timeout=60, headers=headers) as client:
        yield client


def test_completions(cluster, http, tally):
    @EXAMPLES
    @given(bodies(CompletionRequest, {"prompt": "The harbour", "max_tokens": 2}))
    def run(body: bytes) -> None:
        tally.check_http(http, "/v1/completions", body)

    run()
    tally.check_alive(cluster, "/v1/completions")


def test_chat_completions(cluster, http, tally):
    valid = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}

    @EXAMPLES
    @given(bodies(ChatCompletionRequest, valid))
    def run(body: bytes) -> None:
        tally.check_http(http, "/v1/chat/completions", body)

    run()
    tally.check_alive(cluster, "/v1/chat/completions")


def test_bodies_that_are_no_objects(cluster, http, tally):
    @settings(EXAMPLES, max_examples=NUM_EXAMPLES // 5)
    @given(st.binary(max_size=64) | JUNK.map(lambda value: json.dumps(value).encode()))
    def run(body: bytes) -> None:
        for path in ("/v1/completions", "/v1/chat/completions"):
            tally.check_http(http, path, body)

    run()
    tally.check_alive(cluster, "bodies that are no objects")


# -- gRPC ------------------------------------------------------------------------------------------------

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
}
SMALL = {"max_tokens": 6, "n": 4}  # plausible ones are small, so that examples stay short


def values_of(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        return messages_of(field.message_type)
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        small = st.integers(max(low, -2), SMALL.get(field.name, 30))
        return small | st.sampled_from([low, high])
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return st.floats() | st.floats(-3, 3)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        # Unknown numbers too: a newer client's.
        return st.integers(0, len(field.enum_type.values))
    assert kind == FieldDescriptor.CPPTYPE_STRING, field.full_name
    texts = {
        "json_schema": SCHEMAS.map(json.dumps) | TEXT,
        "regex": GRAMMARS | TEXT,
        "grammar": GRAMMARS | TEXT,
        "role": st.sampled_from(["user", "assistant", "system", "tool", ""]),
        "model": st.sampled_from(["embedded", "", "other"]),
        "parameters": SCHEMAS.map(json.dumps) | TEXT,
        "arguments": st.sampled_from(['{"city": "Oslo"}', "{}", "[]", ""]) | TEXT,
    }
    return texts.get(field.name, TEXT)


def messages_of(descriptor: Descriptor, max_fields: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    """Values of a few fields, as the message's constructor takes them; of a `oneof` the last one stays."""

    def change(field: FieldDescriptor) -> st.SearchStrategy[tuple[str, Any]]:
        message = field.message_type
        if message is not None and message.GetOptions().map_entry:
            keys, values = (values_of(message.fields_by_name[n]) for n in ("key", "value"))
            value = st.dictionaries(keys, values, max_size=3)
        elif field.is_repeated:
            value = st.lists(values_of(field), max_size=3)
        else:
            value = values_of(field)
        return st.tuples(st.just(field.name), value)

    fields = st.sampled_from(list(descriptor.fields))
    return st.lists(fields.flatmap(change), max_size=max_fields).map(dict)


REQUESTS = messages_of(generation_pb2.GenerateRequest.DESCRIPTOR, max_fields=4)
CLIENTS_FAULT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
}


def bounded(fields: dict[str, Any]) -> generation_pb2.GenerateRequest:
    """The request; one that would run to the end of the model's context is cut short."""
    inputs = {"prompt", "token_ids", "messages"}
    if not inputs & fields.keys():
        fields = {"prompt": "The harbour", **fields}
    request = generation_pb2.GenerateRequest(**fields)
    if not request.sampling.HasField("max_tokens"):
        request.sampling.max_tokens = 3
    return request


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce"])
def test_grpc(cluster, tally, method):
    with cluster.channel() as channel:
        call = getattr(generation_pb2_grpc.GenerationStub(channel), method)

        def ask(request: generation_pb2.GenerateRequest) -> str:
            """The status."""
            try:
                answer = call(request, timeout=60)
                if method == "Generate":
                    list(answer)
                return "OK"
            except grpc.RpcError as error:
                assert error.code() in CLIENTS_FAULT, (error.code(), error.details(), request)
                assert error.details()
                return error.code().name

        @EXAMPLES
        @given(REQUESTS)
        def run(fields: dict[str, Any]) -> None:
            with tally.checking():
                tally.answers[method][ask(bounded(fields))] += 1

        run()
    tally.check_alive(cluster, method)
