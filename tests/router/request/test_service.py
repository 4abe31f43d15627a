"""The life of a request from `RouterService` to real engines and back, over the real bus, without Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from local_serve import (
    LocalCluster,
    LocalReplica,
    assert_idle,
    perfect,
    start_replica,
    until,
)
from ray.exceptions import RayActorError

from quire.protos.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    ModelNotFound,
    Overloaded,
    QuireError,
    Unavailable,
)
from quire.protos.sampling_params import Grammar, SamplingParams
from quire.protos.wire import Frame
from quire.replica import Engine
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.serving import actor as actor_module
from quire.replica.serving.leases import Leases
from quire.router.admission.failover_budget import FailoverBudget
from quire.router.admission.wait_bounds import AdmissionLimits
from quire.router.fleet.replicas import ReplicaTable
from quire.router.fleet.tracked_replica import ReplicaState
from quire.router.index.prefix_index import PrefixIndex
from quire.router.observer import AnswerEnd, Observer
from quire.router.policy.by_name import make_policy
from quire.router.request.context import ModelFacts
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.request_stream import RequestStream
from quire.router.request.service import MAX_MIGRATIONS, RouterService
from quire.router.text.chat_template import ChatTemplate
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer
from quire.router.tool_types import Tool, ToolChoice
from quire.router.transport import bus as bus_module
from quire.router.types import GenerationRequest, OutputDelta

LIMITS = dict(
    model="embedded",
    device="cpu",
    num_blocks=128,
    block_size=16,
    max_batch_tokens=128,
    max_model_len=1024,
    num_threads=1,
)
PROMPT = "Once upon a time"
LONG = 150  # tokens: more than a test with an early end waits for
MAX_ATTEMPTS = MAX_MIGRATIONS + 1
GREEDY = dict(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = dict(temperature=0.9, top_p=0.95, seed=1234, max_tokens=24, ignore_eos=True)
TOKENIZER = TextTokenizer.load(CHECKPOINT)


class Records(Observer):
    def __init__(self) -> None:
        self.ends: list[AnswerEnd] = []
        self.moves: list[float] = []
        self.num_first = self.num_later = 0
        self.predictions: list[tuple[int, int]] = []

    def on_first_token(self, ttft_s: float) -> None:
        self.num_first += 1

    def on_inter_token(self, itl_s: float) -> None:
        self.num_later += 1

    def on_migration(self, stall_s: float) -> None:
        self.moves.append(stall_s)

    def on_prediction(self, predicted_tokens: int, cached_tokens: int) -> None:
        self.predictions.append((predicted_tokens, cached_tokens))

    def on_end(self, end: AnswerEnd) -> None:
        self.ends.append(end)


class Stack:
    """A router over some replicas."""

    def __init__(self, replicas: list[LocalReplica], **table: float):
        self.cluster = LocalCluster(replicas, ReplicaTable(PrefixIndex(), **table))
        self.observer = Records()
        self.service = RouterService(
            ModelFacts(name="quire", created_s=0, defaults=GenerationDefaults(), limits=Limits()),
            router_id=self.cluster.router_id,
            tokenizer=AsyncTokenizer(TOKENIZER, num_threads=1),
            template=ChatTemplate.load(CHECKPOINT, None),
            table=self.cluster.table,
            policy=make_policy("slo"),
            transport=self.cluster.bus,
            observer=self.observer,
        )

    async def open(self, prompt: str | tuple[int, ...] = PROMPT, **fields: object) -> RequestStream:
        return await self.service.generate(
            GenerationRequest(**(dict(request_id="test", prompt=prompt) | GREEDY | fields))
        )

    async def answer(self, *args: object, **fields: object) -> Answer:
        return await read(await self.open(*args, **fields))


@dataclasses.dataclass
class Answer:
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    stream: RequestStream
    deltas: list[OutputDelta]


async def read(stream: RequestStream) -> Answer:
    deltas = [delta async for delta in stream]
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    return Answer(
        "".join(d.text for d in deltas),
        [i for d in deltas for i in d.token_ids],
        deltas[-1].finish_reason,
        deltas[-1].stop_reason,
        stream,
        deltas,
    )


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def module_replicas(runner, patch) -> Iterator[list[LocalReplica]]:
    async def start() -> list[LocalReplica]:
        return [await start_replica(name, patch, **LIMITS) for name in "ab"]

    replicas = runner.run(start())
    yield replicas
    for replica in replicas:
        replica.engine.close()


@pytest.fixture
def replicas(module_replicas) -> Iterator[list[LocalReplica]]:
    for replica in module_replicas:
        replica.engine.call(lambda scheduler: scheduler.clear_cache()).result(10)
    yield module_replicas
    for replica in module_replicas:
        replica.dead = replica.hanging = False
        replica.network = perfect


@pytest.fixture(scope="module")
def reference() -> Iterator[Engine]:
    with Engine(**LIMITS) as engine:
        yield engine


@asynccontextmanager
async def stack_of(replicas: list[LocalReplica], **table: float) -> AsyncIterator[Stack]:
    stack = Stack(replicas, **table)
    await stack.cluster.start()
    try:
        yield stack
    finally:
        await stack.cluster.stop()


def expected(engine: Engine, prompt: str = PROMPT, **params: object):
    (output,) = engine.generate([TOKENIZER.encode(prompt).tolist()], SamplingParams(**params))
    return output


# -- retention -------------------------------------------------------------------------------------------


TOOL = Tool("weather", "", {"type": "object", "properties": {"city": {"maxLength": 5}}})
CALL_ONCE = dict(
    tool_choice=ToolChoice("required"), parallel_tool_calls=False, max_tokens=80, ignore_eos=False
)


@pytest.mark.parametrize(
    ("fields", "retain_s", "finish_reason", "is_retained"),
    [
        (dict(tools=(TOOL,), **CALL_ONCE), 30.0, "tool_calls", True),
        (dict(tools=(TOOL,), max_tokens=3), 30.0, "length", False),
        (dict(tools=(TOOL,), tool_choice=ToolChoice("none")), 0.0, "length", False),
        (dict(retain=True), 30.0, "length", True),
        (dict(), 0.0, "length", False),
    ],
    ids=["call", "no call", "no call asked", "hint", "no tools"],
)
def test_a_replica_retains_the_conversations_that_will_go_on(
    runner, replicas, monkeypatch, fields, retain_s, finish_reason, is_retained
):
    async def run() -> None:
        # The first report to the replicas follows soon after the answer.
        monkeypatch.setattr(bus_module, "LEASE_S", 0.8)
        async with stack_of(replicas[:1]) as stack:
            stack.service.retain_s = 30.0
            scheduler = stack.cluster.replicas["a"].engine._loop._scheduler
            messages = ({"role": "user", "content": "How is the weather in the north today? " * 4},)
            answer = await stack.answer(None, messages=messages, **fields)
            assert answer.finish_reason == finish_reason
            retained = [scheduler.load().blocks_retained]
            await asyncio.sleep(0.5)
            retained.append(scheduler.load().blocks_retained)
            assert [num > 0 for num in retained] == [retain_s > 0, is_retained]

    runner.run(run())


def test_the_next_turn_of_a_session_ends_the_retention_of_the_one_before(
    runner, replicas, monkeypatch
):
    async def run() -> None:
        monkeypatch.setattr(bus_module, "LEASE_S", 0.8)
        async with stack_of(replicas[:1]) as stack:
            stack.service.retain_s = 30.0
            scheduler = stack.cluster.replicas["a"].engine._loop._scheduler
            asked = {"role": "user", "content": "How is the weather in the north today? " * 8}
            answer = await stack.answer(None, messages=(asked,), session="s", retain=True)
            assert scheduler.load().blocks_retained > 0
            said = {"role": "assistant", "content": answer.text}
            messages = (asked, said, {"role": "user", "content": "And in the south? " * 8})
            await stack.answer(None, messages=messages, session="s")
            await asyncio.sleep(0.5)
            assert scheduler.load().blocks_retained == 0

    runner.run(run())


# -- answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_answer_is_that_of_an_engine_alone(runner, replicas, reference, params):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            answers = await asyncio.gather(*(stack.answer(**params) for _ in range(3)))
            whole = expected(reference, **params)
            for answer in answers:
                assert answer.token_ids == whole.token_ids
                assert answer.text == whole.text
                assert (answer.finish_reason, answer.stop_reason) == ("length", None)
                usage = answer.stream.usage
                assert usage.prompt_tokens == len(whole.prompt_token_ids)
                assert usage.completion_tokens == 24
                assert answer.stream.explain.attempts == 1
            observer = stack.observer
            assert len(observer.ends) == observer.num_first == 3
            assert observer.num_later == sum(len(answer.deltas) - 1 for answer in answers)

    runner.run(run())


def test_the_seed_that_was_drawn_gives_the_answer_again(runner, replicas):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            fields = SAMPLED | dict(seed=None)
            first, other = await stack.answer(**fields), await stack.answer(**fields)
            again = await stack.answer(**(fields | dict(seed=first.stream.origin.seed)))
            assert again.token_ids == first.token_ids
            assert other.token_ids != first.token_ids

    runner.run(run())


def test_a_chat_is_rendered_by_the_template_and_ends_at_eos(runner, replicas):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            request = GenerationRequest(
                request_id="chat",
                messages=({"role": "user", "content": "What is a quire?"},),
                temperature=0.0,
                skip_special_tokens=False,
            )
            answer = await read(await stack.service.generate(request))
            eos = set(stack.service.model_info().eos_token_ids)
            assert answer.finish_reason == "stop" and answer.stop_reason is None
            assert answer.token_ids[-1] in eos
            assert answer.stream.usage.completion_tokens == len(answer.token_ids)
            # The answer has the ending token but not its text, even if special tokens are shown.
            assert answer.text == TOKENIZER.decode(answer.token_ids[:-1], False)
            assert "<|" not in answer.text and answer.text

    runner.run(run())


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_the_text_and_free_the_engine(runner, replicas, reference, include):
    async def run() -> None:
        whole = expected(reference, **(GREEDY | dict(max_tokens=60)))
        stop = whole.text[30:36]  # spans tokens
        async with stack_of(replicas) as stack:
            answer = await stack.answer(
                stop=("never there", stop), include_stop_str_in_output=include, max_tokens=LONG
            )
            end = whole.text.index(stop) + len(stop)
            assert answer.text == whole.text[: end if include else end - len(stop)]
            assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
            count = len(answer.token_ids)
            assert answer.token_ids == whole.token_ids[:count]
            assert answer.stream.usage.completion_tokens == count
            assert stop in TOKENIZER.decode(answer.token_ids)
            assert stop not in TOKENIZER.decode(answer.token_ids[:-1])
            await until(lambda: all(r.engine.load().blocks_in_use == 0 for r in replicas))

    runner.run(run())


def test_no_stop_before_min_tokens(runner, replicas, reference):
    async def run() -> None:
        whole = expected(reference, **GREEDY)
        async with stack_of(replicas) as stack:
            stop = whole.text[3:6]
            answer = await stack.answer(stop=(stop,), min_tokens=15)
            assert len(answer.token_ids) >= 15
            assert answer.text.startswith(whole.text[:20])

    runner.run(run())


def test_stop_token_ids_are_named_as_the_reason(runner, replicas, reference):
    async def run() -> None:
        whole = expected(reference, **GREEDY)
        stop = whole.token_ids[12]
        count = whole.token_ids.index(stop) + 1
        async with stack_of(replicas) as stack:
            answer = await stack.answer(stop_token_ids=(stop,))
            assert answer.token_ids == whole.token_ids[:count]
            assert answer.text == TOKENIZER.decode(whole.token_ids[: count - 1])
            assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)

    runner.run(run())


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("stop", ["<|im_start|>", " <|im_start|>\n"])
def test_a_stop_string_that_is_a_special_token_ends_the_text(runner, replicas, stop, skip):
    """The text leaves special tokens out, so no text would ever match."""
    if not skip:
        stop = stop.strip()
    token_id = TOKENIZER.backend.token_to_id(stop.strip())
    # A stop id is masked before `min_tokens`, a stop string is not looked for.
    wanted = dict(logit_bias=((token_id, 100.0),), skip_special_tokens=skip)
    wanted |= dict(min_tokens=5) if skip else {}

    async def run() -> None:
        async with stack_of(replicas) as stack:
            answer = await stack.answer(stop=("never", stop), **wanted)
            assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
            if skip:
                assert answer.token_ids[-1] == token_id and len(answer.token_ids) == 6
                assert answer.text == TOKENIZER.decode(answer.token_ids[:-1])
            assert "im_start" not in answer.text

    runner.run(run())


def test_text_offsets_are_the_length_of_the_text_before_a_token(runner, replicas):
    """Characters of several tokens count once, with the token that completes them; special tokens do not count."""
    grammar = Grammar("regex", "[一-龥éüß😀-😏]{12,16}", "structured_outputs.regex")
    special = TOKENIZER.backend.token_to_id("<|im_start|>")

    async def run() -> None:
        async with stack_of(replicas) as stack:
            for asked in (
                dict(grammar=grammar, ignore_eos=False, max_tokens=80),
                dict(logit_bias=((special, 3.0),), temperature=1.0, seed=3),
            ):
                answer = await stack.answer(logprobs=1, **asked)
                scores = [s for delta in answer.deltas for s in delta.logprobs or ()]
                ids = answer.token_ids
                before = [TOKENIZER.decode(ids[:i]).rstrip("\ufffd") for i in range(len(ids))]
                assert [score.text_offset for score in scores] == [len(text) for text in before]
                by_themselves = sum(len(score.token.text) for score in scores)
                assert by_themselves > len(answer.text)  # what used to be added up

    runner.run(run())


def test_explain_tells_prediction_and_truth(runner, replicas):
    async def run() -> None:
        prompt = tuple(5 + i % 200 for i in range(200))
        async with stack_of(replicas) as stack:
            first = await stack.answer(prompt, max_tokens=1)
            where = first.stream.explain.replica
            table = stack.cluster.table
            await until(lambda: any(s.indexed_blocks == 3 for s in table.statuses(0.0)))
            second = await stack.answer(prompt, max_tokens=1)
            explain = second.stream.explain
            assert explain.replica == where
            assert {explain.replica, explain.runner_up} == {"a", "b"}
            assert (explain.predicted_cached_tokens, explain.cached_tokens) == (192, 192)
            assert second.stream.usage.cached_tokens == 192
            assert (
                first.stream.explain.predicted_cached_tokens,
                first.stream.usage.cached_tokens,
            ) == (0, 0)
            other_tenant = await stack.answer(prompt, max_tokens=1, tenant="other")
            assert other_tenant.stream.explain.predicted_cached_tokens == 0
            assert other_tenant.stream.usage.cached_tokens == 0
            assert stack.observer.predictions == [(0, 0), (192, 192), (0, 0)]

    runner.run(run())


def test_a_request_carries_its_predicted_cached_tokens(runner, replicas, monkeypatch):
    """The engine starts the request with the least left to compute first, and reports that as queued."""
    taken = []
    for replica in replicas:
        engine = replica.engine

        def submit(request, engine_submit=engine.submit, **options):
            taken.append((request.num_expected_cached, request.num_missing_tokens))
            return engine_submit(request, **options)

        monkeypatch.setattr(engine, "submit", submit)

    async def run() -> None:
        prompt = tuple(7 + i % 190 for i in range(200))
        async with stack_of(replicas) as stack:
            await stack.answer(prompt, max_tokens=1)
            table = stack.cluster.table
            await until(lambda: any(s.indexed_blocks >= 3 for s in table.statuses(0.0)))
            await stack.answer(prompt, max_tokens=1)
        assert taken == [(0, 200), (192, 8)]

    runner.run(run())


def test_every_decision_is_kept_with_its_outcome(runner, replicas):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            answer = await stack.answer(request_id="asked", n=1, max_tokens=2)
            await (await stack.open(request_id="twice", n=2, max_tokens=1)).aclose()
            found = await stack.service.decisions("asked", 10)
            assert (found.routers, found.num_silent) == ([stack.cluster.router_id], 0)
            (decision,) = found.decisions
            explain = answer.stream.explain
            assert [score["replica"] for score in decision["ranking"]] == [
                explain.replica,
                explain.runner_up,
            ]
            assert decision["outcome"]["replica"] == explain.replica
            assert decision["outcome"]["ttft_s"] > 0
            # A fork goes where its lead went: that is one decision.
            assert len((await stack.service.decisions("twice", 10)).decisions) == 1
            last = (await stack.service.decisions(None, 1)).decisions
            assert [d["request_id"] for d in last] == ["twice"]

    runner.run(run())


# -- refusals --------------------------------------------------------------------------------------------


def test_bad_requests_cost_the_replicas_nothing(runner, replicas):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            for error, fields in (
                (ModelNotFound, dict(model="other")),
                (ContextLengthExceeded, dict(max_tokens=1024)),
                (QuireError, dict(temperature=-1.0)),
                (QuireError, dict(prompt=(10**6,))),
            ):
                with pytest.raises(error):
                    await stack.open(**fields)
            assert stack.observer.ends == []

    runner.run(run())


def test_no_replica_is_unavailable_for_now(runner):
    async def run() -> None:
        async with stack_of([]) as stack:
            with pytest.raises(Unavailable) as caught:
                await stack.open()
            assert caught.value.retry_after_s > 0
            assert not stack.service.readiness().ready

    runner.run(run())


def test_a_full_queue_is_refused_with_a_time_to_retry(runner, patch):
    async def run() -> None:
        limits = LIMITS | dict(max_running_requests=1, max_waiting_requests=1)
        replica = await start_replica("small", patch, **limits)
        try:
            async with stack_of([replica]) as stack:
                running = await stack.open(max_tokens=LONG)
                waiting = asyncio.create_task(stack.open(max_tokens=2))
                await until(lambda: replica.engine.load().num_waiting == 1)
                stack.service.gate.limits = AdmissionLimits(max_queued_requests=0)
                with pytest.raises(Overloaded, match=r"router\.max_queued_requests") as caught:
                    await stack.open()
                assert caught.value.retry_after_s > 0
                await running.aclose()
                assert len((await read(await waiting)).token_ids) == 2
        finally:
            replica.engine.close()

    runner.run(run())


def test_attempts_are_bounded(runner, replicas, monkeypatch):
    calls: Counter[str] = Counter()

    async def run() -> None:
        for replica in replicas:

            def refuse(request: object, name: str = replica.name) -> None:
                calls[name] += 1
                raise Unavailable("the engine is closed")

            monkeypatch.setattr(replica.engine, "submit", refuse)
        async with stack_of(replicas) as stack:
            with pytest.raises(Unavailable, match=f"failed on {MAX_ATTEMPTS} replicas") as caught:
                await stack.open()
            assert caught.value.retry_after_s > 0
            assert stack.observer.ends[0].explain.attempts == MAX_ATTEMPTS

    runner.run(run())
    assert calls.total() == MAX_ATTEMPTS
    assert set(calls) == {"a", "b"}  # the other one is tried before the same one again


# -- deadlines and cancellation --------------------------------------------------------------------------


def test_the_deadline_goes_to_the_engine_and_ends_the_request_there(runner, replicas):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            stream = await stack.open(max_tokens=900, deadline_s=0.2)
            began_s = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await read(stream)
            assert time.monotonic() - began_s < 15
            assert 0 < stream.usage.completion_tokens < 900
            with pytest.raises(DeadlineExceeded):
                await stack.open(deadline_s=1e-6)

    runner.run(run())


def test_a_client_that_leaves_before_the_first_token_frees_the_engine(runner, replicas):
    async def withhold(frame: Frame) -> list[Frame | bytes]:
        return [dataclasses.replace(frame, tokens=None, facts=[])]

    async def run() -> None:
        async with stack_of(replicas) as stack:
            for replica in replicas:
                replica.network = withhold
            task = asyncio.create_task(stack.open(max_tokens=900))
            await until(lambda: sum(r.engine.load().num_running for r in replicas) == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: all(r.engine.load().blocks_in_use == 0 for r in replicas))
            assert stack.observer.num_first == 0 and len(stack.observer.ends) == 1

    runner.run(run())


def test_a_client_that_leaves_in_the_middle_frees_the_engine(runner, replicas):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            stream = await stack.open(max_tokens=900)
            for _ in range(5):
                await anext(stream)
            await stream.aclose()
            await stream.aclose()
            await until(lambda: all(r.engine.load().blocks_in_use == 0 for r in replicas))
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert stream.usage.completion_tokens == 5
            reading = asyncio.create_task(read(await stack.open(max_tokens=900)))
            await asyncio.sleep(0.05)
            reading.cancel()
            await asyncio.wait([reading])
            await until(lambda: all(r.engine.load().blocks_in_use == 0 for r in replicas))
            assert len(stack.observer.ends) == 2

    runner.run(run())


# -- faults ----------------------------------------------------------------------------------------------


def at_token(index: int, fault) -> object:
    """A network that calls `fault` once, instead of delivering the frame with the token of this index."""
    done = False

    async def network(frame: Frame) -> list[Frame | bytes]:
        nonlocal done
        if not done and any(d.index >= index for d in frame.token_deltas()):
            done = True
            return await fault(frame)
        return [frame]

    return network


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("index", [0, 11, 23])
@pytest.mark.parametrize("kind", ["stream breaks", "replica dies"])
def test_a_stream_goes_on_elsewhere_with_the_same_tokens(
    runner, replicas, reference, params, index, kind
):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            faulty: list[str] = []

            def install(replica: LocalReplica) -> None:
                async def fault(frame: Frame) -> list[Frame | bytes]:
                    for other in replicas:
                        other.network = perfect
                    faulty.append(replica.name)
                    if kind == "replica dies":
                        asyncio.get_running_loop().create_task(replica.die())
                        return []
                    raise RayActorError()

                replica.network = at_token(index, fault)

            for replica in replicas:
                install(replica)
            answer = await stack.answer(**params)
            whole = expected(reference, **params)
            assert answer.token_ids == whole.token_ids  # each once, in order
            assert answer.text == whole.text
            assert answer.finish_reason == "length"
            explain, usage = answer.stream.explain, answer.stream.usage
            assert explain.attempts == 2
            assert faulty and explain.replica != faulty[0]
            assert usage.prompt_tokens == len(whole.prompt_token_ids)
            assert usage.completion_tokens == 24

    runner.run(run())


def test_stop_strings_and_text_span_a_move(runner, replicas, reference):
    async def run() -> None:
        whole = expected(reference, **(GREEDY | dict(max_tokens=60)))
        stop = whole.text[50:62]
        # Break the stream inside the stop string.
        ids = whole.token_ids
        index = next(i for i in range(60) if len(TOKENIZER.decode(ids[: i + 1])) > 55)
        async with stack_of(replicas) as stack:

            async def fault(frame: Frame) -> list[Frame | bytes]:
                for replica in replicas:
                    replica.network = perfect
                raise RayActorError()

            for replica in replicas:
                replica.network = at_token(index, fault)
            answer = await stack.answer(stop=(stop,), max_tokens=60)
            assert answer.stream.explain.attempts == 2
            assert answer.text == whole.text[: whole.text.index(stop)]
            assert answer.stop_reason == stop

    runner.run(run())


def test_a_stream_without_any_replica_waits_for_the_next(runner, replicas, reference):
    """All die at once, in the middle of the answer; one comes back later."""

    async def run() -> None:
        async with stack_of(replicas) as stack:
            stream = await stack.open(**SAMPLED)
            for replica in replicas:
                await replica.die()
            stack.cluster.membership.update(frozenset())
            reading = asyncio.create_task(read(stream))
            await until(lambda: stack.cluster.table.num_ready() == 0)
            with pytest.raises(Unavailable):  # A new request is refused at once.
                await stack.open()
            await asyncio.sleep(0.2)
            assert not reading.done()
            replicas[1].dead = False
            stack.cluster.membership.update(frozenset({replicas[1].name}))
            answer = await reading
            assert answer.token_ids == expected(reference, **SAMPLED).token_ids
            assert stream.explain.attempts == 2

    runner.run(run())


def test_a_stream_without_any_replica_ends_in_time(runner, replicas):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            stack.service.max_move_s = 0.3
            stream = await stack.open(max_tokens=LONG)
            for replica in replicas:
                await replica.die()
            stack.cluster.membership.update(frozenset())
            began_s = time.monotonic()
            with pytest.raises(Unavailable):
                await read(stream)
            assert 0.3 <= time.monotonic() - began_s < 15  # by default it is 30 s

    runner.run(run())


def test_a_dead_replica_that_is_still_listed_costs_no_migration(
    runner, replicas, reference, monkeypatch
):
    """Serve's news are late: the stream is sent there, again and again, until they come."""

    async def run() -> None:
        async with stack_of(replicas) as stack:
            stack.service.max_migrations = 1
            stream = await stack.open(**SAMPLED)
            here = stack.cluster.replicas[stream.explain.replica]
            there = next(replica for replica in replicas if replica is not here)
            generate, num_calls = there.actor.generate, 0

            async def die(submit: bytes, *, route: list[str]) -> bytes:
                nonlocal num_calls
                num_calls += 1
                if num_calls <= 5:
                    raise RayActorError()
                return await generate(submit, route=route)

            monkeypatch.setattr(there.actor, "generate", die)
            await here.die()
            answer = await read(stream)
            assert answer.token_ids == expected(reference, **SAMPLED).token_ids
            assert (num_calls, stream.explain.attempts) == (6, 7)

    runner.run(run())


def test_a_stream_that_gets_on_may_lose_any_number_of_replicas(runner, replicas, reference):
    """Only losses without a new token in between count."""
    many = SAMPLED | dict(max_tokens=400)

    async def run() -> None:
        async with stack_of(replicas) as stack:
            stack.service.max_migrations = 1
            stream = await stack.open(**many)
            token_ids: list[int] = []
            num_lost, next_loss = 0, 10
            async for delta in stream:
                token_ids += delta.token_ids
                if num_lost < 5 and len(token_ids) >= next_loss:
                    here = stack.cluster.replicas[stream.explain.replica]
                    await here.cut_streams()
                    num_lost, next_loss = num_lost + 1, len(token_ids) + 10
            assert token_ids == expected(reference, **many).token_ids
            assert stream.explain.attempts == 6

    runner.run(run())


@pytest.mark.parametrize(
    "error",
    [Unavailable("not attached"), Overloaded("full", retry_after_s=1.0)],
    ids=["unavailable", "full"],
)
def test_a_refusal_of_a_stream_that_moves_is_not_its_end(
    runner, replicas, reference, monkeypatch, error
):
    """More refusals than the budget has attempts: the replicas take it when they can."""
    refusals: list[str] = []

    async def run() -> None:
        async with stack_of(replicas) as stack:
            stream = await stack.open(**SAMPLED)
            for replica in replicas:
                submit = replica.engine.submit

                def refuse(request: object, name: str = replica.name, submit=submit) -> None:
                    refusals.append(name)
                    if len(refusals) <= 3 * MAX_ATTEMPTS:
                        raise error
                    submit(request)

                monkeypatch.setattr(replica.engine, "submit", refuse)
            await stack.cluster.replicas[stream.explain.replica].cut_streams()
            answer = await read(stream)
            assert answer.token_ids == expected(reference, **SAMPLED).token_ids
            assert len(refusals) == 3 * MAX_ATTEMPTS + 1
            assert set(refusals) == {"a", "b"}

    runner.run(run())


def test_repeated_and_late_frames_change_nothing(runner, replicas, reference):
    earlier: list[Frame] = []

    async def network(frame: Frame) -> list[Frame | bytes]:
        if not any(d.finish_reason is None for d in frame.token_deltas()):
            return [frame]
        earlier.append(frame)
        return [frame, frame, earlier[len(earlier) // 2]]  # twice, and one of long ago

    async def run() -> None:
        async with stack_of(replicas) as stack:
            for replica in replicas:
                replica.network = network
            answer = await stack.answer(**SAMPLED)
            whole = expected(reference, **SAMPLED)
            assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text)
            assert len(earlier) > 15

    runner.run(run())


@pytest.mark.parametrize("index", [1, 5, 22])
def test_a_gap_in_the_tokens_is_closed_by_another_replica(runner, replicas, reference, index):
    async def drop(frame: Frame) -> list[Frame | bytes]:
        for replica in replicas:
            replica.network = perfect
        return [dataclasses.replace(frame, tokens=None, facts=[])]

    async def run() -> None:
        async with stack_of(replicas) as stack:
            for replica in replicas:
                replica.network = at_token(index, drop)
            answer = await stack.answer(**SAMPLED)
            assert answer.token_ids == expected(reference, **SAMPLED).token_ids
            assert answer.stream.explain.attempts == 2
            assert len(stack.observer.moves) == 1

    runner.run(run())


def test_gaps_without_end_are_an_error_and_nothing_leaks(runner, replicas):
    async def network(frame: Frame) -> list[Frame | bytes]:
        if any(delta.index % 3 == 1 for delta in frame.token_deltas()):
            return [dataclasses.replace(frame, tokens=None, facts=[])]
        return [frame]

    async def run() -> None:
        async with stack_of(replicas) as stack:
            for replica in replicas:
                replica.network = network
            stream = await stack.open(max_tokens=LONG)
            with pytest.raises(Unavailable, match=r"tokens .* of the stream are missing"):
                await read(stream)
            assert stream.explain.attempts == MAX_ATTEMPTS

    runner.run(run())


def test_streams_that_move_wait_for_the_budget(runner, replicas, reference):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            stack.service.budget = FailoverBudget(refill_s=0.5, burst=1)
            streams = [await stack.open(max_tokens=LONG, seed=i) for i in range(3)]
            for replica in replicas:
                await replica.cut_streams()
            answers = await asyncio.gather(*map(read, streams))
            assert len({tuple(answer.token_ids) for answer in answers}) == 1  # greedy
            moves = sorted(stack.observer.moves)
            assert len(moves) == 3
            assert moves[1] >= 0.4  # the second token is back after 0.5 s, the third after 1 s
            assert moves[2] >= 0.9

    runner.run(run())


def test_a_stream_that_the_budget_never_lets_move_ends_in_time(runner, replicas):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            stack.service.budget = FailoverBudget(refill_s=20.0, burst=1)
            stack.service.max_move_s = 0.0
            assert stack.service.budget.take(time.monotonic()) == 0.0
            stream = await stack.open(max_tokens=LONG)
            for replica in replicas:
                await replica.cut_streams()
            with pytest.raises(Unavailable, match="too many requests lost") as caught:
                await read(stream)
            assert 15 < caught.value.retry_after_s <= 20

    runner.run(run())


def test_a_lost_last_frame_is_noticed(runner, replicas, reference, monkeypatch):
    """The unary call says that all is well; the frame with the last token never comes."""
    monkeypatch.setattr(bus_module, "LAST_FRAME_TIMEOUT_S", 0.1)
    monkeypatch.setattr(bus_module, "WATCH_PERIOD_S", 0.05)

    async def drop(frame: Frame) -> list[Frame | bytes]:
        for replica in replicas:
            replica.network = perfect
        return [dataclasses.replace(frame, tokens=None, facts=[])]

    async def run() -> None:
        async with stack_of(replicas) as stack:
            for replica in replicas:
                replica.network = at_token(23, drop)
            answer = await stack.answer(**GREEDY)
            assert answer.token_ids == expected(reference, **GREEDY).token_ids
            assert answer.stream.explain.attempts == 2

    runner.run(run())


def test_a_replica_that_hangs_is_left(runner, replicas, reference, monkeypatch):
    monkeypatch.setattr(bus_module, "WATCH_PERIOD_S", 0.05)

    async def run() -> None:
        async with stack_of(replicas, lost_after_s=0.6) as stack:
            stream = await stack.open(**GREEDY)
            name = stream.explain.replica
            stack.cluster.replicas[name].hanging = True
            answer = await read(stream)
            assert answer.token_ids == expected(reference, **GREEDY).token_ids
            assert stack.cluster.replicas[name].hanging and stream.explain.replica != name
            # The replica works again: the router attaches and uses it.
            stack.cluster.replicas[name].hanging = False
            await until(lambda: stack.cluster.table.num_ready() == 2)

    runner.run(run())


def test_an_unreadable_frame_does_not_end_the_bus(runner, replicas, reference):
    async def garble(frame: Frame) -> list[Frame | bytes]:
        for replica in replicas:
            replica.network = perfect
        return [b"\x93\x7f\x01\x02"]

    async def run() -> None:
        async with stack_of(replicas) as stack:
            for replica in replicas:
                replica.network = at_token(9, garble)
            answer = await stack.answer(**GREEDY)
            assert answer.token_ids == expected(reference, **GREEDY).token_ids
            await until(lambda: stack.cluster.table.num_ready() == 2)

    runner.run(run())


# -- membership ------------------------------------------------------------------------------------------


def test_a_request_finishes_on_a_draining_replica_which_is_then_left(runner, replicas, reference):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            cluster = stack.cluster
            stream = await stack.open(**(GREEDY | dict(max_tokens=60)))
            name = stream.explain.replica
            cluster.membership.update(frozenset("ab") - {name})
            await until(lambda: cluster.table.state(name) is ReplicaState.DRAINING)
            answer = await read(stream)
            assert stream.explain.attempts == 1 and stream.explain.replica == name
            assert (
                answer.token_ids == expected(reference, **(GREEDY | dict(max_tokens=60))).token_ids
            )
            await until(lambda: name not in cluster.table)
            await assert_idle(
                cluster.replicas[name], cluster.router_id
            )  # detached: Serve may end it
            assert (await stack.answer(max_tokens=2)).stream.explain.replica != name
            cluster.membership.update(frozenset("ab"))
            await until(lambda: cluster.table.num_ready() == 2)

    runner.run(run())


def test_unfinished_requests_of_a_draining_replica_migrate_outside_the_budget(
    runner, replicas, reference
):
    """Nothing is wrong with the request, so the move counts as none; the replica is idle and may go."""

    async def run() -> None:
        async with stack_of(replicas) as stack:
            cluster = stack.cluster
            cluster.bus.drain_timeout_s = 0.05
            stack.service.max_migrations = 0
            stream = await stack.open(**(SAMPLED | dict(max_tokens=400)))
            name = stream.explain.replica
            cluster.membership.update(frozenset("ab") - {name})
            answer = await read(stream)
            assert stream.explain.attempts == 2 and stream.explain.replica != name
            whole = expected(reference, **(SAMPLED | dict(max_tokens=400)))
            assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text)
            await until(lambda: name not in cluster.table)
            await assert_idle(cluster.replicas[name], cluster.router_id)
            cluster.membership.update(frozenset("ab"))
            await until(lambda: cluster.table.num_ready() == 2)

    runner.run(run())


def test_a_replica_listed_again_while_it_drains_is_used_again(runner, replicas, reference):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            cluster = stack.cluster
            stream = await stack.open(**(GREEDY | dict(max_tokens=70)))
            name = stream.explain.replica
            cluster.membership.update(frozenset("ab") - {name})
            await until(lambda: cluster.table.state(name) is ReplicaState.DRAINING)
            cluster.membership.update(frozenset("ab"))
            await until(lambda: cluster.table.num_ready() == 2)
            answer = await read(stream)
            whole = expected(reference, **(GREEDY | dict(max_tokens=70)))
            assert answer.token_ids == whole.token_ids

    runner.run(run())


def test_a_call_that_serve_gives_to_another_replica_does_not_disturb_its_attachment(
    runner, replicas, reference
):
    """Serve offers others when the replica of the route is gone or full."""

    async def run() -> None:
        async with stack_of(replicas) as stack:
            cluster = stack.cluster
            streams = [await stack.open(**(GREEDY | dict(max_tokens=70))) for _ in range(4)]
            cluster.membership.update(frozenset({"a", "b", "ghost"}))
            answers = await asyncio.gather(*(read(stream) for stream in streams))
            whole = expected(reference, **(GREEDY | dict(max_tokens=70)))
            for answer in answers:
                assert answer.token_ids == whole.token_ids
                assert answer.stream.explain.attempts == 1
            assert "ghost" not in cluster.table
            cluster.handle.passes_over.add("a")
            answer = await stack.answer(**GREEDY)
            assert answer.stream.explain.replica == "b"
            cluster.handle.passes_over.clear()

    runner.run(run())


SHORT_LEASE_S = 1.0


@pytest.fixture
def short_leases(runner, replicas, monkeypatch) -> Iterator[None]:
    """On both sides of the bus."""

    async def restart_reapers() -> None:
        for replica in replicas:
            actor = replica.actor
            actor._reaper.cancel()
            actor._leases = Leases(actor_module.LEASE_S)
            actor._reaper = asyncio.create_task(actor._reap())

    with monkeypatch.context() as patch:
        for module in (actor_module, bus_module):
            patch.setattr(module, "LEASE_S", SHORT_LEASE_S)
        runner.run(restart_reapers())
        yield
    runner.run(restart_reapers())


def hang(stack: Stack) -> None:
    """Stop the router: it sends no more messages and does not react to lost streams."""
    stack.cluster.bus._members = frozenset()  # Otherwise its links would attach again.
    for task in stack.cluster.bus._background:
        if task.get_coro().__name__ == "_renew_leases":
            task.cancel()


def test_requests_of_a_silent_router_end_with_its_lease(runner, replicas, reference, short_leases):
    """A hanging router's calls and attach streams stay open. The other router's streams continue."""

    async def run() -> None:
        async with stack_of(replicas) as lives:
            hung = Stack(replicas)
            await hung.cluster.start()
            for _ in range(4):
                await hung.open(max_tokens=900)
            kept = await lives.open(max_tokens=LONG)
            hang(hung)
            began_s = time.monotonic()
            reading = asyncio.create_task(read(kept))
            await until(
                lambda: (
                    not any(
                        key[0] == hung.cluster.router_id
                        for replica in replicas
                        for key in replica.actor._finished
                    )
                )
            )
            assert time.monotonic() - began_s > SHORT_LEASE_S / 2
            # A replica that has none of its streams has another moment for it.
            await until(
                lambda: all(
                    hung.cluster.router_id not in replica.actor._attachments for replica in replicas
                )
            )
            answer = await reading
            params = GREEDY | dict(max_tokens=LONG)
            assert answer.token_ids == expected(reference, **params).token_ids
            assert kept.explain.attempts == 1
            await asyncio.sleep(2 * SHORT_LEASE_S)
            assert all(
                lives.cluster.router_id in replica.actor._attachments for replica in replicas
            )
            await hung.cluster.bus.close()

    runner.run(run())


def test_a_stream_that_its_living_router_forgot_ends_with_its_lease(
    runner, replicas, reference, short_leases
):
    """As if both the cancelled call and the abort had been lost."""

    async def run() -> None:
        async with stack_of(replicas) as stack:
            forgotten = await stack.open(max_tokens=900)
            stack.cluster.bus._attempts.pop(forgotten.attempts.current.stream_id)
            name = forgotten.explain.replica
            engine = stack.cluster.replicas[name].engine
            await until(lambda: engine.load().num_running == 0)
            assert stack.cluster.router_id in stack.cluster.replicas[name].actor._attachments
            answer = await stack.answer(**GREEDY)
            assert answer.token_ids == expected(reference, **GREEDY).token_ids
            await forgotten.aclose()

    runner.run(run())


def test_a_draining_replica_finishes_its_requests_without_renewals(
    runner, replicas, reference, short_leases, monkeypatch
):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            stream = await stack.open(max_tokens=LONG)
            name = stream.explain.replica
            # Serve drops the replica and reports that.
            stack.cluster.handle.passes_over.add(name)
            stack.cluster.membership.update(frozenset(stack.cluster.replicas) - {name})
            engine = stack.cluster.replicas[name].engine
            await asyncio.wrap_future(engine.call(lambda _: time.sleep(3 * SHORT_LEASE_S)))
            answer = await read(stream)
            params = GREEDY | dict(max_tokens=LONG)
            assert answer.token_ids == expected(reference, **params).token_ids
            assert (stream.explain.attempts, stream.explain.replica) == (1, name)
            stack.cluster.handle.passes_over.clear()

    runner.run(run())


def test_a_request_that_serve_gave_to_another_replica_is_renewed_there(
    runner, replicas, short_leases, monkeypatch
):
    """The request waits in a replica's queue for longer than a lease, before any frame has confirmed it."""

    async def run() -> None:
        async with stack_of(replicas) as stack:
            ranked = await stack.open(max_tokens=1)
            await read(ranked)
            first, second = ranked.explain.replica, ranked.explain.runner_up
            stack.cluster.handle.passes_over.add(first)
            engine = stack.cluster.replicas[second].engine
            submit, held = engine.submit, []
            monkeypatch.setattr(engine, "submit", held.append)
            opening = asyncio.create_task(stack.open(**GREEDY))
            await until(lambda: held)
            stack.cluster.handle.passes_over.clear()
            await asyncio.sleep(2.5 * SHORT_LEASE_S)
            assert not opening.done()
            submit(held[0])
            answer = await read(await opening)
            assert answer.stream.explain.attempts == 1
            assert answer.stream.explain.replica == second

    runner.run(run())


def test_two_routers_share_the_replicas(runner, replicas, reference):
    async def run() -> None:
        whole = expected(reference, **GREEDY)
        async with stack_of(replicas) as one, stack_of(replicas) as two:
            answers = await asyncio.gather(
                *(stack.answer(**GREEDY) for stack in (one, two) for _ in range(6))
            )
            assert all(answer.token_ids == whole.token_ids for answer in answers)
            # Each router knows the whole cache, also of requests from the other router.
            prompt = tuple(5 + i % 200 for i in range(200))
            await one.answer(prompt, max_tokens=1)
            for stack in (one, two):
                table = stack.cluster.table
                await until(lambda t=table: sum(s.indexed_blocks for s in t.statuses(0.0)) == 3)

    runner.run(run())


def test_a_closed_bus_stays_detached(runner, replicas):
    async def run() -> None:
        async with stack_of(replicas) as stack:
            stream = await stack.open(max_tokens=LONG)
            await stack.cluster.bus.close()
            stack.cluster.membership.update(frozenset("a"))
            stack.cluster.membership.update(frozenset("ab"))
            await asyncio.sleep(0.3)
            assert all(len(r.actor._attachments) == 0 for r in replicas)
            await stream.aclose()

    runner.run(run())
