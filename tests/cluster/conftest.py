"""A `Service` without replicas, for the front ends' tests: real bounds, made-up tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from quire.protos.adapter_ref import AdapterRef
from quire.protos.errors import ContextLengthExceeded, QuireError, model_not_found
from quire.protos.field_checks import check_ids
from quire.protos.wire import Frame, Load
from quire.router.adapters.adapter_registry import AdapterRegistry
from quire.router.admission.gate import AdmissionGate
from quire.router.admission.wait_bounds import AdmissionLimits
from quire.router.bill import BilledAnswer
from quire.router.explain.decisions import DecisionRing
from quire.router.explain.live_state import live_state
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.observer import Observer
from quire.router.policy.fleet_view import COLUMN_NAMES, FleetView
from quire.router.policy.policy import Ranking
from quire.router.question_types import Question
from quire.router.request import params
from quire.router.scored_token import ScoredToken, TokenScores
from quire.router.scoring.question_prompts import check_questions
from quire.router.status_types import (
    AdapterEntry,
    Decisions,
    LiveState,
    ModelInfo,
    Readiness,
    ReplicaStatus,
)
from quire.router.text.chat_messages import check_messages
from quire.router.text.stop import StopMatcher
from quire.router.types import (
    Embeddings,
    EncodedPrompt,
    Explain,
    GenerationRequest,
    Origin,
    OutputDelta,
    ReplyScores,
    Usage,
)

# Tests run with --import-mode=importlib, which leaves their folder off the path.
sys.path.insert(0, str(Path(__file__).parent))
from key_files import Keys, one_of_each_kind

VOCAB = [f"word{i} " for i in range(97)] + ["naïve ", "日本 ", '"quoted"\n']
MODEL = "acme/tiny"
MAX_MODEL_LEN = 512


def scores(token_id: int, num_top: int) -> TokenScores:
    """A function of the id; the likeliest is a part of a character."""

    def scored(i: int) -> ScoredToken:
        text = VOCAB[i]
        return ScoredToken(i, -(1.5 + i), text, text.encode())

    top = [ScoredToken(98, -0.5, "\ufffd", b"\xe6"), *map(scored, range(20))]
    return TokenScores(scored(token_id), tuple(top[:num_top]))


class FakeStream:
    """Token i is a function of the seed, the prompt's length and i, as in the real service."""

    def __init__(self, service: FakeService, request: GenerationRequest, prompt_len: int, sampling):
        self.request_id = request.request_id
        self.model = MODEL
        self.origin = Origin(sampling.seed, b"asked..!", uuid.uuid4().hex, 1_700_000_000)
        self.usage = Usage(prompt_tokens=prompt_len)
        self.explain = Explain(
            router="router-1",
            replica="replica-a",
            predicted_cached_tokens=64,
            runner_up="replica-b",
            attempts=1,
            answered_attempt=1,  # the real service returns a stream with its first token
            cached_tokens=min(48, prompt_len),
            queue_s=0.002,
        )
        self.closed = threading.Event()
        self._finish_reason = "abort"
        self._service = service
        self._sampling = sampling
        self._request = self.request = request
        self._deltas = self._generate()

    @property
    def prompt_scores(self) -> list[TokenScores] | None:
        num_top = self._sampling.prompt_logprobs
        if num_top is None:
            return None
        ids = range(self.usage.prompt_tokens)
        first, *others = (scores(i % len(VOCAB), num_top) for i in ids)
        first = TokenScores(dataclasses.replace(first.token, logprob=None), ())
        return [first, *(dataclasses.replace(score, rank=i) for i, score in enumerate(others, 3))]

    def scores_of_prompt(self, index: int) -> list[TokenScores] | None:
        return self.prompt_scores

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self._deltas

    async def aclose(self) -> None:
        bill, usage = self._request.bill, self.usage
        if bill is not None and not self.closed.is_set():
            seconds = (self.explain.queue_s, 0.5, 0.25)
            tokens = (usage.completion_tokens, usage.reasoning_tokens)
            cached = (
                usage.cached_tokens,
                usage.host_cached_tokens,
                usage.peer_cached_tokens,
            )
            answer = BilledAnswer(self._finish_reason, True, False, *tokens, *cached, *seconds)
            bill.end(answer)
        self.closed.set()

    async def _generate(self) -> AsyncIterator[OutputDelta]:
        self.usage.cached_tokens = self.explain.cached_tokens
        self.usage.host_cached_tokens = self.usage.cached_tokens // 3
        self.usage.peer_cached_tokens = self.usage.cached_tokens // 4
        self.usage.accepted_prediction_tokens = len(self._request.prediction)
        self.usage.rejected_prediction_tokens = len(self._request.prediction) // 2
        running = [self._choice(choice) for choice in range(self._request.n)]
        while running:  # one token of each in turn
            for deltas in list(running):
                try:
                    delta = await anext(deltas)
                    self._finish_reason = delta.finish_reason or self._finish_reason
                    yield delta
                except StopAsyncIteration:
                    running.remove(deltas)

    async def _choice(self, choice: int) -> AsyncIterator[OutputDelta]:
        num_chars = 0
        async for delta in self._tokens(choice):
            delta.choice = choice
            if self._sampling.logprobs is not None:
                (token_id,) = delta.token_ids
                of_token = scores(token_id, self._sampling.logprobs)
                delta.logprobs = [dataclasses.replace(of_token, text_offset=num_chars)]
                num_chars += len(VOCAB[token_id])
            yield delta

    async def _tokens(self, choice: int) -> AsyncIterator[OutputDelta]:
        service, sampling, request = self._service, self._sampling, self._request
        if service.script is not None:
            self.usage.reasoning_tokens = service.reasoning_tokens
            for delta in service.script:
                await asyncio.sleep(service.token_s)
                self.usage.completion_tokens += len(delta.token_ids)
                yield dataclasses.replace(delta)
            return
        matcher = StopMatcher(request.stop, include_stop=request.include_stop_str_in_output)
        rng = random.Random((sampling.seed + choice) * 1009 + self.usage.prompt_tokens)
        for i in range(sampling.max_tokens):
            await asyncio.sleep(service.token_s)
            while i and not service.goes_on.is_set():
                await asyncio.sleep(0.005)
            if i == service.fail_at:
                raise service.failure
            token_id = rng.randrange(len(VOCAB))
            last = i == sampling.max_tokens - 1
            text, matched = matcher.feed(VOCAB[token_id])
            self.usage.completion_tokens += 1
            if matched is None and token_id in sampling.stop_token_ids:
                matched, text = token_id, ""
            if matched is not None:
                yield OutputDelta(text, [token_id], "stop", matched)
                return
            if last:
                yield OutputDelta(text + matcher.flush(), [token_id], service.last_reason)
                return
            yield OutputDelta(text, [token_id])


class FakeService:
    """The `Service` protocol over one process, with switches for what goes wrong."""

    def __init__(self) -> None:
        self.token_s = 0.0
        self.goes_on = threading.Event()  # after the first token
        self.goes_on.set()
        self.fail_at: int | None = None  # output index at which the stream raises `failure`
        self.failure: Exception = RuntimeError("secret detail")
        self.refusal: Exception | None = None  # raised by every call
        self.refusals: list[Exception] = []  # raised by the next calls
        self.refused_by_front_end: list[str] = []  # error codes
        self.generate_s = 0.0  # seconds to the first token
        self.last_reason: str | None = "length"
        self.script: list[OutputDelta] | None = None  # the deltas of every choice
        self.reasoning_tokens = 0  # of the usage, with `script`
        self.ready = True
        self.streams: list[FakeStream] = []
        self.requests: list[GenerationRequest] = []
        self.questions: list[Question] = []  # of the last call of `score`
        self.cancelled_in_generate = threading.Event()
        self.watch_closed = threading.Event()
        self.load = Load(num_running=2, blocks_free=5, blocks_cached=3, blocks_in_use=2)
        self.more_metrics = b""  # after the own ones
        self._adapters = AdapterRegistry()

    async def generate(self, request: GenerationRequest) -> FakeStream:
        self.requests.append(request)
        self._refuse()
        if request.model not in (None, MODEL):
            raise model_not_found(request.model, [MODEL])
        params.check(request)
        if request.messages is not None:
            prompt_len = sum(len(str(m["content"])) for m in check_messages(request.messages))
        else:
            prompt_len = len(request.prompt) or 1  # a BOS
        sampling = params.resolve(
            request,
            params.GenerationDefaults(),
            num_prompt_tokens=prompt_len,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=len(VOCAB),
        )
        try:
            await asyncio.sleep(self.generate_s)
        except asyncio.CancelledError:
            self.cancelled_in_generate.set()
            raise
        if request.bill is not None:
            request.bill.begin(prompt_len, 1)
        stream = FakeStream(self, request, prompt_len, sampling)
        self.streams.append(stream)
        return stream

    async def score(self, request: GenerationRequest, questions: Sequence[Question]) -> ReplyScores:
        """A reply's score is minus its length."""
        self.requests.append(request)
        self.questions = list(questions)
        self._refuse()
        check_questions(questions)
        params.check(request)
        if request.model not in (None, MODEL):
            raise model_not_found(request.model, [MODEL])
        try:
            await asyncio.sleep(self.generate_s)
        except asyncio.CancelledError:
            self.cancelled_in_generate.set()
            raise
        logprobs = [[-float(len(reply)) for reply in question.replies] for question in questions]
        usage = Usage(prompt_tokens=120, cached_tokens=48)
        explain = Explain(router="router-1", replica="replica-a", attempts=1, answered_attempt=1)
        if request.bill is not None:
            request.bill.begin(usage.prompt_tokens, 1)
            request.bill.end(
                BilledAnswer("stop", True, False, 0, 0, usage.cached_tokens, 0, 0, 0.0, 0.5, 0.0)
            )
        return ReplyScores(logprobs, usage, explain)

    async def embed(self, request: GenerationRequest, dimensions: int | None) -> Embeddings:
        """The values of an embedding are the input's length, half of it, a third and so on."""
        self.requests.append(request)
        self._refuse()
        prompts = request.prompts or (request.prompt,)
        for i, prompt in enumerate(prompts):
            if len(prompt) > MAX_MODEL_LEN:
                field = f"prompt[{i}]" if request.prompts else "prompt"
                message = f"{field}: {len(prompt)} tokens; the model takes at most {MAX_MODEL_LEN}"
                raise ContextLengthExceeded(message, field=field)
        try:
            await asyncio.sleep(self.generate_s)
        except asyncio.CancelledError:
            self.cancelled_in_generate.set()
            raise
        lengths = [len(prompt) for prompt in prompts]
        vectors = [
            np.float32(length) / np.arange(1, 1 + (dimensions or 4), dtype=np.float32)
            for length in lengths
        ]
        usage = Usage(prompt_tokens=sum(lengths), cached_tokens=3)
        explain = Explain(router="router-1", replica="replica-a", attempts=1, answered_attempt=1)
        if request.bill is not None:
            request.bill.begin(usage.prompt_tokens, 1)
            request.bill.end(BilledAnswer("stop", True, False, 0, 0, 3, 0, 0, 0.0, 0.5, 0.0))
        return Embeddings(vectors, usage, explain)

    async def encode(self, request: GenerationRequest) -> EncodedPrompt:
        """One token for each byte of the text."""
        self.requests.append(request)
        self._refuse()
        params.check(request)
        text: str | None = None
        if request.messages is not None:
            text = "".join(str(m["content"]) for m in check_messages(request.messages))
        elif isinstance(request.prompt, str):
            text = request.prompt
        ids = request.prompt if text is None else text.encode()
        return EncodedPrompt(np.array(list(ids), np.int32), text, MAX_MODEL_LEN)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self._refuse()
        check_ids("tokens", token_ids, len(VOCAB))
        return "".join(VOCAB[i] for i in token_ids)

    async def tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<{i}>" for i in token_ids]

    def adapters(self) -> list[AdapterEntry]:
        return self._adapters.loaded()

    async def load_adapter(self, name: str, path: str) -> AdapterEntry:
        self._refuse()
        return self._adapters.put(AdapterRef(name, path, path), 1_700_000_000 * 10**9)

    async def unload_adapter(self, name: str) -> None:
        """Any but an empty name, with which a test calls every method, must be loaded."""
        if name:
            self._adapters.remove(name, 1_700_000_001 * 10**9)

    def model_info(self) -> ModelInfo:
        self._refuse()
        return ModelInfo(
            name=MODEL,
            created_s=1_700_000_000,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=len(VOCAB),
            revision="main",
            dtype="float32",
            eos_token_ids=(2, 3),
            block_size=16,
        )

    def readiness(self) -> Readiness:
        reason = "ok" if self.ready else "no replica is attached yet"
        return Readiness(self.ready, reason, int(self.ready), {"load_weights": 1.5})

    def replicas(self) -> list[ReplicaStatus]:
        self._refuse()
        return [ReplicaStatus("replica-a", "e1", self.load, 0.05, True, 7)]

    async def decisions(
        self, request_id: str | None, limit: int, payer: str | None = None
    ) -> Decisions:
        """Of every stream so far, the newest first."""
        self._refuse()
        ring = self._ring()
        found = ring.last(limit, payer)
        if request_id is not None:
            found = ring.find(request_id, payer)
        return Decisions(["router-0", "router-1"], 0, found)

    def _ring(self) -> DecisionRing:
        ring = DecisionRing("router-1", 100)
        for stream in self.streams:
            columns = {name: np.zeros(2) for name in COLUMN_NAMES}
            fleet = FleetView.of(["replica-a", "replica-b"], columns)
            names, terms = ("wait_s", "prefill_s"), np.array([[0.25, 0.5], [1.0, 0.125]])
            ranking = Ranking("slo", fleet, [0, 1], terms.sum(1), terms[:, 0], names, terms)
            answer_id, num_tokens = stream.origin.answer_id, stream.usage.prompt_tokens
            owner = stream.request.payer
            ring.add(stream.request_id, answer_id, ranking, num_tokens, stream.explain, 0.0, owner)
        return ring

    def _table(self) -> ReplicaTable:
        table = ReplicaTable(PrefixIndex())
        table.add("replica-a", "e1", block_tokens=16)
        table.on_frame("replica-a", Frame("e1", load=self.load), 0.0)
        return table

    async def live_state(self, payer: str | None = None) -> LiveState:
        """The requests are those of `payer`."""
        self._refuse()
        gate = AdmissionGate(AdmissionLimits(), time.monotonic)
        return live_state(self._ring(), gate, self._table(), Observer(), MODEL, 0.0, payer)

    def refused(self, error: QuireError) -> None:
        self.refused_by_front_end.append(error.code)

    async def metrics(self) -> bytes:
        self._refuse()
        return (
            b"# HELP quire_tests_total Tests.\n# TYPE quire_tests_total counter\nquire_tests_total 1.0\n"
            + self.more_metrics
        )

    async def watch_cache(self, period_s: float) -> AsyncGenerator[list[ReplicaStatus], None]:
        try:
            last = None
            while True:
                statuses = self.replicas()
                if statuses != last:
                    last = statuses
                    yield statuses
                await asyncio.sleep(period_s)
        finally:
            self.watch_closed.set()

    def _refuse(self) -> None:
        if self.refusals:
            raise self.refusals.pop()
        if self.refusal is not None:
            raise self.refusal


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return one_of_each_kind(tmp_path)


@pytest.fixture(scope="session")
def service_class() -> type[FakeService]:
    return FakeService
