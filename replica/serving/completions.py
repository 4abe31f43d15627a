"""The replies to the unary call of a request."""

from __future__ import annotations

from quire.protos.errors import Aborted, QuireError
from quire.protos.wire import Completion, Facts, Submit


def ended(facts: Facts) -> Completion:
    """The reply to a request that the engine has ended."""
    return Completion(
        facts.finish_reason or "error",
        facts.num_prompt_tokens,
        facts.num_output_tokens,
        facts.num_cached_tokens,
        facts.queue_s,
        facts.prefill_s,
        None if facts.error is None else facts.error.to_wire(),
        facts.num_host_cached_tokens,
    )


def failed(error: QuireError, submit: Submit) -> Completion:
    """The reply to a request that the engine does not know."""
    reason = "abort" if isinstance(error, Aborted) else "error"
    return Completion(reason, len(submit.prompt_ids), 0, 0, error=error.to_wire())
