"""The real cluster with its default configuration: start-up, idle CPU, first token, tokens per second.

Starts `quire serve cluster.yaml` on free ports, alternating with an empty Serve application with the same Serve
options. The difference is Quire's own share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import grpc
import yaml

from quire.cluster.bench.results.report import RESULTS, ROOT, Bar, Spread, spread_json, write
from quire.protos import generation_pb2, generation_pb2_grpc
from tests.perf.cluster.live_cluster import LiveCluster, cpu_s, live_cluster

PROMPT = "Tell me a story about a lighthouse."


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.perf serving", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="starts of each application")
    parser.add_argument("--idle-s", type=float, default=30.0, help="seconds to watch idle replicas")
    parser.add_argument("--out", type=Path, default=RESULTS / "serving.json")
    options = parser.parse_args()
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    nothing = json.loads(json.dumps(config))
    nothing["applications"] = [
        {
            "name": "nothing",
            "route_prefix": "/",
            "import_path": "tests.perf.cluster.trivial_app:build",
        }
    ]
    nothing["grpc_options"]["grpc_servicer_functions"] = []
    totals: dict[str, list[float]] = {"quire": [], "nothing": []}
    loads_s: list[float] = []
    idle: list[float] = []
    for _ in range(options.rounds):
        with live_cluster(nothing) as cluster:
            totals["nothing"].append(cluster.startup_s["total"])
        with live_cluster(config) as cluster:
            started_s = cluster.startup_s
            totals["quire"].append(started_s["total"])
            loads_s.append(sum(s for name, s in started_s.items() if name not in ("total", "Ray")))
            time.sleep(15)  # until the replicas' heartbeats have backed off and Serve is idle
            idle += idle_percent(cluster, options.idle_s)
            answers = asyncio.run(measure_answers(cluster.grpc_port))
    ours, theirs = Spread.of(totals["quire"]), Spread.of(totals["nothing"])
    expected_s = theirs.median + Spread.of(loads_s).median
    bars = [
        Bar(
            "engine/idle_cpu_percent_of_core",
            max(idle),
            "%",
            2.0,
            details={"replicas_and_rounds": [round(x, 2) for x in idle]},
        ),
        Bar(
            "engine/startup_over_ray_plus_load",
            ours.median / expected_s,
            "x",
            1.0,
            details={
                "quire_s": spread_json(ours),
                "empty_serve_application_s": spread_json(theirs),
                "imports_load_and_warm_up_s": [round(s, 2) for s in loads_s],
            },
        ),
    ]
    write(options.out, "python -m tests.perf serving", bars, answers=answers)
    print(json.dumps(answers, indent=1))
    return 0


def idle_percent(cluster: LiveCluster, seconds: float) -> list[float]:
    """CPU time of each replica process in percent of one core."""
    pids = list(cluster.replicas("quire", "Replica").values())
    before = [cpu_s([pid]) for pid in pids]
    time.sleep(seconds)
    return [100 * (cpu_s([pid]) - s) / seconds for pid, s in zip(pids, before, strict=True)]


async def measure_answers(port: int) -> dict[str, dict]:
    """First token and tokens per second over gRPC, with 1 and with 32 concurrent streams."""
    found = {}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        client = generation_pb2_grpc.GenerationStub(channel)
        for num_streams in (1, 32):
            began = time.perf_counter()
            results = await asyncio.gather(*(one(client, i) for i in range(num_streams)))
            wall_s = time.perf_counter() - began
            found[f"{num_streams} streams"] = {
                "first_token_s": spread_json(Spread.of([first_s for first_s, _ in results])),
                "tokens_per_s": round(sum(tokens for _, tokens in results) / wall_s, 1),
            }
    return found


async def one(client: generation_pb2_grpc.GenerationStub, i: int) -> tuple[float, int]:
    """Seconds to the first token, and the number of tokens."""
    began = time.perf_counter()
    first_s, num_tokens = 0.0, 0
    request = generation_pb2.GenerateRequest(
        prompt=f"{PROMPT} ({i})",
        ignore_eos=True,
        sampling=generation_pb2.SamplingOptions(max_tokens=128, seed=i),
    )
    async for response in client.Generate(request):
        first_s = first_s or time.perf_counter() - began
        num_tokens += len(response.token_ids)
    return first_s, num_tokens


if __name__ == "__main__":
    sys.exit(main())
