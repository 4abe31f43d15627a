"""Runs one request on a replica and, when that replica is lost, on another one. Each of these is an attempt.

```
 begin ─▶ gate, or wait for a replica ─▶ submit ─▶ `current` ─▶ on_tokens ... release
   ▲                                                  │
   └───── leave the replica ◀── Lost, error, gap ─────┘
```
"""

from __future__ import annotations

import asyncio
import functools

import numpy as np

from quire.protos.errors import (
    DeadlineExceeded,
    EngineCrash,
    Overloaded,
    QuireError,
    StepFailed,
    Unavailable,
    from_wire,
)
from quire.protos.wire import Completion, PullHint, Submit
from quire.router.admission.gate import AdmittedRequest, Arrival
from quire.router.fleet.request_bookings import RequestBooking
from quire.router.fleet.sessions import session_outcome
from quire.router.policy.policy import Ranking, RouteRequest
from quire.router.request.accounting import Accounting
from quire.router.request.answer_text import AnswerText
from quire.router.request.context import RouterContext
from quire.router.request.crash_record import SUSPECTED_AFTER, CrashRecord, PoisonState
from quire.router.request.hand_over import HandOver
from quire.router.transport.retained_turns import Turn
from quire.router.transport.transport import Attempt, Lost
from quire.router.types import GenerationRequest

NO_REPLICA_RETRY_S = 1.0
# Time between two looks for a replica by a stream that has none.
REPLICA_POLL_S = 0.05


class Attempts:
    """The attempts of one request, on one replica after the other, until it ends.

    Parameters
    ----------
    hashes
        [prompt tokens // 64] uint64, routing hashes of the prompt.
    weights
        `Hello.weights` of the first replica. The request runs only on replicas with equal weights, because others would
        give other tokens.
    lead
        The attempts of the request's lead (its first choice that runs). This choice starts on the same replica, as a
        fork; None: this is the lead.
    prediction_ids
        `Submit.prediction_ids`.

    Attributes
    ----------
    current
        The attempt that runs; None between two attempts.
    route
        Replicas ranked for the last attempt, best first.
    num_begun
        Number of attempts so far.
    submitted
        Set when the first attempt is submitted, or when the request ends before that.
    """

    def __init__(
        self,
        router: RouterContext,
        request: GenerationRequest,
        answer: AnswerText,
        accounting: Accounting,
        hashes: np.ndarray,
        weights: str,
        lead: Attempts | None,
        prediction_ids: np.ndarray | None = None,
    ):
        self.current: Attempt | None = None
        self.booking: RequestBooking | None = None
        self.route: list[str] = []
        self.num_begun = 0
        self.submitted = asyncio.Event()
        self._router = router
        self._request = request
        self._answer = answer
        self._accounting = accounting
        self._hashes = hashes
        self._weights = weights
        self._lead = lead
        self._prediction_ids = prediction_ids
        self._admitted: AdmittedRequest | None = None
        self._crash_record = CrashRecord()
        self._failed_on: set[str] = set()
        self._hand_over = HandOver(router, request, answer, hashes, self._rank)
        # The replica of the attempt before, and whether it drains; empty: this is the first.
        self._left_replica, self._left_drains = "", False
        # Replicas that refused the request because they were full, and the last refusal.
        self._full: set[str] = set()
        self._refusal: Overloaded | None = None
        # Replica and stream id of lost attempts that may have been crashes; the causes are not known yet.
        self._unexplained: list[tuple[str, int]] = []
        # Attempts that have failed since the last new token, and the number of tokens at the last failure.
        self._num_failed, self._num_tokens_then = 0, 0
        # The next attempt has to take a token from the failover budget.
        self._needs_budget = False
        # When the last decision began.
        self._decided_s = 0.0
        # Time at which the stream lost its replica; None while it has one.
        self._lost_s: float | None = None

    @property
    def is_isolated(self) -> bool:
        """Whether the request runs in steps without other requests, as a suspected poison request (`crash_record`)."""
        return self._crash_record.is_isolated

    @property
    def is_at_first_choice(self) -> bool:
        """Whether the attempt runs on the replica of its prediction of cached tokens. A fork has no prediction."""
        attempt = self.current
        return self._lead is None and attempt is not None and attempt.replica == self.route[0]

    async def begin(self) -> Attempt:
        """Submit the request and return the attempt.

        The first attempt passes the admission gate. Later attempts, and forks, wait only while no replica is ready.

        Raises
        ------
        QuireError
            The gate refused the request, its deadline has passed, or no replica is left.
        """
        self._accounting.on_ready()
        if self.num_begun == 0 and self._lead is None:
            self._admitted = await self._router.gate.enter(self._arrival())
        else:
            if self._lead is not None:
                await self._lead.submitted.wait()
            await self._wait_for_budget()
            await self._submit_when_ready()
        assert self.current is not None
        return self.current

    def on_tokens(self, num_emitted: int, now_s: float) -> None:
        """Record that the current attempt has produced tokens: `num_emitted` output tokens in total."""
        if self._lost_s is not None:
            self._hand_over.on_resumed(now_s - self._lost_s)
            self._lost_s = None
        self._crash_record.on_tokens(num_emitted)
        if self.booking is not None:
            self._router.table.answered(self.booking, now_s)

    def on_first_token(self) -> None:
        """Record the first token of the answer: a replica has accepted the request."""
        self._full.clear()
        self._refusal = None
        if self._admitted is not None:
            self._admitted.answered(is_usual=self._num_failed == 0)
        self._router.gate.notify()
        if self.current is not None:
            self._hand_over.on_first_token(self.current)

    async def on_completion(self, completion: Completion) -> None:
        """Handle the event that the replica ended the attempt without a last token.

        Raises
        ------
        QuireError
            Another replica would fail too, or no further attempt is allowed.
        """
        if completion.error is None:
            self.fail(f"the replica ended the request with {completion.finish_reason!r}")
            return
        error = from_wire(completion.error)
        if self._answer.token_ids and isinstance(error, Unavailable | Overloaded):
            await self._retry_later(error)
        elif isinstance(error, Unavailable):
            self.fail(error.message)
        elif isinstance(error, StepFailed):
            self._crash_record.on_incident()
            self._leave_replica(error.message)
            self._check_poison(error.message)
        elif isinstance(error, Overloaded):
            # Another replica may have room; `_rank` raises the refusal when none is left.
            if self.current is not None:
                self._full.add(self.current.replica)
            self._refusal = error
            self._accounting.on_lost(error.message)
            self.release()
        else:
            raise error

    async def on_lost(self, lost: Lost) -> None:
        """Handle the loss of the replica, its stream or the call.

        Raises
        ------
        QuireError
            The request has failed too often, or is a poison request.
        """
        attempt = self.current
        if lost.planned or attempt is None:
            self._accounting.explain.num_handovers += self._hand_over.is_leaving
            self._leave_replica(lost.reason, drains=lost.planned)
            return
        self._unexplained.append((lost.replica, attempt.stream_id))
        if self._answer.token_ids and not attempt.placed:
            await self._retry_later(Unavailable(lost.reason, retry_after_s=NO_REPLICA_RETRY_S))
        else:
            self.fail(lost.reason)
        # Attempts without a frame count too: the replica may have crashed in its first step with the request.
        if self._crash_record.num_incidents + len(self._unexplained) >= SUSPECTED_AFTER:
            await self._explain_losses()
            self._check_poison(lost.reason)

    def fail(self, reason: str) -> None:
        """Count the current attempt as failed, and end it so that another replica continues.

        Raises
        ------
        Unavailable
            More than `max_migrations` attempts have failed without a new token.
        """
        num_tokens = len(self._answer.token_ids)
        is_stuck = num_tokens == self._num_tokens_then
        self._num_failed = self._num_failed + 1 if is_stuck else 1
        self._num_tokens_then = num_tokens
        self._needs_budget = True
        self._leave_replica(reason)
        if self._num_failed > self._router.max_migrations:
            raise Unavailable(
                f"the request failed on {self._num_failed} replicas without a new token, last: {reason}",
                retry_after_s=NO_REPLICA_RETRY_S,
            )

    def release(self) -> None:
        """End the current attempt on its replica, and its booking in the table."""
        attempt, self.current = self.current, None
        if attempt is not None:
            attempt.cancel()
            self._accounting.on_release(attempt)
        booking, self.booking = self.booking, None
        self._end(booking, len(self._answer.token_ids))

    def close(self, finish_reason: str) -> None:
        """End the request. Its blocks stay retained if another turn of the conversation will follow soon.

        Those of the turn that it continues are retained no longer.
        """
        is_retained = finish_reason == "tool_calls" or self._request.retain
        if self.current is not None:
            kept = self.current if is_retained and self.current.drops_retained else None
            if kept is not None:
                kept.drops_retained = False
            if finish_reason not in ("abort", "error"):
                num_prompt_tokens = self._answer.num_prompt_tokens
                num_tokens = num_prompt_tokens + len(self._answer.token_ids)
                turn = Turn(self._hashes, num_prompt_tokens, num_tokens, kept)
                self._router.retained_turns.end_turn(self._request.session, turn)
        self.release()
        self._hand_over.close()
        self.submitted.set()
        if self._admitted is not None:
            self._admitted.left()
        self._router.gate.notify()

    # -- beginning an attempt ----------------------------------------------------------------------------

    def _arrival(self) -> Arrival:
        request = self._request
        deadline_s = request.deadline_s
        return Arrival(
            tenant=request.payer,
            tokens=self._answer.num_prompt_tokens,
            priority=request.priority,
            deadline_s=None if deadline_s is None else self._accounting.arrived_s + deadline_s,
            rank=self._rank,
            send=self._submit_ranked,
        )

    async def _wait_for_budget(self) -> None:
        router = self._router
        while self._needs_budget and router.budget is not None:
            wait_s = router.budget.take(router.clock(), router.table.num_routers())
            self._needs_budget = wait_s > 0
            if self._needs_budget:
                if not self._may_wait():
                    raise Unavailable(
                        "too many requests lost their replicas at once", retry_after_s=wait_s
                    )
                await asyncio.sleep(wait_s)

    async def _submit_when_ready(self) -> None:
        while True:
            try:
                parent = self._parent()
                if parent is None:
                    self._submit_ranked(self._rank())
                else:
                    self._submit_fork(*parent)
                return
            except Unavailable:
                if not self._may_wait():
                    raise
            await asyncio.sleep(REPLICA_POLL_S)

    def _may_wait(self) -> bool:
        """Whether the stream has lost its replica less than `max_move_s` ago, so that it may wait for another one."""
        if self._lost_s is None:
            return False
        return self._router.clock() - self._lost_s < self._router.max_move_s

    def _parent(self) -> tuple[Attempt, RequestBooking] | None:
        """Return the lead's first attempt to fork from; None if it does not run, or if this is not the first attempt.

        After a loss, each choice continues independently.
        """
        lead = self._lead
        if lead is None or self.num_begun or lead.num_begun != 1:
            return None
        attempt, booking = lead.current, lead.booking
        if attempt is None or booking is None or booking.replica not in self._router.table:
            return None
        return attempt, booking

    def _rank(self) -> Ranking:
        """Rank the replicas, best first; raise an error if no replica can take the request."""
        router, now_s = self._router, self._router.clock()
        self._decided_s = now_s
        excluded = self._failed_on | self._full
        fleet = router.table.fleet(
            self._hashes,
            self._answer.num_prompt_tokens,
            now_s,
            self._request.session,
            excluded,
            self._weights,
            self._request.adapter,
        )
        # `fleet` contains excluded replicas only if there are no others.
        if self._refusal is not None and not excluded.isdisjoint(fleet.replicas):
            raise self._refusal
        if self._failed_on.issuperset(fleet.replicas):
            # Every replica has failed this request once: try them all again.
            self._failed_on.clear()
        if not len(fleet):
            problem = "no replica is ready to serve the model"
            if router.table.is_mixed:
                problem = "no replica is left with the weights that the request began with"
            raise Unavailable(problem, retry_after_s=NO_REPLICA_RETRY_S)
        return router.policy.choose(self._route_request(), fleet, now_s, router.rng)

    def _route_request(self) -> RouteRequest:
        request = self._request
        facts = self._answer.num_prompt_tokens, request.session, request.priority
        return RouteRequest(*facts, is_continued=self.num_begun > 0)

    def _submit_ranked(self, ranking: Ranking) -> None:
        """Book and submit the next attempt to the best replica of a ranking."""
        ranking = self._hand_over.prefer_target(ranking)
        now_s = self._router.clock()
        deadline_s = self._remaining_s(now_s)
        best, num_tokens = ranking[0], self._answer.num_prompt_tokens
        self._accounting.on_decision(self._route_request(), ranking, now_s)
        if self._request.session and self.num_begun == 0:
            self._router.observer.on_session_request(session_outcome(ranking))
        self.route = ranking.names()
        self.booking = self._router.table.book(
            ranking, self._hashes, num_tokens, now_s, self._request.session, self._request.adapter
        )
        left, pull = self._left_replica, self._router.table.peers.hint(ranking)
        if left:
            is_alive = self._left_drains
            pull = self._hand_over.pull_hint(left, ranking, now_s, is_alive=is_alive) or pull
        self._hand_over.on_decision(ranking, is_first=self.num_begun == 0)
        num_cached = best.held_tokens
        self._accounting.on_submit(
            self.route, ranking, num_tokens, num_cached, self._decided_s, now_s
        )
        self._submit(num_cached, deadline_s, fork_of=None, pull=pull)

    def _end(self, booking: RequestBooking | None, num_output_tokens: int = 0) -> None:
        if booking is not None:
            self._router.table.end(booking, self._router.clock(), num_output_tokens)

    def _submit_fork(self, parent: Attempt, booking: RequestBooking) -> None:
        """Book and submit the first attempt of a fork to its parent's replica."""
        assert self._lead is not None
        now_s = self._router.clock()
        deadline_s = self._remaining_s(now_s)
        num_tokens = self._answer.num_prompt_tokens
        num_cached = num_tokens - 1
        self.route = self._lead.route
        self._hand_over.follow(self._lead._hand_over)
        table, num_prompt_tokens = self._router.table, booking.prompt_tokens
        self.booking = table.book_cached(booking.replica, (), num_prompt_tokens, now_s)
        self._accounting.on_submit(self.route, None, num_tokens, num_cached, now_s, now_s)
        self._submit(num_cached, deadline_s, fork_of=parent.stream_id)

    def _remaining_s(self, now_s: float) -> float | None:
        """Return the seconds until the deadline; raise `DeadlineExceeded` if it has passed."""
        if self._request.deadline_s is None:
            return None
        remaining_s = self._request.deadline_s - (now_s - self._accounting.arrived_s)
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's deadline passed before it was sent")
        return remaining_s

    def _submit(
        self,
        num_cached: int,
        deadline_s: float | None,
        fork_of: int | None,
        pull: PullHint | None = None,
    ) -> None:
        router, answer = self._router, self._answer
        self.num_begun += 1
        num_emitted = len(answer.token_ids)
        submit = Submit(
            router_id=router.router_id,
            stream_id=router.transport.next_stream_id(),
            request_id=self._request.request_id,
            prompt_ids=answer.prompt_ids(),
            params=answer.sampling_params(),
            num_emitted=num_emitted,
            tenant=self._request.tenant,
            deadline_s=deadline_s,
            priority=self._request.priority,
            fork_of=fork_of,
            alone=self._crash_record.begin_attempt(num_emitted),
            num_expected_cached=num_cached,
            # Without keys one pays for all: a client that sends many salts gains nothing.
            payer="" if self._request.bill is None else self._request.bill.tenant,
            retain_s=router.retain_s if self._request.may_be_retained else 0.0,
            adapter=self._request.adapter,
            prediction_ids=self._prediction_ids,
            pull=pull,
        )
        self.current = router.transport.submit(submit, self.route)
        self.current.before_move = functools.partial(self._hand_over.copy_ahead, self.current)
        self.submitted.set()

    # -- losing a replica --------------------------------------------------------------------------------

    async def _retry_later(self, error: QuireError) -> None:
        """Leave a replica that did not accept an answer that has begun; raise `error` if `max_move_s` is over.

        This does not count as a failure of the request, because the replica may have been dead already.
        """
        self._leave_replica(error.message)
        if not self._may_wait():
            raise error
        await asyncio.sleep(REPLICA_POLL_S)

    def _leave_replica(self, reason: str, *, drains: bool = False) -> None:
        """End the attempt. The next one avoids this replica if there is another."""
        if self.current is not None:
            self._left_replica, self._left_drains = self.current.replica, drains
            self._failed_on.add(self.current.replica)
        if self._lost_s is None:
            self._lost_s = self._router.clock()
        self._accounting.on_lost(reason)
        self.release()

    async def _explain_losses(self) -> None:
        """Count an incident for each lost attempt that was in a step during its replica's crash.

        A single loss is not investigated, so that failover need not wait for the replica's record.
        """
        unexplained, self._unexplained = self._unexplained, []
        for replica, stream_id in unexplained:
            if await self._router.transport.crashed_with(replica, stream_id):
                self._crash_record.on_incident()

    def _check_poison(self, reason: str) -> None:
        if self._crash_record.state is PoisonState.CONFIRMED:
            raise EngineCrash(
                f"the engine failed {self._crash_record.num_incidents} times with this request, the last time with "
                f"nothing else in its step: {reason}"
            )
