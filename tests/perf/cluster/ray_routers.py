"""Quire against Ray Serve's own request routers: the same engines and arrivals in one cluster, run alternately.

    python -m tests.perf ray-routers --mix spread|hot

Three applications, each with two ingress processes and four CPU engines of the embedded model: Quire, Serve's
power-of-two router and Ray's `PrefixCacheAffinityRouter` (`ray_router_app`). All get the same requests in the same
order at the same times: HTTP prompts of 8,000 characters that begin with one of several prefixes (Zipf) and end with
unique text. Each request asks for one token, so the benchmark compares placement and its cost, not streaming (see
`data_plane`).

In `spread` a replica's cache holds a third of the prefixes, so placement decides the hit rate. In `hot` it soon holds
all prefixes and every router hits, so the cost of a decision shows.

A turn is a closed loop (requests per second at `--concurrency` users) and an open loop at 60% of the rate that
power-of-two reached in the warm-up (time to first token). Each round has one turn of each system, in an order that
reverses from round to round; ratios are taken within a round. All systems tokenise the text; that time is measured
separately in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quire.cluster.bench.load.clients import OpenAIClient
from quire.cluster.bench.load.load_generator import Run, closed_loop, open_loop
from quire.cluster.bench.load.workloads import TimedRequest
from quire.cluster.bench.results import report
from quire.cluster.bench.results.measures import Slo, summarise
from quire.cluster.bench.results.report import ROOT, Bar, Spread, spread_json
from quire.cluster.proxies.ray_settings import DEPLOYMENT_VARIABLES
from quire.replica.checkpoint.checkpoint import resolve_checkpoint
from quire.router.text.tokenizer import TextTokenizer
from tests.perf.cluster.live_cluster import LiveCluster, cpu_s, live_cluster
from tests.perf.cluster.ray_router_app import ROUTERS

MODEL = "embedded"
QUIRE, BASELINE = "quire", "power_of_two"
SYSTEMS = (QUIRE, *ROUTERS)
NUM_REPLICAS, NUM_ROUTERS = 4, 2
PROMPT_CHARS = 8000
NUM_BLOCKS = 1200  # of a replica's cache, 32 tokens each: about twenty prompts
OPEN_LOOP_SHARE = 0.6  # of the baseline's rate in a closed loop
GOAL = 0.9
_WORDS = (
    "a all and at boat book bread by count every fold gather grey harbour in keep letter light many market morning "
    "night of over page quire same sea sheet sing sound storm tell the thread time tower voice water with word"
).split()


@dataclass(frozen=True, slots=True)
class Mix:
    """Shared prefixes of the prompts."""

    num_prefixes: int  # chosen with Zipf's weights: 1, 1/2, 1/3, ...
    own_chars: int  # unique characters at the end of each prompt


MIXES = {"spread": Mix(48, 500), "hot": Mix(4, 100)}


class ArrivalLog:
    """Prompts with their send times; the same seed and part give the same log.

    Parameters
    ----------
    seed
        Seed of all random numbers.
    """

    def __init__(self, mix: Mix, seed: int = 0):
        rng = random.Random(f"ray-routers/{seed}")
        prefix_chars = PROMPT_CHARS - mix.own_chars
        self._mix, self._seed = mix, seed
        self._prefixes = [_text(rng, prefix_chars) for _ in range(mix.num_prefixes)]
        self._weights = [1 / (i + 1) for i in range(mix.num_prefixes)]
        self.texts: list[str] = []

    def part(self, name: str, count: int, rate_per_s: float) -> list[TimedRequest]:
        """New requests of a Poisson process. The single prompt id of a request is its text's index in `texts`."""
        rng = random.Random(f"ray-routers/{self._seed}/{name}")
        requests, at_s = [], 0.0
        for _ in range(count):
            at_s += rng.expovariate(rate_per_s)
            (prefix,) = rng.choices(self._prefixes, self._weights)
            self.texts.append(prefix + _text(rng, self._mix.own_chars))
            requests.append(TimedRequest(at_s, (len(self.texts) - 1,), 1))
        return requests


def _text(rng: random.Random, num_chars: int) -> str:
    words: list[str] = []
    while sum(map(len, words)) + len(words) < num_chars:
        words.append(rng.choice(_WORDS))
    return " ".join(words)[:num_chars].ljust(num_chars)


class LogClient(OpenAIClient):
    """A client that sends the texts of a log.

    Parameters
    ----------
    url
        URL of the application.
    """

    def __init__(self, url: str, log: ArrivalLog):
        super().__init__(url, MODEL)
        self._log = log

    def body(
        self, prompt_ids: Sequence[int], max_tokens: int, session: str, retain: bool = False
    ) -> dict[str, Any]:
        (number,) = prompt_ids
        return super().body((), max_tokens, session, retain) | {"prompt": self._log.texts[number]}


@dataclass(frozen=True, slots=True)
class Turn:
    """Measurements of one system in one round."""

    closed: dict[str, Any]  # summary of `measures`
    open: dict[str, Any]
    cpu_ms_per_request: dict[str, float]  # of the ingress and engine processes, in the closed loop


class System:
    """One application: its URL and its processes."""

    def __init__(self, name: str, cluster: LiveCluster, log: ArrivalLog):
        self.name = name
        self._client = LogClient(f"http://127.0.0.1:{cluster.http_port}/{name}", log)
        self._pids = {
            who: list(cluster.replicas(name, deployment).values())
            for who, deployment in (("ingress", "Router"), ("engines", "Replica"))
        }

    async def closed(self, requests: list[TimedRequest], users: int) -> dict[str, Any]:
        """Run a closed loop; returns its summary."""
        return _summary(self.name, await closed_loop(self._client, requests, users))

    async def turn(self, closed: list[TimedRequest], users: int, open_: list[TimedRequest]) -> Turn:
        before = {who: cpu_s(pids) for who, pids in self._pids.items()}
        at_concurrency = await self.closed(closed, users)
        spent = {who: cpu_s(pids) - before[who] for who, pids in self._pids.items()}
        at_rate = _summary(self.name, await open_loop(self._client, open_))
        per_request = {who: round(1e3 * s / len(closed), 2) for who, s in spent.items()}
        return Turn(at_concurrency, at_rate, per_request)


def _summary(name: str, run: Run) -> dict[str, Any]:
    row = summarise(run, Slo())
    if row["num_failed"]:
        raise RuntimeError(f"{name}: {row['num_failed']} failed: {row['first_error']}")
    return row


async def measure(
    cluster: LiveCluster, log: ArrivalLog, options: argparse.Namespace
) -> tuple[dict[str, list[Turn]], float]:
    """Run all turns. Returns them by system, and the rate of the open loops."""
    systems = [System(name, cluster, log) for name in SYSTEMS]
    warm_up = log.part("warm-up", options.warm_up, 1.0)
    speeds = {}
    for system in systems:
        speeds[system.name] = (await system.closed(warm_up, options.concurrency))["requests_per_s"]
    rate = OPEN_LOOP_SHARE * speeds[BASELINE]
    turns: dict[str, list[Turn]] = {name: [] for name in SYSTEMS}
    for i in range(options.rounds):
        closed = log.part(f"closed-{i}", options.requests, 1.0)
        open_ = log.part(f"open-{i}", max(1, round(rate * options.open_s)), rate)
        for system in systems[:: 1 if i % 2 == 0 else -1]:
            turn = await system.turn(closed, options.concurrency, open_)
            turns[system.name].append(turn)
            print(
                f"round {i} {system.name:13} {turn.closed['requests_per_s']:7.1f}/s  "
                f"hit {turn.closed['hit_percent']:5.1f}%  open TTFT {turn.open['ttft_ms']}",
                flush=True,
            )
    return turns, rate


def rows_of(turns: dict[str, list[Turn]]) -> list[dict[str, Any]]:
    """The table: medians over the rounds, one row for each system."""
    rows = []
    for name, of_system in turns.items():
        row: dict[str, Any] = {"system": name}
        row["requests_per_s"] = _median([t.closed["requests_per_s"] for t in of_system])
        for kind in ("closed", "open"):
            found = [getattr(turn, kind) for turn in of_system]
            for percent in ("p50", "p99"):
                values = [summary["ttft_ms"][percent] for summary in found]
                row[f"{kind}_ttft_{percent}_ms"] = _median(values)
            row[f"{kind}_hit_percent"] = _median([summary["hit_percent"] for summary in found])
        for who in ("ingress", "engines"):
            values = [turn.cpu_ms_per_request[who] for turn in of_system]
            row[f"{who}_cpu_ms_per_request"] = _median(values)
        rows.append(row)
    return rows


def _median(values: list[float]) -> float:
    return float(f"{statistics.median(values):.4g}")


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"{'':14}{'req/s':>8}{'hit':>7}{'TTFT p50':>10}{'p99':>8}{'open: p50':>11}{'p99':>8}{'hit':>7}"
        f"{'CPU ms: ingress':>17}{'engines':>9}"
    )
    for row in rows:
        print(
            f"{row['system']:14}{row['requests_per_s']:>8.1f}{row['closed_hit_percent']:>6.1f}%"
            f"{row['closed_ttft_p50_ms']:>10.0f}{row['closed_ttft_p99_ms']:>8.0f}"
            f"{row['open_ttft_p50_ms']:>11.0f}{row['open_ttft_p99_ms']:>8.0f}"
            f"{row['open_hit_percent']:>6.1f}%{row['ingress_cpu_ms_per_request']:>17.2f}"
            f"{row['engines_cpu_ms_per_request']:>9.2f}"
        )


def bar_of(mix: str, turns: dict[str, list[Turn]]) -> Bar:
    """Requests per second relative to the baseline, for each round."""
    ratios = [
        ours.closed["requests_per_s"] / theirs.closed["requests_per_s"]
        for ours, theirs in zip(turns[QUIRE], turns[BASELINE], strict=True)
    ]
    spread = Spread.of(ratios)
    return Bar(
        f"router/{mix}_requests_over_power_of_two",
        spread.median,
        "x",
        GOAL,
        at_most=False,
        details=spread_json(spread),
    )


def tokenising_ms(texts: Sequence[str]) -> Spread:
    """Milliseconds to tokenise each prompt in this process with the routers' tokenizer."""
    tokenizer = TextTokenizer.load(resolve_checkpoint(MODEL, None, weights=False))
    times = []
    for text in texts:
        began = time.perf_counter()
        tokenizer.encode(text)
        times.append(1e3 * (time.perf_counter() - began))
    return Spread.of(times)


def serve_config() -> dict[str, Any]:
    """The repository's cluster.yaml with three applications in the same environment, without gRPC."""
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    config["grpc_options"]["grpc_servicer_functions"] = []
    (quire,) = config["applications"]
    num_cpus = 0.05  # so that all actors fit on two cores
    engine = {"num_blocks": NUM_BLOCKS, "num_threads": 1}
    args = {"replicas": NUM_REPLICAS, "routers": NUM_ROUTERS, "engine": engine}
    applications = [
        {
            **quire,
            "name": QUIRE,
            "route_prefix": f"/{QUIRE}",
            "args": {
                "model": MODEL,
                "device": "cpu",
                "replica_resources": {"num_cpus": num_cpus},
                "router_resources": {"num_cpus": num_cpus},
                **args,
            },
        }
    ]
    for router in ROUTERS:
        applications.append(
            {
                **quire,
                "name": router,
                "route_prefix": f"/{router}",
                "runtime_env": {"env_vars": dict(DEPLOYMENT_VARIABLES)},
                "import_path": "tests.perf.cluster.ray_router_app:build",
                "args": {
                    "router": router,
                    "num_cpus": num_cpus,
                    **args,
                    "engine": {**engine, "device": "cpu"},
                },
            }
        )
    config["applications"] = applications
    return config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mix", choices=MIXES, default="spread")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=400, help="of a closed loop")
    parser.add_argument("--concurrency", type=int, default=32, help="users of a closed loop")
    parser.add_argument("--open-s", type=float, default=6.0, help="seconds of an open loop")
    parser.add_argument("--warm-up", type=int, default=300, help="requests of each system")
    parser.add_argument("--out", type=Path, help="default: tests/perf/results/ray_routers_MIX.json")
    options = parser.parse_args()
    log = ArrivalLog(MIXES[options.mix])
    with live_cluster(serve_config()) as cluster:
        turns, rate = asyncio.run(measure(cluster, log, options))
    rows = rows_of(turns)
    print_table(rows)
    report.write(
        options.out or report.RESULTS / f"ray_routers_{options.mix}.json",
        f"python -m tests.perf ray-routers --mix {options.mix} --rounds {options.rounds}",
        [bar_of(options.mix, turns)],
        mix=options.mix,
        concurrency=options.concurrency,
        open_loop_requests_per_s=round(rate, 1),
        tokenising_ms=spread_json(tokenising_ms(log.texts[:300])),
        rows=rows,
    )


if __name__ == "__main__":
    main()
