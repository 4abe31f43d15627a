"""Ten times more requests than the cluster can serve: refusals are quick and polite, what is accepted is served.

Real Ray, streams over HTTP and gRPC. The peak is what as many clients as the cluster takes at once get out of it; then
requests come at ten times its rate, whatever becomes of those before. Goodput counts the tokens of answers that came
whole.

Clients, routers and replicas share the machine's cores. So that capacity is not what the clients leave of them, every
step is made longer by `STEP_MS` of sleep (a fault): the replicas have the speed of a device of their own. Asserted are
counts; speeds are reported (`CHAOS_OUT`): the time to a refusal as a client sees it, beside it the client's own delay,
and the router's part of it by its histogram.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import orjson
import pytest
from live import Cluster, start_cluster, wait_until

from quire.cluster.bench.results.report import Bar, write
from quire.protos import generation_pb2 as pb
from quire.protos import generation_pb2_grpc

SIZE = os.environ.get("CHAOS_SIZE", "ci")
OVERLOAD_S = {"ci": 30.0, "long": 600.0}[SIZE]
WARM_S, PEAK_S, SETTLE_S = 3.0, 9.0, 5.0
FACTOR = 10
NUM_TOKENS = 50
NUM_REPLICAS = 2
MAX_RUNNING, MAX_WAITING = 8, 4  # of each
STEP_MS = 50
MAX_WAIT_S = 5.0  # at a router
LAG_PERIOD_S = 0.02
GRPC_EVERY = 4  # one in so many requests is over gRPC
OVERLOADED = grpc.StatusCode.RESOURCE_EXHAUSTED

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def small_cluster(tmp_path_factory) -> Iterator[Cluster]:
    def change(config: dict) -> None:
        engine = {"max_running_requests": MAX_RUNNING, "max_waiting_requests": MAX_WAITING}
        engine["fault_injection"] = True
        router = {"max_wait_s": MAX_WAIT_S}
        args = config["applications"][0]["args"]
        args |= {"replicas": NUM_REPLICAS, "engine": engine, "router": router}

    yield from start_cluster(tmp_path_factory.mktemp("overload"), change)


@dataclass
class Tally:
    """What became of requests."""

    ends: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0  # of answers that came whole
    answer_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    late: list[tuple[float, float]] = field(
        default_factory=list
    )  # when asked, and beyond the bound until when
    began_s: float = field(default_factory=time.monotonic)
    refusal_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(
        default_factory=list
    )  # answers and refusals that are not as they should be

    def started(self, began_s: float) -> None:
        wait_s = time.monotonic() - began_s
        self.first_token_s.append(wait_s)
        if wait_s > MAX_WAIT_S:
            self.late.append((round(began_s - self.began_s, 1), round(wait_s, 1)))

    def refused(self, began_s: float, retry_after: str, is_well_formed: bool, said: object) -> None:
        self.ends["refused"] += 1
        self.refusal_s.append(time.monotonic() - began_s)
        if not is_well_formed or not retry_after.isdigit() or int(retry_after) < 1:
            self.wrong.append(f"refused with {retry_after!r}: {said}")

    def answered(self, began_s: float, is_whole: bool, num_tokens: int, said: object) -> None:
        self.ends["answered"] += 1
        self.answer_s.append(time.monotonic() - began_s)
        self.num_tokens += num_tokens
        if not is_whole or num_tokens != NUM_TOKENS:
            self.wrong.append(f"{num_tokens} tokens of {NUM_TOKENS}, the end is {said}")


class Clients:
    """Asks for streams over both APIs."""

    def __init__(self, client: httpx.AsyncClient, channel: grpc.aio.Channel):
        self._client = client
        self._stub = generation_pb2_grpc.GenerationStub(channel)
        self._number = 0

    async def ask(self, tally: Tally) -> None:
        self._number += 1
        over_grpc = self._number % GRPC_EVERY == 0
        try:
            await (self._over_grpc if over_grpc else self._over_http)(tally)
        except httpx.HTTPError as error:
            tally.ends[type(error).__name__] += 1

    async def _over_http(self, tally: Tally) -> None:
        body = {
            "prompt": f"Story {random.random()}",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s = time.monotonic()
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 429:
                error = orjson.loads(await response.aread())["error"]
                after = response.headers.get("retry-after", "")
                tally.refused(began_s, after, error["code"] == "overloaded", error)
                return
            if response.status_code != 200:
                tally.ends[str(response.status_code)] += 1
                return
            end = b""
            async for part in response.aiter_raw():
                if not end:
                    tally.started(began_s)
                end = (end + part)[-2000:]
        usage = re.search(rb'"completion_tokens":(\d+)', end)
        is_whole = end.endswith(b"data: [DONE]\n\n")
        tally.answered(began_s, is_whole, int(usage[1]) if usage else 0, end[-300:])

    async def _over_grpc(self, tally: Tally) -> None:
        request = pb.GenerateRequest(
            prompt=f"Story {random.random()}",
            sampling=pb.SamplingOptions(max_tokens=NUM_TOKENS),
            ignore_eos=True,
        )
        began_s = time.monotonic()
        num_tokens, last = 0, None
        try:
            async for last in self._stub.Generate(request):
                if not num_tokens:
                    tally.started(began_s)
                num_tokens += len(last.token_ids)
        except grpc.aio.AioRpcError as error:
            if error.code() is not OVERLOADED:
                tally.ends[error.code().name] += 1
                return
            trailing = dict(error.trailing_metadata() or ())
            after = str(trailing.get("grpc-retry-pushback-ms", ""))
            tally.refused(began_s, after, num_tokens == 0, error.details())
            return
        tally.answered(began_s, bool(last and last.finish_reason), num_tokens, last)


async def slow_down(client: httpx.AsyncClient) -> None:
    """From now on every replica's steps take `STEP_MS` longer."""
    body = {"prompt": "Slow", "max_tokens": 2, "ignore_eos": True}
    headers = {"x-request-id": f"fault:drag:{STEP_MS}@1"}
    slowed: set[str] = set()
    async with asyncio.timeout(30):
        while len(slowed) < NUM_REPLICAS:  # between two idle ones a router chooses at random
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            slowed.add(answer.headers["x-quire-replica"])


async def peak(clients: Clients, seconds: float) -> tuple[float, Tally]:
    """Tokens per second when some more are asked than run at once, by Little's law: each worker always has one."""
    tally, end_s = Tally(), time.monotonic() + seconds
    num_workers = NUM_REPLICAS * (MAX_RUNNING + MAX_WAITING // 2)

    async def worker() -> None:
        while time.monotonic() < end_s:
            await clients.ask(tally)

    await asyncio.gather(*(worker() for _ in range(num_workers)))
    return num_workers * NUM_TOKENS / statistics.mean(tally.answer_s), tally


async def overload(clients: Clients, rate: float) -> tuple[float, Tally]:
    """Tokens per second when `rate` requests come in each; those of the first answers come before the count."""
    tally, tasks = Tally(), set()
    due_s = time.monotonic()
    began_s = due_s + SETTLE_S
    before: int | None = None
    while due_s < began_s + OVERLOAD_S:
        if before is None and due_s >= began_s:
            before = tally.num_tokens
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        task = asyncio.create_task(clients.ask(tally))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        due_s += 1 / rate
    num_tokens = tally.num_tokens - before  # those of answers that end later are not of this time
    elapsed_s = time.monotonic() - began_s
    await asyncio.gather(*tasks)
    return num_tokens / elapsed_s, tally


async def measure_lag(lags_s: list[float]) -> None:
    """How late this process comes to what it wants to do, until cancelled."""
    while True:
        began_s = time.monotonic()
        await asyncio.sleep(LAG_PERIOD_S)
        lags_s.append(time.monotonic() - began_s - LAG_PERIOD_S)


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))] if values else 0.0


def router_refusals(cluster: Cluster) -> Counter[float]:
    """Upper bounds in seconds of the routers' histogram, and how many refusals took at most so long."""
    return cluster.buckets("quire_refusal_seconds")


def test_ten_times_the_load(small_cluster):
    lags_s: list[float] = []

    async def run() -> tuple[float, float, float, Tally, Tally]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        url, address = small_cluster.url, f"127.0.0.1:{small_cluster.grpc_port}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client,
            grpc.aio.insecure_channel(address) as channel,
        ):
            await slow_down(client)
            clients = Clients(client, channel)
            await peak(clients, WARM_S)
            peak_rate, calm = await peak(clients, PEAK_S)
            rate = FACTOR * peak_rate / NUM_TOKENS
            lag = asyncio.create_task(measure_lag(lags_s))
            goodput, storm = await overload(clients, rate)
            lag.cancel()
            return peak_rate, rate, goodput, calm, storm

    peak_rate, rate, goodput, calm, storm = asyncio.run(run())
    assert storm.ends["refused"], storm.ends
    wait_until(
        lambda: router_refusals(small_cluster)[float("inf")] >= storm.ends["refused"],
        30,
        "the routers' metrics tell of all refusals",
    )
    buckets = router_refusals(small_cluster)
    at_most_s = min(le for le, n in buckets.items() if n >= 0.99 * buckets[float("inf")])
    num_bad = sum(n for end, n in storm.ends.items() if end not in ("answered", "refused"))
    details = {
        "offered_per_s": round(rate, 1),
        "peak_tokens_per_s": round(peak_rate),
        "ends": dict(storm.ends),
    }
    refusals = {
        "p50_s": round(quantile(storm.refusal_s, 0.5), 4),
        "max_s": round(quantile(storm.refusal_s, 1.0), 4),
        "client_lag_p99_s": round(quantile(lags_s, 0.99), 4),
    }
    router = {f"<= {le:g} s": n for le, n in sorted(buckets.items())}
    wait = {
        "p50_s": round(quantile(storm.first_token_s, 0.5), 3),
        "num": len(storm.first_token_s),
        "late_asked_and_waited_s": storm.late,
    }
    bars = [
        Bar("chaos/overload_5xx", num_bad, "answers", 0, details=details),
        Bar("chaos/overload_malformed", len(storm.wrong), "answers", 0),
        Bar("chaos/overload_goodput", goodput / peak_rate, "of peak", 0.8, at_most=False),
        Bar(
            "chaos/overload_refusal_p99",
            quantile(storm.refusal_s, 0.99),
            "s",
            0.1,
            details=refusals,
        ),
        # The bound of the bucket that the 99th percentile is in.
        Bar("chaos/overload_refusal_router_p99", at_most_s, "s", 0.1, details=router),
        Bar(
            "chaos/overload_first_token_p99",
            quantile(storm.first_token_s, 0.99),
            "s",
            MAX_WAIT_S,
            details=wait,
        ),
    ]
    for bar in bars:
        print(bar.to_json())
    out = os.environ.get("CHAOS_OUT")
    if out:
        write(Path(out).with_name("chaos_overload.json"), f"make chaos SIZE={SIZE}", bars)
    assert set(calm.ends) <= {"answered", "refused"}, calm.ends
    assert set(storm.ends) == {"answered", "refused"}, storm.ends
    assert (calm.wrong[:3], storm.wrong[:3]) == ([], [])
    assert storm.ends["refused"] > storm.ends["answered"], "that was no overload"
    wait_until(
        lambda: all(load.num_running + load.num_waiting == 0 for load in small_cluster.loads()),
        60,
        "what was accepted has ended",
    )
