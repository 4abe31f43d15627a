"""Functions that the HTTP and the gRPC front end share: checks of input, answers, explanations."""

from __future__ import annotations

import logging
import math
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from quire.protos.errors import (
    Aborted,
    EngineError,
    InvalidRequest,
    QuireError,
    UnsupportedField,
    model_not_found,
)
from quire.router.refused_fields import NO_FUNCTIONS
from quire.router.scored_token import TokenScores
from quire.router.tool_types import ToolCall
from quire.router.types import (
    Explain,
    GenerationRequest,
    GenerationStream,
    OutputDelta,
    Service,
)

logger = logging.getLogger(__name__)

# `developer` is OpenAI's newer name for the system role; the chat templates of open checkpoints use `system`.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
TIMEOUT_HEADER = (
    "x-request-timeout-seconds"  # defined by Ray Serve; an HTTP header or gRPC metadata
)
SESSION_HEADER = "x-session-id"  # an HTTP header or gRPC metadata
TRACE_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context; HTTP headers or gRPC metadata
_INDEX = re.compile(r"\[\d+\]")
_LABEL = re.compile(r"[\x20-\x7e]{1,128}")


@contextmanager
def counting_refusals(service: Service) -> Iterator[None]:
    """Count a request that the front end refuses before it calls `generate`."""
    try:
        yield
    except QuireError as error:
        service.refused(error)
        raise


def served_role(role: str, field: str) -> str:
    """Convert a client's role to the name that chat templates use; refuse other roles.

    Most templates would write an unknown role into the prompt unchanged.

    Parameters
    ----------
    role
        The client's role.
    field
        Path of the role in the request, such as ``messages[3].role``.

    Raises
    ------
    UnsupportedField
        The role is OpenAI's old name for a tool.
    InvalidRequest
        The role is unknown.
    """
    refusal = f"{field} must be one of {', '.join(ROLES)}, got {role[:64]!r}"
    if role == "function":
        raise UnsupportedField(f"{NO_FUNCTIONS}: {refusal}", field=field)
    if role not in ROLES:
        raise InvalidRequest(refusal, field=field)
    return ROLES[role]


def is_label(value: str) -> bool:
    """Whether a text is 1 to 128 printable ASCII characters."""
    return _LABEL.fullmatch(value) is not None


def request_label(value: str, field: str) -> str:
    """Check a client's id for its request. The id is written to logs and headers, so it must not contain line breaks.

    Raises
    ------
    InvalidRequest
        The id is not 1 to 128 printable ASCII characters.
    """
    if not is_label(value):
        raise InvalidRequest(
            f"{field} must be 1 to 128 printable ASCII characters, got {len(value)} characters: "
            f"{value[:32]!r}",
            field=field,
        )
    return value


def renamed(error: QuireError, names: Mapping[str, str]) -> QuireError:
    """Return the error with the client's name of the field instead of the router's.

    Parameters
    ----------
    names
        Map from the router's to the client's names of fields, where they differ. `[]` stands for any index:
        ``tools[].name``.
    """
    field = error.field
    if field is None:
        return error
    name = names.get(field) or _renamed_in_lists(field, names)
    if name is None:
        return error
    message = error.message
    if re.match(rf"{re.escape(field)}( must|:)", message):
        message = name + message.removeprefix(field)
    return type(error)(message, field=name, retry_after_s=error.retry_after_s)


def _renamed_in_lists(field: str, names: Mapping[str, str]) -> str | None:
    """Return the client's name of a field with indices; None if it has no other name."""
    indices = iter(_INDEX.findall(field))
    name = names.get(_INDEX.sub("[]", field))
    return None if name is None else re.sub(r"\[\]", lambda _: next(indices), name)


def check_model(service: Service, name: str | None) -> None:
    """Check the model of a request that the router does not check.

    Raises
    ------
    ModelNotFound
        The application serves another model.
    Unavailable
        No replica has reported the model yet.
    """
    served = [service.model_info().name, *(entry.ref.name for entry in service.adapters())]
    if name not in (None, *served):
        raise model_not_found(name or "", served)


def timeout_seconds(value: str | None) -> float | None:
    """Parse the value of `TIMEOUT_HEADER` in seconds. A value <= 0 means no timeout (None); Serve has the same rule.

    Raises
    ------
    InvalidRequest
        The value is not a number.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} must be a number of seconds, got {value[:32]!r}",
            field=TIMEOUT_HEADER,
        )
    return seconds if seconds > 0 else None


def with_headers(
    asked: GenerationRequest, headers: Mapping[str, str]
) -> tuple[GenerationRequest, dict[str, str]]:
    """Take the deadline and the session from headers or metadata, where the body has none, and the client's trace.

    Returns
    -------
    The request; and for these fields the client's names, for errors.

    Raises
    ------
    InvalidRequest
        The value of `TIMEOUT_HEADER` is not a number.
    """
    names: dict[str, str] = {}
    if asked.deadline_s is None:
        asked = replace(asked, deadline_s=timeout_seconds(headers.get(TIMEOUT_HEADER)))
        names |= dict.fromkeys(("deadline_s", "timeout"), TIMEOUT_HEADER)
    if not asked.session and (session := headers.get(SESSION_HEADER)):
        asked = replace(asked, session=session)
        names["session"] = SESSION_HEADER
    if parent := headers.get(TRACE_HEADERS[0]):
        asked = replace(asked, trace_headers=(parent, headers.get(TRACE_HEADERS[1], "")))
    return asked, names


@dataclass(slots=True)
class Progress:
    """How much of one choice (one of a request's answers) has been sent. A stream keeps no other such state."""

    num_tokens: int = 0
    finish_reason: str | None = None  # stop | length | tool_calls
    stop_reason: str | int | None = None

    def add(self, delta: OutputDelta) -> None:
        """Count a delta.

        Raises
        ------
        Aborted
            The router has aborted the request.
        """
        if delta.finish_reason == "abort":
            raise Aborted("the request was aborted by the server")
        self.num_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    def end(self) -> None:
        """Check that the choice has a finish reason.

        Raises
        ------
        EngineError
            The choice has no finish reason: its answer is truncated and must not look complete.
        """
        if self.finish_reason is None:
            raise EngineError("the answer ended without a finish reason")


@dataclass(slots=True)
class Answer(Progress):
    """Collects the deltas of one choice into a complete answer."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenScores] | None = None
    reasoning_pieces: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: OutputDelta) -> None:
        """Count a delta and append its output; raises `Aborted` if the router has aborted the request."""
        Progress.add(self, delta)
        self.pieces.append(delta.text)
        self.token_ids += delta.token_ids
        self.reasoning_pieces.append(delta.reasoning)
        self.tool_calls += delta.tool_calls
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += delta.logprobs

    @property
    def text(self) -> str:
        """The complete text."""
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        """The complete reasoning before the text."""
        return "".join(self.reasoning_pieces)


async def collect(stream: GenerationStream, num_choices: int) -> list[Answer]:
    """Collect the complete answers of a stream, one for each choice. The caller closes the stream."""
    answers = [Answer() for _ in range(num_choices)]
    async for delta in stream:
        answers[delta.choice].add(delta)
    for answer in answers:
        answer.end()
    return answers


EXPLAIN_HEADERS = (
    "x-quire-router",
    "x-quire-replica",
    "x-quire-runner-up",
    "x-quire-predicted-cached-tokens",
    "x-quire-cached-tokens",
    "x-quire-queue-ms",
    "x-quire-attempts",
)


def explain_headers(explain: Explain, *, complete: bool) -> dict[str, str]:
    """Explain the routing decision of a request, as HTTP headers or gRPC trailing metadata.

    Parameters
    ----------
    complete
        Whether the answer is complete. False at the first token, because the request may still continue on another
        replica, which would change the number of attempts.
    """
    headers = {
        "x-quire-router": explain.router,
        "x-quire-replica": explain.replica,
        "x-quire-runner-up": explain.runner_up,
        "x-quire-predicted-cached-tokens": str(explain.predicted_cached_tokens),
    }
    if explain.answered:
        headers["x-quire-cached-tokens"] = str(explain.cached_tokens)
        headers["x-quire-queue-ms"] = f"{explain.queue_s * 1000:.1f}"
    if complete:
        headers["x-quire-attempts"] = str(explain.attempts)
    return {name: value for name, value in headers.items() if value}


def internal_error(error: Exception) -> QuireError:
    """Log an unexpected exception and return an error for the client with only the id of the log entry."""
    error_id = uuid.uuid4().hex
    logger.error("internal error, id=%s", error_id, exc_info=error)
    return QuireError(f"internal error, id={error_id}")


def retry_after_ms(retry_after_s: float) -> int:
    """Convert to milliseconds, rounded up. Never 0, because clients would retry immediately."""
    return max(1, math.ceil(retry_after_s * 1000))
