"""Keeps the numbers of one stream: usage, explanation of its routing, latencies, and the charge to its tenant."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from quire.protos.wire import Facts
from quire.router.admission.fair_queue import TOKENS_PER_GENERATED
from quire.router.bill import BilledAnswer
from quire.router.observer import AnswerEnd, PrefixUse, error_code
from quire.router.policy.policy import Ranking, RouteRequest
from quire.router.request.context import RouterContext
from quire.router.trace.request_trace import AnswerTrace
from quire.router.trace.span import Attributes
from quire.router.transport.transport import Attempt
from quire.router.types import Explain, GenerationRequest, Origin, Usage


class Accounting:
    """The numbers of one stream.

    Attributes
    ----------
    usage, explain
        The objects that the stream shows to its reader; they change until the stream ends.
    arrived_s
        Time of the request's arrival on the router's clock.
    is_fork
        A further choice, whose prompt another choice has computed.
    """

    def __init__(
        self,
        router: RouterContext,
        request: GenerationRequest,
        origin: Origin,
        num_prompt_tokens: int,
        arrived_s: float,
        trace: AnswerTrace | None = None,
        *,
        is_fork: bool = False,
    ):
        self.usage = Usage(prompt_tokens=num_prompt_tokens)
        self.explain = Explain(router=router.router_id)
        self.arrived_s = arrived_s
        self._router = router
        self._request_id = request.request_id
        self._answer_id = origin.answer_id
        self._payer = request.payer
        self._bill = request.bill
        self._is_fork = is_fork
        self._trace = trace
        # When the prompt was ready to be routed.
        self._ready_s: float | None = None
        self._sent_s = arrived_s
        self._first_token_s: float | None = None
        self._prefill_s = 0.0
        self._last_delta_s = arrived_s
        self._unread_s = 0.0
        # The longest cached prefix of the prompt at the last decision; None: there was no decision.
        self._available_tokens: int | None = None
        self._decision_number: int | None = None

    def on_ready(self) -> None:
        """Record that the prompt is ready to be routed: the first attempt begins."""
        if self._ready_s is None:
            self._ready_s = self._router.clock()
            if self._trace is not None:
                self._trace.on_ready(self._ready_s)

    def on_decision(self, asked: RouteRequest, ranking: Ranking, now_s: float) -> None:
        """Log a decision. Call it before the request is booked, which changes the columns that the decision used."""
        fleet = ranking.fleet
        self._available_tokens = int((fleet.gpu_tokens + fleet.host_tokens).max())
        if self._router.decision_log is not None:
            attempt = self.explain.attempts + 1
            number = self._router.decision_log.decided(asked, ranking, attempt, now_s)
            self._decision_number = number

    def on_submit(
        self,
        route: Sequence[str],
        ranking: Ranking | None,
        num_prompt_tokens: int,
        num_cached: int,
        decided_s: float,
        now_s: float,
    ) -> None:
        """Record an attempt.

        Parameters
        ----------
        ranking
            None for a fork (a further choice), which runs on the replica of its lead.
        decided_s
            When the decision began.
        """
        explain = self.explain
        left_replica = explain.replica
        explain.attempts += 1
        if explain.attempts == 1:
            self._router.gate.charge(self._payer, num_prompt_tokens - num_cached)
        explain.replica = route[0]
        explain.predicted_cached_tokens = num_cached
        explain.runner_up = route[1] if len(route) > 1 else ""
        if ranking is not None:
            self._router.ring.add(
                self._request_id,
                self._answer_id,
                ranking,
                num_prompt_tokens,
                explain,
                now_s,
                self._payer,
                left_replica,
            )
        self._sent_s = now_s
        if self._trace is not None:
            decision = decision_attributes(explain, ranking)
            self._trace.on_submit(explain.replica, decided_s, now_s, decision)

    def on_next_tokens(self, num_tokens: int) -> None:
        """Record a delta with these tokens only: the work of `on_tokens` and `on_output`, faster."""
        now_s = self._router.clock()
        self._router.observer.on_inter_token(now_s - self._last_delta_s)
        self._last_delta_s = now_s
        self.usage.completion_tokens += num_tokens
        self._router.gate.charge(self._payer, TOKENS_PER_GENERATED * num_tokens)

    def on_first_token(
        self, facts: Facts, replica: str, is_first_choice: bool, now_s: float
    ) -> None:
        """Record the first delta of the stream.

        Parameters
        ----------
        is_first_choice
            `replica` is the replica for which cached tokens were predicted.
        """
        router, explain = self._router, self.explain
        ttft_s = now_s - self.arrived_s
        router.observer.on_first_token(ttft_s)
        self._first_token_s = self._last_delta_s = now_s
        # All time since the submission except the replica's queue: the prefill, and the way to the replica and back.
        self._prefill_s = max(0.0, now_s - self._sent_s - facts.queue_s)
        if explain.attempts == 1:
            # The charge at submission used the predicted number of cached tokens: correct it.
            router.gate.charge(
                self._payer, explain.predicted_cached_tokens - facts.num_cached_tokens
            )
        self.usage.cached_tokens = facts.num_cached_tokens
        self.usage.host_cached_tokens = facts.num_host_cached_tokens
        self.usage.peer_cached_tokens = facts.num_peer_cached_tokens or 0
        explain.ttft_s = ttft_s
        self._explain_outcome(facts)
        if is_first_choice:
            router.observer.on_prediction(explain.predicted_cached_tokens, facts.num_cached_tokens)
        if self._available_tokens is not None:
            router.observer.on_prefix(
                PrefixUse(
                    self.usage.prompt_tokens,
                    self._available_tokens,
                    explain.predicted_cached_tokens,
                    facts.num_cached_tokens,
                )
            )
        if self._decision_number is not None and router.decision_log is not None:
            router.decision_log.answered(self._decision_number, explain)
        explain.replica = replica
        if self._trace is not None:
            self._trace.on_tokens(facts, replica, now_s)

    def on_tokens(self, facts: Facts, replica: str, now_s: float) -> None:
        """Record the arrival of a delta after the first one."""
        if self._trace is not None:
            self._trace.on_tokens(facts, replica, now_s)
        self._router.observer.on_inter_token(now_s - self._last_delta_s)
        self.explain.replica = replica
        if self.explain.answered_attempt < self.explain.attempts:
            self._explain_outcome(facts)
        self._last_delta_s = now_s

    def _explain_outcome(self, facts: Facts) -> None:
        """Record the outcome of an attempt at its first delta."""
        explain = self.explain
        explain.answered_attempt = explain.attempts
        explain.cached_tokens, explain.queue_s = facts.num_cached_tokens, facts.queue_s

    def on_output(self, num_tokens: int) -> None:
        """Charge the tokens since the last call. The answer has `num_tokens` tokens now."""
        num_new = num_tokens - self.usage.completion_tokens
        self.usage.completion_tokens = num_tokens
        self._router.gate.charge(self._payer, TOKENS_PER_GENERATED * num_new)

    def on_drafts(self, facts: Facts) -> None:
        """Count the drafted tokens of an attempt that has ended."""
        if facts.num_drafted:
            num_accepted = facts.num_accepted or 0
            self.usage.accepted_prediction_tokens += num_accepted
            self.usage.rejected_prediction_tokens += facts.num_drafted - num_accepted

    def on_lost(self, reason: str) -> None:
        """Record that another attempt has to continue the current one, which `on_release` will end."""
        if self._trace is not None:
            self._trace.on_lost(reason, self.usage.completion_tokens, self._router.clock())

    def on_release(self, attempt: Attempt) -> None:
        """Record the end of an attempt."""
        unread_s = attempt.unread_s()
        self._unread_s += unread_s
        if self._trace is not None:
            self._trace.on_release(unread_s, attempt.ended_s, self._router.clock())

    def end(self, finish_reason: str, error: Exception | None) -> AnswerEnd:
        """Bill the answer, and return the summary of the stream; `error` has ended it."""
        now_s = self._router.clock()
        total_s = now_s - self.arrived_s
        end = AnswerEnd(
            finish_reason,
            self.usage,
            self.explain,
            total_s,
            error_code="" if error is None else error_code(error),
        )
        first_s = self._first_token_s
        if first_s is not None:
            first_step_s = first_s - self._prefill_s
            ready_s = min(self._ready_s or self.arrived_s, first_step_s)
            delivery_s = min(self._unread_s, now_s - first_s)
            end = dataclasses.replace(
                end,
                router_s=ready_s - self.arrived_s,
                queue_s=first_step_s - ready_s,
                prefill_s=self._prefill_s,
                decode_s=now_s - first_s - delivery_s,
                delivery_s=delivery_s,
            )
        if self._trace is not None:
            self._trace.on_end(end, error, now_s)
        if self._bill is not None:
            usage = self.usage
            self._bill.end(
                BilledAnswer(
                    finish_reason,
                    self.explain.answered,
                    self._is_fork,
                    usage.completion_tokens,
                    usage.reasoning_tokens,
                    usage.cached_tokens,
                    usage.host_cached_tokens,
                    usage.peer_cached_tokens,
                    end.router_s + end.queue_s,
                    end.prefill_s,
                    end.decode_s + end.delivery_s,
                )
            )
        return end


def decision_attributes(explain: Explain, ranking: Ranking | None) -> Attributes:
    """Explain a decision as attributes of its span, with the names that `/v1/router/explain` uses."""
    found: Attributes = {
        "quire.replica": explain.replica,
        "quire.predicted_cached_tokens": explain.predicted_cached_tokens,
    }
    if ranking is None:
        return found
    best = ranking[0]
    found |= {
        "quire.policy": ranking.policy,
        "quire.num_replicas": len(ranking.fleet),
        "quire.cost_s": best.cost_s,
        "quire.host_cached_tokens": best.host_tokens,
        **{f"quire.cost.{name}": seconds for name, seconds in best.terms.items()},
    }
    if len(ranking) > 1:
        second = ranking[1]
        found |= {"quire.runner_up": second.replica, "quire.runner_up.cost_s": second.cost_s}
    return found
