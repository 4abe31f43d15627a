"""The spans of one request.

```
 chat MODEL     ├──────────────────────────────────────────────────────────────┤  as its client sees it
   tokenise     ├───┤                                                             template, tokenizer, hashes
   queue.router     ├──┤                                                          admission
   route               ├┤                                                         the decision and its cost terms
   attempt               ├─────────────────────┤                                  on the first replica, until lost
     queue.replica        ├───┤
     prefill                  ├──────┤
     decode                          ├─────────┤
   queue.router                                ├─┤                                looks for another replica
   route, attempt, ...                           ├─────────────────────────────┤  which links to the lost attempt
   delivery                            ├───────────────────────────────────────┤  first delta to the last one taken
```

Replicas export nothing. A replica reports with an attempt's first token how long the attempt waited and how long its
prefill took, by its own clock. The router lays these durations between the submission and the arrival of the first
token, by its own clock, with half of the remaining time (the way to the replica and back) on either side. So no clocks
need to agree, and the engine's thread does no work for traces.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from quire.protos.errors import QuireError
from quire.protos.wire import Facts
from quire.router.observer import AnswerEnd, error_code
from quire.router.trace.span import Attributes, AttributeValue, Span, SpanEvent
from quire.router.trace.trace_context import TraceContext
from quire.router.types import GenerationRequest, Usage

# Spans of one request; further ones are left out. A request may have 128 choices, and many prompts.
MAX_SPANS = 1024


class RequestTrace:
    """The trace of one request, from its arrival until its last answer has ended.

    Parameters
    ----------
    parent
        The client's span. `span_id` 0: the request starts the trace.
    export
        Takes the trace at its end.
    clock_zero_s
        Unix time at second 0 of the router's clock.

    Attributes
    ----------
    spans
        The finished spans; the request's own span is the last one.
    """

    def __init__(
        self,
        parent: TraceContext,
        rng: random.Random,
        export: Callable[[RequestTrace], None],
        *,
        arrived_s: float,
        clock_zero_s: float,
    ):
        self.trace_id = parent.trace_id
        self.state = parent.state
        self.clock_zero_s = clock_zero_s
        self.spans: list[Span] = []
        self._rng = rng
        self._export = export
        self._num_left_out = 0
        self._root = Span("", self._new_id(), parent.span_id, arrived_s, arrived_s)
        # The call of the service, and each answer.
        self._num_open = 1
        self._usage = Usage()
        self._finish_reasons: list[str] = []

    def describe_request(
        self, request: GenerationRequest, operation: str, model: str, router_id: str
    ) -> None:
        """Name the request's span, and set the attributes that the request has."""
        self._root.name = f"{operation} {model}"
        found: dict[str, AttributeValue | None] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": model,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.top_p": request.top_p,
            "gen_ai.request.top_k": request.top_k,
            "gen_ai.request.seed": request.seed,
            "gen_ai.request.frequency_penalty": request.frequency_penalty,
            "gen_ai.request.presence_penalty": request.presence_penalty,
            "gen_ai.request.choice.count": None if request.n == 1 else request.n,
            "gen_ai.conversation.id": request.session or None,
            "quire.request.id": request.request_id,
            "quire.router": router_id,
        }
        self._root.attributes.update((k, v) for k, v in found.items() if v is not None)

    def add(
        self, name: str, start_s: float, end_s: float, attributes: Attributes | None = None
    ) -> Span:
        """Add a finished child of the request's span, and return it."""
        return self.add_child(self._root, name, start_s, end_s, attributes)

    def add_child(
        self,
        parent: Span,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes | None = None,
    ) -> Span:
        """Add a finished child of any span, and return it."""
        span = Span(name, self._new_id(), parent.span_id, start_s, end_s, attributes or {})
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self._num_left_out += 1
        return span

    def event(self, name: str, at_s: float, attributes: Attributes) -> None:
        """Add an event to the request's span."""
        if len(self._root.events) < MAX_SPANS:
            self._root.events.append(SpanEvent(name, at_s, attributes))

    def answer_began(self) -> None:
        """Keep the trace open for one more answer."""
        self._num_open += 1

    def answer_ended(self, end: AnswerEnd, is_fork: bool, now_s: float) -> None:
        """Count an answer that has ended. The prompt of a fork is that of another answer."""
        usage, total = end.usage, self._usage
        if end.explain.answered:
            self.set("gen_ai.response.time_to_first_chunk", end.explain.ttft_s)
        if not is_fork:
            total.prompt_tokens += usage.prompt_tokens
            total.cached_tokens += usage.cached_tokens
        total.completion_tokens += usage.completion_tokens
        total.reasoning_tokens += usage.reasoning_tokens
        self._finish_reasons.append(end.finish_reason)
        self.leave(now_s)

    def set(self, name: str, value: AttributeValue) -> None:
        """Set an attribute of the request's span, unless it is set already."""
        self._root.attributes.setdefault(name, value)

    def fail(self, error: Exception) -> None:
        """Record that the request, or one of its answers, ended with an error.

        The span's status says so only if the server is at fault, and not the request.
        """
        code = error_code(error)
        self.set("error.type", code)
        if not isinstance(error, QuireError) or error.http_status >= 500:
            self._root.error = code

    def on_tokenised(
        self, start_s: float, end_s: float, num_tokens: int, answer_id: str = ""
    ) -> None:
        """Record that a prompt has been rendered, tokenised and hashed."""
        self.add("tokenise", start_s, end_s, {"gen_ai.usage.input_tokens": num_tokens})
        if answer_id:
            self.set("gen_ai.response.id", answer_id)

    def refused(self, error: BaseException, now_s: float) -> None:
        """End the trace of a request without an answer. One that is no `Exception`: the client has left."""
        if isinstance(error, Exception):
            self.fail(error)
        else:
            self._finish_reasons = self._finish_reasons or ["abort"]
        self.end(now_s)

    def leave(self, now_s: float) -> None:
        """Close one holder of the trace: the service's call or an answer. The last one ends the trace."""
        self._num_open -= 1
        if self._num_open == 0:
            self.end(now_s)

    def end(self, now_s: float) -> None:
        """End the request's span and export the trace. Idempotent; what ends later is left out."""
        if self.spans and self.spans[-1] is self._root:
            return
        root, usage = self._root, self._usage
        root.end_s = now_s
        if self._finish_reasons:
            root.attributes |= {
                "gen_ai.response.finish_reasons": tuple(self._finish_reasons),
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
            }
        if self._num_left_out:
            root.attributes["quire.trace.num_left_out"] = self._num_left_out
        self.spans.append(root)
        self._export(self)

    def _new_id(self) -> int:
        return self._rng.getrandbits(64) or 1


class AnswerTrace:
    """The spans of one answer: its waits, its decisions and its attempts.

    Parameters
    ----------
    choice
        Index of the answer among those of its prompt.
    """

    def __init__(self, trace: RequestTrace, choice: int, *, is_fork: bool):
        self._trace = trace
        self._own: Attributes = {"quire.choice": choice} if choice else {}
        self._is_fork = is_fork
        # Since when the answer waits for a replica; None: it is on one.
        self._waits_since_s: float | None = None
        self._attempt: Span | None = None
        self._num_attempts = 0
        self._lost_id = 0
        # Start and end of the current attempt's prefill, from its first token.
        self._prefill: tuple[float, float] | None = None
        self._facts = Facts()
        self._first_token_s: float | None = None
        self._unread_s = 0.0
        trace.answer_began()

    def on_ready(self, now_s: float) -> None:
        """Record that the prompt is ready to be routed."""
        self._waits_since_s = now_s

    def on_submit(
        self, replica: str, decided_s: float, now_s: float, attributes: Attributes
    ) -> None:
        """Record an attempt.

        Parameters
        ----------
        decided_s
            When the decision for this replica began.
        attributes
            The explanation of the decision.
        """
        waited_s = decided_s if self._waits_since_s is None else self._waits_since_s
        self._trace.add("queue.router", waited_s, decided_s, dict(self._own))
        self._trace.add("route", decided_s, now_s, self._own | attributes)
        self._num_attempts += 1
        self._attempt = self._trace.add(
            "attempt",
            now_s,
            now_s,
            {**self._own, "quire.replica": replica, "quire.attempt": self._num_attempts},
        )
        if self._lost_id:
            self._attempt.links.append(self._lost_id)
        self._waits_since_s = self._prefill = None

    def on_tokens(self, facts: Facts, replica: str, now_s: float) -> None:
        """Record a delta; the first one of an attempt brings the times of the engine."""
        attempt = self._attempt
        if attempt is None or self._prefill is not None:
            return
        self._first_token_s = self._first_token_s or now_s
        # The half of the time that the engine does not account for.
        way_s = max(0.0, now_s - attempt.start_s - facts.queue_s - facts.prefill_s) / 2
        end_s = now_s - way_s
        self._prefill = end_s - facts.prefill_s, end_s
        self._facts = facts
        attempt.attributes["quire.replica"] = replica

    def on_lost(self, reason: str, num_emitted: int, now_s: float) -> None:
        """Record that the current attempt is over before its answer: `on_release` follows."""
        attempt = self._attempt
        if attempt is None:
            return
        attempt.error, self._lost_id = reason, attempt.span_id
        self._trace.event(
            "quire.failover",
            now_s,
            {
                **self._own,
                "quire.replica": attempt.attributes["quire.replica"],
                "quire.reason": reason,
                "quire.emitted_tokens": num_emitted,
            },
        )

    def on_release(self, unread_s: float, arrived_s: float | None, now_s: float) -> None:
        """Record the end of the current attempt.

        Parameters
        ----------
        unread_s
            Seconds in which its output waited for the client.
        arrived_s
            When its last output arrived; None: it ended before that.
        """
        self._unread_s += unread_s
        self._waits_since_s = now_s
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        end_s = attempt.end_s = now_s if arrived_s is None else arrived_s
        if self._prefill is None:
            return
        start_s, prefilled_s = self._prefill
        facts = self._facts
        add = self._trace.add_child
        add(attempt, "queue.replica", max(attempt.start_s, start_s - facts.queue_s), start_s)
        add(
            attempt,
            "prefill",
            start_s,
            prefilled_s,
            {
                "quire.cached_tokens": facts.num_cached_tokens,
                "quire.host_cached_tokens": facts.num_host_cached_tokens,
                "quire.peer_cached_tokens": facts.num_peer_cached_tokens or 0,
            },
        )
        add(attempt, "decode", prefilled_s, max(prefilled_s, end_s))

    def on_end(self, end: AnswerEnd, error: Exception | None, now_s: float) -> None:
        """Record the end of the answer; `error` has ended it."""
        if error is not None:
            self._trace.fail(error)
        if self._first_token_s is not None:
            self._trace.add(
                "delivery",
                self._first_token_s,
                now_s,
                {
                    **self._own,
                    "quire.unread_s": self._unread_s,
                    "gen_ai.usage.output_tokens": end.usage.completion_tokens,
                },
            )
        self._trace.answer_ended(end, self._is_fork, now_s)
