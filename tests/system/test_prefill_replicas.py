"""Long prompts on a cluster with a prefill replica, whose process is killed while it computes one. Real Ray.

What streams should be is what an engine alone answers. Too long for `make test`: `make prefill`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import openai
import pytest
from live import Cluster, start_cluster, wait_until

from quire.cluster.config.router_section import RouterArgs
from quire.protos.sampling_params import SamplingParams
from quire.replica import Engine
from quire.router.fleet.block_peers import BlockPeers
from quire.router.fleet.prefill_pool import PrefillPool

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]
NUM_REPLICAS, NUM_LONG, NUM_KILLS = 2, 6, 3
LONG_TOKENS, ANSWER_TOKENS, STREAM_TOKENS = 3500, 100, 3000
SAMPLING = {"temperature": 0.9, "top_p": 1.0, "seed": 7}


def prompt_ids(number: int, num_tokens: int) -> list[int]:
    return [10 + (number * 7919 + i * i) % 900 for i in range(num_tokens)]


STREAMS = [(prompt_ids(i, 20), STREAM_TOKENS) for i in range(4)]
LONG = [(prompt_ids(100 + i, LONG_TOKENS), ANSWER_TOKENS) for i in range(NUM_LONG + NUM_KILLS)]


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """Token ids by the number of the long prompt."""
    params = SamplingParams(**SAMPLING, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    with Engine(model="embedded", deterministic=True) as engine:
        outputs = engine.generate([prompt for prompt, _ in LONG], params)
    return {i: list(output.token_ids) for i, output in enumerate(outputs)}


@pytest.fixture(scope="module")
def split_cluster(tmp_path_factory) -> Iterator[Cluster]:
    def change(config: dict) -> None:
        args = config["applications"][0]["args"]
        args |= {"replicas": NUM_REPLICAS, "routers": 1}
        args["engine"] = {"deterministic": True, "restore": "always"}
        args["router"] = {"policy": "disaggregated", "max_move_s": 240.0}

    yield from start_cluster(tmp_path_factory.mktemp("prefill"), change)


@asynccontextmanager
async def streams(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client, while some streams run that a prompt would delay."""
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        others = [asyncio.create_task(repeat(client, *request)) for request in STREAMS]
        await asyncio.sleep(1.0)
        try:
            yield client
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)


async def repeat(client: openai.AsyncOpenAI, prompt: list[int], max_tokens: int) -> None:
    while True:
        await ask(client, prompt, max_tokens)


async def ask(
    client: openai.AsyncOpenAI, prompt: list[int], max_tokens: int, request_id: str = ""
) -> list[int]:
    token_ids: list[int] = []
    stream = await client.completions.create(
        model="embedded",
        prompt=prompt,
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
        extra_headers={"x-request-id": request_id} if request_id else None,
        **SAMPLING,
    )
    async for chunk in stream:
        token_ids += chunk.choices[0].token_ids or []
    return token_ids


def outcomes(cluster: Cluster) -> dict[str, float]:
    """Hand-overs so far."""
    name = "quire_disaggregated_prefills_total"
    return {s.labels["outcome"]: s.value for s in cluster.metrics() if s.name == name}


def num_computed(cluster: Cluster) -> float:
    """Prompt tokens that the engines had to compute, those of further attempts included."""
    hits = cluster.metric("quire_prefix_hit_tokens_total")
    return cluster.metric("quire_prefix_queried_tokens_total") - hits


def wrong(
    answers: Sequence[list[int]], expected: dict[int, list[int]], first: int = 0
) -> list[int]:
    return [first + i for i, ids in enumerate(answers) if ids != expected[first + i]]


def test_long_prompts_are_computed_once_and_their_streams_move(split_cluster, expected):
    async def run() -> list[list[int]]:
        async with streams(split_cluster) as client:
            return [await ask(client, *request) for request in LONG[:NUM_LONG]]

    before = num_computed(split_cluster)
    assert wrong(asyncio.run(run()), expected) == []
    # The page of metrics is up to a second old.
    wait_until(
        lambda: outcomes(split_cluster)["moved"] >= NUM_LONG // 2,
        10,
        f"streams have moved: {outcomes(split_cluster)}",
    )
    assert outcomes(split_cluster)["failed"] == 0
    assert num_computed(split_cluster) - before <= 1.1 * NUM_LONG * LONG_TOKENS
    assert split_cluster.metric("quire_migrations_total") == 0


def prefill_pid(cluster: Cluster) -> int:
    """The process of the prefill replica."""
    pool = PrefillPool(BlockPeers())
    pool.share = RouterArgs().prefill_share
    (name,) = pool.members([load.replica for load in cluster.loads()])
    details = cluster.serve_status()["applications"]["quire"]["deployments"]["Replica"]
    return next(r["pid"] for r in details["replicas"] if r["replica_id"] == name)


def test_a_prefill_replica_that_is_killed_with_a_prompt_changes_no_answer(split_cluster, expected):
    async def run(number: int) -> list[int]:
        async with streams(split_cluster) as client:
            pid = await asyncio.to_thread(prefill_pid, split_cluster)
            # It gets the prompt, and dies a moment after it has begun.
            os.kill(pid, signal.SIGSTOP)
            answer = asyncio.create_task(ask(client, *LONG[number]))
            await asyncio.sleep(0.5)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
            return await answer

    for number in range(NUM_LONG, NUM_LONG + NUM_KILLS):
        wait_until(
            lambda: (
                len(split_cluster.pids("Replica")) == len(split_cluster.loads()) == NUM_REPLICAS
            ),
            120,
            "all replicas",
        )
        assert wrong([asyncio.run(run(number))], expected, number) == []
    wait_until(
        lambda: outcomes(split_cluster)["failed"] >= 1, 10, "a prompt was computed elsewhere"
    )
    print(outcomes(split_cluster))
