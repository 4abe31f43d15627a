"""What the HTTP and the gRPC front end share: checks of input, answers, explanations."""

from __future__ import annotations

import logging
import math
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from quire.protos.errors import (
    Aborted,
    EngineError,
    InvalidRequest,
    QuireError,
    UnsupportedField,
)
from quire.router.refused_fields import NO_TOOLS
from quire.router.types import Explain, GenerationStream, OutputDelta, Service, TokenScores

logger = logging.getLogger(__name__)

# `developer` is OpenAI's newer name of the system turn; open checkpoints' templates know `system`.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TOOL_ROLES = ("tool", "function")
TIMEOUT_HEADER = "x-request-timeout-seconds"  # Ray Serve's own, as HTTP header or gRPC metadata
_LABEL = re.compile(r"[\x20-\x7e]{1,128}")


@contextmanager
def counting_refusals(service: Service) -> Iterator[None]:
    """Count a refusal that a front end makes before it calls `generate`."""
    try:
        yield
    except QuireError as error:
        service.refused(error)
        raise


def served_role(role: str, field: str) -> str:
    """The role as the chat template knows it; most templates would render any word.

    Parameters
    ----------
    role
        What the client wrote.
    field
        Its place in the request: ``messages[3].role``.

    Raises
    ------
    UnsupportedField
        The role belongs to tool calls.
    InvalidRequest
        Any other unknown role.
    """
    refusal = f"{field} must be one of {', '.join(ROLES)}, got {role[:64]!r}"
    if role in _TOOL_ROLES:
        raise UnsupportedField(f"{NO_TOOLS}: {refusal}", field=field)
    if role not in ROLES:
        raise InvalidRequest(refusal, field=field)
    return ROLES[role]


def is_label(value: str) -> bool:
    """Whether a text is 1 to 128 printable ASCII characters."""
    return _LABEL.fullmatch(value) is not None


def request_label(value: str, field: str) -> str:
    """A client's own id of its request; it goes into logs and headers, so it must not forge one.

    Raises
    ------
    InvalidRequest
        Not 1 to 128 printable ASCII characters.
    """
    if not is_label(value):
        raise InvalidRequest(
            f"{field} must be 1 to 128 printable ASCII characters, got {len(value)}: "
            f"{value[:32]!r}",
            field=field,
        )
    return value


def renamed(error: QuireError, names: Mapping[str, str]) -> QuireError:
    """The error with the name by which the client knows the field.

    Parameters
    ----------
    names
        The router's names to the client's, where they differ.
    """
    field = error.field
    if field is None or field not in names:
        return error
    name, message = names[field], error.message
    if re.match(rf"{re.escape(field)}( must|:)", message):
        message = name + message.removeprefix(field)
    return type(error)(message, field=name, retry_after_s=error.retry_after_s)


def timeout_seconds(value: str | None) -> float | None:
    """What `TIMEOUT_HEADER` says, as Serve reads it: 0 and less turn the timeout off.

    Raises
    ------
    InvalidRequest
        It is no number.
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


@dataclass(slots=True)
class Progress:
    """How far one choice has come: all that a stream keeps of what it has sent."""

    num_tokens: int = 0
    finish_reason: str | None = None  # stop | length
    stop_reason: str | int | None = None

    def add(self, delta: OutputDelta) -> None:
        """Count a delta.

        Raises
        ------
        Aborted
            The router gave the request up: that is no answer.
        """
        if delta.finish_reason == "abort":
            raise Aborted("the request was aborted by the server")
        self.num_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    def end(self) -> None:
        """Check that the stream has said why it ended.

        Raises
        ------
        EngineError
            It has not: the answer is cut off, and must not look complete.
        """
        if self.finish_reason is None:
            raise EngineError("the answer ended without a finish reason")


@dataclass(slots=True)
class Answer(Progress):
    """The deltas of one choice, put together as they come."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenScores] | None = None

    def add(self, delta: OutputDelta) -> None:
        """Append a delta; see `Progress.add`."""
        Progress.add(self, delta)
        self.pieces.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += delta.logprobs

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(self.pieces)


async def collect(stream: GenerationStream, num_choices: int) -> list[Answer]:
    """The whole answers of a stream, one for each choice; the caller closes it."""
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
    """Why the request went where it went: HTTP headers, or gRPC's trailing metadata.

    Parameters
    ----------
    complete
        False at the first token, when the request may still move to another replica.
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
    """What a client learns of a defect: a number that finds it in the log, and no more."""
    error_id = uuid.uuid4().hex
    logger.error("internal error, id=%s", error_id, exc_info=error)
    return QuireError(f"internal error, id={error_id}")


def retry_after_ms(retry_after_s: float) -> int:
    """Milliseconds, rounded up; never 0, which clients read as "at once"."""
    return max(1, math.ceil(retry_after_s * 1000))
