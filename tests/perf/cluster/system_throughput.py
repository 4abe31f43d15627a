"""Throughput of the whole system (HTTP, HAProxy, two routers, one replica) relative to the engine alone.

    python -m tests.perf system-throughput CHECKPOINT

W1 and W2 run alternately through an engine in its own process, and as streams of OpenAI's API through a cluster of
`quire serve`, with one connection per request. All requests are sent at once. The engine's process is stopped while the
cluster works. The cluster is idle but not stopped while the engine works, so its idle use slows the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

import yaml

from quire.cluster.bench.engines.checkpoints import VOCAB_SIZE
from quire.cluster.bench.engines.compare import spread
from quire.cluster.bench.engines.engine_process import EngineProcess, EngineSpec
from quire.cluster.bench.load.clients import OpenAIClient
from quire.cluster.bench.load.load_generator import closed_loop
from quire.cluster.bench.load.workloads import TimedRequest, Workload, batches
from quire.cluster.bench.results import report
from quire.cluster.bench.results.measures import Slo, summarise
from quire.cluster.bench.results.report import ROOT, Bar
from tests.perf.cluster.live_cluster import live_cluster

GOAL_PERCENT = 90.0
_WARM_UP = Workload("warm-up", 8, 0, 128, 4)


def serve_config(checkpoint: str, dtype: str, engine: dict[str, Any]) -> dict[str, Any]:
    """The repository's cluster.yaml with this model and one replica."""
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    config["applications"][0]["args"] = {
        "model": str(Path(checkpoint).resolve()),
        "served_model_name": "bench",
        "device": "cpu",
        "dtype": dtype,
        "replicas": 1,
        "routers": 2,
        "engine": engine,
    }
    return config


async def over_http(port: int, workload: Workload, repetition: int | str) -> dict[str, Any]:
    """Run one batch as streams; returns the summary of `measures`."""
    client = OpenAIClient(f"http://127.0.0.1:{port}", "bench", {"return_token_ids": True})
    requests = [
        TimedRequest(0.0, tuple(prompt), workload.output_tokens)
        for prompt in workload.prompts(repetition, VOCAB_SIZE)
    ]
    row = summarise(await closed_loop(client, requests, len(requests)), Slo())
    if row["num_failed"] or row["output_tokens"] != workload.num_output_tokens:
        raise RuntimeError(
            f"{workload.name}: {row['num_failed']} failed, {row['output_tokens']} of "
            f"{workload.num_output_tokens} tokens: {row.get('first_error')}"
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "system_throughput.json")
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    engine = {
        "max_model_len": 2048,
        "kv_cache_gib": 2.0,
        "max_prefill_ms": None,
        "num_threads": threads,
    }
    workloads = list(batches(options.workloads))
    spec = EngineSpec("quire", "quire", options.checkpoint, options.dtype, threads, engine)
    alone: dict[str, list[float]] = {w.name: [] for w in workloads}
    whole: dict[str, list[dict[str, Any]]] = {w.name: [] for w in workloads}
    config = serve_config(options.checkpoint, options.dtype, engine)
    with open(os.devnull, "w") as log, live_cluster(config) as cluster:
        process = EngineProcess(spec, log)
        try:
            process.generate(_WARM_UP.prompts("alone", VOCAB_SIZE), _WARM_UP.output_tokens)
            process.stop()
            asyncio.run(over_http(cluster.http_port, _WARM_UP, "whole"))
            for i in range(options.rounds):
                for workload in workloads:
                    with process.awake():
                        prompts = workload.prompts(i, VOCAB_SIZE)
                        answer = process.generate(prompts, workload.output_tokens)
                    alone[workload.name].append(answer["seconds"])
                    whole[workload.name].append(
                        asyncio.run(over_http(cluster.http_port, workload, i))
                    )
                    print(
                        f"{workload.name}: alone {answer['seconds']:.2f} s, whole "
                        f"{whole[workload.name][-1]['duration_s']:.2f} s",
                        flush=True,
                    )
        finally:
            process.close()
    bars = []
    for workload in workloads:
        seconds = [row["duration_s"] for row in whole[workload.name]]
        percents = [100 * a / b for a, b in zip(alone[workload.name], seconds, strict=True)]
        bars.append(
            Bar(
                f"cpu/system_{workload.name}_percent_of_offline",
                spread(percents)["median"],
                "%",
                GOAL_PERCENT,
                at_most=False,
                details={
                    "percent": spread(percents),
                    "offline_s": spread(alone[workload.name]),
                    "system_s": spread(seconds),
                },
            )
        )
    name = Path(options.checkpoint).name
    report.write(
        options.out,
        f"python -m tests.perf system-throughput {name} --rounds {options.rounds}",
        bars,
        checkpoint=name,
        engine=engine,
        http={w.name: whole[w.name][-1] for w in workloads},
    )


if __name__ == "__main__":
    main()
