"""A step that fails ends only the request that makes it fail; real engines, the real bus, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from local_serve import LocalCluster, LocalReplica, start_replica, until

from quire.protos.errors import EngineCrash
from quire.protos.sampling_params import SamplingParams
from quire.replica import Engine
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.serving.faults.faulty_actor import FaultyReplica
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.request.context import ModelFacts
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.service import RouterService
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer
from quire.router.types import GenerationRequest

ENGINE = dict(
    model="embedded",
    device="cpu",
    num_blocks=256,
    block_size=16,
    max_model_len=512,
    num_threads=1,
)
TOKENIZER = TextTokenizer.load(CHECKPOINT)
NUM_OTHERS = 8


@pytest.fixture(scope="module")
def replicas(runner) -> Iterator[list[LocalReplica]]:
    with pytest.MonkeyPatch.context() as patch:
        replicas = [
            runner.run(start_replica(name, patch, FaultyReplica, **ENGINE)) for name in "ab"
        ]
        yield replicas
    for replica in replicas:
        replica.engine.close()


def params(i: int) -> dict[str, object]:
    return dict(temperature=0.9, seed=100 + i, max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    prompts = [TOKENIZER.encode(f"Story {i}").tolist() for i in range(NUM_OTHERS)]
    with Engine(**ENGINE) as engine:
        outputs = engine.generate(prompts, [SamplingParams(**params(i)) for i in range(NUM_OTHERS)])
        return [output.token_ids for output in outputs]


def test_only_the_guilty_request_fails_and_the_engines_go_on(runner, replicas, expected):
    async def run() -> None:
        cluster = LocalCluster(replicas, ReplicaTable(PrefixIndex()))
        service = RouterService(
            ModelFacts(name="quire", created_s=0, defaults=GenerationDefaults(), limits=Limits()),
            router_id=cluster.router_id,
            tokenizer=AsyncTokenizer(TOKENIZER, num_threads=1),
            template=None,
            table=cluster.table,
            policy=make_policy("round_robin"),
            transport=cluster.bus,
            max_migrations=0,
        )
        await cluster.start()

        async def answer(
            prompt: str, label: str = "test", **fields: object
        ) -> tuple[list[int], int]:
            stream = await service.generate(
                GenerationRequest(request_id=label, prompt=prompt, **fields)
            )
            ids = [i async for delta in stream for i in delta.token_ids]
            return ids, stream.explain.attempts

        others = [asyncio.ensure_future(answer(f"Story {i}", **params(i))) for i in range(8)]
        poison = asyncio.ensure_future(
            answer("Poison", "fault:fail!@60", **(params(0) | {"seed": 99}))
        )
        with pytest.raises(EngineCrash, match=r"failed 3 times .* nothing else in its step"):
            await poison
        answers = await asyncio.gather(*others)
        assert [ids for ids, _ in answers] == expected
        assert any(attempts > 1 for _, attempts in answers), "no request was in a step that failed"
        # The engines serve on, with an empty cache that routers know of.
        assert (await answer("Story 0", **params(0)))[0] == expected[0]
        for replica in replicas:
            replica.engine.check_health()
            await until(lambda r=replica: not r.engine.load().blocks_in_use)
        await cluster.stop()

    runner.run(run())
