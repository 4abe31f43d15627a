"""The router's service: checks a client's request, encodes its prompt and starts its streams.

1. Check everything that needs no tokenizer (`params.check`).
2. Render the chat template and tokenise the text; long texts run in a thread (`PromptEncoder`).
3. Resolve the sampling parameters within their bounds (`params.resolve`).
4. Hash the prompt for routing.
5. Start a `RequestStream` for each choice.

Plain asyncio: replicas are reached through the `Transport` protocol, so tests run without Ray.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress

import numpy as np

from quire.protos.engine_facts import engine_facts
from quire.protos.errors import InvalidRequest, QuireError, Unavailable
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import Hello
from quire.router.adapters.adapter_control import AdapterControl, AdapterMethods
from quire.router.admission.failover_budget import FailoverBudget
from quire.router.admission.gate import AdmissionGate
from quire.router.admission.wait_bounds import AdmissionLimits
from quire.router.explain.decision_log import DecisionLog
from quire.router.explain.decisions import DecisionRing
from quire.router.explain.live_state import live_state, merged
from quire.router.explain.regret_worker import RegretWorker
from quire.router.fleet.replicas import ReplicaTable
from quire.router.observer import Observer
from quire.router.policy.policy import Policy
from quire.router.question_types import Question
from quire.router.request import params, resume
from quire.router.request.attempts import NO_REPLICA_RETRY_S
from quire.router.request.choices import ChoicesStream
from quire.router.request.context import Arrived, ModelFacts, PeerRouters, observed
from quire.router.request.prompt_encoder import PromptEncoder, of_prompt
from quire.router.request.prompts import PromptOnlyStream, PromptsStream
from quire.router.request.request_stream import RequestStream
from quire.router.request.token_scores import TokenScorer
from quire.router.scoring.embedder import Embedder, check_num_inputs
from quire.router.scoring.many_prompts import PartOfBill
from quire.router.scoring.question_prompts import check_questions
from quire.router.scoring.reply_scorer import ReplyScorer
from quire.router.status_types import Decisions, LiveState, ModelInfo, Readiness, ReplicaStatus
from quire.router.text.chat_template import ChatTemplate
from quire.router.text.detokenizer import DetokenizerFactory
from quire.router.text.tokenizer import AsyncTokenizer
from quire.router.trace.tracer import Tracer
from quire.router.transport.retained_turns import RetainedTurns
from quire.router.transport.transport import Transport
from quire.router.types import (
    Embeddings,
    EncodedPrompt,
    GenerationRequest,
    GenerationStream,
    Mark,
    Origin,
    ReplyScores,
)

MAX_MIGRATIONS = 3


class RouterService(AdapterMethods):
    """Serves generation requests over a transport: the `Service` that HTTP and gRPC call.

    Parameters
    ----------
    max_move_s
        Longest time for which a stream that lost its replica waits for another one.
    max_migrations
        A request may fail on this many replicas without a new token and continue on another one.
    budget
        Limits the migrations of all requests together; None: no limit.
    retain_s
        Seconds for which replicas retain the blocks of a conversation after an answer that ended with a tool call.
    ready_timeout_s
        A replica with work that has finished no step for this time does not count as ready.
    admission
        Limits of the router's queue; None: the defaults of `AdmissionLimits`.
    max_explained_decisions
        Number of decisions that `decisions` can return.
    decision_log
        Records every decision and its outcome; None: nothing is recorded.
    peers
        All routers, including this one, to ask them; None: this is the only router.
    scrape
        Returns the Prometheus page of the whole application; None: an empty page.
    tracer
        Traces requests; None: no request is traced.
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
        retain_s: float = 0.0,
        ready_timeout_s: float = math.inf,
        admission: AdmissionLimits | None = None,
        max_explained_decisions: int = 256,
        decision_log: DecisionLog | None = None,
        peers: PeerRouters | None = None,
        scrape: Callable[[], Awaitable[bytes]] | None = None,
        adapter_control: AdapterControl | None = None,
        tracer: Tracer | None = None,
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
        self.retain_s = retain_s
        self.retained_turns = RetainedTurns()
        self.ready_timeout_s = ready_timeout_s
        self.clock = clock
        self.gate = AdmissionGate(admission or AdmissionLimits(), clock, max_away_s=max_move_s)
        self.ring = DecisionRing(router_id, max_explained_decisions, clock)
        self.regret = RegretWorker(self.ring, clock)
        self.decision_log = decision_log
        self._peers = peers
        self._scrape = scrape
        self.adapter_control = adapter_control or AdapterControl(facts.name)
        self.tracer = tracer
        self.rng = random.Random(secrets.randbits(64))
        self._detokenizers = DetokenizerFactory(tokenizer.tokenizer.backend)
        self.scorer = TokenScorer(self._detokenizers)
        self._prompt_encoder = PromptEncoder(tokenizer, template)

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
        """Apply new settings, also to requests that already run or wait."""
        self.facts = facts
        self.policy = policy
        self.max_move_s = max_move_s
        self.max_migrations = max_migrations
        self.ready_timeout_s = ready_timeout_s
        self.gate.reconfigure(admission, max_away_s=max_move_s)
        if max_explained_decisions != self.ring.size:
            self.ring.resize(max_explained_decisions)

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Check, tokenise, route and submit a request; return its stream when the first token has arrived."""
        operation = "chat" if request.messages else "text_completion"
        with observed(self, request, operation) as arrived:
            return await self._generate(request, arrived)

    async def score(self, request: GenerationRequest, questions: Sequence[Question]) -> ReplyScores:
        """Score the replies to some questions about the request's messages."""
        with observed(self, request, "score") as arrived:
            return await self._score(request, questions, arrived)

    async def embed(self, request: GenerationRequest, dimensions: int | None) -> Embeddings:
        """Embed each prompt of a request."""
        with observed(self, request, "embeddings") as arrived:
            return await self._embed(request, dimensions, arrived)

    async def encode(self, request: GenerationRequest) -> EncodedPrompt:
        """Check a request with one prompt and encode the prompt; nothing is generated."""
        request = self._check(request)
        return await self._prompt_encoder.encode(request, self._hello(), self.facts)

    async def load_parser(self) -> None:
        """Load in a thread what the first parsed chat needs. This takes about a second."""
        await self._prompt_encoder.load_parser()

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of some token ids."""
        return await self._prompt_encoder.decode(token_ids, skip_special_tokens)

    async def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it."""
        return await self._prompt_encoder.tokens(token_ids)

    def refused(self, error: QuireError) -> None:
        """Count a request that a front end refused before it called `generate`."""
        self.observer.on_request()
        self.observer.on_refusal(error, 0.0)

    async def metrics(self) -> bytes:
        """Return the Prometheus page of all routers and replicas of the application."""
        return b"" if self._scrape is None else await self._scrape()

    async def _generate(self, request: GenerationRequest, arrived: Arrived) -> GenerationStream:
        request = self._check(request)
        candidates = self._candidates(request)
        self.gate.check(request.payer, request.priority)
        asked = dataclasses.replace(request, max_tokens=1) if request.max_tokens == 0 else request
        answer_id = uuid.uuid4().hex
        streams = []
        for index, single in enumerate(asked.for_each_prompt()):
            try:
                streams.append(await self._stream(single, candidates, arrived, answer_id))
            except InvalidRequest as error:
                raise (of_prompt(error, index) if request.prompts else error) from None
        if request.bill is not None:
            num_tokens = sum(stream.usage.prompt_tokens for stream in streams)
            request.bill.begin(num_tokens, sum(not mark.finished for mark in request.marks))
        stream: PromptsStream | ChoicesStream | RequestStream = streams[0]
        if request.prompts:
            stream = PromptsStream(streams, request.n)
        if request.max_tokens == 0:
            prompt_only = PromptOnlyStream(stream, request.logprobs is not None)
            await prompt_only.start()
            return prompt_only
        await stream.start()
        return stream

    async def _score(
        self, request: GenerationRequest, questions: Sequence[Question], arrived: Arrived
    ) -> ReplyScores:
        check_questions(questions)
        request = self._check(request)
        hello = self._candidates(request)[0]
        self.gate.check(request.payer, request.priority)
        began_s = self.clock()
        prompts = await self._prompt_encoder.encode_questions(request, questions, hello, self.facts)
        arrived.on_tokenised(began_s, self.clock(), prompts.max_len)
        part = dataclasses.replace(
            request, messages=None, prompt=(0,), max_tokens=1, bill=PartOfBill(request.payer)
        )
        sampling = params.resolve(
            part,
            self.facts.defaults,
            num_prompt_tokens=prompts.max_len,
            max_model_len=min(hello.max_model_len, hello.max_cache_tokens),
            vocab_size=hello.vocab_size,
            limits=self.facts.limits,
        )
        origin = Origin(sampling.seed, b"", uuid.uuid4().hex, int(time.time()))

        async def new_stream(prompt_ids: np.ndarray, start: int) -> RequestStream:
            asked = dataclasses.replace(sampling, prompt_logprobs=0, prompt_logprobs_start=start)
            return await self._part_stream(part, prompt_ids, asked, hello, arrived, origin)

        return await ReplyScorer(prompts, new_stream).run(request.bill, self.clock)

    async def _embed(
        self, request: GenerationRequest, dimensions: int | None, arrived: Arrived
    ) -> Embeddings:
        embedding = self.facts.embedding
        check_num_inputs(request)
        part = dataclasses.replace(request, prompt=(0,), prompts=(), bill=PartOfBill(request.payer))
        part = self._check(part)
        hello = self._candidates(request)[0]
        embedding.check(dimensions, hello.hidden_size)
        self.gate.check(request.payer, request.priority)
        began_s = self.clock()
        prompts = await self._prompt_encoder.encode_inputs(request, hello, self.facts)
        arrived.on_tokenised(began_s, self.clock(), sum(map(len, prompts)))
        sampling = SamplingParams(max_tokens=1, temperature=0.0, pooling=embedding.pooling)
        origin = Origin(0, b"", uuid.uuid4().hex, int(time.time()))

        async def new_stream(prompt_ids: np.ndarray) -> RequestStream:
            return await self._part_stream(part, prompt_ids, sampling, hello, arrived, origin)

        embedder = Embedder(prompts, embedding, dimensions, new_stream)
        return await embedder.run(request.bill, self.clock)

    async def _part_stream(
        self,
        part: GenerationRequest,
        prompt_ids: np.ndarray,
        sampling: SamplingParams,
        hello: Hello,
        arrived: Arrived,
        origin: Origin,
    ) -> RequestStream:
        """Return the stream, not started, of one prompt of a request."""
        # The time to the first token counts from here, and so does the deadline.
        now_s, deadline_s = self.clock(), part.deadline_s
        if deadline_s is not None:
            deadline_s = max(0.0, deadline_s - (now_s - arrived.at_s))
        hashes = await self._prompt_encoder.hashes(prompt_ids, hello, self.namespace(part))
        if sampling.pooling == "mean":
            # Every hidden state is read, so the replica computes the whole prompt.
            hashes = hashes[:0]
        return RequestStream(
            self,
            dataclasses.replace(part, deadline_s=deadline_s),
            prompt_ids,
            sampling,
            hashes,
            hello,
            self._detokenizers.new(True),
            arrived._replace(at_s=now_s),
            origin,
            Mark(),
            {},
        )

    def _check(self, request: GenerationRequest) -> GenerationRequest:
        """Check everything that needs no tokenizer; return the request with its adapter."""
        request = self.with_adapter(request, self.facts.name)
        params.check(request, self.facts.limits)
        return request

    async def _stream(
        self,
        request: GenerationRequest,
        candidates: Sequence[Hello],
        arrived: Arrived,
        answer_id: str,
    ) -> RequestStream | ChoicesStream:
        """Check and tokenise one prompt; return its stream, not started."""
        encoder, began_s = self._prompt_encoder, self.clock()
        encoded = await encoder.encode(request, candidates[0], self.facts)
        prompt_ids, text = encoded.token_ids, encoded.text or ""
        answer = await encoder.answer_format(request, text)
        if answer is not None:
            request = params.with_grammar(request, answer.grammar)
        special_stops = encoder.special_stops(request)
        prediction_ids = await encoder.encode_prediction(request, candidates[0])
        for hello in candidates:
            sampling = params.resolve(
                resume.with_seed(request),
                self.facts.defaults,
                num_prompt_tokens=len(prompt_ids),
                max_model_len=min(hello.max_model_len, hello.max_cache_tokens),
                vocab_size=hello.vocab_size,
                limits=self.facts.limits,
                bad_word_ids=encoder.bad_word_ids(request),
                special_stop_ids=[i for i in special_stops if i < hello.vocab_size],
            )
            hashes = await encoder.hashes(prompt_ids, hello, self.namespace(request))
            try:
                origin = self._origin(request, prompt_ids, hashes, sampling, hello, answer_id)
                break
            except InvalidRequest:
                if hello is candidates[-1]:
                    raise
        arrived.on_tokenised(began_s, self.clock(), len(prompt_ids), answer_id)
        context = () if request.messages else prompt_ids[-16:].tolist()
        kept_ids = frozenset() if answer is None else encoder.marker_ids
        streams: list[RequestStream] = []
        lead: RequestStream | None = None
        for choice, mark in enumerate(request.marks):
            # All choices have the same prompt, so only the lead asks for its log-probabilities.
            scored = sampling.prompt_logprobs if lead is None else None
            stream = RequestStream(
                self,
                request,
                prompt_ids,
                dataclasses.replace(sampling, choice=choice, prompt_logprobs=scored),
                hashes,
                hello,
                self._detokenizers.new(request.skip_special_tokens, context, kept_ids),
                arrived,
                origin,
                mark,
                special_stops,
                None if answer is None else answer.new_parser(origin.answer_id, choice),
                lead=lead,
                prediction_ids=prediction_ids,
            )
            streams.append(stream)
            if lead is None and not mark.finished:
                lead = stream
        return streams[0] if request.n == 1 else ChoicesStream(streams, lead or streams[0])

    def _origin(
        self,
        request: GenerationRequest,
        prompt_ids: np.ndarray,
        hashes: np.ndarray,
        sampling: SamplingParams,
        hello: Hello,
        answer_id: str,
    ) -> Origin:
        """Return a new origin, or that of the resumed stream after a check that the request is the same."""
        options = (
            request.stop,
            request.include_stop_str_in_output,
            request.skip_special_tokens,
            request.echo,
            request.n,
            request.tool_choice is not None and request.tool_choice.mode == "none",
            request.parallel_tool_calls,
            *(() if request.adapter is None else (request.adapter.digest,)),
        )
        fingerprint = resume.fingerprint_of(prompt_ids, hashes, sampling, options, hello)
        if request.resume_from is not None:
            resume.check(request.resume_from, fingerprint, request.n, sampling.max_tokens)
            return request.resume_from.origin
        return Origin(sampling.seed, fingerprint, answer_id, int(time.time()))

    def model_info(self) -> ModelInfo:
        return ModelInfo.of(self.facts.name, self.facts.created_s, self._hello())

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

    async def decisions(
        self, request_id: str | None, limit: int, payer: str | None = None
    ) -> Decisions:
        """Return the recent decisions of all routers: a proxy, not the client, chose the router of this call."""
        num_silent = 0
        if self._peers is not None:
            try:
                return await self._peers.decisions(request_id, limit, payer)
            except Unavailable:
                num_silent = 1
        return Decisions([self.router_id], num_silent, self.ring.recent(request_id, limit, payer))

    def own_state(self, payer: str | None = None) -> LiveState:
        """Return what this router knows; only the requests of `payer`, if given."""
        parts = (self.ring, self.gate, self.table, self.observer)
        return live_state(*parts, self.facts.name, self.clock(), payer, self.regret.regrets)

    async def live_state(self, payer: str | None = None) -> LiveState:
        own = self.own_state(payer)
        if self._peers is None or own.num_routers == 1:
            return own
        with suppress(Unavailable):
            return merged(own, await self._peers.live_states(payer))
        return own

    async def watch_cache(self, period_s: float) -> AsyncGenerator[list[ReplicaStatus], None]:
        last = None
        while True:
            statuses = self.replicas()
            seen = [(s.replica, s.epoch, s.attached, s.load, s.indexed_blocks) for s in statuses]
            if seen != last:
                last = seen
                yield statuses
            await asyncio.sleep(period_s)

    def _candidates(self, request: GenerationRequest) -> list[Hello]:
        """Return at least one replica for each set of weights that the request may use.

        During an update, replicas have different weights. A new request takes the weights of a random replica, so that
        old and new replicas share the load. A resumed request needs the weights that it started with.
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
