"""With Ray Serve's code for headers: no header value leads to a 5xx, and HTTP/1.0 clients get no chunked bodies."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from ray.serve._private import http_util
from ray.serve._private.utils import call_function_from_import_path
from starlette.types import Receive, Scope, Send

from quire.cluster.http.http_api import build_app
from quire.cluster.proxies.ray_settings import SERVE_DEFAULTS

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
BODY = json.dumps({"prompt": "x", "max_tokens": 3})
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def door(service_class) -> Iterator[tuple[int, object]]:
    """A server in which a request passes the same code as in a Serve replica."""
    service = service_class()
    app = build_app(lambda: service, max_body_bytes=65536)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the headers like `ray.serve._private.replica` and `proxy`."""
        headers = dict(scope["headers"])
        headers.get(b"x-request-id", b"").decode("utf-8")
        http_util.parse_disconnect_disabled_header(headers)
        http_util.parse_request_timeout_header(headers, None)
        http_util.parse_session_id_header(headers)
        for key, value in scope["headers"]:
            name = key.decode().lower().replace("-", "_")
            if name in ("serve_multiplexed_model_id", "traceparent", "tracestate"):
                value.decode()
        await app(scope, receive, send)

    path = SERVE_DEFAULTS[CALLBACK]
    middlewares = call_function_from_import_path(path) if path else []
    app_of_serve = http_util._apply_middlewares(serve, middlewares)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app_of_serve, log_level="critical", lifespan="off", http="httptools")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()[1], service
    server.should_exit = server.force_exit = True
    thread.join()


def exchange(port: int, *headers: bytes, body: str = BODY, version: bytes = b"1.1") -> bytes:
    """Return all bytes that the server sends until it closes the connection."""
    raw = body.encode()
    given = b"".join(header + b"\r\n" for header in headers)
    if version == b"1.1":
        given += b"connection: close\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(
            b"POST %b HTTP/%b\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b"
            % (PATH.encode(), version, len(raw), given, raw)
        )
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


@pytest.mark.parametrize(
    "value", [b"\xe9", b"\xff\xfe", b"x" * 200, b"", b"a\tb", "日本".encode(), b"\xed\xa0\x80"]
)
def test_a_request_id_that_cannot_be_logged_is_replaced(door, value: bytes) -> None:
    port, service = door
    for headers in (
        (b"x-request-id: " + value,),
        (b"X-Request-Id: " + value, b"x-request-id: " + value),
    ):
        answer = exchange(port, *headers)
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        (sent,) = (
            line for line in answer.split(b"\r\n") if line.lower().startswith(b"x-request-id:")
        )
        assert sent.split(b": ")[1].decode() == service.requests[-1].request_id
        assert len(service.requests[-1].request_id) == 32


NAMES = [
    "x-request-timeout-seconds", "x-request-disconnect-disabled", "x-session-id", "serve_multiplexed_model_id",
    "serve-multiplexed-model-id", "traceparent", "tracestate", "authorization", "content-type", "content-encoding",
    "last-event-id", "accept", "accept-encoding", "user-agent", "cookie", "origin", "referer", "x-forwarded-for",
    "x-forwarded-proto", "forwarded", "expect", "te", "upgrade", "x-anything", "baggage", "range", "if-none-match",
]  # fmt: skip
VALUES = [
    b"\xe9",
    b"\xff" * 50,
    b"",
    b"\x80",
    "é".encode(),
    b"nan",
    b"inf",
    b"-1",
    b"1e999",
    b"9" * 5000,
    b"a" * 9000,
]


@pytest.mark.parametrize("name", NAMES)
def test_no_header_value_makes_a_5xx(door, name: str) -> None:
    port, _ = door
    for value in VALUES:
        answer = exchange(port, name.encode() + b": " + value)
        status = int(answer.split(b" ")[1])
        assert status < 500, (value, answer)
        if not value.isascii() and name in NAMES[:7]:
            error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
            assert (status, error["param"]) == (400, name)


@pytest.mark.parametrize("keep", [(), (b"connection: keep-alive",)])
def test_a_stream_to_http_1_0_ends_with_the_connection(door, keep) -> None:
    port, _ = door
    body = json.dumps({"prompt": "x", "max_tokens": 30, "stream": True})
    head, events = exchange(port, *keep, body=body, version=b"1.0").split(b"\r\n\r\n", 1)
    assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
    assert events.startswith((b"data: ", b"id: ")) and events.endswith(b"data: [DONE]\n\n")
    assert events.count(b'"finish_reason":"length"') == 1
    chunked = exchange(port, body=body)
    assert b"transfer-encoding: chunked" in chunked.lower()


def test_a_whole_answer_to_http_1_0_has_its_length(door) -> None:
    port, _ = door
    head, body = exchange(port, version=b"1.0").split(b"\r\n\r\n", 1)
    assert b"content-length: %d" % len(body) in head.lower() and json.loads(body)["choices"]
