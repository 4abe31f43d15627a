"""The one error hierarchy of Quire, and the one table that maps it to HTTP and gRPC.

Every error that can reach a client is a `QuireError` with a message the client can act on: it names the
field, the bound and the value. Errors cross the bus as plain data (`to_wire`, `from_wire`), never pickled.
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
    """Base of every error with a meaning for a client.

    Parameters
    ----------
    message
        What is wrong, with the bound and the value; shown to the client as it is.
    field
        Name of the request field at fault, in the spelling of the public API (`max_tokens`), or None.
    retry_after_s
        Seconds after which the same request may succeed, or None.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = (
        "INTERNAL"  # a name in grpc.StatusCode: this module imports no grpc
    )
    openai_type: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ):
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def to_wire(self) -> dict[str, Any]:
        """Plain data for the bus; `from_wire` gives an equal error on the other side."""
        return {
            "code": self.code,
            "message": self.message,
            "field": self.field,
            "retry_after_s": self.retry_after_s,
        }


class InvalidRequest(QuireError):
    """A field has a value that can never be served."""

    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"


class UnsupportedEncoding(InvalidRequest):
    """The body is compressed."""

    code = "unsupported_encoding"
    http_status = 415


class UnsupportedField(InvalidRequest):
    """A field that is known but not served (yet), or that nobody knows."""

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
    """No router remembers a decision for the request."""

    code = "decision_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"
    openai_type = "invalid_request_error"


class BodyTooLarge(QuireError):
    """The request has more bytes, or more parts, than a front end reads."""

    code = "body_too_large"
    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "invalid_request_error"


class Overloaded(QuireError):
    """A queue is full; `retry_after_s` says when to come back."""

    code = "overloaded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_error"


class Unavailable(QuireError):
    """No replica can take the request now: starting, draining or lost."""

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
    """The client did not take what was sent to it for too long; its request has ended."""

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
    """A step with the request in it failed, for what reason and because of whom is not known."""

    code = "step_failed"


class EngineCrash(EngineError):
    """The request brings down whatever computes it, also when it is alone in its step."""

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
        Unavailable,
        DeadlineExceeded,
        SlowClient,
        Aborted,
        EngineError,
        StepFailed,
        EngineCrash,
    )
}


# All that a client may see.
ERROR_CODES = tuple(sorted({*_BY_CODE, UnsupportedEncoding.code}))


def from_wire(data: dict[str, Any]) -> QuireError:
    """Rebuild the error that `QuireError.to_wire` described; an unknown code becomes a `QuireError`."""
    cls = _BY_CODE.get(data.get("code", ""), QuireError)
    return cls(
        str(data.get("message", "unknown error")),
        field=data.get("field"),
        retry_after_s=data.get("retry_after_s"),
    )


def shown(value: Any) -> str:
    """A client's value for a message: short, whatever it is, and in no time."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 3]}..."


def described(value: Any) -> str:
    """A JSON value for a message: short, whatever it is, and without walking into it."""
    if isinstance(value, dict):
        return f"an object with {len(value)} {'field' if len(value) == 1 else 'fields'}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shown(value)


def model_not_found(asked: str, served: Iterable[str]) -> ModelNotFound:
    """The refusal of a model by its name."""
    names = ", ".join(map(repr, served))
    return ModelNotFound(
        f"this model is not served here: model must be one of {names}, got {shown(asked)}",
        field="model",
    )
