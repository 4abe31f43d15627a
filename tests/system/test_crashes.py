"""Replicas that hang or crash are replaced, and only the request that makes them crash fails. Real Ray.

The faults are those of `quire.replica.fault_seeds`. What streams should be is what an engine alone answers.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import openai
import pytest
from live import Cluster, start_cluster, wait_until

from quire.protos.wire import SamplingParams
from quire.replica import Engine
from quire.replica.embedded import CHECKPOINT
from quire.replica.fault_seeds import CRASH, FAULT_POSITION, HANG
from quire.router.tokenizer import TextTokenizer

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
NUM_ROUNDS = {"ci": 1, "long": 50}[os.environ.get("CHAOS_SIZE", "ci")]
rounds = pytest.mark.parametrize("number", range(NUM_ROUNDS))
NUM_REPLICAS = 3
NUM_OTHERS = 12
NUM_TOKENS = 400


@pytest.fixture(scope="module")
def faulty_cluster(tmp_path_factory) -> Iterator[Cluster]:
    def change(config: dict) -> None:
        args = config["applications"][0]["args"]
        args |= {"replicas": NUM_REPLICAS, "routers": 2}
        args["engine"] = {"deterministic": True, "fault_injection": True, "step_timeout_s": 3.0}
        # However slow the machine is: the last of the replicas may be dead until the first is back.
        args["router"] = {"max_move_s": 240.0}

    yield from start_cluster(tmp_path_factory.mktemp("crashes"), change)


def fields(i: int) -> dict[str, object]:
    return {"temperature": 0.9, "top_p": 1.0, "seed": 100 + i, "max_tokens": NUM_TOKENS}


@pytest.fixture(scope="module")
def expected() -> dict[int | str, list[int]]:
    """Token ids by stream number, and of the request whose step hangs."""
    tokenizer = TextTokenizer.load(CHECKPOINT)
    wanted = {i: (f"Story {i}", fields(i)) for i in range(NUM_OTHERS)}
    wanted["hang"] = ("Story", fields(0) | {"seed": HANG})
    prompts = [tokenizer.encode(prompt).tolist() for prompt, _ in wanted.values()]
    assert max(map(len, prompts)) < FAULT_POSITION
    params = [SamplingParams(**given, ignore_eos=True) for _, given in wanted.values()]
    with Engine(model="embedded", deterministic=True) as engine:
        outputs = engine.generate(prompts, params)
    return {name: out.token_ids for name, out in zip(wanted, outputs, strict=True)}


def replicas(cluster: Cluster) -> dict[str, int]:
    """Serve's id of every running replica, and its process."""
    details = cluster.serve_status()["applications"]["quire"]["deployments"]["Replica"]
    return {r["replica_id"]: r["pid"] for r in details["replicas"] if r["state"] == "RUNNING"}


def wait_until_replaced(cluster: Cluster, before: dict[str, int], num_gone: int) -> None:
    def is_whole() -> bool:
        now = set(replicas(cluster).values())
        gone = set(before.values()) - now
        return len(now) == NUM_REPLICAS and len(gone) >= num_gone and len(cluster.loads()) == 3

    wait_until(is_whole, 120, f"{num_gone} replicas were replaced")
    assert len(set(before.values()) & set(replicas(cluster).values())) == NUM_REPLICAS - num_gone


async def ask(client: openai.AsyncOpenAI, prompt: str, **given: object) -> list[int]:
    token_ids: list[int] = []
    stream = await client.completions.create(
        model="embedded",
        prompt=prompt,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
        **given,
    )
    async for chunk in stream:
        token_ids += chunk.choices[0].token_ids or []
    return token_ids


def run_beside_others(cluster: Cluster, prompt: str, **given: object) -> tuple[object, list]:
    """The answer to one request, or its error, and those of the others that run meanwhile."""

    async def run() -> tuple[object, list]:
        async with openai.AsyncOpenAI(
            base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:
            others = [
                asyncio.create_task(ask(client, f"Story {i}", **fields(i)))
                for i in range(NUM_OTHERS)
            ]
            await asyncio.sleep(0.3)
            outcome = (await asyncio.gather(ask(client, prompt, **given), return_exceptions=True))[
                0
            ]
            return outcome, await asyncio.gather(*others, return_exceptions=True)

    return asyncio.run(run())


@rounds
def test_a_hung_step_ends_its_process_and_every_stream_goes_on(faulty_cluster, expected, number):
    before = replicas(faulty_cluster)
    answer, others = run_beside_others(faulty_cluster, "Story", **(fields(0) | {"seed": HANG}))
    assert answer == expected["hang"]
    assert others == [expected[i] for i in range(NUM_OTHERS)]
    assert httpx.get(f"{faulty_cluster.url}/ready").status_code == 200
    wait_until_replaced(faulty_cluster, before, 1)


@rounds
def test_a_poison_request_fails_and_everybody_else_is_untouched(faulty_cluster, expected, number):
    before = replicas(faulty_cluster)
    error, others = run_beside_others(faulty_cluster, "Poison", **(fields(0) | {"seed": CRASH}))
    assert isinstance(error, openai.APIError) and error.code == "engine_crash", repr(error)
    assert "with nothing else in its step" in error.message
    assert others == [expected[i] for i in range(NUM_OTHERS)]
    wait_until_replaced(faulty_cluster, before, 3)


def test_kills_from_outside_convict_nobody(faulty_cluster, expected):
    """A stream outlives three kills of the very replica that computes it."""

    async def run() -> list[int]:
        token_ids: list[int] = []
        num_kills = 0
        async with openai.AsyncOpenAI(
            base_url=f"{faulty_cluster.url}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:
            stream = await client.completions.create(
                model="embedded",
                prompt="Story 1",
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
                **fields(1),
            )
            async for chunk in stream:
                token_ids += chunk.choices[0].token_ids or []
                if num_kills < 3 and len(token_ids) >= 100 * (num_kills + 1):
                    num_kills += 1
                    await asyncio.to_thread(kill_the_busy_one)
        assert num_kills == 3
        return token_ids

    def kill_the_busy_one() -> None:
        running = [load.replica for load in faulty_cluster.loads() if load.num_running]
        processes = replicas(faulty_cluster)
        for name in running:
            os.kill(processes[name], signal.SIGKILL)

    assert asyncio.run(run()) == expected[1]
