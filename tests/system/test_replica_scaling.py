"""The number of replicas follows the load, and nobody's stream notices. Real Ray."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import openai
import pytest
from live import Cluster, start_cluster, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]
TARGET_REQUESTS = 10.0  # of one replica
NUM_USERS = 20  # two replicas' worth
NUM_LONG_EACH, LONG_TOKENS = 2, 500  # with the brakes, six requests: less than one replica's worth
# While a brake is in a replica's steps no long stream there ends within 75 s, however fast the machine is.
BRAKE_MS, BRAKE_TOKENS = 150, 1000
DOWN_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def elastic(tmp_path_factory) -> Iterator[Cluster]:
    """One replica to begin with, two at most."""

    def change(config: dict) -> None:
        args = config["applications"][0]["args"]
        # Streams shall come to both: prices may prefer the one that this machine held up less.
        args["router"] = {"drain_timeout_s": 240.0, "policy": "least_loaded"}
        args["replicas"] = 1
        args["engine"] = {"fault_injection": True}
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


@dataclass(slots=True)
class Reader:
    """Reads a long answer."""

    seed: int
    replica: str = ""  # known with the first token
    task: asyncio.Task[list[int]] | None = None

    async def read(
        self, client: openai.AsyncOpenAI, label: str = "", max_tokens: int = LONG_TOKENS
    ) -> list[int]:
        """Its token ids."""
        response = await client.completions.with_raw_response.create(
            model="embedded",
            prompt=f"Story {self.seed}",
            max_tokens=max_tokens,
            seed=self.seed,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            extra_headers={"x-request-id": label} if label else None,
        )
        ids: list[int] = []
        async with response.parse() as chunks:
            async for chunk in chunks:
                ids += getattr(chunk.choices[0], "token_ids", None) or []
                self.replica = response.headers["x-quire-replica"]
        return ids

    async def stop(self) -> None:
        """Leave, as a client does that wants no more."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


async def on_each(
    names: set[str],
    num_each: int,
    seeds: Iterator[int],
    read: Callable[[Reader], asyncio.Task[list[int]]],
) -> list[Reader]:
    """So many readers on each of these replicas; who finds another place leaves again."""
    kept: list[Reader] = []
    num_on: Counter[str] = Counter()
    async with asyncio.timeout(90):
        while set(num_on) != names or min(num_on.values()) < num_each:
            reader = Reader(next(seeds))
            reader.task = read(reader)
            while not reader.replica:
                assert not reader.task.done(), reader.task.exception()
                await asyncio.sleep(0.02)
            if num_on[reader.replica] < num_each:
                num_on[reader.replica] += 1
                kept.append(reader)
            else:
                await reader.stop()
    return kept


async def press(client: openai.AsyncOpenAI, number: int) -> None:
    """One user who asks again and again."""
    for i in itertools.count():
        await client.completions.create(
            model="embedded",
            prompt=f"User {number} asks {i}",
            max_tokens=60,
            extra_body={"ignore_eos": True},
        )


def test_replicas_come_with_the_load_and_drain_when_it_goes(elastic):
    assert num_running(elastic) == 1
    seconds: dict[str, float] = {}

    async def run() -> tuple[list[Reader], list[list[int]], set[str]]:
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
            seeds = itertools.count()

            def brake(reader: Reader) -> asyncio.Task[list[int]]:
                label = f"fault:slow:{BRAKE_MS}@0"
                return asyncio.create_task(reader.read(client, label, BRAKE_TOKENS))

            def tell(reader: Reader) -> asyncio.Task[list[int]]:
                return asyncio.create_task(reader.read(client))

            brakes = await on_each(both, 1, seeds, brake)
            longs = await on_each(both, NUM_LONG_EACH, seeds, tell)
            for user in users:
                user.cancel()
            await asyncio.gather(*users, return_exceptions=True)
            began_s = time.monotonic()
            await asyncio.to_thread(
                wait_until, lambda: num_running(elastic) == 1, DOWN_TIMEOUT_S, "one goes"
            )
            seconds["down"] = time.monotonic() - began_s
            assert not any(reader.task.done() for reader in [*brakes, *longs])
            for reader in brakes:
                await reader.stop()
            answers = await asyncio.gather(*(reader.task for reader in longs))
            seconds["rest"] = time.monotonic() - began_s - seconds["down"]
            return longs, answers, both

    longs, answers, both = asyncio.run(run())
    wait_until(lambda: len(replicas(elastic)) == 1, 120, "the other has drained")
    print({name: round(s, 1) for name, s in seconds.items()}, [reader.replica for reader in longs])
    (left,) = replicas(elastic)
    assert left in both
    assert [len(ids) for ids in answers] == [LONG_TOKENS] * len(longs)
    drained = [i for i, reader in enumerate(longs) if reader.replica != left]
    assert len(drained) == NUM_LONG_EACH

    async def again(seed: int) -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{elastic.url}/v1", api_key="none") as client:
            return await Reader(seed).read(client)

    first = drained[0]
    assert asyncio.run(again(longs[first].seed)) == answers[first]
