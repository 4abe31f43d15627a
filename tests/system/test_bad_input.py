"""Bad input is refused by name, with the bound and the value, and the engine goes on serving."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import grpc
import pytest

from quire.protos import generation_pb2

pytestmark = pytest.mark.system

BAD_BODIES = {
    "empty prompt": ({"prompt": "", "add_special_tokens": False}, 400, "prompt", "at least 1"),
    "no prompt": ({}, 400, "prompt", "prompt"),
    "token id": ({"prompt": [1, 1024]}, 400, "prompt[1]", "1024"),
    "negative token id": ({"prompt": [-1]}, 400, "prompt[0]", "-1"),
    "too long": ({"prompt": [5] * 5000}, 400, "prompt", "4095"),
    "max_tokens": ({"prompt": "a", "max_tokens": 10**6}, 400, "max_tokens", "1000000"),
    "unknown field": ({"prompt": "a", "temprature": 1}, 400, "temprature", "temperature"),
    "unsupported field": ({"prompt": "a", "suffix": "b"}, 400, "suffix", "suffix"),
    "n": ({"prompt": "a", "n": 33}, 400, "n", "33"),
    "wrong type": ({"prompt": "a", "max_tokens": "7"}, 400, "max_tokens", "7"),
    "out of range": ({"prompt": "a", "top_p": 1.5}, 400, "top_p", "1.5"),
    "unknown model": ({"prompt": "a", "model": "gpt-9"}, 404, "model", "gpt-9"),
}


def post(url: str, body: bytes) -> tuple[int, dict]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def assert_serving(cluster) -> None:
    answer = cluster.openai().completions.create(
        model="embedded", prompt="A quire is", max_tokens=3, temperature=0
    )
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("case", BAD_BODIES)
def test_http(cluster, case):
    fields, status, param, words = BAD_BODIES[case]
    body = json.dumps({"model": "embedded", **fields}).encode()
    got, answer = post(f"{cluster.url}/v1/completions", body)
    assert (got, answer["error"]["param"]) == (status, param), answer
    assert words in answer["error"]["message"]
    assert_serving(cluster)


@pytest.mark.parametrize("body", [b"{", b"[1]", b'{"prompt": "a", "temperature": NaN}', b"\xff"])
def test_http_bodies_that_are_not_json_objects(cluster, body):
    status, answer = post(f"{cluster.url}/v1/completions", body)
    assert status == 400 and answer["error"]["message"]


def test_http_body_too_large(cluster):
    body = json.dumps({"model": "embedded", "prompt": "a" * (9 << 20)}).encode()
    status, answer = post(f"{cluster.url}/v1/completions", body)
    assert status == 413
    assert str(8 << 20) in answer["error"]["message"]
    assert_serving(cluster)


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({}, "INVALID_ARGUMENT", "input"),
        ({"token_ids": {"ids": [1024]}}, "INVALID_ARGUMENT", "1024"),
        ({"token_ids": {"ids": [5] * 5000}}, "INVALID_ARGUMENT", "4095"),
        ({"prompt": "a", "sampling": {"temperature": float("nan")}}, "INVALID_ARGUMENT", "nan"),
        ({"prompt": "a", "sampling": {"top_p": 0.0}}, "INVALID_ARGUMENT", "top_p"),
        ({"prompt": "a", "stop_token_ids": [4096]}, "INVALID_ARGUMENT", "4096"),
        ({"prompt": "a", "model": "gpt-9"}, "NOT_FOUND", "gpt-9"),
    ],
)
@pytest.mark.parametrize("streaming", [True, False])
def test_grpc(cluster, generation, fields, code, words, streaming):
    request = generation_pb2.GenerateRequest(**fields)
    with pytest.raises(grpc.RpcError) as error:
        list(generation.Generate(request)) if streaming else generation.GenerateOnce(request)
    assert error.value.code() == grpc.StatusCode[code]
    assert words in error.value.details()
    assert_serving(cluster)


def test_a_path_and_a_method_that_are_not_served_get_those_that_are(cluster):
    status, answer = post(f"{cluster.url}/v1/images/generations", b"{}")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert "POST /v1/chat/completions" in answer["error"]["message"]
    with cluster.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/quire.v1.Generation/Translate")(b"", timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (
        "quire.v1.Generation has Detokenize, Embed, Generate, GenerateOnce"
        in caught.value.details()
    )


def test_bytes_that_are_no_message_are_refused(cluster):
    with cluster.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/quire.v1.Generation/GenerateOnce")(b"\xff" * 9, timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the request must be a quire.v1.GenerateRequest"
