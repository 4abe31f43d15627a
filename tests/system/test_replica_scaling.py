"""The number of replicas follows the load, and nobody's stream notices. Real Ray.

```
 streams  12 ──────────────┐ 15 ┌─ 6 ─────────────────┐ 4 ──▶ 0
 replicas  1 ──▶ 2 starts ─┘    └─ 1 drains ──────────┘ its streams end; it has gone
 steps     slow ──────────────────────────────────────┐ fast
```

What the load is made of are long streams, so that each replica has as much of it at any moment, however the machine
shares its cores between replicas, routers and clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import openai
import pytest
from live import CHANGE_TIMEOUT_S, Cluster, assert_serve_ends, start_cluster, wait_until

pytestmark = pytest.mark.system
# Of one replica. Serve's own policy counts calls, wants one replica for every two, and would take none away below.
TARGET_REQUESTS = 10.0
NUM_CROWD = 9  # streams that leave when two replicas run
# Of the two that are read to their ends on each replica. The short one has the credit that it needs from the start, the
# long one needs more.
SHORT_TOKENS, LONG_TOKENS = 100, 400
# A brake is a stream that makes the steps it is in so much longer: no reader beside one ends within 100 s, however fast
# the machine is.
BRAKE_TOKENS, BRAKE_MS = 1000, 1000


@pytest.fixture(scope="module")
def elastic(tmp_path_factory) -> Iterator[Cluster]:
    """One replica to begin with, two at most."""

    def change(config: dict) -> None:
        args = config["applications"][0]["args"]
        # The second replica shall get what comes next, whatever prices say of a machine that is shared.
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


def running(cluster: Cluster) -> set[str]:
    return {name for name, state in replicas(cluster).items() if state == "RUNNING"}


def every_router_knows(cluster: Cluster, names: set[str]) -> bool:
    """HAProxy gives the next connection to the other router."""
    return all({load.replica for load in cluster.loads()} == names for _ in range(4))


@dataclass(slots=True)
class Stream:
    """One long answer."""

    seed: int
    max_tokens: int = LONG_TOKENS
    label: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    replica: str = ""  # where its first token came from
    request_id: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def read(self, client: openai.AsyncOpenAI) -> None:
        """To its end."""
        response = await client.completions.with_raw_response.create(
            model="embedded",
            prompt=f"Story {self.seed}",
            max_tokens=self.max_tokens,
            seed=self.seed,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            extra_headers={"x-request-id": self.label} if self.label else None,
        )
        async with response.parse() as chunks:
            async for chunk in chunks:
                (choice,) = chunk.choices
                self.ids += getattr(choice, "token_ids", None) or []
                self.finish_reason = choice.finish_reason or self.finish_reason
                self.replica = response.headers["x-quire-replica"]
                self.request_id = response.headers["x-request-id"]
                self.begun.set()


async def once(condition: Callable[[], bool], what: str) -> float:
    """Seconds until it holds; streams go on meanwhile."""
    return await asyncio.to_thread(wait_until, condition, CHANGE_TIMEOUT_S, what)


async def end(streams: list[Stream]) -> None:
    """Leave, as a client does that wants no more."""
    for stream in streams:
        stream.task.cancel()
    await asyncio.wait([stream.task for stream in streams])


def num_attempts(cluster: Cluster, stream: Stream) -> int:
    """Replicas to which it was sent, one after the other."""
    query = {"request_id": stream.request_id}
    told = httpx.get(f"{cluster.url}/v1/router/explain", params=query, timeout=30)
    return len(told.json()["data"])


async def undisturbed(cluster: Cluster, streams: list[Stream]) -> list[list[int]]:
    """Token ids of such streams when nothing happens."""
    again = [Stream(stream.seed, stream.max_tokens) for stream in streams]
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        await asyncio.gather(*(stream.read(client) for stream in again))
    return [stream.ids for stream in again]


def test_replicas_come_with_the_load_and_drain_when_it_goes(elastic):
    (first,) = running(elastic)
    seconds: dict[str, float] = {}
    brakes = [Stream(i, BRAKE_TOKENS, f"fault:slow:{BRAKE_MS}@0") for i in range(2)]
    crowd = [Stream(100 + i) for i in range(NUM_CROWD)]
    there = [Stream(200, SHORT_TOKENS), Stream(201, LONG_TOKENS)]
    here = [Stream(202, SHORT_TOKENS), Stream(203, LONG_TOKENS)]
    readers = [*there, *here]

    async def run() -> None:
        async with (
            openai.AsyncOpenAI(
                base_url=f"{elastic.url}/v1", api_key="none", max_retries=0, timeout=300
            ) as client,
            asyncio.TaskGroup() as group,  # the first stream that fails ends the test
        ):

            async def begin(*streams: Stream) -> None:
                for stream in streams:
                    stream.task = group.create_task(stream.read(client))
                for stream in streams:
                    await stream.begun.wait()

            await begin(brakes[0])
            await begin(*there, *crowd)
            seconds["up"] = await once(lambda: len(running(elastic)) == 2, "a second replica")
            both = running(elastic)
            await once(lambda: every_router_knows(elastic, both), "routers know it")
            await begin(brakes[1])
            await begin(*here)
            (second,) = both - {first}
            assert {stream.replica for stream in [brakes[0], *there, *crowd]} == {first}
            assert {stream.replica for stream in [brakes[1], *here]} == {second}

            await end(crowd)
            seconds["down"] = await once(lambda: len(running(elastic)) == 1, "one drains")
            assert set(replicas(elastic)) == both, "it waits for its streams"
            assert not any(stream.task.done() for stream in [*brakes, *readers])
            await end(brakes)

    asyncio.run(run())
    seconds["gone"] = wait_until(lambda: len(replicas(elastic)) == 1, 120, "the other has gone")
    (left,) = replicas(elastic)
    print({name: round(s, 1) for name, s in seconds.items()}, "the first stays:", left == first)
    for stream in readers:
        assert (len(stream.ids), stream.finish_reason) == (stream.max_tokens, "length")
    assert asyncio.run(undisturbed(elastic, readers)) == [stream.ids for stream in readers]
    # Those of the replica that has drained, too.
    assert [num_attempts(elastic, stream) for stream in readers] == [1, 1, 1, 1]
    assert running(elastic) == {left}


def test_quire_serve_ends_when_the_application_is_removed_without_it(elastic):
    """The last test of this file, because it ends the cluster."""
    elastic.shut_down_serve()
    assert_serve_ends(
        elastic,
        "Ray Serve no longer has the application quire; was it removed with `serve shutdown`?",
    )
