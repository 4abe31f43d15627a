"""The router's reports on its requests, as clients experience them."""

from __future__ import annotations

from dataclasses import dataclass

from quire.protos.errors import ERROR_CODES, QuireError
from quire.router.types import Explain, Usage


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How an answer ended: one for each prompt and choice of a request that was sent to a replica.

    Attributes
    ----------
    finish_reason
        stop, length, abort (its client left, or the server stopped it) or error.
    total_s
        From the request's arrival to the end.
    queue_s, prefill_s, decode_s
        From the arrival to the first step with it, from there to its first token, and from there to its end; their
        sum is `total_s`. 0 unless `explain.answered`.
    """

    finish_reason: str
    usage: Usage
    explain: Explain
    total_s: float
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Observer:
    """Hears what happens to requests; the base class ignores it."""

    def on_request(self) -> None:
        """A request has arrived."""

    def on_refusal(self, error: Exception, seconds: float) -> None:
        """A request was refused before its first token, so long after its arrival."""

    def on_first_token(self, ttft_s: float) -> None:
        """Seconds from the request's arrival to its first token."""

    def on_inter_token(self, itl_s: float) -> None:
        """Seconds between two deltas of one stream."""

    def on_migration(self, stall_s: float) -> None:
        """A stream that lost its replica has its next token; seconds since the router knew of the loss."""

    def on_prediction(self, predicted_tokens: int, cached_tokens: int) -> None:
        """How many of a prompt's tokens the router expected in the replica's cache, and how many there were."""

    def on_end(self, end: AnswerEnd) -> None:
        """An answer has ended, for whatever reason."""


def error_code(error: Exception) -> str:
    """The label of a refusal: one of `ERROR_CODES`; a defect is an internal error."""
    code = error.code if isinstance(error, QuireError) else QuireError.code
    return code if code in ERROR_CODES else QuireError.code
