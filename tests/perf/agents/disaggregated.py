"""Prefill replicas: long prompts meet streams that decode, with the policy `disaggregated` and without, in turns.

    python -m tests.perf disaggregated [--device paced]

One cluster has an application for each policy, with the same number of replicas. `--users` users have one stream each,
of a short prompt and a long answer, one after the other. Meanwhile long prompts arrive in a Poisson process. Each round
runs the same requests on one application after the other, in alternating order; its prompts are new.

On the device `paced` a step takes 30 ms, and each token of a prompt 0.3 ms, whatever the cores of this machine do. So
every replica has a device of its own, as on GPUs. On the device `real` all replicas compute the embedded model on the
cores of this machine, so a prompt also delays the streams of other replicas.

*Gap*: between two pieces of a user's stream. *TTFT*: of the long prompts, from the time at which they arrive.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from quire.cluster.bench.load.clients import Answer, OpenAIClient
from quire.cluster.bench.load.workloads import random_token_ids
from quire.cluster.bench.results import report
from quire.cluster.bench.results.measures import percentile, percentiles_ms
from quire.cluster.bench.results.report import ROOT, Bar
from tests.perf.agents.agent_replica import PACE
from tests.perf.cluster.live_cluster import LiveCluster, live_cluster

MODEL, VOCAB_SIZE = "embedded", 1024
OFF, ON = "slo", "disaggregated"
POLICIES = (OFF, ON)
NUM_REPLICAS = 3
SHORT_TOKENS, STREAM_TOKENS = 48, 160
LONG_TOKENS, ANSWER_TOKENS = 2048, 32
GOAL_GAP_RATIO, GOAL_TTFT_RATIO = 0.7, 1.25
_OUTCOME = re.compile(r'^quire_disaggregated_prefills_total\{.*outcome="(\w+)".*\} (\S+)', re.M)
_PAUSE = re.compile(r"^quire_prefill_handover_seconds_(sum|count)\{.*\} (\S+)", re.M)


@dataclass(slots=True)
class Measured:
    """What the users of one policy have seen, in all rounds."""

    gaps_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    short_ttft_s: list[float] = field(default_factory=list)
    # Token ids of each long prompt's answer, in the order of the prompts.
    answers: list[list[int]] = field(default_factory=list)

    def row(self, policy: str) -> dict[str, Any]:
        """The measurements as JSON."""
        return {
            "policy": policy,
            "gaps": len(self.gaps_s),
            "long_prompts": len(self.ttft_s),
            "gap_ms": percentiles_ms(self.gaps_s),
            "long_ttft_ms": percentiles_ms(self.ttft_s),
            "short_ttft_ms": percentiles_ms(self.short_ttft_s),
        }


async def run_round(
    client: OpenAIClient, measured: Measured, options: argparse.Namespace, seed: int
) -> None:
    """Run one round's requests on one application."""
    chance = random.Random(seed)
    at_s, due = 0.0, []
    while (at_s := at_s + chance.expovariate(options.rate)) < options.duration_s:
        due.append((at_s, random_token_ids(chance, LONG_TOKENS, VOCAB_SIZE)))
    shorts = [random.Random(f"{seed}/{user}") for user in range(options.users)]
    began_s = time.perf_counter()
    end_s = began_s + options.duration_s

    async def user(own: random.Random) -> None:
        # So that the streams do not begin at once.
        await asyncio.sleep(own.random() * 2)
        while time.perf_counter() < end_s:
            sent_s = time.perf_counter()
            prompt = random_token_ids(own, SHORT_TOKENS, VOCAB_SIZE)
            answer = await client.complete(prompt, STREAM_TOKENS)
            arrivals = answer.arrivals_s
            measured.short_ttft_s.append(arrivals[0] - sent_s)
            measured.gaps_s += [b - a for a, b in pairwise(arrivals) if a < end_s]

    async def long(at_s: float, prompt: list[int]) -> Answer:
        await asyncio.sleep(began_s + at_s - time.perf_counter())
        answer = await client.complete(prompt, ANSWER_TOKENS)
        measured.ttft_s.append(answer.arrivals_s[0] - began_s - at_s)
        return answer

    users = [asyncio.ensure_future(user(own)) for own in shorts]
    answers = await asyncio.gather(*(long(*one) for one in due))
    await asyncio.gather(*users)
    measured.answers += [answer.token_ids for answer in answers]


async def measure(cluster: LiveCluster, options: argparse.Namespace) -> dict[str, Measured]:
    """Run all rounds; the first one is not counted."""
    found = {policy: Measured() for policy in POLICIES}
    for number in range(options.rounds + 1):
        for policy in POLICIES[:: 1 if number % 2 else -1]:
            url = f"http://127.0.0.1:{cluster.http_port}/{policy}"
            client = OpenAIClient(url, MODEL, {"return_token_ids": True})
            measured = found[policy] if number else Measured()
            await run_round(client, measured, options, options.seed + number)
    return found


def handovers(cluster: LiveCluster) -> dict[str, float]:
    """Requests that went to the prefill replica by outcome, and the mean pause of a hand-over."""
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.http_port}/{ON}/metrics") as page:
        text = page.read().decode()
    pause = {name: float(value) for name, value in _PAUSE.findall(text)}
    mean_ms = round(1e3 * pause["sum"] / max(1.0, pause["count"]), 1)
    return {outcome: int(float(n)) for outcome, n in _OUTCOME.findall(text)} | {"pause_ms": mean_ms}


def serve_config(device: str) -> dict[str, Any]:
    """The repository's cluster.yaml with one application for each policy, without gRPC."""
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    config["grpc_options"]["grpc_servicer_functions"] = []
    (quire,) = config["applications"]
    config["applications"] = []
    num_cpus = 0.05  # so that all actors fit on two cores
    for policy in POLICIES:
        application = {**quire, "name": policy, "route_prefix": f"/{policy}"}
        if device == "paced":
            application["import_path"] = "tests.perf.agents.agent_replica:build"
        application["args"] = {
            "model": MODEL,
            "device": "cpu",
            "replicas": NUM_REPLICAS,
            "routers": 1,
            "replica_resources": {"num_cpus": num_cpus},
            "router_resources": {"num_cpus": num_cpus},
            "router": {"policy": policy},
            "engine": {
                "num_blocks": 4096,
                "block_size": 8,
                "node_pool_gib": 0.25,
                "max_batch_tokens": 256,
                "async_batching": "on",  # as on a GPU
                "num_threads": 1,
            },
        }
        config["applications"].append(application)
    return config


def bars_of(found: dict[str, Measured]) -> list[Bar]:
    """The bars; their details have the absolute values."""
    off, on = found[OFF], found[ON]

    def ratio(name: str, percent: float, goal: float, what: str) -> Bar:
        values = {p: percentile(getattr(found[p], name), percent) for p in POLICIES}
        details = {f"{policy}_ms": round(1e3 * value, 1) for policy, value in values.items()}
        bar = f"router/disaggregated/{what}"
        return Bar(bar, values[ON] / values[OFF], "x", goal, details=details)

    different = sum(a != b for a, b in zip(off.answers, on.answers, strict=True))
    return [
        ratio("gaps_s", 99, GOAL_GAP_RATIO, "decode_gap_p99_ratio"),
        ratio("ttft_s", 50, GOAL_TTFT_RATIO, "long_ttft_p50_ratio"),
        ratio("ttft_s", 99, GOAL_TTFT_RATIO, "long_ttft_p99_ratio"),
        Bar(
            "router/disaggregated/different_answers",
            different,
            "answers",
            0,
            details={"answers": len(on.answers)},
        ),
    ]


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each policy."""
    for row in rows:
        gaps, ttft = row["gap_ms"], row["long_ttft_ms"]
        print(
            f"{row['policy']:14} gaps p50 {gaps['p50']:6.1f}, p99 {gaps['p99']:6.1f} ms   "
            f"TTFT of {row['long_prompts']} long prompts p50 {ttft['p50']:6.0f}, p99 {ttft['p99']:6.0f} ms   "
            f"of short ones p50 {row['short_ttft_ms']['p50']:6.0f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("real", "paced"), default="real")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.5, help="long prompts per second")
    parser.add_argument("--duration-s", type=float, default=20.0, help="of a policy in a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: in tests/perf/results")
    options = parser.parse_args()
    with live_cluster(serve_config(options.device)) as cluster:
        found = asyncio.run(measure(cluster, options))
        outcomes = handovers(cluster)
    rows = [found[policy].row(policy) for policy in POLICIES]
    print_rows(rows)
    print(f"prefill replica: {outcomes}")
    name = "disaggregated" if options.device == "real" else f"disaggregated_{options.device}"
    paced = {"step_ms": 1e3 * PACE.step_s, "prefill_ms_per_token": 1e3 * PACE.prefill_token_s}
    report.write(
        options.out or report.RESULTS / f"{name}.json",
        f"python -m tests.perf disaggregated --device {options.device} --users {options.users} "
        f"--rate {options.rate:g} --duration-s {options.duration_s:g} --rounds {options.rounds} "
        f"--seed {options.seed}",
        bars_of(found),
        replicas=NUM_REPLICAS,
        long_prompt_tokens=LONG_TOKENS,
        **({"paced_device": paced} if options.device == "paced" else {}),
        # With the round that is not counted.
        handovers=outcomes,
        rows=rows,
    )


if __name__ == "__main__":
    main()
