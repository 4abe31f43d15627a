"""Errors of the Messages API in Anthropic's form."""

from __future__ import annotations

from typing import Any

import orjson

from quire.protos.errors import ContextLengthExceeded, Overloaded, QuireError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Anthropic's statuses where they differ: a server that is overloaded or not ready, and a deadline that has passed.
_STATUSES = {503: 529, 408: 504}
# Claude Code compacts a conversation when an error begins so.
TOO_LONG = "prompt is too long"


def error_form(
    status: int, code: str, message: str, request_id: str
) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Return Anthropic's status, headers and body of an error; an `error_response.ErrorForm`."""
    status = 529 if code == Overloaded.code else _STATUSES.get(status, status)
    if code == ContextLengthExceeded.code:
        message = f"{TOO_LONG}: {message}"
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    body = {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }
    return status, request_id_header(request_id), body


def request_id_header(request_id: str) -> dict[str, str]:
    """Return the header that has Anthropic's name of `x-request-id`."""
    return {"request-id": request_id}


def error_event(error: QuireError, request_id: str) -> bytes:
    """Encode the last event of a failed stream."""
    _, _, body = error_form(error.http_status, error.code, error.message, request_id)
    return b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"
