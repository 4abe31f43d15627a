"""Accuracy of the routers' view of the caches: a recorded trace on a real cluster, and lost caches.

    python -m tests.perf truth TRACE [--requests 2000] [--speed 6]

Four CPU replicas of the embedded model behind two routers. `TRACE` is JSON lines as `quire bench serve` takes them
(`workloads.read_trace`), scaled down (`SCALE`): prompts have an eighth of their tokens with the same shared parts,
answers a sixteenth. Requests that are still too long for the model are left out.

*Over-predicted*: requests for which the router expected more cached tokens than there were. *Hit rate of pooled*:
cached tokens relative to one cache with the memory of all replicas (`pooled_cache`), for the same requests in the same
order.

*Wrong credit*: one replica gets many prefixes that no other replica has, and each prefix is requested once, one every
10 ms. Meanwhile the replica's cache is cleared, or its process is killed. From then on, every decision that counts the
replica's blocks is wrong. The routers' decision logs have all decisions with their times and counted blocks. The result
is the time from the event to the last wrong decision.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quire.cluster.bench.load.clients import OpenAIClient, RequestFailed
from quire.cluster.bench.load.load_generator import Record, open_loop
from quire.cluster.bench.load.workloads import FIRST_TOKEN_ID, TimedRequest, TraceScale, read_trace
from quire.cluster.bench.results import report
from quire.cluster.bench.results.measures import Slo, summarise
from quire.cluster.bench.results.report import ROOT, Bar
from quire.router.explain.decision_log import LoggedDecision, read
from tests.perf.cluster.live_cluster import LiveCluster, live_cluster
from tests.perf.router.pooled_cache import PooledCache

MODEL = "embedded"
VOCAB_SIZE, MAX_MODEL_LEN = 1024, 4096
NUM_REPLICAS, NUM_ROUTERS = 4, 2
BLOCK_SIZE = 32
NUM_BLOCKS = 4096  # of a replica; all replicas together hold a third of the trace's tokens
# 64 tokens for 512, so that a block of the trace is one routing block.
SCALE = TraceScale(block_tokens=64, output_share=1 / 16, max_tokens=MAX_MODEL_LEN)
SPEED = 6.0  # keeps two cores busy; a third of the requests miss their objective
PREFIX_TOKENS = 128
PROBE_PERIOD_S = 0.01
NUM_BEFORE, NUM_AFTER = 20, 60  # probes
CLEAR_AFTER_S = NUM_BEFORE * PROBE_PERIOD_S
HORIZON_S = 0.3  # the probes are valid only with decisions this close to the event
REPLACED_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class WrongCredit:
    """Decisions that counted a replica's blocks after it had lost its cache."""

    seconds: float  # from the event to the last wrong decision; 0 if there was none
    num_wrong: int  # decisions that counted lost blocks
    num_decisions: int  # after the event
    resolution_s: float  # longest gap between the first decisions after the event

    @classmethod
    def of(cls, decisions: Iterable[LoggedDecision], replica: str, event_s: float) -> WrongCredit:
        """Evaluate the decisions of all routers about prefixes that only `replica` held.

        Parameters
        ----------
        event_s
            Seconds since 1970 at which the replica lost its cache.

        Raises
        ------
        RuntimeError
            No decision before the event counted the replica's blocks, or no decision came within `HORIZON_S` after it,
            so nothing was measured.
        """
        ordered = sorted(decisions, key=lambda decision: decision.time_s)
        before = [d for d in ordered if event_s - HORIZON_S <= d.time_s < event_s]
        after = [d for d in ordered if d.time_s >= event_s]
        if not any(credit(decision, replica) for decision in before):
            raise RuntimeError(
                f"nobody counted the blocks of {replica} in {len(before)} decisions before it lost them"
            )
        times = [d.time_s - event_s for d in after if d.time_s - event_s <= HORIZON_S]
        if not times:
            raise RuntimeError(f"no decision within {HORIZON_S:g} s after {replica} lost its cache")
        wrong = [d.time_s - event_s for d in after if credit(d, replica)]
        gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
        return cls(max(wrong, default=0.0), len(wrong), len(after), max(gaps))

    def to_json(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "ms": round(1e3 * self.seconds, 1),
            "wrong_decisions": self.num_wrong,
            "decisions": self.num_decisions,
            "resolution_ms": round(1e3 * self.resolution_s, 1),
        }


def credit(decision: LoggedDecision, replica: str) -> float:
    """Prompt tokens that a decision counted as cached at a replica, in any tier."""
    fleet = decision.fleet
    if replica not in fleet.replicas:
        return 0.0
    row = list(fleet.replicas).index(replica)
    return float(fleet.gpu_tokens[row] + fleet.host_tokens[row])


def pooled_tokens(requests: Sequence[TimedRequest], records: Sequence[Record]) -> int:
    """Prompt tokens that one cache with the memory of all replicas would have had.

    Parameters
    ----------
    records
        Records of all requests in any order; a record and its request have the same due time.
    """
    cache = PooledCache(NUM_REPLICAS * NUM_BLOCKS, BLOCK_SIZE)
    order = sorted(zip(records, in_order_of_due(requests, records), strict=True), key=_sent)
    return sum(cache.serve(request.prompt_ids, request.output_tokens) for _, request in order)


def in_order_of_due(
    requests: Sequence[TimedRequest], records: Sequence[Record]
) -> list[TimedRequest]:
    """The request of each record; lengths distinguish requests with the same due time."""
    by_key: dict[tuple[float, int], list[TimedRequest]] = {}
    for request in requests:
        by_key.setdefault((request.at_s, len(request.prompt_ids)), []).append(request)
    return [by_key[record.due_s, record.prompt_tokens].pop(0) for record in records]


def _sent(pair: tuple[Record, TimedRequest]) -> float:
    return pair[0].sent_s


# -- lost caches ------------------------------------------------------------------------------------------


class Prober:
    """Prefixes that one replica holds; each is requested once."""

    def __init__(self, url: str, rng: random.Random):
        self._url, self._rng = url, rng
        self._client = OpenAIClient(url, MODEL)
        self.num_failed = 0

    async def fill(self, num_prefixes: int) -> tuple[str, list[list[int]]]:
        """Send new prefixes until one replica holds enough; returns its name and the prefixes."""
        held: dict[str, list[list[int]]] = {}
        while max(map(len, held.values()), default=0) < num_prefixes:
            prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(8)]
            answers = await asyncio.gather(*map(self._ask, prefixes))
            for prefix, replica in zip(prefixes, answers, strict=True):
                if replica:
                    held.setdefault(replica, []).append(prefix)
        return max(held.items(), key=lambda item: len(item[1]))

    async def ask_each(self, prefixes: Iterable[Sequence[int]]) -> None:
        """Send a probe every `PROBE_PERIOD_S` without waiting for answers."""
        tasks = []
        for i, prefix in enumerate(prefixes):
            if i:
                await asyncio.sleep(PROBE_PERIOD_S)
            tasks.append(asyncio.ensure_future(self._ask(prefix)))
        await asyncio.gather(*tasks)

    async def clear(self, prefix: Sequence[int], after_s: float) -> float:
        """Have the replica that holds this prefix clear its cache after a delay.

        Returns
        -------
        Earliest time of the clear, in seconds since 1970; this request's way to its first step delays it further.
        """
        label = {"x-request-id": f"fault:forget:{after_s:g}@0"}
        client = OpenAIClient(self._url, MODEL, headers=label)
        asked_s = time.time()
        await client.complete([*prefix, *self._tokens(8)], 1)
        return asked_s + after_s

    async def _ask(self, prefix: Sequence[int]) -> str:
        """The replica that answered; empty if the request failed."""
        try:
            return (await self._client.complete([*prefix, *self._tokens(8)], 1)).replica
        except RequestFailed:
            self.num_failed += 1
            return ""

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(count)]


async def vanish(
    cluster: LiveCluster, prober: Prober, decisions: Callable[[], list[LoggedDecision]], how: str
) -> WrongCredit:
    """Clear a replica's cache or kill its process while probes request its prefixes."""
    replica, prefixes = await prober.fill(NUM_BEFORE + NUM_AFTER + 1)
    pid = cluster.replicas("quire", "Replica")[replica]
    await asyncio.sleep(1.0)  # until the routers have all cache events
    first, *rest = prefixes
    probes = asyncio.ensure_future(prober.ask_each(rest))
    if how == "clear":
        event_s = await prober.clear(first, CLEAR_AFTER_S)
    else:
        await asyncio.sleep(CLEAR_AFTER_S)
        os.kill(pid, signal.SIGKILL)
        event_s = time.time()
    await probes
    await asyncio.sleep(0.5)  # a thread writes the log
    found = WrongCredit.of(
        (d for d in decisions() if d.time_s >= event_s - HORIZON_S), replica, event_s
    )
    if how == "kill":
        await until_replaced(cluster, replica)
    return found


async def until_replaced(cluster: LiveCluster, gone: str) -> None:
    """Wait until Serve runs as many replicas as before."""
    async with asyncio.timeout(REPLACED_TIMEOUT_S):
        while gone in (names := cluster.replicas("quire", "Replica")) or len(names) < NUM_REPLICAS:
            await asyncio.sleep(0.5)
    await asyncio.sleep(2.0)  # until the routers have attached to the new replica


# -- the benchmark----------------------------------------------------------------------------------------


def serve_config(log_folder: Path) -> dict[str, Any]:
    """The repository's cluster.yaml with four small caches, fault injection, and all decisions on disk."""
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    (application,) = config["applications"]
    application["args"] = {
        "model": MODEL,
        "device": "cpu",
        "replicas": NUM_REPLICAS,
        "routers": NUM_ROUTERS,
        "engine": {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "fault_injection": True},
        "router": {"decision_log_folder": str(log_folder), "decision_log_bytes": 2**30},
    }
    return config


def bars_of(
    records: Sequence[Record],
    num_pooled: int,
    vanished: dict[str, list[WrongCredit]],
    speed: float = SPEED,
) -> list[Bar]:
    """Bars of the replay (their names have a speed other than the default) and of each lost cache."""
    at_speed = "" if speed == SPEED else f"_at_speed_{speed:g}"
    over = [r for r in records if (r.predicted_tokens or 0) > r.cached_tokens]
    under = [r for r in records if (r.predicted_tokens or 0) < r.cached_tokens]
    num_cached = sum(record.cached_tokens for record in records)
    num_asked = sum(record.prompt_tokens for record in records)
    predictions = {
        "requests": len(records),
        "over_predicted": len(over),
        "over_predicted_tokens": sum(r.predicted_tokens - r.cached_tokens for r in over),
        "under_predicted": len(under),
    }
    hits = {
        "cached_tokens": num_cached,
        "hit_percent": round(100 * num_cached / num_asked, 2),
        "pooled_hit_percent": round(100 * num_pooled / num_asked, 2),
    }
    bars = [
        Bar(
            f"router/truth_over_predicted{at_speed}",
            100 * len(over) / len(records),
            "%",
            1.0,
            details=predictions,
        ),
        Bar(
            f"router/truth_hit_rate_of_pooled{at_speed}",
            num_cached / num_pooled,
            "x",
            0.95,
            at_most=False,
            details=hits,
        ),
    ]
    for how, found in vanished.items():
        worst = max((each.seconds for each in found), default=None)
        bars.append(
            Bar(
                f"router/truth_wrong_credit_after_{how}",
                None if worst is None else 1e3 * worst,
                "ms",
                150.0,
                details={"each": [each.to_json() for each in found]},
            )
        )
    return bars


def tokens_elsewhere(decisions: Iterable[LoggedDecision]) -> int:
    """Prompt tokens that another replica had cached in addition to the chosen one: the price of balancing load."""
    elsewhere = 0.0
    for decision in decisions:
        fleet = decision.fleet
        held = fleet.gpu_tokens + fleet.host_tokens
        elsewhere += held.max() - held[list(fleet.replicas).index(decision.chosen)]
    return int(elsewhere)


async def measure(
    cluster: LiveCluster, requests: list[TimedRequest], log_folder: Path, events: dict[str, int]
) -> tuple[list[Record], dict[str, Any], dict[str, list[WrongCredit]], int]:
    """Run everything: the replay's records and summary, the wrong credit by event, and failed probes."""
    url = f"http://127.0.0.1:{cluster.http_port}"
    run = await open_loop(OpenAIClient(url, MODEL, {"return_token_ids": True}), requests)
    summary = summarise(run, Slo())
    if summary["num_failed"]:
        raise RuntimeError(f"{summary['num_failed']} failed: {summary['first_error']}")
    prober = Prober(url, random.Random("truth"))

    def decisions() -> list[LoggedDecision]:
        return [decision for path in log_folder.glob("*.jsonl") for decision in read(path)]

    await asyncio.sleep(0.5)  # a thread writes the log
    summary["held_elsewhere_tokens"] = tokens_elsewhere(decisions())

    vanished: dict[str, list[WrongCredit]] = {how: [] for how in events}
    for how, count in events.items():
        for _ in range(count):
            vanished[how].append(await vanish(cluster, prober, decisions, how))
            print(how, vanished[how][-1].to_json(), flush=True)
    return run.records, summary, vanished, prober.num_failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument(
        "--speed", type=float, default=SPEED, help="of the trace; 2 is twice as fast"
    )
    parser.add_argument("--clears", type=int, default=3, help="caches to clear")
    parser.add_argument("--kills", type=int, default=2, help="replicas to kill")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "truth.json")
    options = parser.parse_args()
    requests = read_trace(
        options.trace, VOCAB_SIZE, speed=options.speed, limit=options.requests, scale=SCALE
    )
    wanted = {"clear": options.clears, "kill": options.kills}
    events = {how: count for how, count in wanted.items() if count}
    with tempfile.TemporaryDirectory() as folder:
        with live_cluster(serve_config(Path(folder))) as cluster:
            records, summary, vanished, num_failed = asyncio.run(
                measure(cluster, requests, Path(folder), events)
            )
    bars = bars_of(records, pooled_tokens(requests, records), vanished, options.speed)
    shares = {}
    for record in records:
        shares[record.replica] = shares.get(record.replica, 0) + 1
    report.write(
        options.out,
        f"python -m tests.perf truth {options.trace.name} --requests {options.requests} "
        f"--speed {options.speed:g}",
        bars,
        replay=summary,
        requests_by_replica=sorted(shares.values()),
        failed_probes=num_failed,
    )


if __name__ == "__main__":
    main()
