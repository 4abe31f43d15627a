"""Admission in the life of a request: real engines behind the real bus, without Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from local_serve import LocalCluster, LocalReplica, start_replica, until

from quire.cluster.autoscaling import KV_IN_USE, NUM_REQUESTS, QUEUED_PREFILL_S
from quire.protos.errors import DeadlineExceeded, Overloaded
from quire.protos.wire import Submit
from quire.replica.builtin_model import CHECKPOINT
from quire.router.admission.wait_bounds import AdmissionLimits
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.policy.policy import Policy, Ranking, rank
from quire.router.request.context import ModelFacts
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.service import RouterService
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer
from quire.router.transport import bus
from quire.router.types import GenerationRequest

ENGINE = dict(
    model="embedded",
    device="cpu",
    num_blocks=64,
    block_size=16,
    max_batch_tokens=64,
    max_model_len=512,
    num_threads=1,
)
# One request at a time, and the next waits at the router until the first has its token.
ONE_BY_ONE = AdmissionLimits(
    dispatch_window_s=1e-9, max_replica_waiting_requests=0, quantum_tokens=1
)
LONG = 300  # tokens
TOKENIZER = TextTokenizer.load(CHECKPOINT)


@pytest.fixture(scope="module")
def replicas(runner) -> Iterator[list[LocalReplica]]:
    """`a` runs one request and lets one wait; `b` takes many."""
    with pytest.MonkeyPatch.context() as patch:

        async def start() -> list[LocalReplica]:
            small = dict(max_running_requests=1, max_waiting_requests=1)
            a = await start_replica("a", patch, **ENGINE, **small)
            return [a, await start_replica("b", patch, **ENGINE)]

        replicas = runner.run(start())
        yield replicas
        for replica in replicas:
            replica.engine.close()


class AFirst:
    """A policy that sends everything to the replica `a`, else to another."""

    def choose(self, request, replicas, now_s, rng) -> Ranking:
        return rank(
            "a", replicas, np.array([name != "a" for name in replicas.replicas], float), rng
        )


class Stack:
    """A router over some replicas, and what it sent to them."""

    def __init__(self, replicas: list[LocalReplica], policy: Policy, limits: AdmissionLimits):
        self.cluster = LocalCluster(replicas, ReplicaTable(PrefixIndex()))
        bus = self.cluster.bus
        self.sent: list[Submit] = []
        submit = bus.submit

        def record(request: Submit, route: list[str]):
            self.sent.append(request)
            return submit(request, route)

        bus.submit = record
        self.service = RouterService(
            ModelFacts(name="quire", created_s=0, defaults=GenerationDefaults(), limits=Limits()),
            router_id=self.cluster.router_id,
            tokenizer=AsyncTokenizer(TOKENIZER, num_threads=1),
            template=None,
            table=self.cluster.table,
            policy=policy,
            transport=bus,
            admission=limits,
        )

    async def open(self, name: str = "test", **fields):
        fields = dict(prompt=f"Once upon a time {name}", max_tokens=4, ignore_eos=True) | fields
        return await self.service.generate(GenerationRequest(request_id=name, **fields))

    async def answer(self, name: str, **fields) -> int:
        """How many tokens the answer has."""
        stream = await self.open(name, **fields)
        return sum([len(delta.token_ids) async for delta in stream])

    def start(self, name: str, **fields) -> asyncio.Task[int]:
        return asyncio.create_task(self.answer(name, **fields))


@asynccontextmanager
async def stack_of(
    replicas: list[LocalReplica],
    policy: Policy | None = None,
    limits: AdmissionLimits = ONE_BY_ONE,
) -> AsyncIterator[Stack]:
    stack = Stack(replicas, policy or make_policy("slo"), limits)
    await stack.cluster.start()
    try:
        async with asyncio.timeout(60):
            yield stack
    finally:
        await stack.cluster.stop()


def count_done(tasks: list[asyncio.Task]) -> int:
    return sum(task.done() for task in tasks)


@asynccontextmanager
async def held(replica: LocalReplica) -> AsyncIterator[None]:
    """The engine answers nothing; all that comes waits in its mailbox."""
    entered, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def wait(scheduler: object) -> None:
        loop.call_soon_threadsafe(entered.set)
        release.wait(60)

    future = replica.engine.call(wait)
    await entered.wait()
    try:
        yield
    finally:
        release.set()
        await asyncio.wrap_future(future)


def test_a_request_that_one_replica_has_no_place_for_is_tried_on_the_next(runner, replicas):
    """Another router has taken the last row, and no report has shown it yet."""

    async def run() -> None:
        a, _ = replicas
        async with (
            stack_of(replicas, AFirst(), AdmissionLimits()) as stack,
            stack_of(replicas, AFirst(), AdmissionLimits()) as other,
        ):
            running = await stack.open("first", max_tokens=LONG)
            async with held(a):  # so that the first still runs when the others arrive
                waiting = other.start("second", max_tokens=2)
                await until(lambda: len(other.sent) == 1)
                opening = asyncio.create_task(stack.open("third"))
                await until(lambda: len(stack.sent) == 2)
            stream = await opening
            assert [s.request_id for s in stack.sent] == ["first", "third", "third"]
            assert stream.explain.replica == "b" and stream.explain.attempts == 2
            assert sum([len(delta.token_ids) async for delta in stream]) == 4
            await running.aclose()
            assert await waiting == 2

    runner.run(run())


def test_a_request_that_no_replica_has_a_place_for_is_refused(runner, replicas):
    async def run() -> None:
        a, _ = replicas
        async with (
            stack_of([a], limits=AdmissionLimits()) as stack,
            stack_of([a], limits=AdmissionLimits()) as other,
        ):
            running = await stack.open("first", max_tokens=LONG)
            async with held(a):
                waiting = other.start("second", max_tokens=2)
                await until(lambda: len(other.sent) == 1)
                refused = asyncio.create_task(stack.open("third"))
                await until(lambda: len(stack.sent) == 2)
            with pytest.raises(Overloaded, match="max_waiting_requests") as caught:
                await refused
            assert caught.value.retry_after_s >= 1
            await running.aclose()
            assert await waiting == 2

    runner.run(run())


def test_a_request_that_would_be_refused_waits_at_the_router_instead(runner, replicas):
    async def run() -> None:
        a, _ = replicas
        async with stack_of([a], limits=AdmissionLimits()) as stack:
            running = await stack.open("first", max_tokens=LONG)
            async with held(a):
                tasks = [stack.start(f"{i}", max_tokens=2) for i in range(4)]
                await until(lambda: len(stack.service.gate.queue) == 3)
                assert len(stack.sent) == 2
            await running.aclose()
            assert await asyncio.gather(*tasks) == [2] * 4
            assert len(stack.sent) == 5, "none came back"

    runner.run(run())


def test_a_tenant_with_a_few_requests_is_not_behind_all_of_a_flood(runner, replicas):
    async def run() -> None:
        _, b = replicas
        async with stack_of([b]) as stack:
            await stack.answer("warm")
            async with held(b):
                flood = [stack.start(f"flood {i}", tenant="flood") for i in range(30)]
                await until(lambda: len(stack.service.gate.queue) >= 29)
                small = [stack.start(f"small {i}", tenant="small") for i in range(3)]
                await until(lambda: stack.service.gate.queue.of_tenant("small")[0] == 3)
                stack.sent.clear()
            assert await asyncio.gather(*small, *flood) == [4] * 33
            order = [request.tenant for request in stack.sent]
            # One flood request and one small one at a time; and what was under way is charged late.
            last = max(i for i, tenant in enumerate(order) if tenant == "small")
            assert last < 10, order

    runner.run(run())


def test_requests_that_would_wait_too_long_are_refused_and_others_served(runner, replicas):
    async def run() -> None:
        _, b = replicas
        limits = AdmissionLimits(dispatch_window_s=1e-9, max_replica_waiting_requests=0)
        async with stack_of([b], limits=limits) as stack:
            await stack.answer("warm", prompt="word " * 100)
            # The time of a few of these prompts, measured on this machine.
            wait_s = 500 * b.engine.load().prefill_s_per_token
            stack.service.gate.limits = dataclasses.replace(limits, max_wait_s=wait_s)
            async with held(b):
                tasks = [stack.start(f"{i}", prompt=f"{i} " * 50) for i in range(60)]
                await until(lambda: len(stack.service.gate.queue) + count_done(tasks) == 59)
                assert len(stack.sent) == 2, "the first only"
                refused = [task.exception() for task in tasks if task.done()]
                assert refused
                for error in refused:
                    assert isinstance(error, Overloaded)
                    assert "router.max_wait_s" in error.message
                    assert error.retry_after_s > 0
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert results.count(4) > 0
            assert results.count(4) + sum(isinstance(r, Overloaded) for r in results) == 60

    runner.run(run())


def test_a_deadline_that_passes_at_the_router_costs_no_prefill(runner, replicas):
    async def run() -> None:
        _, b = replicas
        async with stack_of([b]) as stack:
            await stack.answer("warm")
            async with held(b):
                first = stack.start("first")
                await until(lambda: len(stack.sent) == 2)
                with pytest.raises(DeadlineExceeded):
                    await stack.open("late", deadline_s=0.05)
            assert await first == 4
            assert [request.request_id for request in stack.sent] == ["warm", "first"]

    runner.run(run())


def test_the_choices_of_a_request_wait_as_one_and_stay_together(runner, replicas):
    async def run() -> None:
        _, b = replicas
        async with stack_of([b]) as stack:
            await stack.answer("warm")
            async with held(b):
                first = stack.start("first")
                await until(lambda: len(stack.sent) == 2)
                choices = stack.start("choices", n=3, temperature=1.0)
                await until(lambda: len(stack.service.gate.queue) == 1)
                gone = stack.start("gone", n=3)
                await until(lambda: len(stack.service.gate.queue) == 2)
                gone.cancel()
                await until(lambda: len(stack.service.gate.queue) == 1)
            assert await first == 4
            assert await choices == 12
            sent = [request for request in stack.sent if request.request_id == "choices"]
            assert [request.fork_of for request in sent] == [None] + 2 * [sent[0].stream_id]
            assert "gone" not in {request.request_id for request in stack.sent}

    runner.run(run())


def test_replicas_report_their_share_of_the_routers_queue_to_the_autoscaler(
    runner, replicas, monkeypatch
):
    async def run() -> None:
        monkeypatch.setattr(bus, "LEASE_S", 0.2)
        _, b = replicas
        async with stack_of([b]) as stack:
            await stack.answer("warm")
            stack.cluster.bus.queued_prefill_s = stack.service.gate.queued_prefill_s
            idle = b.actor.record_autoscaling_stats()
            assert set(idle) == {QUEUED_PREFILL_S, KV_IN_USE, NUM_REQUESTS}
            assert idle[NUM_REQUESTS] == idle[KV_IN_USE] == 0
            async with held(b):
                tasks = [stack.start(f"{i}", prompt=f"{i} " * 50) for i in range(5)]
                await until(lambda: len(stack.service.gate.queue) == 4)
                waiting_s = stack.service.gate.queued_prefill_s()
                assert waiting_s > 0
                await until(
                    lambda: b.actor.record_autoscaling_stats()[QUEUED_PREFILL_S] >= waiting_s
                )
            assert await asyncio.gather(*tasks) == [4] * 5
            await until(lambda: b.actor.record_autoscaling_stats()[QUEUED_PREFILL_S] == 0)

    runner.run(run())


def test_a_router_takes_on_other_bounds_while_requests_wait(runner, replicas):
    async def run() -> None:
        async with stack_of(replicas[1:]) as stack:
            service = stack.service

            def reconfigure(admission: AdmissionLimits, max_explained_decisions: int) -> None:
                service.reconfigure(
                    service.facts,
                    service.policy,
                    max_move_s=7.0,
                    max_migrations=1,
                    ready_timeout_s=5.0,
                    admission=admission,
                    max_explained_decisions=max_explained_decisions,
                )

            async with held(replicas[1]):
                tasks = [stack.start(f"r{i}", max_tokens=2) for i in range(5)]
                await until(lambda: len(service.gate.queue) == 4)
                reconfigure(dataclasses.replace(ONE_BY_ONE, max_queued_requests=0), 2)
                with pytest.raises(Overloaded, match="free of 0"):
                    await stack.open("late")
                assert len(service.gate.queue) == 4
                reconfigure(AdmissionLimits(), 2)
                await until(lambda: len(stack.sent) == 5)  # No request has an answer yet.
            assert await asyncio.gather(*tasks) == [2] * 5
            decisions = service.ring.last(10)
            assert [d["request_id"] for d in decisions] == ["r4", "r3"]

    runner.run(run())
