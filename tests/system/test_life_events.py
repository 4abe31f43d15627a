"""What happens to replicas while routers count on them: a cache that vanishes, a slow one, more work than fits.

Real Ray. Kills, hangs and rolling updates have suites of their own, and so has the number of replicas
(`test_replica_scaling.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import grpc
import httpx
import pytest
from live import CHANGE_TIMEOUT_S, Cluster, start_cluster, wait_until
from patient_channel import aio_channel, was_not_sent
from prometheus_client.samples import Sample

from quire.cluster.scrape import MAX_AGE_S, TIMEOUT_S
from quire.protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.system
CLEAR_AFTER_S = 2.0  # time enough to see that it has not happened yet
NUM_PREFIXES = 4
# Milliseconds that every step takes longer: so much that what else the machine does hardly matters.
FAST_MS, SLOW_MS = 100, 200
MAX_WAIT_S = 1.0


@pytest.fixture(scope="module")
def eventful(tmp_path_factory) -> Iterator[Cluster]:
    """Two routers, two replicas on which faults may happen."""

    def change(config: dict) -> None:
        args = config["applications"][0]["args"]
        args["engine"] = {"fault_injection": True, "num_blocks": 2048, "step_timeout_s": 60.0}
        # With a pool each replica also reports what the other one has published.
        args["engine"]["node_pool_gib"] = 0.0

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


@contextmanager
def router_settings(cluster: Cluster, **user_config: object) -> Iterator[None]:
    """Other ones, changed in place, and back."""
    config = json.loads(json.dumps(cluster.config))
    config["applications"][0]["deployments"] = [{"name": "Router", "user_config": user_config}]
    deploy(cluster, config, user_config)
    try:
        yield
    finally:
        deploy(cluster, cluster.config, {})


def deploy(cluster: Cluster, config: dict, user_config: dict[str, object]) -> None:
    """Until the routers have this `user_config`."""

    def is_done() -> bool:
        router = cluster.serve_status()["applications"]["quire"]["deployments"]["Router"]
        return router["deployment_config"]["user_config"] == user_config and cluster.is_running()

    cluster.deploy(config)
    wait_until(is_done, CHANGE_TIMEOUT_S, f"the routers have {user_config}")


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


def counted(cluster: Cluster, answer: httpx.Response) -> dict[str, int]:
    """Prompt tokens that the router of an answer believed each replica to hold, when it decided."""
    query = {"request_id": answer.headers["x-request-id"]}
    told = httpx.get(f"{cluster.url}/v1/router/explain", params=query, timeout=30)
    (decision,) = told.json()["data"]
    return {score["replica"]: score["cached_tokens"] for score in decision["ranking"]}


def every_router_indexes(cluster: Cluster, replica: str, num_blocks: int) -> bool:
    """HAProxy gives the next connection to the other router."""
    return all(indexed_blocks(cluster)[replica] == num_blocks for _ in range(4))


def spread(cluster: Cluster, names: list[str]) -> dict[str, list[list[int]]]:
    """`NUM_PREFIXES` or more prefixes of 128 tokens on each replica."""
    held: dict[str, list[list[int]]] = {name: [] for name in names}
    for i in range(100):
        if min(map(len, held.values())) >= NUM_PREFIXES:
            return held
        prefix = [300 + i] * 64 + [400 + i] * 64
        held[ask(cluster, [*prefix, 5]).headers["x-quire-replica"]].append(prefix)
    pytest.fail(f"all on one: {[len(prefixes) for prefixes in held.values()]}")


def from_both_routers(ask_one: Callable[[], httpx.Response]) -> list[httpx.Response]:
    """Answers until each router has given one."""
    answers = [ask_one()]
    while len({answer.headers["x-quire-router"] for answer in answers}) < 2:
        assert len(answers) < 40, "one router is never asked"
        answers.append(ask_one())
    return answers


def test_a_cache_that_is_cleared_while_idle_is_counted_by_no_router(eventful):
    """Under the policy that goes where the cache is, whatever that saves.

    The 128 tokens are worth 4 ms here. With prices a single step that is held up for 0.9 s makes its replica look so
    slow that the next request prefers to compute them elsewhere.
    """
    names = sorted(load.replica for load in eventful.loads())
    none = dict.fromkeys(names, 0)
    with router_settings(eventful, policy="prefix_affinity"):
        before = indexed_blocks(eventful)
        held = spread(eventful, names)
        for name in names:
            num_blocks = before[name] + 2 * len(held[name])
            wait_until(
                lambda: every_router_indexes(eventful, name, num_blocks),  # noqa: B023
                15,
                "every router knows what was stored",
            )
        replica, other = names
        first = held[replica][0]
        # Both routers count what the replicas hold, and it is there.
        warm = from_both_routers(lambda: ask(eventful, [*first, 6, 7], max_tokens=8))
        for answer in warm:
            assert counted(eventful, answer) == none | {replica: 128}
            assert tokens_told(answer) == (128, 128)
        text = warm[0].json()["choices"][0]["text"]
        label = f"fault:forget:{CLEAR_AFTER_S}@0"
        assert ask(eventful, [*first, 9], label).headers["x-quire-replica"] == replica
        assert indexed_blocks(eventful)[replica] > 0, "it comes when nothing runs"
        # No request meanwhile: only the event can tell.
        wait_until(
            lambda: every_router_indexes(eventful, replica, 0),
            CLEAR_AFTER_S + 15,
            "every router knows that it is gone",
        )
        assert indexed_blocks(eventful)[other] >= 2 * len(held[other])
        lost = [ask(eventful, [*prefix, 6, 7], max_tokens=8) for prefix in held[replica]]
        kept = [ask(eventful, [*prefix, 6]) for prefix in held[other]]
        assert lost[0].json()["choices"][0]["text"] == text
        for answer in lost:
            assert counted(eventful, answer) == none
            assert tokens_told(answer) == (0, 0)
        for answer in kept:  # the other one's cache is what it was
            assert counted(eventful, answer) == none | {other: 128}
            assert tokens_told(answer) == (128, 128)
        for answers in (lost, kept):
            assert len({answer.headers["x-quire-router"] for answer in answers}) == 2


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


@contextmanager
def slower(cluster: Cluster, step_ms: float) -> Iterator[None]:
    """Every step of every replica takes so much longer."""
    make_slower(cluster, step_ms)
    try:
        yield
    finally:
        make_slower(cluster, 0)


def make_slower(cluster: Cluster, step_ms: float) -> None:
    """From now on every step of every replica takes so much longer.

    In turns: under prices a replica that a step was held up on may get none of these requests.
    """
    wanted = {load.replica for load in cluster.loads()}
    label = f"fault:crawl:{step_ms}@0"
    with router_settings(cluster, policy="round_robin"), ThreadPoolExecutor(8) as pool:
        for attempt in range(40):
            # As long as those of `closed_loop`: a price is of a token, of few it would be a step's.
            prompts = [[300 + 8 * attempt + i] * 200 for i in range(8)]
            for answer in pool.map(lambda prompt: ask(cluster, prompt, label), prompts):
                wanted.discard(answer.headers["x-quire-replica"])
            if not wanted:
                return
    pytest.fail(f"never reached {wanted}")


def test_a_replica_that_is_slower_by_two_gets_fewer_requests(eventful):
    with slower(eventful, FAST_MS):
        slow = ask(eventful, [777] * 200, f"fault:crawl:{SLOW_MS}@0").headers["x-quire-replica"]
        ratios: list[float] = []

        async def watch() -> None:
            while True:
                await asyncio.sleep(0.2)
                loads = await asyncio.to_thread(eventful.loads)
                steps_ms = {load.replica: load.decode_step_ms for load in loads}
                ratios.append(steps_ms.pop(slow) / max(0.001, *steps_ms.values()))

        async def run() -> Counter[str]:
            await closed_loop(eventful, 8, 48)  # routers come to know
            watching = asyncio.create_task(watch())
            answered = await closed_loop(eventful, 8, 120)
            watching.cancel()
            return answered

        answered = asyncio.run(run())
    ratio = statistics.median(ratios)  # a step that the machine held up counts in a few of them
    print({"slow": slow, "answered": dict(answered), "steps are longer by": ratio})
    assert ratio > 1.5
    assert sum(answered.values()) == 120
    assert sum(answered.values()) - answered[slow] > 1.2 * answered[slow]


def test_work_beyond_the_bound_is_refused_with_a_time_and_the_rest_is_served(eventful):
    """Prompts of most of a second each, many at once, where a first token may take one.

    Nothing is asserted of how long the accepted ones take, which is up to five seconds. Of a burst each router sends
    its first ones at once, before a report tells it of the other's. And what it expects of the next ones is a price of
    a token, averaged over the last half minute, of steps that take as long here however many tokens they compute.
    """
    ends: Counter[str] = Counter()
    waits_s: list[float] = []
    is_full = asyncio.Event()

    async def over_http(client: httpx.AsyncClient, i: int) -> None:
        began_s = time.monotonic()
        body = {"prompt": [300 + i] * 1500, "max_tokens": 1, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            error = answer.json()["error"]
            assert error["code"] == "overloaded" and "max_wait_s" in error["message"], error
            ends["refused over HTTP"] += 1
            is_full.set()
            return
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 1
        waits_s.append(time.monotonic() - began_s)
        ends["answered"] += 1

    async def over_grpc(i: int) -> None:
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=[300 + i] * 1500),
            sampling=generation_pb2.SamplingOptions(max_tokens=1),
            ignore_eos=True,
        )
        address = f"127.0.0.1:{eventful.grpc_port}"
        began_s = time.monotonic()
        while True:
            async with aio_channel(address) as channel:
                stub = generation_pb2_grpc.GenerationStub(channel)
                try:
                    answer = await stub.GenerateOnce(request)
                    break
                except grpc.aio.AioRpcError as error:
                    if was_not_sent(error):
                        continue
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
                    trailing = dict(error.trailing_metadata() or ())
                    assert int(trailing["grpc-retry-pushback-ms"]) >= 1
                    ends["refused over gRPC"] += 1
                    return
        assert answer.usage.completion_tokens == 1
        waits_s.append(time.monotonic() - began_s)
        ends["answered"] += 1

    async def run() -> None:
        async with httpx.AsyncClient(base_url=eventful.url, timeout=120) as client:
            for i in range(4):  # the speed of such prompts is known
                await over_http(client, i)
            ends.clear()
            waits_s.clear()
            async with asyncio.TaskGroup() as burst:
                for i in range(48):
                    burst.create_task(over_http(client, 100 + i))
                # Requests over gRPC that come first may all be accepted.
                await asyncio.wait_for(is_full.wait(), 30)
                for i in range(16):
                    burst.create_task(over_grpc(200 + i))

    def is_served() -> bool:
        body = {"prompt": [999] * 1500, "max_tokens": 1, "ignore_eos": True}
        answer = httpx.post(f"{eventful.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code in (200, 429), answer.text
        return answer.status_code == 200

    limits = {"max_wait_s": MAX_WAIT_S, "dispatch_window_s": 0.2}
    with slower(eventful, SLOW_MS), router_settings(eventful, **limits):
        asyncio.run(run())
        # The routers hear a moment later that the replicas have nothing more to do.
        wait_until(is_served, 15, "room again")
    print(dict(ends), f"longest wait of an accepted request {max(waits_s):.2f} s")
    assert sum(ends.values()) == 64
    assert ends["answered"] >= 2
    assert ends["refused over HTTP"] > 0 and ends["refused over gRPC"] > 0
    assert ends["answered"] < 64 / 2, "that was no overload"


# -- metrics ---------------------------------------------------------------------------------------------


def processes_told(samples: list[Sample]) -> dict[str, set[str]]:
    """Of each deployment those whose metrics a scrape has."""
    told: dict[str, set[str]] = {"Router": set(), "Replica": set()}
    for labels in (s.labels for s in samples if s.name == "quire_build_info"):
        told[labels["deployment"]].add(labels.get("router", labels.get("replica")))
    return told


def num_silent(samples: list[Sample], deployment: str) -> float:
    (found,) = (
        sample.value
        for sample in samples
        if sample.name == "quire_scrape_silent_processes"
        and sample.labels["deployment"] == deployment
    )
    return found


def whole_scrape(cluster: Cluster) -> dict[str, set[str]]:
    """All processes. A router may still have the answer of a second ago, when one was silent."""
    told: dict[str, set[str]] = {}

    def is_whole() -> bool:
        told.update(processes_told(cluster.metrics()))
        return [len(ids) for ids in told.values()] == [2, 2]

    wait_until(is_whole, 30, "two routers and two replicas are in the metrics")
    return told


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def scrape_beside_a_silent(cluster: Cluster, deployment: str) -> tuple[list[Sample], float]:
    """The first scrape that says that one is silent, and its seconds. Until the proxy knows it, a router that has
    stopped may be the one that is asked: that one gives no answer."""
    for _ in range(40):
        began_s = time.monotonic()
        with suppress(OSError):
            samples = cluster.metrics(timeout_s=TIMEOUT_S + 3)
            if num_silent(samples, deployment):
                return samples, time.monotonic() - began_s
        time.sleep(0.1)
    pytest.fail(f"no scrape says that a {deployment} is silent")


@pytest.mark.parametrize("deployment", ["Replica", "Router"])
def test_a_silent_process_neither_holds_a_scrape_nor_hides_the_others(eventful, deployment):
    everything = whole_scrape(eventful)
    with stopped(eventful.pids(deployment)[0]):
        samples, taken_s = scrape_beside_a_silent(eventful, deployment)
    print(f"a scrape beside a silent {deployment} takes {taken_s:.1f} s")
    found = processes_told(samples)
    assert num_silent(samples, deployment) == len(found[deployment]) == 1
    other = "Router" if deployment == "Replica" else "Replica"
    assert found[other] == everything[other]

    def is_whole_again() -> bool:
        samples = eventful.metrics()
        return processes_told(samples) == everything and not num_silent(samples, deployment)

    wait_until(is_whole_again, CHANGE_TIMEOUT_S, "all are there again")


def test_metrics_go_on_while_a_router_and_a_replica_are_replaced_and_count_right_after_that(
    eventful,
):
    before = whole_scrape(eventful)
    killed = [eventful.pids(deployment)[0] for deployment in ("Router", "Replica")]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    num_scrapes = 0

    def is_whole() -> bool:
        nonlocal num_scrapes
        with suppress(OSError):  # the proxy may still send it to the router that was killed
            told = processes_told(eventful.metrics())
            num_scrapes += 1
            gone = [before[name] - told[name] for name in told]
            sizes = [len(ids) for ids in told.values()]
            return sizes == [2, 2] and all(len(ids) == 1 for ids in gone)
        return False

    wait_until(is_whole, CHANGE_TIMEOUT_S, "the new ones are in the metrics")
    assert num_scrapes > 1
    wait_until(eventful.every_router_knows_every_replica, CHANGE_TIMEOUT_S, "all are attached")

    def counts() -> list[float]:
        time.sleep(MAX_AGE_S)
        received = eventful.metric("quire_requests_received_total")
        ended = eventful.metric("quire_requests_finished_total", finish_reason="length")
        return [received, ended, eventful.metric("quire_output_tokens_total")]

    first = counts()
    for _ in range(10):
        ask(eventful, [5] * 100, max_tokens=3)
    added = [late - early for early, late in zip(first, counts(), strict=True)]
    assert added == [10, 10, 30]
    for deployment in ("Router", "Replica"):
        assert num_silent(eventful.metrics(), deployment) == 0
