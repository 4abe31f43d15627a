"""The interface of the router for the bill of a request: who pays for it, and what its answers used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BilledAnswer:
    """The end of one answer of a request: one for each prompt and choice.

    Attributes
    ----------
    finish_reason
        stop, length, tool_calls, abort or error.
    is_answered
        The answer has a first token; without one it costs nothing.
    is_fork
        A further choice of a prompt, whose prompt tokens the first choice has computed.
    cached_tokens, host_cached_tokens, peer_cached_tokens
        Prompt tokens from the caches of all tiers, the part from the host tier, and the part of that from
        another node.
    queue_s, prefill_s, decode_s
        Seconds of each phase; 0 unless `is_answered`.
    """

    finish_reason: str
    is_answered: bool
    is_fork: bool
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    host_cached_tokens: int
    peer_cached_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float


class Bill(Protocol):
    """The bill of one request.

    Attributes
    ----------
    tenant
        The tenant that pays. The router's queue is fair between these.
    """

    tenant: str

    def begin(self, num_prompt_tokens: int, num_answers: int) -> None:
        """Charge the prompts of a request before it is sent to a replica.

        Parameters
        ----------
        num_answers
            Number of calls of `end` that follow.

        Raises
        ------
        RateLimited
            A quota is used up.
        """
        ...

    def end(self, answer: BilledAnswer) -> None:
        """Record the end of an answer."""
        ...
