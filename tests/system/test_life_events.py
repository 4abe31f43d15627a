"""What happens to replicas while routers count on them: a cache that vanishes, a slow one, more work than fits.

Real Ray. Kills, hangs and rolling updates have suites of their own, and so has the number of replicas
(`test_replica_scaling.py`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from live import Cluster, start_cluster, wait_until

from quire.protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.system
CLEAR_AFTER_S = 0.5
NUM_PREFIXES = 12
# Milliseconds that every step takes longer: so much that what else the machine does hardly matters.
FAST_MS, SLOW_MS = 100, 200
MAX_WAIT_S = 1.0


@pytest.fixture(scope="module")
def eventful(tmp_path_factory) -> Iterator[Cluster]:
    """Two routers, two replicas on which faults may happen."""

    def change(config: dict) -> None:
        args = config["applications"][0]["args"]
        args["engine"] = {"fault_injection": True, "num_blocks": 2048, "step_timeout_s": 60.0}

    yield from start_cluster(tmp_path_factory.mktemp("eventful"), change)


@pytest.fixture(autouse=True)
def at_rest(eventful) -> Iterator[None]:
    """Nothing runs and no block is lost after a test."""
    yield

    def is_at_rest() -> bool:
        return all(
            load.num_running + load.num_waiting == 0
            and tier.blocks_free + tier.blocks_cached == tier.blocks_total
            for load in eventful.loads()
            for tier in load.cache.tiers
        )

    wait_until(is_at_rest, 15, "free + cached = total")


def ask(
    cluster: Cluster, prompt: list[int], label: str = "", max_tokens: int = 1
) -> httpx.Response:
    """Over a connection of its own: any router may get it."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"x-request-id": label} if label else {}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def tokens_told(answer: httpx.Response) -> tuple[int, int]:
    """Predicted and found in the cache."""
    headers = answer.headers
    return (
        int(headers["x-quire-predicted-cached-tokens"]),
        int(headers["x-quire-cached-tokens"]),
    )


def indexed_blocks(cluster: Cluster) -> dict[str, int]:
    """What some router believes each replica to hold."""
    with cluster.channel() as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        caches = next(stub.WatchCache(control_pb2.WatchCacheRequest(), timeout=10))
    return {cache.replica: cache.indexed_blocks for cache in caches.replicas}


def test_a_cache_that_is_cleared_while_idle_is_counted_by_no_router(eventful):
    prefixes = [[300 + i] * 64 + [400 + i] * 64 for i in range(NUM_PREFIXES)]
    where = {i: ask(eventful, [*p, 5]).headers["x-quire-replica"] for i, p in enumerate(prefixes)}
    # Both routers count what the replicas hold, and it is there.
    text, routers = "", set()
    while len(routers) < 2:
        answer = ask(eventful, [*prefixes[0], 6, 7], max_tokens=8)
        assert tokens_told(answer) == (128, 128)
        text = answer.json()["choices"][0]["text"]
        routers.add(answer.headers["x-quire-router"])
    replica = where[0]
    assert (
        ask(eventful, [*prefixes[0], 9], f"fault:forget:{CLEAR_AFTER_S}@0").headers[
            "x-quire-replica"
        ]
        == replica
    )
    assert indexed_blocks(eventful)[replica] > 0, "it comes when nothing runs"
    time.sleep(CLEAR_AFTER_S + 0.5)  # no request meanwhile: only the event can tell
    assert indexed_blocks(eventful)[replica] == 0
    lost = [prefixes[i] for i, name in where.items() if name == replica]
    kept = [prefixes[i] for i, name in where.items() if name != replica]
    routers.clear()
    for prefix in lost:
        answer = ask(eventful, [*prefix, 6, 7], max_tokens=8)
        assert tokens_told(answer) == (0, 0)
        routers.add(answer.headers["x-quire-router"])
        if prefix is prefixes[0]:
            assert answer.json()["choices"][0]["text"] == text
    for prefix in kept:  # the other one's cache is what it was
        assert tokens_told(ask(eventful, [*prefix, 6])) == (128, 128)
    assert len(lost) > 1 and len(routers) == 2, (where, routers)


async def closed_loop(cluster: Cluster, num_users: int, num_requests: int) -> Counter[str]:
    """Requests that share nothing, each user's next when the last is answered; how many each replica answered."""
    numbers = iter(range(num_requests))
    answered: Counter[str] = Counter()
    stamp = time.monotonic_ns() % 10**9

    async def user(client: httpx.AsyncClient) -> None:
        for number in numbers:
            text = f"{stamp}-{number} " + "the harbour and every boat in it " * 12
            body = {"prompt": text, "max_tokens": 4, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            answered[answer.headers["x-quire-replica"]] += 1

    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        await asyncio.gather(*(user(client) for _ in range(num_users)))
    return answered


def make_slower(cluster: Cluster, step_ms: float) -> None:
    """From now on every step of every replica takes so much longer."""
    wanted = {load.replica for load in cluster.loads()}
    label = f"fault:crawl:{step_ms}@0"
    with ThreadPoolExecutor(8) as pool:  # at once: of idle replicas the faster one gets all
        for attempt in range(40):
            prompts = [[300 + 8 * attempt + i] * 20 for i in range(8)]
            for answer in pool.map(lambda prompt: ask(cluster, prompt, label), prompts):
                wanted.discard(answer.headers["x-quire-replica"])
            if not wanted:
                return
    pytest.fail(f"never reached {wanted}")


def test_a_replica_that_is_slower_by_two_gets_fewer_requests(eventful):
    make_slower(eventful, FAST_MS)
    slow = ask(eventful, [777, 778], f"fault:crawl:{SLOW_MS}@0").headers["x-quire-replica"]
    asyncio.run(closed_loop(eventful, 8, 48))  # routers come to know
    answered = asyncio.run(closed_loop(eventful, 8, 120))
    steps_ms = {load.replica: load.decode_step_ms for load in eventful.loads()}
    print({"slow": slow, "answered": dict(answered), "decode_step_ms": steps_ms})
    (fast,) = answered.keys() - {slow}
    assert steps_ms[slow] > 1.5 * steps_ms[fast]
    assert answered[fast] > 1.2 * answered[slow]
    make_slower(eventful, 0)


def with_router_settings(cluster: Cluster, **user_config: object) -> None:
    """Change them in place."""
    config = json.loads(json.dumps(cluster.config))
    if user_config:
        deployments = [{"name": "Router", "user_config": user_config}]
        config["applications"][0]["deployments"] = deployments
    cluster.deploy(config)
    time.sleep(1.0)  # until Serve has begun with it
    wait_until(cluster.is_running, 60, "the routers have other settings")


def test_work_beyond_the_bound_is_refused_with_a_time_and_the_rest_is_served(eventful):
    """Prompts of seconds, all at once, where a first token may take one."""
    make_slower(eventful, SLOW_MS)
    with_router_settings(eventful, max_wait_s=MAX_WAIT_S, dispatch_window_s=0.2)
    ends: Counter[str] = Counter()
    waits_s: list[float] = []

    async def over_http(client: httpx.AsyncClient, i: int) -> None:
        began_s = time.monotonic()
        body = {"prompt": [300 + i] * 1500, "max_tokens": 1, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            error = answer.json()["error"]
            assert error["code"] == "overloaded" and "max_wait_s" in error["message"], error
            ends["refused over HTTP"] += 1
            return
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 1
        waits_s.append(time.monotonic() - began_s)
        ends["answered"] += 1

    async def over_grpc(stub: generation_pb2_grpc.GenerationStub, i: int) -> None:
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=[300 + i] * 1500),
            sampling=generation_pb2.SamplingOptions(max_tokens=1),
            ignore_eos=True,
        )
        try:
            answer = await stub.GenerateOnce(request)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            trailing = dict(error.trailing_metadata() or ())
            assert int(trailing["grpc-retry-pushback-ms"]) >= 1
            ends["refused over gRPC"] += 1
            return
        assert answer.usage.completion_tokens == 1
        ends["answered"] += 1

    async def run() -> None:
        async with (
            httpx.AsyncClient(base_url=eventful.url, timeout=120) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{eventful.grpc_port}") as channel,
        ):
            stub = generation_pb2_grpc.GenerationStub(channel)
            for i in range(4):  # the speed of such prompts is known
                await over_http(client, i)
            ends.clear()
            waits_s.clear()
            calls = [over_http(client, 100 + i) for i in range(48)]
            calls += [over_grpc(stub, 200 + i) for i in range(16)]
            await asyncio.gather(*calls)

    asyncio.run(run())
    print(dict(ends), f"longest wait of an accepted request {max(waits_s):.2f} s")
    assert sum(ends.values()) == 64
    assert ends["answered"] >= 2
    assert ends["refused over HTTP"] > 0 and ends["refused over gRPC"] > 0
    assert ends["answered"] < 64 / 2, "that was no overload"
    ask(eventful, [999] * 1500)  # room again
    with_router_settings(eventful)
    make_slower(eventful, 0)
