"""What happens to a client's request until it is on its way.

1. check what can be checked without the model's words (`params.check`)
2. chat template and tokens, off the event loop
3. sampling parameters, complete and within bounds (`params.resolve`)
4. routing hashes of the prompt, longest match and cost at every replica (`policy.choose`)
5. its `RequestStream` takes it from there, one for each choice

Plain asyncio: the bus comes in through the `Transport` protocol, so this file is tested without Ray.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import random
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from quire.protos.engine_facts import engine_facts
from quire.protos.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    QuireError,
    Unavailable,
    UnsupportedField,
    model_not_found,
)
from quire.protos.field_checks import check_ids
from quire.protos.routing_hash import RoutingHasher
from quire.protos.wire import Hello, PromptLogprobs, SamplingParams, TokenLogprob
from quire.router.admission.gate import AdmissionGate
from quire.router.admission.wait_bounds import AdmissionLimits
from quire.router.explain.decision_log import DecisionLog
from quire.router.explain.decisions import DecisionRing
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_hashes import prefix_hashes
from quire.router.observer import Observer
from quire.router.policy.policy import Policy
from quire.router.request import params, resume
from quire.router.request.choices import ChoicesStream
from quire.router.request.context import ModelFacts
from quire.router.request.failover_budget import FailoverBudget
from quire.router.request.prompts import PromptOnlyStream, PromptsStream
from quire.router.request.request_stream import NO_REPLICA_RETRY_S, RequestStream
from quire.router.text.chat_template import ChatTemplate, TemplateOptions, num_chars
from quire.router.text.detokenizer import DetokenizerFactory
from quire.router.text.special_tokens import SpecialTokens
from quire.router.text.tokenizer import MAX_BYTES_PER_TOKEN, AsyncTokenizer
from quire.router.transport.transport import Transport
from quire.router.types import (
    Decisions,
    GenerationRequest,
    GenerationStream,
    ModelInfo,
    Origin,
    Readiness,
    ReplicaStatus,
    ScoredToken,
    TokenScores,
)

MAX_MIGRATIONS = 3
_MANY_IDS = 16 * 1024


class RouterService:
    """Serves generation requests over a transport: the `Service` that HTTP and gRPC call.

    Owns nothing that survives a request but the table, which the bus feeds.

    Parameters
    ----------
    max_move_s
        A stream that has lost its replica looks for another for at most so long.
    max_migrations
        So many times a request moves to another replica: one that kills its replicas must not kill all of them.
    budget
        What all requests together may move; None: without a bound.
    ready_timeout_s
        A replica that has work and has not finished a step for so long does not count as ready.
    admission
        Bounds of those who wait here; None for the defaults.
    max_explained_decisions
        Decisions that are remembered for `decisions`.
    decision_log
        Takes every decision and what came of it; None: they are not recorded.
    peers
        Asks every router, this one included, for its `own_decisions`; None: there is no other.
    scrape
        Gathers the metrics of the whole application.
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
        max_move_s: float = 30.0,
        max_migrations: int = MAX_MIGRATIONS,
        budget: FailoverBudget | None = None,
        ready_timeout_s: float = math.inf,
        admission: AdmissionLimits | None = None,
        max_explained_decisions: int = 256,
        decision_log: DecisionLog | None = None,
        peers: Callable[[str | None, int], Awaitable[Decisions]] | None = None,
        scrape: Callable[[], Awaitable[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.facts = facts
        self.router_id = router_id
        self.table = table
        self.policy = policy
        self.transport = transport
        self.observer = observer or Observer()
        self.max_move_s = max_move_s
        self.max_migrations = max_migrations
        self.budget = budget
        self.ready_timeout_s = ready_timeout_s
        self.clock = clock
        self.gate = AdmissionGate(admission or AdmissionLimits(), clock, max_away_s=max_move_s)
        self.ring = DecisionRing(router_id, max_explained_decisions, clock)
        self.decision_log = decision_log
        self._peers = peers
        self._scrape = scrape or _no_metrics
        self.rng = random.Random(secrets.randbits(64))
        self._tokenizer = tokenizer
        self._detokenizers = DetokenizerFactory(tokenizer.tokenizer.backend)
        self._template = template
        self._hashers: dict[str, RoutingHasher] = {}

    def reconfigure(
        self,
        facts: ModelFacts,
        policy: Policy,
        *,
        max_move_s: float,
        max_migrations: int,
        ready_timeout_s: float,
        admission: AdmissionLimits,
        max_explained_decisions: int,
    ) -> None:
        """Take on other limits; requests that run or wait go on under them."""
        self.facts = facts
        self.policy = policy
        self.max_move_s = max_move_s
        self.max_migrations = max_migrations
        self.ready_timeout_s = ready_timeout_s
        self.gate.reconfigure(admission, max_away_s=max_move_s)
        if max_explained_decisions != self.ring.size:
            self.ring.resize(max_explained_decisions)

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Check, tokenise, route and submit; returns with the first token (see `Service.generate`)."""
        arrived_s = self.clock()
        self.observer.on_request()
        try:
            return await self._generate(request, arrived_s)
        except Exception as error:
            self.observer.on_refusal(error, self.clock() - arrived_s)
            raise

    def refused(self, error: QuireError) -> None:
        """See `Service.refused`."""
        self.observer.on_request()
        self.observer.on_refusal(error, 0.0)

    async def metrics(self) -> bytes:
        """See `Service.metrics`."""
        return await self._scrape()

    async def _generate(self, request: GenerationRequest, arrived_s: float) -> GenerationStream:
        if request.model not in (None, self.facts.name):
            raise model_not_found(request.model, [self.facts.name])
        params.check(request, self.facts.limits)
        candidates = self._candidates(request)
        self.gate.check(request.tenant, request.priority)
        asked = dataclasses.replace(request, max_tokens=1) if request.max_tokens == 0 else request
        answer_id = uuid.uuid4().hex
        streams = []
        for index, single in enumerate(asked.for_each_prompt()):
            try:
                streams.append(await self._stream(single, candidates, arrived_s, answer_id))
            except InvalidRequest as error:
                raise (_of_prompt(error, index) if request.prompts else error) from None
        stream = PromptsStream(streams, request.n) if request.prompts else streams[0]
        if request.max_tokens == 0:
            stream = PromptOnlyStream(stream, request.logprobs is not None)
        await stream.start()
        return stream

    async def _stream(
        self,
        request: GenerationRequest,
        candidates: Sequence[Hello],
        arrived_s: float,
        answer_id: str,
    ) -> RequestStream | ChoicesStream:
        """Check and tokenise one prompt; its stream is not started."""
        prompt_ids = await self._prompt_ids(request, candidates[0])
        self._check_prompt_len(len(prompt_ids))
        special_stops = self._special_stops(request)
        for hello in candidates:
            sampling = params.resolve(
                _with_seed(request),
                self.facts.defaults,
                num_prompt_tokens=len(prompt_ids),
                max_model_len=min(hello.max_model_len, hello.max_cache_tokens),
                vocab_size=hello.vocab_size,
                limits=self.facts.limits,
                bad_word_ids=self._tokenizer.tokenizer.bad_word_ids(request.bad_words),
                special_stop_ids=[i for i in special_stops if i < hello.vocab_size],
            )
            await _turn(prompt_ids)
            hashes = prefix_hashes(self._hasher(hello, request.tenant), prompt_ids)
            try:
                origin = self._origin(request, prompt_ids, hashes, sampling, hello, answer_id)
                break
            except InvalidRequest:
                if hello is candidates[-1]:
                    raise
        context = () if request.messages else prompt_ids[-16:].tolist()
        streams: list[RequestStream] = []
        lead: RequestStream | None = None
        for choice, mark in enumerate(request.marks):
            # The prompt is the same for all: the lead's log-probabilities of it are everybody's.
            scored = sampling.prompt_logprobs if lead is None else None
            stream = RequestStream(
                self,
                request,
                prompt_ids,
                dataclasses.replace(sampling, choice=choice, prompt_logprobs=scored),
                hashes,
                hello,
                self._detokenizers.new(request.skip_special_tokens, context),
                arrived_s,
                origin,
                mark,
                special_stops,
                lead=lead,
            )
            streams.append(stream)
            if lead is None and not mark.finished:
                lead = stream
        return streams[0] if request.n == 1 else ChoicesStream(streams, lead or streams[0])

    def _special_stops(self, request: GenerationRequest) -> dict[int, str]:
        """Stop strings that are special tokens, by id. Where the text leaves special tokens out, only the id shows."""
        if not request.skip_special_tokens:
            return {}
        special = self._tokenizer.tokenizer.special
        found = ((special.id_of(stop.strip()), stop) for stop in request.stop)
        return {token_id: stop for token_id, stop in found if token_id is not None}

    def _origin(
        self,
        request: GenerationRequest,
        prompt_ids: np.ndarray,
        hashes: np.ndarray,
        sampling: SamplingParams,
        hello: Hello,
        answer_id: str,
    ) -> Origin:
        """A new one, or that of the stream that is resumed if the request is the same."""
        options = (
            request.stop,
            request.include_stop_str_in_output,
            request.skip_special_tokens,
            request.echo,
            request.n,
        )
        fingerprint = resume.fingerprint_of(prompt_ids, hashes, sampling, options, hello)
        if request.resume_from is not None:
            resume.check(request.resume_from, fingerprint, request.n, sampling.max_tokens)
            return request.resume_from.origin
        return Origin(sampling.seed, fingerprint, answer_id, int(time.time()))

    def scores(self, token_id: int, of_token: TokenLogprob, text_offset: int) -> TokenScores:
        """A token's log-probabilities with the tokens' texts."""
        return TokenScores(
            self._scored(token_id, of_token.logprob),
            tuple(map(self._scored, of_token.top_ids, of_token.top_logprobs)),
            text_offset=text_offset,
        )

    def prompt_scores(
        self, first_id: int, parts: Sequence[PromptLogprobs], *, skip_special_tokens: bool
    ) -> list[TokenScores]:
        """The first token of a prompt, and those that the parts are about.

        Parameters
        ----------
        skip_special_tokens
            Whether special tokens are no part of the prompt's text: so where a tokenizer added them.
        """
        detokenizer = self._detokenizers.new(skip_special_tokens)
        num_chars = len(detokenizer.feed([first_id]))
        scores = [TokenScores(self._scored(first_id, None), ())]
        for part in parts:
            tops = zip(part.top_ids.tolist(), part.top_logprobs.tolist(), strict=True)
            columns = (part.token_ids.tolist(), part.logprobs.tolist(), part.ranks.tolist(), tops)
            for token_id, logprob, rank, top in zip(*columns, strict=True):
                token, likeliest = self._scored(token_id, logprob), tuple(map(self._scored, *top))
                scores.append(TokenScores(token, likeliest, rank, num_chars))
                num_chars += len(detokenizer.feed([token_id]))
        return scores

    def _scored(self, token_id: int, logprob: float | None) -> ScoredToken:
        utf8 = self._detokenizers.token_bytes(token_id)
        return ScoredToken(token_id, logprob, utf8.decode(errors="replace"), utf8)

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
        attached = [status for status in self.replicas() if status.attached]
        num_ready = sum(status.load.stalled_s <= self.ready_timeout_s for status in attached)
        slowest = max(
            (hello.startup_s for hello in hellos.values()),
            key=lambda phases: sum(phases.values()),
            default={},
        )
        reason = "ok" if num_ready else "no replica is attached yet"
        if attached and not num_ready:
            stalled_s = min(status.load.stalled_s for status in attached)
            reason = f"no replica has finished a step for {stalled_s:.1f} s, though there is work"
        engine = next((engine_facts(hello) for hello in hellos.values()), None)
        return Readiness(num_ready > 0, reason, num_ready, dict(slowest), engine)

    def replicas(self) -> list[ReplicaStatus]:
        return self.table.statuses(self.clock())

    def own_decisions(self, request_id: str | None, limit: int) -> list[dict[str, Any]]:
        """What this router remembers; see `Service.decisions`."""
        return self.ring.last(limit) if request_id is None else self.ring.find(request_id)

    async def decisions(self, request_id: str | None, limit: int) -> Decisions:
        """See `Service.decisions`: behind a proxy nobody can choose the router that is asked."""
        num_silent = 0
        if self._peers is not None:
            try:
                return await self._peers(request_id, limit)
            except Unavailable:
                num_silent = 1
        return Decisions([self.router_id], num_silent, self.own_decisions(request_id, limit))

    async def watch_cache(self, period_s: float) -> AsyncIterator[list[ReplicaStatus]]:
        last = None
        while True:
            statuses = self.replicas()
            seen = [(s.replica, s.epoch, s.attached, s.load, s.indexed_blocks) for s in statuses]
            if seen != last:
                last = seen
                yield statuses
            await asyncio.sleep(period_s)

    def _candidates(self, request: GenerationRequest) -> list[Hello]:
        """Replicas that stand for the weights with which the request may run; at least one.

        During an update replicas differ in their weights. A new request draws from all replicas, so that old and new
        ones share the load; a resumed one has to find the weights that it began with.
        """
        first = self._hello()
        if not self.table.is_mixed:
            return [first]
        hellos = list(self.transport.hellos.values())
        if request.resume_from is None:
            return [self.rng.choice(hellos)]
        return list({hello.weights: hello for hello in hellos}.values())

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
            await _turn(request.prompt)
            try:
                ids = np.asarray(request.prompt, dtype=np.int32)
            except OverflowError:
                check_ids("prompt", request.prompt, hello.vocab_size)
                raise
            await _turn(ids)
            return ids
        if request.messages is not None:
            if self._template is None:
                raise UnsupportedField(
                    "the checkpoint has no chat template, so messages are not served; configure `chat_template` or "
                    "use /v1/completions",
                    field="messages",
                )
            # By default the template has written the special tokens itself.
            special = self._tokenizer.tokenizer.special
            if self.facts.special_tokens_in_messages:
                special = None
            options = self._template_options(request)
            text = await self._rendered(self._template, request.messages, options, special, hello)
            add_special_tokens, is_guarded = bool(request.add_special_tokens), special is not None
        else:
            text, is_guarded = request.prompt, False
            add_special_tokens = request.add_special_tokens is not False
        ids = await self._tokenizer.encode(
            text,
            add_special_tokens,
            max_model_len=hello.max_model_len,
            field="prompt" if request.messages is None else "messages",
            tenant=request.tenant,
            is_guarded=is_guarded,
        )
        if not len(ids) and request.prompt == "":
            return self._empty_prompt(hello)
        return ids

    def _empty_prompt(self, hello: Hello) -> np.ndarray:
        """What an empty prompt is where the tokenizer adds no BOS: a model needs one token to begin with."""
        start = self._tokenizer.tokenizer.start_id()
        known = [*(() if start is None else (start,)), *hello.eos_token_ids]
        if not known:
            raise InvalidRequest(
                "the checkpoint has neither a BOS nor an EOS token: prompt must have at least 1 character, got 0",
                field="prompt",
            )
        return np.array(known[:1], np.int32)

    async def _rendered(
        self,
        template: ChatTemplate,
        messages: tuple[dict[str, Any], ...],
        options: TemplateOptions,
        special: SpecialTokens | None,
        hello: Hello,
    ) -> str:
        """The prompt text of a conversation; off the event loop if that takes long."""
        length, bound = num_chars(messages), MAX_BYTES_PER_TOKEN * hello.max_model_len
        if length > bound:
            raise ContextLengthExceeded(
                f"messages have {length} characters; at most {bound} can be served"
                f" ({MAX_BYTES_PER_TOKEN} for each of the model's {hello.max_model_len} tokens)",
                field="messages",
            )
        text = template.render_quickly(messages, options, special=special)
        if text is None:
            render = functools.partial(template.render, messages, options, special=special)
            text = await self._tokenizer.in_thread(render)
        return text

    def _template_options(self, request: GenerationRequest) -> TemplateOptions:
        """What the request asks of the chat template, over the application's own."""
        continues, add_prompt = request.continue_final_message, request.add_generation_prompt
        return TemplateOptions(
            add_generation_prompt=not continues if add_prompt is None else add_prompt,
            continue_final_message=continues,
            kwargs={**self.facts.chat_template_kwargs, **(request.chat_template_kwargs or {})},
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


async def _no_metrics() -> bytes:
    return b""


async def _turn(ids: Sequence[int] | np.ndarray) -> None:
    """Let others run between two steps through many ids."""
    if len(ids) > _MANY_IDS:
        await asyncio.sleep(0)


def _of_prompt(error: InvalidRequest, index: int) -> InvalidRequest:
    """The refusal of one prompt of a list."""
    message, field = error.message, error.field
    if field is not None and field.startswith("prompt") and not field.startswith("prompt_"):
        field = f"prompt[{index}]{field.removeprefix('prompt')}"
        if message.startswith("prompt"):
            message = f"prompt[{index}]{message.removeprefix('prompt')}"
    return type(error)(message, field=field)


def _with_seed(request: GenerationRequest) -> GenerationRequest:
    """The router drew a seed for the stream that is resumed where the client gave none."""
    if request.resume_from is None or request.seed is not None:
        return request
    return dataclasses.replace(request, seed=request.resume_from.origin.seed)
