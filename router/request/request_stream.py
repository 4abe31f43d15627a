"""One request on its way: what happens between its prompt's tokens and the last character of its answer.

1. book the work, submit; the first token, or the refusal, decides what `start` returns or raises
2. tokens → text → stop strings → deltas
3. a replica that is lost is replaced by another one, and the stream goes on
4. every exit ends the attempt and returns the booking
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

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
from quire.protos.wire import (
    Completion,
    Hello,
    PromptLogprobs,
    SamplingParams,
    Submit,
    TokenDelta,
)
from quire.router.admission.fair_queue import TOKENS_PER_GENERATED
from quire.router.admission.gate import AdmittedRequest, Arrival
from quire.router.fleet.request_bookings import RequestBooking
from quire.router.observer import AnswerEnd
from quire.router.policy.policy import Ranking, RouteRequest
from quire.router.request import resume
from quire.router.request.crash_record import SUSPECTED_AFTER, CrashRecord, PoisonState
from quire.router.text.detokenizer import Detokenizer
from quire.router.text.stop import StopMatcher
from quire.router.transport.transport import Attempt, Lost
from quire.router.types import (
    Explain,
    GenerationRequest,
    Mark,
    Origin,
    OutputDelta,
    TokenScores,
    Usage,
)

if TYPE_CHECKING:
    from quire.router.request.context import RouterContext

NO_REPLICA_RETRY_S = 1.0
MOVE_POLL_S = 0.05  # a stream without a replica looks for one


class _Missing(Exception):
    """The replica sent what comes later, but not what comes before it."""


class RequestStream:
    """One request on its way, across however many replicas it takes: the `GenerationStream`.

    The emitted tokens, the detokeniser and the stop matcher live here, so a stream whose replica is lost
    continues on another with prompt + emitted tokens, the same seed and the next index.

    Parameters
    ----------
    origin
        What its event ids say of it.
    mark
        What the client has of it: none of that comes in a delta.
    special_stops
        Stop strings that are special tokens, by id.
    lead
        The first choice of the same request that runs, submitted before: this one goes to the same replica as its
        fork.
    """

    def __init__(
        self,
        service: RouterContext,
        request: GenerationRequest,
        prompt_ids: np.ndarray,
        sampling: SamplingParams,
        hashes: np.ndarray,
        hello: Hello,
        detokenizer: Detokenizer,
        arrived_s: float,
        origin: Origin,
        mark: Mark,
        special_stops: Mapping[int, str],
        lead: RequestStream | None = None,
    ):
        self.request_id = request.request_id
        self.model = service.facts.name
        self.origin = origin
        self.choice = sampling.choice
        self.usage = Usage(prompt_tokens=len(prompt_ids))
        self.explain = Explain(router=service.router_id)
        self._service = service
        self._request = request
        self._lead = lead
        self._prompt_ids = prompt_ids
        self._sampling = sampling
        self._hashes = hashes
        self._eos_token_ids = frozenset(hello.eos_token_ids)
        self._weights = hello.weights  # of every replica that it runs on
        self._detokenizer = detokenizer
        self._special_stops = special_stops
        self._stop = StopMatcher(request.stop, request.include_stop_str_in_output)
        self._arrived_s = arrived_s
        self._sent_s = arrived_s  # the last attempt
        self._first_s: float | None = None  # its first token
        self._prefill_s = 0.0
        self._last_delta_s: float | None = None
        self._emitted: list[int] = []
        self._prompt_logprobs: list[PromptLogprobs] = []  # parts, in order
        self._num_scored = 0  # prompt tokens in them
        self._attempt: Attempt | None = None
        # The attempt has answered, and a delta with nothing but one more token means nothing but its text.
        self._is_usual = False
        self._booking: RequestBooking | None = None
        self._route: list[str] = []  # of the attempt, best first
        self._failed_on: set[str] = set()
        self._crash_record = CrashRecord()
        self._lost_attempts: list[
            tuple[str, int]
        ] = []  # replica and stream id, not looked into yet
        self._full: set[str] = set()  # replicas that had no place for it
        self._refused: Overloaded | None = None  # by one of them
        self._admitted: AdmittedRequest | None = None  # through the gate
        self._sent = asyncio.Event()  # to some replica, or closed before that
        self._num_lost = 0  # attempts that a replica did not end as it should
        self._must_pay = False  # the next attempt is a move, not yet taken from the budget
        self._homeless_s: float | None = None  # since when it has been without a replica that works
        self._logged: int | None = None  # number of the last decision in the log
        self._first: OutputDelta | None = None
        self._known_prefix = (
            resume.KnownPrefix(mark, request.resume_from.field) if mark.num_tokens else None
        )
        self._num_chars = 0  # of the emitted tokens, as far as `_on_tokens` has seen them
        self._closed = self.was_complete = mark.finished  # then nothing is left to do
        if self.was_complete:
            self.usage.completion_tokens = mark.num_tokens

    async def start(self) -> None:
        """Submit and wait for the first delta or the refusal."""
        if self._closed:
            return
        try:
            self._first = await self._next_delta()
        except BaseException as error:
            self._close(_reason_of(error))
            raise

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        delta, self._first = self._first, None
        if delta is None:
            if self._closed:
                raise StopAsyncIteration
            try:
                delta = await self._next_delta()
            except BaseException as error:
                self._close(_reason_of(error))
                raise
        if self._attempt is not None:
            self._attempt.taken_s = self._service.clock()
        return delta

    async def aclose(self) -> None:
        """End the request on its replica if it still runs. Idempotent."""
        self._close("abort")

    # -- attempts ----------------------------------------------------------------------------------------

    async def _begin_attempt(self) -> None:
        """Submit. The first attempt passes the gate, the later ones of an accepted request do not; they wait for
        a replica when there is none."""
        if self.explain.attempts == 0 and self._lead is None:
            self._admitted = await self._service.gate.enter(self._arrival())
            return
        if self._lead is not None:
            await self._lead._sent.wait()
        await self._wait_for_budget()
        while True:
            try:
                self._send(None if self._parent() is not None else self._rank())
                return
            except Unavailable:
                if self._homeless_s is None or self._has_waited_enough():
                    raise
            await asyncio.sleep(MOVE_POLL_S)

    def _arrival(self) -> Arrival:
        request = self._request
        deadline_s = request.deadline_s
        return Arrival(
            tenant=request.tenant,
            tokens=len(self._prompt_ids),
            priority=request.priority,
            deadline_s=None if deadline_s is None else self._arrived_s + deadline_s,
            rank=self._rank,
            send=self._send,
        )

    async def _wait_for_budget(self) -> None:
        budget = self._service.budget
        while self._must_pay and budget is not None:
            wait_s = budget.take(self._service.clock(), self._service.table.num_routers())
            self._must_pay = wait_s > 0
            if self._must_pay:
                if self._has_waited_enough():
                    raise Unavailable(
                        "too many requests lost their replicas at once", retry_after_s=wait_s
                    )
                await asyncio.sleep(wait_s)

    def _has_waited_enough(self) -> bool:
        service = self._service
        return service.clock() - self._homeless_s >= service.max_move_s

    def _rank(self) -> Ranking:
        """The replicas, best first; raises Unavailable when there is none."""
        service, now = self._service, self._service.clock()
        num_prompt_tokens = len(self._prompt_ids) + len(self._emitted)
        fleet = service.table.fleet(
            self._hashes,
            num_prompt_tokens,
            now,
            self._request.session,
            self._failed_on | self._full,
            self._weights,
        )
        if self._refused is not None and not (self._full | self._failed_on).isdisjoint(
            fleet.replicas
        ):
            raise self._refused  # nobody is left: it was left out as long as there was another
        if self._failed_on.issuperset(fleet.replicas):
            # Better a replica that failed this request once than none at all: all of them in turn.
            self._failed_on.clear()
        if not len(fleet):
            problem = "no replica is ready to serve the model"
            if service.table.is_mixed:
                problem = "no replica is left with the weights that the request began with"
            raise Unavailable(problem, retry_after_s=NO_REPLICA_RETRY_S)
        return service.policy.choose(self._asked(num_prompt_tokens), fleet, now, service.rng)

    def _asked(self, num_prompt_tokens: int) -> RouteRequest:
        """What a policy knows of the request."""
        return RouteRequest(num_prompt_tokens, self._request.session, self._request.priority)

    def _send(self, ranking: Ranking | None) -> None:
        """Book and submit the next attempt; a fork goes where its lead is, without a ranking."""
        service, now = self._service, self._service.clock()
        num_prompt_tokens = len(self._prompt_ids) + len(self._emitted)
        deadline_s = self._request.deadline_s
        if deadline_s is not None:
            deadline_s -= now - self._arrived_s
            if deadline_s <= 0:
                raise DeadlineExceeded("the request's deadline passed before it was sent")
        parent = self._parent()
        if ranking is None:
            self._route, num_cached = self._lead._route, num_prompt_tokens - 1
            self._booking = service.table.book_fork(self._lead._booking, now)
        else:
            best = ranking[0]
            self._route, num_cached = ranking.names(), best.cached_tokens + best.host_tokens
            if service.decision_log is not None:
                # Before the booking changes the columns that the decision was made from.
                asked, attempt = self._asked(num_prompt_tokens), self.explain.attempts + 1
                self._logged = service.decision_log.decided(asked, ranking, attempt, now)
            self._booking = service.table.book(
                ranking, self._hashes, num_prompt_tokens, now, self._request.session
            )
        self.explain.attempts += 1
        if self.explain.attempts == 1:
            service.gate.charge(self._request.tenant, num_prompt_tokens - num_cached)
        self.explain.replica = self._route[0]
        self.explain.predicted_cached_tokens = num_cached
        self.explain.runner_up = self._route[1] if len(self._route) > 1 else ""
        if ranking is not None:
            service.ring.add(
                self.request_id,
                self.origin.answer_id,
                ranking,
                num_prompt_tokens,
                self.explain,
                now,
            )
        submit = Submit(
            router_id=service.router_id,
            stream_id=service.transport.next_stream_id(),
            request_id=self.request_id,
            prompt_ids=np.concatenate(
                [self._prompt_ids, np.asarray(self._emitted, dtype=np.int32)]
            ),
            params=self._params(),
            num_emitted=len(self._emitted),
            tenant=self._request.tenant,
            deadline_s=deadline_s,
            priority=self._request.priority,
            fork_of=None if parent is None else parent.stream_id,
            alone=self._crash_record.begin_attempt(len(self._emitted)),
            num_expected_cached=num_cached,
        )
        self._attempt = service.transport.submit(submit, self._route)
        self._sent_s = now
        self._sent.set()

    def _params(self) -> SamplingParams:
        """Those of the next attempt: what has been told of the prompt is not computed again."""
        if self._lacks_scores():
            return self._sampling
        return dataclasses.replace(self._sampling, prompt_logprobs=None)

    def _lacks_scores(self) -> bool:
        asked = self._sampling.prompt_logprobs is not None
        return asked and self._num_scored < len(self._prompt_ids) - 1

    def _parent(self) -> Attempt | None:
        """The lead's attempt, for the first one of this stream: whoever loses a replica goes on alone."""
        lead = self._lead
        if lead is None or self.explain.attempts or lead.explain.attempts != 1:
            return None
        booking = lead._booking
        if booking is None or booking.replica not in self._service.table:
            return None
        return lead._attempt

    def _release_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        self._is_usual = False
        if attempt is not None:
            attempt.cancel()
        booking, self._booking = self._booking, None
        if booking is not None:
            self._service.table.end(booking, self._service.clock(), len(self._emitted))

    def _close(self, finish_reason: str) -> None:
        """The one way out: finish, stop string, error, cancellation."""
        if not self._closed:
            self._closed = True
            self._release_attempt()
            self._sent.set()
            if self._admitted is not None:
                self._admitted.left()
            self._service.gate.notify()
            self._service.observer.on_end(self._end(finish_reason))

    def _end(self, finish_reason: str) -> AnswerEnd:
        now_s = self._service.clock()
        total_s = now_s - self._arrived_s
        end = AnswerEnd(finish_reason, self.usage, self.explain, total_s)
        if self._first_s is None:
            return end
        queue_s = self._first_s - self._prefill_s - self._arrived_s
        times = {"queue_s": queue_s, "prefill_s": self._prefill_s}
        return dataclasses.replace(end, **times, decode_s=now_s - self._first_s)

    # -- events ------------------------------------------------------------------------------------------

    async def _next_delta(self) -> OutputDelta:
        while True:
            if self._attempt is None:
                await self._begin_attempt()
            attempt = self._attempt
            while (event := attempt.take()) is None:
                await attempt.arrival()  # `next` would be one more coroutine for every token
            if isinstance(event, TokenDelta):
                if self._is_usual and self._is_next_token(event):
                    return self._on_next_token(event)
                try:
                    delta = self._on_tokens(event)
                except _Missing as gap:
                    self._on_lost(str(gap))
                    continue
                if delta is not None:
                    return delta
            elif isinstance(event, Lost):
                await self._on_gone(event)
            else:
                await self._on_failure(event)

    def _is_next_token(self, event: TokenDelta) -> bool:
        return (
            event.index == len(self._emitted)
            and len(event.token_ids) == 1
            and event.finish_reason is None
            and event.logprobs is None
        )

    def _on_next_token(self, event: TokenDelta) -> OutputDelta:
        """What `_on_tokens` does for nearly every token of every stream, without asking what else it may be."""
        service, token_ids, now = self._service, event.token_ids, self._service.clock()
        self._emitted += token_ids
        service.observer.on_inter_token(now - self._last_delta_s)
        self._last_delta_s = now
        self.usage.completion_tokens = len(self._emitted)
        service.gate.charge(self._request.tenant, TOKENS_PER_GENERATED)
        return OutputDelta(self._detokenizer.feed(token_ids), token_ids)

    def _on_tokens(self, event: TokenDelta) -> OutputDelta | None:
        """Tokens to text; None when the delta held nothing new."""
        expected = len(self._emitted)
        if event.index > expected:
            raise _Missing(f"tokens {expected} to {event.index - 1} of the stream are missing")
        new_ids = event.token_ids[expected - event.index :]
        if event.prompt_logprobs is not None:
            self._take_prompt_logprobs(event.prompt_logprobs)
        if not new_ids and event.finish_reason is None:
            return None
        if self._lacks_scores():
            raise _Missing(
                f"log-probabilities of {self._num_scored} of {len(self._prompt_ids) - 1} prompt tokens "
                "came before the first token"
            )
        if self._homeless_s is not None:
            self._service.observer.on_migration(self._service.clock() - self._homeless_s)
            self._homeless_s = None
        self._crash_record.on_tokens(expected + len(new_ids))
        self._observe(event)
        pieces: list[str] = []
        matched: str | None = None
        offsets: list[int] = []
        num_known = 0 if self._known_prefix is None else self._known_prefix.take(expected, new_ids)
        for i, token_id in enumerate(new_ids):
            self._emitted.append(token_id)
            offsets.append(self._num_chars)
            last = event.finish_reason == "stop" and i == len(new_ids) - 1
            if last and self._ends(token_id):
                break  # the ending token counts, its text does not show
            text = self._detokenizer.feed([token_id])
            self._num_chars += len(text)
            text, matched = self._match(text)
            if i >= num_known:
                pieces.append(text)
            if matched is not None:
                new_ids = new_ids[: i + 1]
                break
        self.usage.completion_tokens = len(self._emitted)
        self._service.gate.charge(self._request.tenant, TOKENS_PER_GENERATED * len(new_ids))
        ends = matched is not None or event.finish_reason is not None
        if ends and self._known_prefix is not None:
            self._known_prefix.check_end(len(self._emitted))
        scores = self._scores(event, expected, new_ids, offsets)
        if num_known:
            new_ids = new_ids[num_known:]
            scores = None if scores is None else scores[num_known:]
            if not new_ids and not ends:
                return None
        if matched is not None:
            self._close("stop")
            return OutputDelta("".join(pieces), new_ids, "stop", matched, scores)
        if event.finish_reason is None:
            self._is_usual = not (
                self._request.stop
                or self._known_prefix is not None
                or self._sampling.prompt_logprobs is not None
                or self._crash_record.is_isolated
            )
            return OutputDelta("".join(pieces), new_ids, logprobs=scores)
        delta = self._finish(event.finish_reason, pieces, new_ids)
        delta.logprobs = scores
        return delta

    def _take_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """Each position once: a second attempt may tell again what is known."""
        expected = self._num_scored + 1
        if part.start > expected:
            raise _Missing(
                f"log-probabilities of prompt tokens {expected} to {part.start - 1} are missing"
            )
        part = part.after(expected)
        if len(part):
            self._prompt_logprobs.append(part)
            self._num_scored += len(part)

    @property
    def prompt_scores(self) -> list[TokenScores] | None:
        """The prompt's tokens with their log-probabilities, None of the first; None if not asked for."""
        if self._sampling.prompt_logprobs is None:
            return None
        is_text = isinstance(self._request.prompt, str)
        first_id, parts = int(self._prompt_ids[0]), self._prompt_logprobs
        return self._service.prompt_scores(first_id, parts, skip_special_tokens=is_text)

    def scores_of_prompt(self, index: int) -> list[TokenScores] | None:
        """There is one prompt."""
        return self.prompt_scores

    def _scores(
        self, event: TokenDelta, expected: int, ids: list[int], offsets: list[int]
    ) -> list[TokenScores] | None:
        """What the replica said of `ids`, whose first has the index `expected`; None if not asked."""
        if event.logprobs is None:
            return None
        of_ids = event.logprobs[expected - event.index :][: len(ids)]
        return [
            self._service.scores(token_id, logprob, offset)
            for token_id, logprob, offset in zip(ids, of_ids, offsets, strict=True)
        ]

    def _match(self, text: str) -> tuple[str, str | None]:
        if len(self._emitted) <= self._sampling.min_tokens:
            return self._stop.flush() + text, None
        return self._stop.feed(text)

    def _finish(self, reason: str, pieces: list[str], new_ids: list[int]) -> OutputDelta:
        text, matched = self._match(self._detokenizer.flush())
        pieces.append(text)
        if matched is not None:
            self._close("stop")
            return OutputDelta("".join(pieces), new_ids, "stop", matched)
        pieces.append(self._stop.flush())
        last = self._emitted[-1] if reason == "stop" else None
        stop_reason: int | str | None = last if last in self._sampling.stop_token_ids else None
        stop_reason = self._special_stops.get(last, stop_reason)
        self._close(reason)
        return OutputDelta("".join(pieces), new_ids, reason, stop_reason)

    def _ends(self, token_id: int) -> bool:
        if token_id in self._sampling.stop_token_ids:
            return True
        return token_id in self._eos_token_ids and not self._sampling.ignore_eos

    def _observe(self, event: TokenDelta) -> None:
        now, observer = self._service.clock(), self._service.observer
        if self._last_delta_s is not None:
            observer.on_inter_token(now - self._last_delta_s)
        else:
            observer.on_first_token(now - self._arrived_s)
            self._first_s = now
            # What is not the replica's queue: its computation, and the way there and back.
            self._prefill_s = max(0.0, now - self._sent_s - event.queue_s)
            self._on_place(event.num_cached_tokens)
            self.usage.cached_tokens = event.num_cached_tokens
            self.usage.host_cached_tokens = event.num_host_cached_tokens
            explain = self.explain
            explain.cached_tokens = event.num_cached_tokens
            explain.queue_s = event.queue_s
            explain.answered, explain.ttft_s = True, now - self._arrived_s
            if self._lead is None and self._attempt.replica == self._route[0]:
                # Of another replica, to which Serve passed it on, nothing was predicted.
                observer.on_prediction(explain.predicted_cached_tokens, event.num_cached_tokens)
            if self._logged is not None:
                self._service.decision_log.answered(self._logged, explain)
        if self._booking is not None and self._attempt is not None:
            self.explain.replica = self._attempt.replica
            self._service.table.answered(self._booking, now)
        self._last_delta_s = now

    def _on_place(self, num_cached_tokens: int) -> None:
        """The first token: a replica has taken the request and found so much in its cache."""
        self._full.clear()
        self._refused = None
        gate = self._service.gate
        if self.explain.attempts == 1:
            # What was charged when it was sent rested on the prediction.
            wrong = self.explain.predicted_cached_tokens - num_cached_tokens
            gate.charge(self._request.tenant, wrong)
        if self._admitted is not None:
            self._admitted.answered(is_usual=self._num_lost == 0)
        gate.notify()

    async def _on_failure(self, completion: Completion) -> None:
        """The replica ended the request: refused, failed, or going away."""
        if completion.error is None:
            self._on_lost(f"the replica ended the request with {completion.finish_reason!r}")
            return
        error = from_wire(completion.error)
        if self._emitted and isinstance(error, Unavailable | Overloaded):
            await self._try_again(error)
        elif isinstance(error, Unavailable):
            self._on_lost(error.message)
        elif isinstance(error, StepFailed):
            self._crash_record.on_incident()
            self._leave()
            self._check_poison(error.message)
        elif isinstance(error, Overloaded):
            # Another may have a place; `_rank` gives up when none is left.
            self._full.add(self._attempt.replica)
            self._refused = error
            self._release_attempt()
        else:
            raise error

    async def _on_gone(self, lost: Lost) -> None:
        """The replica, its stream or its call broke."""
        if lost.planned:
            self._leave()
            return
        self._lost_attempts.append((lost.replica, self._attempt.stream_id))
        if self._emitted and not self._attempt.placed:
            await self._try_again(Unavailable(lost.reason, retry_after_s=NO_REPLICA_RETRY_S))
        else:
            self._on_lost(lost.reason)
        # Also one that no frame has confirmed: the replica may have died of its first step with the request.
        if self._crash_record.num_incidents + len(self._lost_attempts) >= SUSPECTED_AFTER:
            await self._look_into_losses()
            self._check_poison(lost.reason)

    async def _look_into_losses(self) -> None:
        """Whether the replicas crashed, and in steps with this request; the first time nobody waits for the answer."""
        looked_into, self._lost_attempts = self._lost_attempts, []
        for replica, stream_id in looked_into:
            if await self._service.transport.crashed_with(replica, stream_id):
                self._crash_record.on_incident()

    def _check_poison(self, reason: str) -> None:
        if self._crash_record.state is PoisonState.CONFIRMED:
            raise EngineCrash(
                f"the engine failed {self._crash_record.num_incidents} times with this request, the last time with "
                f"nothing else in its step: {reason}"
            )

    async def _try_again(self, error: QuireError) -> None:
        """A replica that did not take over an answer that has begun has not failed it: it may have been dead
        already. So only time counts."""
        self._leave()
        if self._has_waited_enough():
            raise error
        await asyncio.sleep(MOVE_POLL_S)

    def _on_lost(self, reason: str) -> None:
        """Continue elsewhere, or give up when the budget is spent."""
        self._num_lost += 1
        self._must_pay = True
        self._leave()
        if self._num_lost > self._service.max_migrations:
            raise Unavailable(
                f"the request failed on {self._num_lost} replicas, last: {reason}",
                retry_after_s=NO_REPLICA_RETRY_S,
            )

    def _leave(self) -> None:
        """The attempt is over; the next one is elsewhere if it can be."""
        if self._attempt is not None:
            self._failed_on.add(self._attempt.replica)
        if self._homeless_s is None:
            self._homeless_s = self._service.clock()
        self._release_attempt()


def _reason_of(error: BaseException) -> str:
    """The finish reason of an answer that ends with this."""
    return "error" if isinstance(error, Exception) else "abort"
