"""Receives what clients experience of their requests: latencies, refusals and ends."""

from __future__ import annotations

from dataclasses import dataclass

from quire.protos.errors import ERROR_CODES, QuireError
from quire.router.types import Explain, Usage


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of an answer: one for each prompt and choice of a request.

    Attributes
    ----------
    finish_reason
        stop, length, abort (the client disconnected, or the server stopped the answer) or error.
    total_s
        Seconds from the request's arrival to the end.
    queue_s, prefill_s, decode_s
        Seconds from the arrival to the first step with the request, from that step to the first token, and from the
        first token to the end. Their sum is `total_s`. 0 unless `explain.answered`.
    """

    finish_reason: str
    usage: Usage
    explain: Explain
    total_s: float
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Observer:
    """Receives events of requests, for metrics. The base class ignores them."""

    def on_request(self) -> None:
        """A request has arrived."""

    def on_refusal(self, error: Exception, seconds: float) -> None:
        """A request was refused before its first token, `seconds` after its arrival."""

    def on_first_token(self, ttft_s: float) -> None:
        """An answer has its first token, `ttft_s` after the request's arrival."""

    def on_inter_token(self, itl_s: float) -> None:
        """A stream has a delta, `itl_s` after the one before."""

    def num_deltas(self) -> int:
        """Return how often `on_inter_token` was called."""
        return 0

    def on_migration(self, stall_s: float) -> None:
        """A stream that lost its replica has its next token, `stall_s` after the router noticed the loss."""

    def on_prediction(self, predicted_tokens: int, cached_tokens: int) -> None:
        """A replica found `cached_tokens` of a prompt in its cache; the router had predicted `predicted_tokens`."""

    def on_end(self, end: AnswerEnd) -> None:
        """An answer has ended, for any reason."""


def error_code(error: Exception) -> str:
    """Return the label of a refusal, one of `ERROR_CODES`; any other exception is an internal error."""
    code = error.code if isinstance(error, QuireError) else QuireError.code
    return code if code in ERROR_CODES else QuireError.code
