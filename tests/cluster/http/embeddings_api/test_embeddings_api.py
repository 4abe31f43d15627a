"""`POST /v1/embeddings` with openai's own client: both encodings, every form of input, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from live_app import serving

from quire.cluster.http.embeddings_api.embeddings_body import EmbeddingsRequest
from quire.cluster.http.embeddings_api.embeddings_routes import EmbeddingList, add_routes
from quire.protos.errors import InvalidRequest, Overloaded
from quire.router.request.params import DEFAULT_LIMITS
from quire.router.scoring.embedder import MAX_INPUTS

ASKED: dict[str, Any] = {"model": "acme/tiny", "input": "Help!"}


@pytest.fixture
def http(service) -> Iterator[httpx.Client]:
    with serving(service, apis=[add_routes]) as client:
        yield client


@pytest.fixture
def client(http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, timeout=30)


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/embeddings", json={**ASKED, **fields})


# The values of the service's embeddings are the input's length, half of it, a third and so on. Numbers have as many
# digits as float32 needs.
def is_of(found: list[float], length: int, number: int = 4) -> bool:
    return np.array_equal(np.float32(found), np.float32(length) / np.float32(range(1, 1 + number)))


@pytest.mark.parametrize("form", ["float", "base64", None])
@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ("seven..", [7]),
        (["seven..", "two"], [7, 3]),
        ([5, 6, 7], [3]),
        ([[5, 6, 7], [1]], [3, 1]),
    ],
)
def test_openai_s_client_reads_each_form(client, service, form, given, lengths):
    """By default the client asks for base64 and decodes it."""
    options = {} if form is None else {"encoding_format": form}
    answer = client.embeddings.create(**{**ASKED, "input": given}, **options)
    assert (answer.object, answer.model) == ("list", "acme/tiny")
    assert [item.index for item in answer.data] == list(range(len(lengths)))
    for item, length in zip(answer.data, lengths, strict=True):
        vector: Any = item.embedding
        if form == "base64":
            vector = np.frombuffer(base64.b64decode(vector), "<f4").tolist()
        assert is_of(vector, length)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(lengths)
    asked = service.requests[-1]
    is_one = not isinstance(given, list) or isinstance(given[0], int)
    plain = given if isinstance(given, str) else tuple(given)
    if not is_one:
        plain = tuple(one if isinstance(one, str) else tuple(one) for one in given)
    assert (asked.prompt if is_one else asked.prompts) == plain


def test_the_answer_has_its_documented_form_and_the_fields_reach_the_router(http, service):
    answer = post(
        http,
        **dict(input=["a", "bc"], dimensions=2, cache_salt="salt", prompt_cache_key="s"),
        **dict(priority=3, timeout=9, add_special_tokens=False, user="u"),
    )
    assert answer.status_code == 200 and answer.headers["x-quire-replica"] == "replica-a"
    found = EmbeddingList.model_validate(answer.json())
    assert all(is_of(item.embedding, item.index + 1, 2) for item in found.data)
    assert found.usage.prompt_tokens_details.cached_tokens == 3
    asked = service.requests[-1]
    assert (asked.tenant, asked.session, asked.priority, asked.deadline_s) == ("salt", "s", 3, 9)
    assert asked.add_special_tokens is False
    headers = {"x-request-timeout-seconds": "7", "x-session-id": "t"}
    http.post("/v1/embeddings", json=ASKED, headers=headers)
    assert (service.requests[-1].deadline_s, service.requests[-1].session) == (7, "t")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (dict(input=None), "input", "input is required"),
        (dict(input=""), "input", "input must be a string of at least 1 character"),
        (dict(input=["a", ""]), "input[1]", "input[1] must be a string of at least 1 character"),
        (dict(input=["a", 1]), "input[1]", "input[1] must be a string of at least 1 character"),
        (dict(input=[]), "input", "input must be a string, a list of token ids, or a list"),
        (dict(input=[1.5]), "input", "input must be a string, a list of token ids, or a list"),
        (dict(input={}), "input", "input must be a string, a list of token ids, or a list"),
        (dict(input=[1, "a"]), "input", "input must be a list of at least 1 token id"),
        (dict(input=[1, True]), "input", "input must be a list of at least 1 token id"),
        (dict(input=[[1], []]), "input[1]", "input[1] must be a list of at least 1 token id"),
        (dict(input=["a"] * (MAX_INPUTS + 1)), "input", f"input must have at most {MAX_INPUTS}"),
        (dict(input=["a", "a" * 513]), "input[1]", "input[1]: 513 tokens; the model takes at most"),
        (dict(input=[5] * 513), "input", "input: 513 tokens; the model takes at most 512"),
        (dict(dimensions="8"), "dimensions", "dimensions must be an integer"),
        (dict(encoding_format="int8"), "encoding_format", "'float' or 'base64'"),
        (dict(messages=[]), "messages", "only texts and token ids are embedded"),
        (dict(truncate_prompt_tokens=5), "truncate_prompt_tokens", "inputs are not truncated"),
        (dict(dimension=5), "dimension", "did you mean 'dimensions'?"),
        (dict(temperature=0.5), "temperature", "/v1/embeddings has no such field"),
    ],
)
def test_bad_input_is_refused_by_name(http, fields, param, message):
    answer = post(http, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param and message in error["message"]


@pytest.mark.parametrize("divide", [False, True])
def test_the_number_of_ids_has_a_bound(divide):
    bound = DEFAULT_LIMITS.max_prompt_ids
    for num_ids in (bound, bound + 1):
        ids: list[Any] = [5] * num_ids
        body = EmbeddingsRequest(input=[ids[:9], ids[9:]] if divide else ids)
        if num_ids == bound:
            assert body.to_request("r").max_tokens == 1
            continue
        with pytest.raises(InvalidRequest, match=f"input must have at most {bound} token ids"):
            body.to_request("r")


def test_a_refusal_has_its_status_and_is_counted(http, service):
    service.refusal = Overloaded("full", retry_after_s=3.0)
    answer = post(http)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
    service.refusal = None
    post(http, input=[])
    assert len(service.refused_by_front_end) == 1
