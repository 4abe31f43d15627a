"""Responses of errors, in the form of the API that the client uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from quire.cluster.api_common.front_end import retry_after_ms
from quire.cluster.http.http_answers import json_response
from quire.protos.errors import QuireError, Unauthenticated

# The form of an API's errors: from HTTP status, code, message and the request's id to that API's status, headers, JSON.
ErrorForm = Callable[[int, str, str, str], tuple[int, dict[str, str], Any]]


def error_response(scope: Scope, error: QuireError) -> Response:
    """Make the response of an error."""
    detail = error_answer(error)["error"]
    return formed_response(scope, error.http_status, detail, error_headers(error))


def formed_response(
    scope: Scope, status: int, detail: dict[str, Any], headers: dict[str, str]
) -> Response:
    """Make the response of an error in the form of the API to which the path belongs; by default OpenAI's."""
    body: Any = {"error": detail}
    path = scope["path"].removeprefix(scope.get("root_path", "")) + "/"
    forms: dict[str, ErrorForm] = scope["app"].state.error_forms
    for begin, form in forms.items():
        if path.startswith(f"{begin}/"):
            status, own_headers, body = form(
                status, detail["code"], detail["message"], scope["state"]["request_id"]
            )
            headers = {**own_headers, **headers}
    return json_response(body, status_code=status, headers=headers)


def error_answer(error: QuireError) -> dict[str, Any]:
    """Build an `ErrorAnswer`."""
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.field,
            "code": error.code,
        }
    }


def error_headers(error: QuireError) -> dict[str, str]:
    """Headers that say when to retry: whole seconds, and milliseconds for OpenAI's client. 401 asks for a key."""
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    if error.retry_after_s is None:
        return {}
    return {
        "retry-after": str(max(1, math.ceil(error.retry_after_s))),
        "retry-after-ms": str(retry_after_ms(error.retry_after_s)),
    }
