"""Who is told of what clients experience."""

from __future__ import annotations

from quire.router.types import Explain, Usage


class Observer:
    """Told of what clients experience; the base class ignores it."""

    def on_first_token(self, ttft_s: float) -> None:
        """Seconds from the request's arrival to its first token."""

    def on_inter_token(self, itl_s: float) -> None:
        """Seconds between two deltas of one stream."""

    def on_refusal(self, seconds: float) -> None:
        """A request was refused as overloaded, so long after its arrival."""

    def on_move(self, stall_s: float) -> None:
        """A stream that lost its replica has its next token; seconds since the router knew of the loss."""

    def on_prediction(self, predicted_tokens: int, cached_tokens: int) -> None:
        """How many of a prompt's tokens the router expected in the replica's cache, and how many there were."""

    def on_end(self, usage: Usage, explain: Explain) -> None:
        """The stream ended, for whatever reason."""
