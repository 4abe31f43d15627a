"""The request lifecycle: what happens between a client's prompt and the last character of its answer.

1. check what can be checked without the model's words (`params.check`)
2. chat template and tokens, off the event loop
3. sampling parameters, complete and within bounds (`params.resolve`)
4. routing hashes of the prompt, longest match and cost at every replica (`policy.choose`)
5. book the work, submit; the first token, or the refusal, decides what `generate` returns or raises
6. tokens → text → stop strings → deltas
7. every exit ends the attempt and returns the booking

Plain asyncio: the bus comes in through the `Transport` protocol, so this file is tested without Ray.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import numpy as np

from quire.protos.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    ModelNotFound,
    Unavailable,
    UnsupportedField,
    from_wire,
)
from quire.protos.wire import (
    Completion,
    Hello,
    RoutingHasher,
    SamplingParams,
    Submit,
    TokenDelta,
    TokenLogprob,
)
from quire.router import params
from quire.router.chat_template import ChatTemplate
from quire.router.choices import ChoicesStream
from quire.router.detokenizer import Detokenizer, DetokenizerFactory
from quire.router.policy import Policy, RouteRequest
from quire.router.replicas import ReplicaTable, RequestBooking
from quire.router.stop import StopMatcher
from quire.router.tokenizer import AsyncTokenizer
from quire.router.transport import Attempt, Lost, Transport
from quire.router.types import (
    Explain,
    GenerationRequest,
    ModelInfo,
    OutputDelta,
    Readiness,
    ReplicaStatus,
    ScoredToken,
    TokenScores,
    Usage,
)

MAX_ATTEMPTS = 4  # the first and three more
NO_REPLICA_RETRY_S = 1.0


class Observer:
    """Told of what clients experience; the base class ignores it."""

    def on_first_token(self, ttft_s: float) -> None:
        """Seconds from the request's arrival to its first token."""

    def on_inter_token(self, itl_s: float) -> None:
        """Seconds between two deltas of one stream."""

    def on_end(self, usage: Usage, explain: Explain) -> None:
        """The stream ended, for whatever reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the router knows of its model without a replica."""

    name: str  # as clients call it
    created_s: int
    defaults: params.GenerationDefaults
    limits: params.Limits
    max_prompt_tokens: int | None = None  # None: as many as the model takes


class RouterService:
    """Serves generation requests over a transport: the `Service` that HTTP and gRPC call.

    Owns nothing that survives a request but the table, which the bus feeds.
    """

    def __init__(
        self,
        facts: ModelFacts,
        *,
        router_id: str,
        tokenizer: AsyncTokenizer,
        template: ChatTemplate | None,
        table: ReplicaTable,
        policy: Policy,
        transport: Transport,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.facts = facts
        self.router_id = router_id
        self.table = table
        self.policy = policy
        self.transport = transport
        self.observer = observer or Observer()
        self.clock = clock
        self.rng = random.Random(secrets.randbits(64))
        self._tokenizer = tokenizer
        self._detokenizers = DetokenizerFactory(tokenizer.tokenizer.backend)
        self._template = template
        self._hashers: dict[str, RoutingHasher] = {}

    async def generate(self, request: GenerationRequest) -> RequestStream | ChoicesStream:
        """Check, tokenise, route and submit; returns with the first token (see `Service.generate`)."""
        arrived_s = self.clock()
        if request.model not in (None, self.facts.name):
            raise ModelNotFound(
                f"model: {request.model!r} is not served here; this application serves "
                f"{self.facts.name!r}",
                field="model",
            )
        params.check(request, self.facts.limits)
        hello = self._hello()
        prompt_ids = await self._prompt_ids(request, hello)
        self._check_prompt_len(len(prompt_ids))
        sampling = params.resolve(
            request,
            self.facts.defaults,
            num_prompt_tokens=len(prompt_ids),
            max_model_len=min(hello.max_model_len, hello.max_cache_tokens),
            vocab_size=hello.vocab_size,
            limits=self.facts.limits,
            rng=self.rng,
            bad_word_ids=self._tokenizer.tokenizer.bad_word_ids(request.bad_words),
        )
        hashes = self._hasher(hello, request.tenant).hashes(prompt_ids)
        context = () if request.messages else prompt_ids[-16:].tolist()
        streams = [
            RequestStream(
                self,
                request,
                prompt_ids,
                dataclasses.replace(sampling, choice=choice),
                hashes,
                hello,
                self._detokenizers.new(request.skip_special_tokens, context),
                arrived_s,
            )
            for choice in range(request.n)
        ]
        stream = streams[0] if request.n == 1 else ChoicesStream(streams)
        await stream.start()
        return stream

    def scores(self, token_id: int, of_token: TokenLogprob) -> TokenScores:
        """A token's log-probabilities with the tokens' texts."""

        def scored(token_id: int, logprob: float) -> ScoredToken:
            utf8 = self._detokenizers.token_bytes(token_id)
            return ScoredToken(token_id, logprob, utf8.decode(errors="replace"), utf8)

        return TokenScores(
            scored(token_id, of_token.logprob),
            tuple(map(scored, of_token.top_ids, of_token.top_logprobs)),
        )

    def model_info(self) -> ModelInfo:
        hello = self._hello()
        return ModelInfo(
            name=self.facts.name,
            created_s=self.facts.created_s,
            max_model_len=min(hello.max_model_len, hello.max_cache_tokens),
            vocab_size=hello.vocab_size,
            revision=hello.revision,
            dtype=hello.dtype,
            eos_token_ids=tuple(hello.eos_token_ids),
            block_size=hello.block_size,
        )

    def readiness(self) -> Readiness:
        hellos = self.transport.hellos
        num_ready = sum(status.attached for status in self.replicas())
        slowest = max(
            (hello.startup_s for hello in hellos.values()),
            key=lambda phases: sum(phases.values()),
            default={},
        )
        reason = "ok" if num_ready else "no replica is attached yet"
        return Readiness(num_ready > 0, reason, num_ready, dict(slowest))

    def replicas(self) -> list[ReplicaStatus]:
        return self.table.statuses(self.clock())

    async def watch_cache(self, period_s: float) -> AsyncIterator[list[ReplicaStatus]]:
        last = None
        while True:
            statuses = self.replicas()
            seen = [(s.replica, s.epoch, s.attached, s.load, s.indexed_blocks) for s in statuses]
            if seen != last:
                last = seen
                yield statuses
            await asyncio.sleep(period_s)

    def _hello(self) -> Hello:
        for hello in self.transport.hellos.values():
            return hello
        raise Unavailable(
            "no replica is ready to serve the model", retry_after_s=NO_REPLICA_RETRY_S
        )

    def _check_prompt_len(self, num_tokens: int) -> None:
        bound = self.facts.max_prompt_tokens
        if bound is not None and num_tokens > bound:
            raise ContextLengthExceeded(
                f"prompt has {num_tokens} tokens; this server takes at most {bound}", field="prompt"
            )

    async def _prompt_ids(self, request: GenerationRequest, hello: Hello) -> np.ndarray:
        """[tokens] int32."""
        if request.messages is None and not isinstance(request.prompt, str):
            return np.asarray(request.prompt, dtype=np.int32)
        if request.messages is not None:
            if self._template is None:
                raise UnsupportedField(
                    "messages: the checkpoint has no chat template; configure `chat_template` or "
                    "use /v1/completions",
                    field="messages",
                )
            # The template has written the special tokens itself.
            text, add_special_tokens = self._template.render(request.messages), False
        else:
            text, add_special_tokens = request.prompt, True
        return await self._tokenizer.encode(
            text,
            add_special_tokens,
            max_model_len=hello.max_model_len,
            field="prompt" if request.messages is None else "messages",
        )

    def _hasher(self, hello: Hello, tenant: str) -> RoutingHasher:
        key = f"{hello.model_name}\x00{hello.revision}\x00{tenant}"
        hasher = self._hashers.get(key)
        if hasher is None:
            if len(self._hashers) >= 1024:  # tenants come and go; a hasher is cheap to make again
                self._hashers.clear()
            hasher = RoutingHasher(hello.model_name, hello.revision, tenant)
            self._hashers[key] = hasher
        return hasher


class RequestStream:
    """One request on its way, across however many replicas it takes: the `GenerationStream`.

    The emitted tokens, the detokeniser and the stop matcher live here, so a stream whose replica is lost
    continues on another with prompt + emitted tokens, the same seed and the next index.
    """

    def __init__(
        self,
        service: RouterService,
        request: GenerationRequest,
        prompt_ids: np.ndarray,
        sampling: SamplingParams,
        hashes: np.ndarray,
        hello: Hello,
        detokenizer: Detokenizer,
        arrived_s: float,
    ):
        self.request_id = request.request_id
        self.model = service.facts.name
        self.created_s = int(time.time())
        self.seed = sampling.seed
        self.usage = Usage(prompt_tokens=len(prompt_ids))
        self.explain = Explain()
        self._service = service
        self._request = request
        self._prompt_ids = prompt_ids
        self._sampling = sampling
        self._hashes = hashes
        self._eos_token_ids = frozenset(hello.eos_token_ids)
        self._detokenizer = detokenizer
        self._stop = StopMatcher(request.stop, request.include_stop_str_in_output)
        self._arrived_s = arrived_s
        self._last_delta_s: float | None = None
        self._emitted: list[int] = []
        self._attempt: Attempt | None = None
        self._booking: RequestBooking | None = None
        self._failed_on: set[str] = set()
        self._first: OutputDelta | None = None
        self._closed = False

    async def start(self) -> None:
        """Submit and wait for the first token or the refusal."""
        try:
            self._first = await self._next_delta()
        except BaseException:
            self._close()
            raise

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        if self._first is not None:
            delta, self._first = self._first, None
            return delta
        if self._closed:
            raise StopAsyncIteration
        try:
            return await self._next_delta()
        except BaseException:
            self._close()
            raise

    async def aclose(self) -> None:
        """End the request on its replica if it still runs. Idempotent."""
        self._close()

    # -- attempts ----------------------------------------------------------------------------------------

    def _submit(self) -> Attempt:
        service, now = self._service, self._service.clock()
        num_prompt_tokens = len(self._prompt_ids) + len(self._emitted)
        fleet = service.table.fleet(
            self._hashes, num_prompt_tokens, now, self._request.session, self._failed_on
        )
        if not len(fleet):
            raise Unavailable(
                "no replica is ready to serve the model", retry_after_s=NO_REPLICA_RETRY_S
            )
        deadline_s = self._request.deadline_s
        if deadline_s is not None:
            deadline_s -= now - self._arrived_s
            if deadline_s <= 0:
                raise DeadlineExceeded("the request's deadline passed before it was sent")
        ranking = service.policy.choose(
            RouteRequest(num_prompt_tokens, self._request.session, self._request.priority),
            fleet,
            now,
            service.rng,
        )
        best = ranking[0]
        self._booking = service.table.book(
            ranking, self._hashes, num_prompt_tokens, now, self._request.session
        )
        self.explain.attempts += 1
        self.explain.replica = best.replica
        self.explain.predicted_cached_tokens = best.cached_tokens
        self.explain.runner_up = ranking[1].replica if len(ranking) > 1 else ""
        submit = Submit(
            router_id=service.router_id,
            stream_id=service.transport.next_stream_id(),
            request_id=self.request_id,
            prompt_ids=np.concatenate(
                [self._prompt_ids, np.asarray(self._emitted, dtype=np.int32)]
            ),
            params=self._sampling,
            num_emitted=len(self._emitted),
            tenant=self._request.tenant,
            deadline_s=deadline_s,
            priority=self._request.priority,
        )
        return service.transport.submit(submit, ranking.names())

    def _release_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.cancel()
        booking, self._booking = self._booking, None
        if booking is not None:
            self._service.table.end(booking, self._service.clock(), len(self._emitted))

    def _close(self) -> None:
        """The one way out: finish, stop string, error, cancellation."""
        if not self._closed:
            self._closed = True
            self._release_attempt()
            self._service.observer.on_end(self.usage, self.explain)

    # -- events ------------------------------------------------------------------------------------------

    async def _next_delta(self) -> OutputDelta:
        while True:
            if self._attempt is None:
                self._attempt = self._submit()
            event = await self._attempt.next()
            if isinstance(event, TokenDelta):
                delta = self._on_tokens(event)
                if delta is not None:
                    return delta
            elif isinstance(event, Lost):
                self._on_lost(event.reason)
            else:
                self._on_failure(event)

    def _on_tokens(self, event: TokenDelta) -> OutputDelta | None:
        """Tokens to text; None when the delta held nothing new."""
        expected = len(self._emitted)
        if event.index > expected:
            raise EngineError(f"tokens {expected} to {event.index - 1} of the stream are missing")
        new_ids = event.token_ids[expected - event.index :]
        if not new_ids and event.finish_reason is None:
            return None
        self._observe(event)
        pieces: list[str] = []
        for i, token_id in enumerate(new_ids):
            self._emitted.append(token_id)
            last = event.finish_reason == "stop" and i == len(new_ids) - 1
            if last and self._ends(token_id):
                break  # the ending token counts, its text does not show
            text = self._detokenizer.feed([token_id])
            text, matched = self._match(text)
            pieces.append(text)
            if matched is not None:
                self.usage.completion_tokens = len(self._emitted)
                self._close()
                ids = new_ids[: i + 1]
                return OutputDelta(
                    "".join(pieces), ids, "stop", matched, self._scores(event, expected, ids)
                )
        self.usage.completion_tokens = len(self._emitted)
        if event.finish_reason is None:
            delta = OutputDelta("".join(pieces), new_ids)
        else:
            delta = self._finish(event.finish_reason, pieces, new_ids)
        delta.logprobs = self._scores(event, expected, new_ids)
        return delta

    def _scores(self, event: TokenDelta, expected: int, ids: list[int]) -> list[TokenScores] | None:
        """What the replica said of `ids`, whose first has the index `expected`; None if not asked."""
        if event.logprobs is None:
            return None
        of_ids = event.logprobs[expected - event.index :][: len(ids)]
        return [self._service.scores(i, logprob) for i, logprob in zip(ids, of_ids, strict=True)]

    def _match(self, text: str) -> tuple[str, str | None]:
        if len(self._emitted) <= self._sampling.min_tokens:
            return self._stop.flush() + text, None
        return self._stop.feed(text)

    def _finish(self, reason: str, pieces: list[str], new_ids: list[int]) -> OutputDelta:
        text, matched = self._match(self._detokenizer.flush())
        pieces.append(text)
        if matched is not None:
            self._close()
            return OutputDelta("".join(pieces), new_ids, "stop", matched)
        pieces.append(self._stop.flush())
        last = self._emitted[-1] if reason == "stop" else None
        stop_reason = last if last in self._sampling.stop_token_ids else None
        self._close()
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
            self.usage.cached_tokens = event.num_cached_tokens
            self.explain.cached_tokens = event.num_cached_tokens
            self.explain.queue_s = event.queue_s
        if self._booking is not None and self._attempt is not None:
            self.explain.replica = self._attempt.replica
            self._service.table.answered(self._booking, now)
        self._last_delta_s = now

    def _on_failure(self, completion: Completion) -> None:
        """The replica ended the request: refused, failed, or going away."""
        if completion.error is None:
            self._on_lost(f"the replica ended the request with {completion.finish_reason!r}")
            return
        error = from_wire(completion.error)
        if isinstance(error, Unavailable):
            self._on_lost(error.message)
            return
        raise error

    def _on_lost(self, reason: str) -> None:
        """Continue elsewhere, or give up when the budget is spent."""
        if self._attempt is not None:
            self._failed_on.add(self._attempt.replica)
        self._release_attempt()
        if self.explain.attempts >= MAX_ATTEMPTS:
            raise Unavailable(
                f"the request failed on {self.explain.attempts} replicas, last: {reason}",
                retry_after_s=NO_REPLICA_RETRY_S,
            )
