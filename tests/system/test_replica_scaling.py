"""The number of replicas follows the load, and nobody's stream notices. Real Ray."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import openai
import pytest
from live import Cluster, start_cluster, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]
TARGET_REQUESTS = 8.0  # of one replica
NUM_USERS = 20  # 2.5 replicas' worth
NUM_LONG, LONG_TOKENS = 4, 1500  # half a replica's worth


@pytest.fixture(scope="module")
def elastic(tmp_path_factory) -> Iterator[Cluster]:
    """One replica to begin with, two at most."""

    def change(config: dict) -> None:
        args = config["applications"][0]["args"]
        args |= {"replicas": 1, "router": {"drain_timeout_s": 240.0}}
        args["autoscaling"] = {
            "max_replicas": 2,
            "target_queued_prefill_s": None,
            "target_kv_in_use": None,
            "target_requests": TARGET_REQUESTS,
            "upscale_delay_s": 1.0,
            "downscale_delay_s": 3.0,
            "look_back_s": 2.0,
            "report_interval_s": 0.5,
        }

    yield from start_cluster(tmp_path_factory.mktemp("elastic"), change)


def replicas(cluster: Cluster) -> dict[str, str]:
    """Serve's id and the state of each."""
    details = cluster.serve_status()["applications"]["quire"]["deployments"]["Replica"]
    return {r["replica_id"]: r["state"] for r in details["replicas"]}


def num_running(cluster: Cluster) -> int:
    return sum(state == "RUNNING" for state in replicas(cluster).values())


async def stream(client: openai.AsyncOpenAI, i: int, begun: dict[int, str]) -> list[int]:
    """Token ids of a long answer; `begun` gets the replica with its first token."""
    response = await client.completions.with_raw_response.create(
        model="embedded",
        prompt=f"Story {i}",
        max_tokens=LONG_TOKENS,
        seed=i,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    ids: list[int] = []
    async for chunk in response.parse():
        ids += getattr(chunk.choices[0], "token_ids", None) or []
        begun.setdefault(i, response.headers["x-quire-replica"])
    return ids


async def press(client: openai.AsyncOpenAI, number: int) -> None:
    """One user who asks again and again."""
    for i in range(10**6):
        await client.completions.create(
            model="embedded",
            prompt=f"User {number} asks {i}",
            max_tokens=60,
            extra_body={"ignore_eos": True},
        )


def test_replicas_come_with_the_load_and_drain_when_it_goes(elastic):
    assert num_running(elastic) == 1
    seconds: dict[str, float] = {}

    async def run() -> tuple[list[list[int]], dict[int, str], set[str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{elastic.url}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:
            users = [asyncio.create_task(press(client, n)) for n in range(NUM_USERS)]
            began_s = time.monotonic()
            await asyncio.to_thread(wait_until, lambda: num_running(elastic) == 2, 120, "a second")
            seconds["up"] = time.monotonic() - began_s
            for user in users:
                assert not user.done(), user.exception()
            both = set(replicas(elastic))
            begun: dict[int, str] = {}
            longs: list[asyncio.Task[list[int]]] = []
            async with asyncio.timeout(90):  # streams on both of them
                while set(begun.values()) != both:
                    longs.append(asyncio.create_task(stream(client, len(longs), begun)))
                    while len(begun) < len(longs):
                        await asyncio.sleep(0.05)
            while len(longs) < NUM_LONG:
                longs.append(asyncio.create_task(stream(client, len(longs), begun)))
            for user in users:
                user.cancel()
            for user in users:
                with contextlib.suppress(asyncio.CancelledError):
                    await user
            began_s = time.monotonic()
            await asyncio.to_thread(wait_until, lambda: num_running(elastic) == 1, 60, "one goes")
            seconds["down"] = time.monotonic() - began_s
            assert not all(task.done() for task in longs), "the streams must outlive the change"
            return await asyncio.gather(*longs), begun, both

    answers, begun, both = asyncio.run(run())
    print({name: round(s, 1) for name, s in seconds.items()}, begun)
    wait_until(lambda: len(replicas(elastic)) == 1, 120, "the other has drained")
    (left,) = replicas(elastic)
    assert left in both
    drained = [i for i, replica in begun.items() if replica != left]
    assert drained, "no stream was on the replica that went"
    assert [len(ids) for ids in answers] == [LONG_TOKENS] * len(answers)

    async def again(i: int) -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{elastic.url}/v1", api_key="none") as client:
            return await stream(client, i, {})

    assert asyncio.run(again(drained[0])) == answers[drained[0]]
