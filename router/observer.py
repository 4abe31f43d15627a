"""Receives what clients experience of their requests: latencies, refusals and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.protos.errors import ERROR_CODES, QuireError
from quire.router.types import Explain, Usage

# Where a session's request went: to the replica of its last request, to another one, or no such replica was known.
SESSION_OUTCOMES = ("same", "other", "unknown")
# How a request that was sent to a prefill replica went on: on a replica that decodes; there, because its answer ended
# soon or no other replica could take it over; or another replica computed the prompt.
PREFILL_OUTCOMES = ("moved", "stayed", "failed")


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of an answer: one for each prompt and choice of a request.

    Attributes
    ----------
    finish_reason
        stop, length, abort (the client disconnected, or the server stopped the answer) or error.
    total_s
        Seconds from the request's arrival to the end.
    router_s
        Seconds from the arrival until the prompt was checked, tokenised and hashed.
    queue_s
        Seconds from then to the first step with the request: in the queues of the router and the replica.
    prefill_s
        Seconds from that step to the first token.
    decode_s
        Seconds from the first token to the end, without `delivery_s`.
    delivery_s
        Seconds in which output waited at the router because the client had not taken the output before it.
    error_code
        The code of the error that ended the answer; empty: none did.

    The sum of the five is `total_s`. They are 0 unless `explain.answered`.
    """

    finish_reason: str
    usage: Usage
    explain: Explain
    total_s: float
    router_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    delivery_s: float = 0.0
    error_code: str = ""


class PrefixUse(NamedTuple):
    """How much of one prompt was cached somewhere, in tokens.

    Attributes
    ----------
    prompt
        The whole prompt.
    available
        The longest prefix that any one replica held, on its device or in host memory, when the request was routed.
    captured
        The prefix that the chosen replica held.
    delivered
        The prefix that the engine did not compute again.
    """

    prompt: int
    available: int
    captured: int
    delivered: int


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

    def on_handover(self, stall_s: float) -> None:
        """A stream that left a prefill replica has its next token, `stall_s` after it left."""

    def on_prefill(self, outcome: str) -> None:
        """A request that was sent to a prefill replica has got on: one of `PREFILL_OUTCOMES`."""

    def on_prediction(self, predicted_tokens: int, cached_tokens: int) -> None:
        """A replica found `cached_tokens` of a prompt in its cache; the router had predicted `predicted_tokens`."""

    def on_prefix(self, use: PrefixUse) -> None:
        """A routed request has its first token. Not called for further choices of the same prompt."""

    def on_session_request(self, outcome: str) -> None:
        """A request of a session was routed: one of `SESSION_OUTCOMES`."""

    def on_end(self, end: AnswerEnd) -> None:
        """An answer has ended, for any reason."""


def error_code(error: Exception) -> str:
    """Return the label of a refusal, one of `ERROR_CODES`; any other exception is an internal error."""
    code = error.code if isinstance(error, QuireError) else QuireError.code
    return code if code in ERROR_CODES else QuireError.code
