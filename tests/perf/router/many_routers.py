"""Many routers in front of a few replicas: hits, agreement of the routers' indexes, and the streams themselves.

    python -m tests.perf many_routers [--routers 1 4 8 16]

A real cluster for each number of routers: CPU replicas of the embedded model behind HAProxy, the same requests in the
same order. They share prefixes, and all caches together hold every prefix once but one cache does not, so a router
finds a prefix only if it knows what the requests of the other routers have brought where. Every request has a
connection of its own, so the proxy gives consecutive requests to different routers.

*Agreement*: some seconds after the last request, every router says how many blocks each replica holds by its index, and
whether its digest of that replica equals the replica's own. Routers agree if all say the same, and all digests are
equal. *Streams*: the token ids of each answer are those of the first cluster. One router is then killed, and requests
go on; the new one's index must agree as well.

Throughput is not measured: the routers share two cores with everything else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from quire.cluster.bench.load.clients import Answer, OpenAIClient, RequestFailed
from quire.cluster.bench.load.workloads import FIRST_TOKEN_ID
from quire.cluster.bench.results.report import RESULTS, ROOT, Bar, write
from tests.perf.cluster.live_cluster import LiveCluster, live_cluster

MODEL, VOCAB_SIZE = "embedded", 1024
NUM_REPLICAS, CONCURRENCY = 2, 6
NUM_PREFIXES, PREFIX_TOKENS, SUFFIX_TOKENS, OUTPUT_TOKENS = 40, 512, 24, 8
BLOCK_SIZE = 32
# Of a replica: 0.75 of what all prefixes need, and room for the requests that run.
NUM_BLOCKS = NUM_PREFIXES * PREFIX_TOKENS * 3 // 4 // BLOCK_SIZE + CONCURRENCY * 20
SETTLE_S, KNOWN_TIMEOUT_S = 3.0, 120.0


@dataclass(slots=True)
class Found:
    """What one cluster showed.

    Attributes
    ----------
    answers
        By request; None: it failed.
    indexes
        Router to replica to (number of blocks, state), some time after the load.
    by_router
        Requests that each router received.
    replaced_s
        Seconds from the death of a router until its successor's index agreed; None: no router was killed.
    failed_meanwhile
        Requests that failed after the router was killed.
    """

    answers: list[Answer | None]
    indexes: dict[str, dict[str, tuple[int, str]]]
    by_router: dict[str, int]
    replaced_s: float | None = None
    num_meanwhile: int = 0
    failed_meanwhile: int = 0
    reasons: list[str] = field(default_factory=list)

    def hit_ratio(self) -> float:
        """Cached tokens of all prompts, as a share."""
        answered = [answer for answer in self.answers if answer is not None]
        return sum(a.cached_tokens for a in answered) / sum(a.prompt_tokens for a in answered)

    def num_over_predicted(self) -> int:
        """Requests for which the router expected more cached tokens than there were."""
        answered = [answer for answer in self.answers if answer is not None]
        return sum((a.predicted_tokens or 0) > a.cached_tokens for a in answered)


def num_agreeing(indexes: dict[str, dict[str, tuple[int, str]]]) -> int:
    """The number of routers in the largest group that sees the same blocks, with equal digests."""
    views = Counter(
        tuple(sorted(view.items()))
        for view in indexes.values()
        if view and all(state == "attached" for _, state in view.values())
    )
    return max(views.values(), default=0)


def prompts(num_requests: int) -> list[list[int]]:
    """Prompts of popular and of rare prefixes, the same in each run."""
    rng = random.Random("many routers")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(count)]

    prefixes = [tokens(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    return [[*rng.choice(prefixes), *tokens(SUFFIX_TOKENS)] for _ in range(num_requests)]


def serve_config(num_routers: int) -> dict[str, Any]:
    """The repository's cluster.yaml with small caches and this many routers."""
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    (application,) = config["applications"]
    application["args"] = {
        "model": MODEL,
        "device": "cpu",
        "replicas": NUM_REPLICAS,
        "routers": num_routers,
        # So that Ray places 16 of them on two cores.
        "router_resources": {"num_cpus": 0.01},
        "engine": {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_threads": 1},
    }
    return config


# -- questions to a cluster -------------------------------------------------------------------------------


def _get(cluster: LiveCluster, path: str) -> bytes:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{cluster.http_port}{path}", timeout=30
    ) as response:
        content: bytes = response.read()
        return content


def indexes(cluster: LiveCluster, num_routers: int) -> dict[str, dict[str, tuple[int, str]]]:
    """What every router says of the replicas: asks over new connections until all have answered."""
    found: dict[str, dict[str, tuple[int, str]]] = {}
    end_s = time.monotonic() + KNOWN_TIMEOUT_S
    while len(found) < num_routers and time.monotonic() < end_s:
        try:
            state = json.loads(_get(cluster, "/ui/state"))
        except OSError:
            time.sleep(0.2)
            continue
        columns = state["replicas"]
        rows = zip(columns["name"], columns["indexed"], columns["state"], strict=True)
        found[state["router"]] = {name: (blocks, seen) for name, blocks, seen in rows}
    return found


def requests_by_router(cluster: LiveCluster) -> dict[str, int]:
    """How many requests each router has received."""
    text = _get(cluster, "/metrics").decode()
    return {
        sample.labels["router"]: int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "quire_requests_received_total"
    }


async def ask_all(
    cluster: LiveCluster, asked: Sequence[Sequence[int]]
) -> tuple[list[Answer | None], list[str]]:
    """The answers in order, and why some failed."""
    client = OpenAIClient(
        f"http://127.0.0.1:{cluster.http_port}", MODEL, {"return_token_ids": True}
    )
    turns, reasons = asyncio.Semaphore(CONCURRENCY), []

    async def ask(prompt: Sequence[int]) -> Answer | None:
        async with turns:
            try:
                return await client.complete(prompt, OUTPUT_TOKENS)
            except RequestFailed as error:
                reasons.append(str(error))
                return None

    return list(await asyncio.gather(*map(ask, asked))), reasons


# -- the measurement --------------------------------------------------------------------------------------


def measure(num_routers: int, asked: list[list[int]]) -> Found:
    """Run the requests on a cluster with this many routers."""
    with live_cluster(serve_config(num_routers)) as cluster:
        known = indexes(cluster, num_routers)
        until_s = time.monotonic() + KNOWN_TIMEOUT_S
        while any(len(view) < NUM_REPLICAS for view in known.values()):
            if time.monotonic() > until_s:
                raise RuntimeError(f"the routers do not know the replicas: {known}")
            known = indexes(cluster, num_routers)
        answers, reasons = asyncio.run(ask_all(cluster, asked))
        time.sleep(SETTLE_S)
        found = Found(
            answers, indexes(cluster, num_routers), requests_by_router(cluster), reasons=reasons
        )
        if num_routers > 1:
            asyncio.run(_replace_one(cluster, num_routers, asked, found))
        return found


async def _replace_one(
    cluster: LiveCluster, num_routers: int, asked: list[list[int]], found: Found
) -> None:
    """Kill a router, send requests meanwhile, and wait until its successor's index agrees."""
    routers = await asyncio.to_thread(cluster.replicas, "quire", "Router")
    dead, pid = next(iter(routers.items()))
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()

    async def successor_agrees() -> float:
        while True:
            views = await asyncio.to_thread(indexes, cluster, num_routers)
            is_whole = num_agreeing(views) == num_routers
            if is_whole and not any(dead in router for router in views):
                return time.monotonic() - killed_s
            if time.monotonic() - killed_s > KNOWN_TIMEOUT_S:
                raise RuntimeError(f"no successor of {dead} agrees: {views}")
            await asyncio.sleep(0.5)

    # Requests that meet the dead router's sockets break, as its own streams do; those afterwards must not.
    await asyncio.sleep(2.0)
    meanwhile, reasons = await ask_all(cluster, asked[: len(asked) // 4])
    found.num_meanwhile = len(meanwhile)
    found.failed_meanwhile = meanwhile.count(None)
    found.reasons += reasons
    found.replaced_s = await successor_agrees()


def bars_of(found: dict[int, Found]) -> list[Bar]:
    """Bars of every number of routers; hits and streams are compared with those of the smallest."""
    least = min(found)
    bars = []
    for num_routers, one in sorted(found.items()):
        answers = zip(found[least].answers, one.answers, strict=True)
        different = sum(a is None or b is None or a.token_ids != b.token_ids for a, b in answers)
        over = 100 * one.num_over_predicted() / len(one.answers)
        details = {
            "hit_percent": round(100 * one.hit_ratio(), 2),
            "over_predicted_percent": round(over, 2),
            "requests_by_router": sorted(one.by_router.values()),
        }
        agreement = {
            "blocks_of_replicas": sorted(
                blocks for blocks, _ in next(iter(one.indexes.values())).values()
            ),
            "seconds_until_a_successor_agreed": one.replaced_s and round(one.replaced_s, 1),
        }
        streams = {"requests": len(one.answers) + one.num_meanwhile, "reasons": one.reasons[:3]}
        if num_routers > least:
            hits = one.hit_ratio() / found[least].hit_ratio()
            name = f"router/many_{num_routers}_hits_of_{least}"
            bars.append(Bar(name, hits, "x", 0.95, at_most=False, details=details))
        bars += [
            Bar(
                f"router/many_{num_routers}_agree",
                100 * num_agreeing(one.indexes) / num_routers,
                "%",
                100.0,
                at_most=False,
                details=agreement if num_routers > least else agreement | details,
            ),
            Bar(
                f"router/many_{num_routers}_different_streams",
                different + one.failed_meanwhile,
                "",
                0,
                details=streams,
            ),
        ]
    return bars


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf many_routers",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--out", type=Path, default=RESULTS / "many_routers.json")
    options = parser.parse_args()
    asked = prompts(options.requests)
    command = (
        f"python -m tests.perf many_routers --routers {' '.join(map(str, options.routers))} "
        f"--requests {options.requests}"
    )
    found = {}
    for num_routers in options.routers:
        found[num_routers] = measure(num_routers, asked)
        print(
            f"{num_routers} routers: {100 * found[num_routers].hit_ratio():.1f}% hits", flush=True
        )
        # After each: what was measured stays if a later cluster does not start.
        write(options.out, command, bars_of(found), show=num_routers == options.routers[-1])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
