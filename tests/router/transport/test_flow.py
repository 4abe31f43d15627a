"""Credit: no request runs further ahead than allowed, and a client that reads never waits; slow clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_serve import LocalCluster, LocalReplica, assert_idle, start_replica, until

from quire.protos.errors import SlowClient
from quire.protos.sampling_params import SamplingParams
from quire.replica import Engine
from quire.replica.builtin_model import CHECKPOINT
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.request.context import ModelFacts
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.request_stream import RequestStream
from quire.router.request.service import RouterService
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer
from quire.router.transport import bus as bus_module
from quire.router.transport.flow import Credit, by_replica
from quire.router.types import GenerationRequest

ENGINE = dict(
    model="embedded",
    device="cpu",
    num_blocks=128,
    block_size=16,
    max_batch_tokens=128,
    max_model_len=1024,
    num_threads=1,
)
SAMPLED = dict(temperature=0.9, seed=5, max_tokens=150, ignore_eos=True)
PROMPT = "Once upon a time"
CREDIT_TOKENS = 16


@given(
    num_tokens=st.integers(1, 300),
    start=st.integers(0, 1000),
    reads=st.lists(st.integers(1, 50), max_size=100),
)
def test_the_replica_is_never_further_ahead_than_allowed_and_never_out_of_credit_for_long(
    num_tokens, start, reads
):
    credit, written = Credit(num_tokens, start), start
    for count in reads:
        written = min(written + count, credit.end)  # no more than was generated
        if credit.is_low(written):
            end = credit.end
            assert credit.extend(written) == credit.end >= end
        assert written < credit.end <= written + num_tokens
        assert credit.end - written > num_tokens // 2


def test_grants_travel_together():
    grants = [("a", 1, 20), ("b", 2, 30), ("a", 3, 40)]
    assert by_replica(grants) == {"a": {1: 20, 3: 40}, "b": {2: 30}}


# -- real engines and the real bus -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def replicas(runner) -> Iterator[list[LocalReplica]]:
    with pytest.MonkeyPatch.context() as patch:
        replicas = [runner.run(start_replica(name, patch, **ENGINE)) for name in "ab"]
        yield replicas
    for replica in replicas:
        replica.engine.close()


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with Engine(**ENGINE) as engine:
        ids = TextTokenizer.load(CHECKPOINT).encode(PROMPT).tolist()
        return engine.generate([ids], SamplingParams(**SAMPLED))[0].token_ids


@asynccontextmanager
async def stack_of(
    replicas: list[LocalReplica],
) -> AsyncIterator[tuple[RouterService, LocalCluster]]:
    cluster = LocalCluster(replicas, ReplicaTable(PrefixIndex()))
    cluster.bus.credit_tokens = CREDIT_TOKENS
    service = RouterService(
        ModelFacts(name="quire", created_s=0, defaults=GenerationDefaults(), limits=Limits()),
        router_id=cluster.router_id,
        tokenizer=AsyncTokenizer(TextTokenizer.load(CHECKPOINT), num_threads=1),
        template=None,
        table=cluster.table,
        policy=make_policy("slo"),
        transport=cluster.bus,
    )
    await cluster.start()
    try:
        yield service, cluster
    finally:
        await cluster.stop()


async def open_stream(service: RouterService) -> RequestStream:
    return await service.generate(GenerationRequest(request_id="test", prompt=PROMPT, **SAMPLED))


def ahead(stream: RequestStream) -> int:
    """Tokens received and not read."""
    return sum(len(event.token_ids) for event in stream.attempts.current._events)


def test_a_reader_that_stops_and_goes_on_gets_its_tokens_each_once(runner, replicas, expected):
    async def run() -> None:
        async with stack_of(replicas) as (service, cluster):
            stream = await open_stream(service)
            engine = cluster.replicas[stream.explain.replica].engine
            token_ids: list[int] = []
            async for delta in stream:
                token_ids += delta.token_ids
                if len(token_ids) in (1, 20, 61):
                    # It computes what the credit allows, and then nothing.
                    steps = -1
                    while steps != (steps := engine.load().num_steps):
                        await asyncio.sleep(0.1)
                    assert ahead(stream) <= CREDIT_TOKENS
                    assert engine.load().num_running == 1  # it keeps its row and its blocks
                    engine.check()
            assert token_ids == expected
            assert stream.explain.attempts == 1

    runner.run(run())


def test_one_that_reads_nothing_ends_with_an_error_and_frees_the_engine(
    runner, replicas, monkeypatch
):
    monkeypatch.setattr(bus_module, "WATCH_PERIOD_S", 0.02)

    async def run() -> None:
        async with stack_of(replicas) as (service, cluster):
            cluster.bus.slow_client_timeout_s = 0.3
            slow, other = await open_stream(service), await open_stream(service)
            await anext(slow)
            assert sum([len(delta.token_ids) async for delta in other]) == 150
            await assert_idle_soon(cluster)
            assert ahead_bytes(slow) == 0
            with pytest.raises(SlowClient, match=r"nothing for 0\.3 s.*slow_client_timeout_s"):
                async for _ in slow:
                    pass

    runner.run(run())


async def assert_idle_soon(cluster: LocalCluster) -> None:
    def at_rest() -> bool:
        loads = [replica.engine.load() for replica in cluster.replicas.values()]
        return all(not load.num_running and not load.blocks_in_use for load in loads)

    await until(at_rest)


def ahead_bytes(stream: RequestStream) -> int:
    """Return the tokens in the stream that the client has not read."""
    return sum(
        4 * len(getattr(event, "token_ids", [])) for event in stream.attempts.current._events
    )


def test_a_client_that_takes_its_time_before_the_first_token_is_not_slow(
    runner, replicas, monkeypatch
):
    """What counts is what it has been given, not how long others wait in the queue."""
    monkeypatch.setattr(bus_module, "WATCH_PERIOD_S", 0.02)

    async def run() -> None:
        async with stack_of(replicas) as (service, cluster):
            cluster.bus.slow_client_timeout_s = 0.1
            stream = await open_stream(service)
            await asyncio.sleep(0.4)
            assert sum([len(delta.token_ids) async for delta in stream]) == 150

    runner.run(run())


def test_a_paused_stream_of_a_replica_that_drains_goes_on_there(runner, replicas, expected):
    """A grant reaches a replica that Serve no longer lists."""

    async def run() -> None:
        async with stack_of(replicas) as (service, cluster):
            stream = await open_stream(service)
            name = stream.explain.replica
            token_ids = list((await anext(stream)).token_ids)
            await until(lambda: ahead(stream) >= CREDIT_TOKENS - 1)
            cluster.membership.update(frozenset("ab") - {name})
            async for delta in stream:
                token_ids += delta.token_ids
            assert token_ids == expected
            assert stream.explain.attempts == 1 and stream.explain.replica == name
            await assert_idle(cluster.replicas[name], cluster.router_id)
            cluster.membership.update(frozenset("ab"))
            await until(lambda: cluster.table.num_ready() == 2)

    runner.run(run())
