"""Hostile requests to a running cluster: HAProxy, Ray Serve and our front ends together."""

from __future__ import annotations

import json
import socket

import grpc
import httpx
import pytest
from live import Cluster

from quire.protos import generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.system

BODY = {"prompt": "Once", "max_tokens": 2}


def exchange(cluster: Cluster, body: dict, *headers: bytes, version: bytes = b"1.1") -> bytes:
    raw = json.dumps(body).encode()
    lines = [
        b"host: localhost",
        b"content-type: application/json",
        b"content-length: %d" % len(raw),
    ]
    lines += [*headers, *([b"connection: close"] if version == b"1.1" else [])]
    with socket.create_connection(("127.0.0.1", cluster.http_port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/%b\r\n%b\r\n\r\n%b" % (version, b"\r\n".join(lines), raw)
        )
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


@pytest.mark.parametrize("value", [b"\xe9", b"x" * 200, b"\xff"])
def test_a_request_id_that_cannot_be_logged_is_replaced(cluster: Cluster, value: bytes) -> None:
    assert exchange(cluster, BODY, b"x-request-id: " + value).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "name", [b"x-request-timeout-seconds", b"serve_multiplexed_model_id", b"x-session-id"]
)
def test_headers_that_serve_cannot_decode_are_refused_by_name(
    cluster: Cluster, name: bytes
) -> None:
    answer = exchange(cluster, BODY, name + b": \xe9")
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"param":"%b"' % name in answer


def test_a_stream_to_http_1_0_ends_with_the_connection(cluster: Cluster) -> None:
    answer = exchange(cluster, {**BODY, "stream": True}, version=b"1.0")
    head, events = answer.split(b"\r\n\r\n", 1)
    assert b"transfer-encoding" not in head.lower() and events.endswith(b"data: [DONE]\n\n")


def test_a_grpc_message_of_millions_of_turns_is_refused(cluster: Cluster) -> None:
    turns = [generation_pb2.ChatMessage(role="user", content="a")] * 1_000_000
    messages = generation_pb2.ChatMessages(messages=turns)
    for count, size in ((1, "too many fields or bytes"), (4, "too many bytes for gRPC")):
        request = generation_pb2.GenerateRequest(messages=messages)
        for _ in range(count - 1):
            request.messages.MergeFrom(messages)
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(
            f"127.0.0.1:{cluster.grpc_port}", options, grpc.Compression.Gzip
        ) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.GenerateOnce(request, timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, (size, caught.value)
    assert httpx.post(f"{cluster.url}/v1/completions", json=BODY, timeout=60).status_code == 200
