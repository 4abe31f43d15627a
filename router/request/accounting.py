"""What one stream reports: usage, the explanation of its routing, latencies, and the charge to its tenant."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from quire.protos.wire import TokenDelta
from quire.router.admission.fair_queue import TOKENS_PER_GENERATED
from quire.router.observer import AnswerEnd
from quire.router.policy.policy import Ranking, RouteRequest
from quire.router.request.context import RouterContext
from quire.router.types import Explain, GenerationRequest, Origin, Usage


class Accounting:
    """The numbers of one stream.

    Attributes
    ----------
    usage, explain
        The stream's own; they change until it ends.
    arrived_s
        When the request arrived, on the router's clock.
    """

    def __init__(
        self,
        router: RouterContext,
        request: GenerationRequest,
        origin: Origin,
        num_prompt_tokens: int,
        arrived_s: float,
    ):
        self.usage = Usage(prompt_tokens=num_prompt_tokens)
        self.explain = Explain(router=router.router_id)
        self.arrived_s = arrived_s
        self._router = router
        self._request_id = request.request_id
        self._answer_id = origin.answer_id
        self._tenant = request.tenant
        self._sent_s = arrived_s
        self._first_token_s: float | None = None
        self._prefill_s = 0.0
        self._last_delta_s = arrived_s
        self._decision_number: int | None = None

    def on_decision(self, asked: RouteRequest, ranking: Ranking, now_s: float) -> None:
        """Write a decision to the log. Call it before booking changes the columns that the decision used."""
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
        now_s: float,
    ) -> None:
        """Record an attempt. A fork has no ranking: it follows its lead."""
        explain = self.explain
        explain.attempts += 1
        if explain.attempts == 1:
            self._router.gate.charge(self._tenant, num_prompt_tokens - num_cached)
        explain.replica = route[0]
        explain.predicted_cached_tokens = num_cached
        explain.runner_up = route[1] if len(route) > 1 else ""
        if ranking is not None:
            self._router.ring.add(
                self._request_id, self._answer_id, ranking, num_prompt_tokens, explain, now_s
            )
        self._sent_s = now_s

    def on_next_token(self) -> None:
        """Record one more token, as `on_tokens` and `on_output` do for a stream that has begun."""
        now_s = self._router.clock()
        self._router.observer.on_inter_token(now_s - self._last_delta_s)
        self._last_delta_s = now_s
        self.usage.completion_tokens += 1
        self._router.gate.charge(self._tenant, TOKENS_PER_GENERATED)

    def on_first_token(
        self, event: TokenDelta, replica: str, is_first_choice: bool, now_s: float
    ) -> None:
        """Record the first delta of the stream.

        Parameters
        ----------
        is_first_choice
            `replica` is the one for which cached tokens were predicted.
        """
        router, explain = self._router, self.explain
        ttft_s = now_s - self.arrived_s
        router.observer.on_first_token(ttft_s)
        self._first_token_s = self._last_delta_s = now_s
        # The prefill itself and the way to the replica and back: the time that was not the replica's queue.
        self._prefill_s = max(0.0, now_s - self._sent_s - event.queue_s)
        if explain.attempts == 1:
            # The charge at submission used the predicted number.
            router.gate.charge(
                self._tenant, explain.predicted_cached_tokens - event.num_cached_tokens
            )
        self.usage.cached_tokens = event.num_cached_tokens
        self.usage.host_cached_tokens = event.num_host_cached_tokens
        explain.cached_tokens = event.num_cached_tokens
        explain.queue_s = event.queue_s
        explain.answered, explain.ttft_s = True, ttft_s
        if is_first_choice:
            router.observer.on_prediction(explain.predicted_cached_tokens, event.num_cached_tokens)
        if self._decision_number is not None and router.decision_log is not None:
            router.decision_log.answered(self._decision_number, explain)
        explain.replica = replica

    def on_tokens(self, replica: str, now_s: float) -> None:
        """Record the arrival of a delta, after `on_first_token`."""
        self._router.observer.on_inter_token(now_s - self._last_delta_s)
        self.explain.replica = replica
        self._last_delta_s = now_s

    def on_output(self, num_tokens: int) -> None:
        """Charge the tokens since the last call; the answer has `num_tokens` now."""
        num_new = num_tokens - self.usage.completion_tokens
        self.usage.completion_tokens = num_tokens
        self._router.gate.charge(self._tenant, TOKENS_PER_GENERATED * num_new)

    def end(self, finish_reason: str) -> AnswerEnd:
        """Return the summary of the stream."""
        now_s = self._router.clock()
        total_s = now_s - self.arrived_s
        end = AnswerEnd(finish_reason, self.usage, self.explain, total_s)
        if self._first_token_s is None:
            return end
        return dataclasses.replace(
            end,
            queue_s=self._first_token_s - self._prefill_s - self.arrived_s,
            prefill_s=self._prefill_s,
            decode_s=now_s - self._first_token_s,
        )
