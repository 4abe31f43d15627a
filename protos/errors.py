"""Quire's errors and their HTTP and gRPC status codes.

Every error that can reach a client is a `QuireError`. Its message names the field, the bound and the value. Errors
travel between processes as plain data (`to_wire`, `from_wire`), never pickled.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any, ClassVar

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 61
_SHORT.maxlevel = 2
_MAX_SHOWN_CHARS = 64


class QuireError(Exception):
    """Base of all errors that are reported to clients.

    Parameters
    ----------
    message
        The problem with its bound and value; sent to the client unchanged.
    field
        Name of the wrong field as in the public API, for example `max_tokens`; None: no single field is wrong.
    retry_after_s
        Seconds after which the same request may succeed; None: not known.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    # A name in grpc.StatusCode. This module does not import grpc.
    grpc_status: ClassVar[str] = "INTERNAL"
    openai_type: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ):
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def to_wire(self) -> dict[str, Any]:
        """Convert to plain data for `from_wire`."""
        return {
            "code": self.code,
            "message": self.message,
            "field": self.field,
            "retry_after_s": self.retry_after_s,
        }


class InvalidRequest(QuireError):
    """A field has a value that is never accepted."""

    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"


class UnsupportedEncoding(InvalidRequest):
    """The body is compressed."""

    code = "unsupported_encoding"
    http_status = 415


class UnsupportedField(InvalidRequest):
    """A field is unknown, or known but not supported."""

    code = "unsupported_field"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt with its output, is longer than the model or the whole cache."""

    code = "context_length_exceeded"


class ModelNotFound(QuireError):
    """The request names a model that this application does not serve."""

    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"
    openai_type = "invalid_request_error"


class DecisionNotFound(QuireError):
    """No router has a decision for the request in its memory."""

    code = "decision_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"
    openai_type = "invalid_request_error"


class BodyTooLarge(QuireError):
    """The request has more bytes or parts than a front end accepts."""

    code = "body_too_large"
    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "invalid_request_error"


class Overloaded(QuireError):
    """A queue is full; `retry_after_s` says when to try again.

    Attributes
    ----------
    reason
        One of `OVERLOAD_REASONS`, for metrics. It does not travel: an error from a replica has "replicas".
    """

    code = "overloaded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_error"

    def __init__(self, message: str, *, reason: str = "replicas", **rest: Any):
        super().__init__(message, **rest)
        self.reason = reason


class RateLimited(QuireError):
    """A quota of the key is used up; `retry_after_s` says when to try again."""

    code = "rate_limit_exceeded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_error"


class Unauthenticated(QuireError):
    """The request has no key, or one that is unknown or expired."""

    code = "invalid_api_key"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    openai_type = "invalid_request_error"


class PermissionDenied(QuireError):
    """The key lacks the right to do this."""

    code = "permission_denied"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    openai_type = "invalid_request_error"


class Unavailable(QuireError):
    """No replica can accept the request now: all are starting, draining or lost."""

    code = "unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class DeadlineExceeded(QuireError):
    """The request's own deadline has passed."""

    code = "deadline_exceeded"
    openai_type = "timeout_error"
    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"


class SlowClient(QuireError):
    """The client did not read for too long, so its request has ended."""

    code = "slow_client"
    openai_type = "timeout_error"
    http_status = 408
    grpc_status = "ABORTED"


class Aborted(QuireError):
    """The request was cancelled, by its client or by an operator."""

    code = "aborted"
    http_status = 499
    grpc_status = "CANCELLED"


class EngineError(QuireError):
    """The engine failed while it computed the request."""

    code = "engine_error"


class StepFailed(EngineError):
    """A step with the request failed; the reason and the responsible request are unknown."""

    code = "step_failed"


class EngineCrash(EngineError):
    """The request crashes replicas, even when it is alone in its step."""

    code = "engine_crash"


_BY_CODE: dict[str, type[QuireError]] = {
    cls.code: cls
    for cls in (
        QuireError,
        InvalidRequest,
        UnsupportedField,
        ContextLengthExceeded,
        ModelNotFound,
        DecisionNotFound,
        BodyTooLarge,
        Overloaded,
        RateLimited,
        Unauthenticated,
        PermissionDenied,
        Unavailable,
        DeadlineExceeded,
        SlowClient,
        Aborted,
        EngineError,
        StepFailed,
        EngineCrash,
    )
}


# Why a request was refused as overloaded: a bound of the router's queue, its tokenizer's threads, or full replicas.
OVERLOAD_REASONS = (
    "max_wait_s",
    "max_queued_requests",
    "max_queued_tokens",
    "tokenizer",
    "replicas",
)

# Every code that a client may receive.
ERROR_CODES = tuple(sorted({*_BY_CODE, UnsupportedEncoding.code}))


def from_wire(data: dict[str, Any]) -> QuireError:
    """Rebuild an error from `QuireError.to_wire`; an unknown code gives a `QuireError`."""
    cls = _BY_CODE.get(data.get("code", ""), QuireError)
    return cls(
        str(data.get("message", "unknown error")),
        field=data.get("field"),
        retry_after_s=data.get("retry_after_s"),
    )


def shown(value: Any) -> str:
    """Return a client's value as a short text for a message, in bounded time."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 3]}..."


def described(value: Any) -> str:
    """Return a JSON value as a short text for a message, without reading its items."""
    if isinstance(value, dict):
        return f"an object with {len(value)} {'field' if len(value) == 1 else 'fields'}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shown(value)


def model_not_found(asked: str, served: Iterable[str]) -> ModelNotFound:
    """Return the error for an unknown model name."""
    names = ", ".join(map(repr, served))
    return ModelNotFound(
        f"this application does not serve the model: model must be one of {names}, got {shown(asked)}",
        field="model",
    )
