"""Ten times more requests than the cluster can serve: refusals are quick and polite, what is accepted is served.

Real Ray. The peak is what as many clients as the cluster takes at once get out of it; then requests come at ten times
its rate, whatever becomes of those before. Goodput counts the tokens of answers that came whole. Clients and servers
share the machine's cores, so speeds are reported, not asserted (`CHAOS_OUT`).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from live import Cluster, start_cluster, wait_until

from quire.bench.report import Bar, write

SIZE = os.environ.get("CHAOS_SIZE", "ci")
OVERLOAD_S = {"ci": 30.0, "long": 600.0}[SIZE]
PEAK_S = 10.0
FACTOR = 10
NUM_TOKENS = 200
MAX_RUNNING, MAX_WAITING = 16, 4  # of each of the two replicas

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def small_cluster(tmp_path_factory) -> Iterator[Cluster]:
    def change(config: dict) -> None:
        limits = {"max_running_requests": MAX_RUNNING, "max_waiting_requests": MAX_WAITING}
        config["applications"][0]["args"] |= {"engine": limits}

    yield from start_cluster(tmp_path_factory.mktemp("overload"), change)


@dataclass
class Tally:
    """What became of requests."""

    statuses: Counter[int | str] = field(default_factory=Counter)
    num_tokens: int = 0  # of answers that came whole
    refusal_s: list[float] = field(default_factory=list)
    bad_refusals: list[str] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, tally: Tally) -> None:
    body = {
        "prompt": f"Story {random.random()}",
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    began_s = time.monotonic()
    try:
        response = await client.post("/v1/completions", json=body)
    except httpx.HTTPError as error:
        tally.statuses[type(error).__name__] += 1
        return
    tally.statuses[response.status_code] += 1
    if response.status_code == 200:
        tally.num_tokens += response.json()["usage"]["completion_tokens"]
    elif response.status_code == 429:
        tally.refusal_s.append(time.monotonic() - began_s)
        retry_after = response.headers.get("retry-after", "")
        if not retry_after.isdigit() or response.json()["error"]["code"] != "overloaded":
            tally.bad_refusals.append(f"Retry-After {retry_after!r}: {response.text}")


async def peak(client: httpx.AsyncClient) -> tuple[float, Tally]:
    """Tokens per second when as many are asked as run at once."""
    tally, end_s = Tally(), time.monotonic() + PEAK_S

    async def worker() -> None:
        while time.monotonic() < end_s:
            await ask(client, tally)

    began_s = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(2 * MAX_RUNNING)))
    return tally.num_tokens / (time.monotonic() - began_s), tally


async def overload(client: httpx.AsyncClient, rate: float) -> tuple[float, Tally]:
    """Tokens per second when `rate` requests come in each."""
    tally, tasks = Tally(), set()
    began_s = time.monotonic()
    due_s = began_s
    while due_s < began_s + OVERLOAD_S:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        task = asyncio.create_task(ask(client, tally))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        due_s += 1 / rate
    num_tokens = tally.num_tokens  # those of answers that end later are not of this time
    elapsed_s = time.monotonic() - began_s
    await asyncio.gather(*tasks)
    return num_tokens / elapsed_s, tally


def test_ten_times_the_load(small_cluster):
    async def run() -> tuple[float, float, float, Tally, Tally]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(
            base_url=small_cluster.url, timeout=120, limits=limits
        ) as client:
            await peak(client)  # warm
            peak_rate, calm = await peak(client)
            rate = FACTOR * peak_rate / NUM_TOKENS
            goodput, storm = await overload(client, rate)
            return peak_rate, rate, goodput, calm, storm

    peak_rate, rate, goodput, calm, storm = asyncio.run(run())
    refusals = sorted(storm.refusal_s)
    p99_s = refusals[int(0.99 * (len(refusals) - 1))] if refusals else 0.0
    p50_s = refusals[len(refusals) // 2] if refusals else 0.0
    details = {
        "offered_per_s": round(rate, 1),
        "peak_tokens_per_s": round(peak_rate),
        "statuses": {str(status): count for status, count in storm.statuses.items()},
        "refusal_p50_s": round(p50_s, 3),
    }
    num_bad = sum(n for status, n in storm.statuses.items() if status not in (200, 429))
    bars = [
        Bar("chaos/overload_bad_answers", num_bad, "answers", 0, details=details),
        Bar("chaos/overload_goodput", goodput / peak_rate, "of peak", 0.8, at_most=False),
        Bar("chaos/overload_refusal_p99", p99_s, "s", 0.1),
    ]
    for bar in bars:
        print(bar.to_json())
    out = os.environ.get("CHAOS_OUT")
    if out:
        write(Path(out).with_name("chaos_overload.json"), f"make chaos SIZE={SIZE}", bars)
    assert set(calm.statuses) <= {200, 429}, calm.statuses
    assert set(storm.statuses) == {200, 429}, storm.statuses
    assert storm.statuses[429] > storm.statuses[200], "that was no overload"
    assert storm.bad_refusals == []
    wait_until(
        lambda: all(load.num_running + load.num_waiting == 0 for load in small_cluster.loads()),
        60,
        "what was accepted has ended",
    )
