"""ASGI middleware: `HeaderMiddleware` runs before Ray Serve's own code, `Boundary` is the application's outer layer.

The environment variable `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `middlewares`, and Ray Serve puts the result
before its own handling of a request: in routers behind HAProxy, and in Ray's own proxy. `HeaderMiddleware` corrects
two problems:

- Serve decodes some headers as UTF-8 and answers 500 if that fails.
- uvicorn sends chunked bodies to HTTP/1.0 clients, which do not support them.
"""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.cluster.api_common.front_end import internal_error, is_label
from quire.cluster.http.error_response import error_answer, error_headers, error_response
from quire.cluster.http.http_answers import json_response
from quire.protos.errors import InvalidRequest, QuireError

REQUEST_ID = b"x-request-id"


def middlewares() -> list[Middleware]:
    """Return the middleware; called by Ray Serve."""
    return [Middleware(HeaderMiddleware)]


class HeaderMiddleware:
    """Makes headers readable for Serve, and ends streams to HTTP/1.0 clients by closing the connection.

    It replaces request ids that cannot be logged or sent, and refuses requests with other headers that Serve cannot
    decode.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["http_version"] == "1.0":
            send = _unchunked(send)
        scope["headers"] = _with_one_label(scope["headers"])
        for name, value in scope["headers"]:
            if _is_read_by_serve(name) and not value.isascii():
                field = name.decode("latin-1")
                error = InvalidRequest(
                    f"{field} must be ASCII, got {value.decode('latin-1')[:32]!r}", field=field
                )
                answer = json_response(
                    error_answer(error),
                    status_code=error.http_status,
                    headers={**error_headers(error), REQUEST_ID.decode(): uuid.uuid4().hex},
                )
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Boundary:
    """The outermost layer: sets the request id, and turns unexpected exceptions into answers without details."""

    def __init__(self, app: ASGIApp, echo_request_id: bool):
        self._app = app
        self._echo_request_id = echo_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False
        request_id = ""

        async def send_labelled(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._echo_request_id:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
                if more := scope["state"].get("answer_headers"):
                    MutableHeaders(scope=message).update(more())
            await send(message)

        try:
            # Serve gives every request an id. An id that cannot be logged is replaced, because logs contain it.
            given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
            request_id = given if is_label(given) else uuid.uuid4().hex
            scope.setdefault("state", {})["request_id"] = request_id
            await self._app(scope, receive, send_labelled)
        except ClientDisconnect:
            # The client has disconnected while it sent the body.
            return
        except Exception as error:
            answer = error_response(
                scope, error if isinstance(error, QuireError) else internal_error(error)
            )
            if not started:
                await answer(scope, receive, send_labelled)


class HostCheck:
    """Refuses requests that name an unknown host in the header Host.

    A web page can make its own name resolve to this machine's address (DNS rebinding). To a browser this server then
    belongs to the page, which may read every answer. Such a request names the page's host. IP addresses and localhost
    belong to no page.
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str]):
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and not self._is_known(value.decode("latin-1")):
                    raise InvalidRequest(
                        "the header Host must be localhost, an IP address or one of http.allowed_hosts, got "
                        f"{value.decode('latin-1')[:64]!r}",
                        field="host",
                    )
        await self._app(scope, receive, send)

    def _is_known(self, value: str) -> bool:
        host = _PORT.sub("", value).lower().rstrip(".")
        if host in ("", "localhost") or host in self._allowed or "*" in self._allowed:
            return True
        try:
            ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


_PORT = re.compile(r":[0-9]*\Z")


def _with_one_label(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Keep only the first request id, replaced if it is not printable.

    With several ids Serve would use the first in one place and the last in another.
    """
    headers = list(headers)
    labels = [value for name, value in headers if name == REQUEST_ID]
    if not labels:
        # Serve adds an id.
        return headers
    is_good = is_label(labels[0].decode("latin-1"))
    others = [(name, value) for name, value in headers if name != REQUEST_ID]
    return [*others, (REQUEST_ID, labels[0] if is_good else uuid.uuid4().hex.encode())]


def _is_read_by_serve(name: bytes) -> bool:
    """Whether Serve decodes this header. Serve treats `-` and `_` in names as equal."""
    return name.lower().replace(b"-", b"_") in _READ_BY_SERVE


_READ_BY_SERVE = frozenset(
    {
        b"x_request_timeout_seconds",
        b"x_request_disconnect_disabled",
        b"serve_multiplexed_model_id",
        b"traceparent",
        b"tracestate",
        b"x_session_id",
    }
)


def _unchunked(send: Send) -> Send:
    """Wrap `send` so that uvicorn does not use chunked encoding.

    uvicorn's `httptools` protocol has no option for this. It stores the encoding, and the number of bytes still
    expected, in attributes of the object to which the method `send` belongs. uvicorn's other protocol lacks these
    attributes and handles HTTP/1.0 correctly.
    """
    cycle: Any = getattr(send, "__self__", None)
    if not hasattr(cycle, "chunked_encoding") or not hasattr(cycle, "expected_content_length"):
        return send

    async def send_unchunked(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            if b"content-length" not in names:
                cycle.chunked_encoding = False
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        elif cycle.chunked_encoding is False and cycle.expected_content_length == 0:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unchunked
