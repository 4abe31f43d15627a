"""Agents on a real cluster: token hits and time to first token, next to `round_robin` and Ray Serve's own router.

    python -m tests.perf agents
    python -m tests.perf agents --virtual-time

The load is `cluster/bench/load/agent_sessions.py`: sessions of about 33 turns, contexts that grow from 12k to 80k
tokens, 131 prompt tokens for each output token, log-normal pauses for tools (median 5 s, 99th percentile 81 s). Every
token count is divided by 32. All turns but a session's last one ask for retention.

Each system has four paced replicas (`agent_replica`) with a host tier. The sessions in progress hold four times the
tokens of all devices together; each replica's host tier is six times its device. All systems get the same agents, one
system after the other in one cluster. The agents' first turns bring contexts of all lengths that no cache has; the
first `--warm-up-s` seconds are not counted.

In virtual time (`simulated_cluster`) the same schedulers, caches, routing tables and policies run without Ray and
without the cores of this machine, so the results are exact; Serve's router is then Quire's policy `power_of_two`.

A turn's time to first token counts from the end of the pause before it. A session has moved if a turn and the turn
before it ran on different replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from quire.cluster.bench.load.agent_sessions import AgentShape, agents
from quire.cluster.bench.load.clients import Client, OpenAIClient
from quire.cluster.bench.load.load_generator import Record, Run, session_loop
from quire.cluster.bench.results import report
from quire.cluster.bench.results.measures import percentile, percentiles_ms
from quire.cluster.bench.results.report import ROOT, Bar
from quire.cluster.proxies.ray_settings import DEPLOYMENT_VARIABLES
from quire.replica.config import EngineConfig
from tests.perf.agents.agent_replica import BLOCK_SIZE, PACE
from tests.perf.agents.simulated_cluster import SimulatedCluster, run_in_virtual_time
from tests.perf.cluster.live_cluster import LiveCluster, live_cluster
from tests.perf.cluster.ray_router_app import ROUTERS

MODEL, VOCAB_SIZE = "embedded", 1024
SHAPE = AgentShape(token_scale=1 / 32, time_scale=1)
NUM_AGENTS = 192
NUM_REPLICAS, NUM_ROUTERS = 4, 2
# Times all devices, by the means of the shape; 4.0 in the counted time of a run, by its turns.
WORKING_SET = 4.3
HOST_TIER = 6  # times the replica's device
# Longer than nearly all pauses; the default of 90 s covers 99% of them. Nothing but
# sessions is cached here, so they may have all of the tiers.
RETAIN_S, MAX_RETAINED_SHARE = 300 * SHAPE.time_scale, 1.0
QUIRE = "quire"
# Name of a system to its routing policy; the other systems are Serve's routers.
POLICIES = {QUIRE: "slo", "round_robin": "round_robin"}
SYSTEMS = (*POLICIES, *ROUTERS)
DEFAULT_SYSTEMS = (*POLICIES, "power_of_two")
MAX_BATCH_TOKENS = SHAPE.scaled(8192)  # of the default on a GPU
GOAL_HIT_PERCENT, GOAL_TTFT_RATIO = 92.0, 2.0
_KV_BYTES_PER_TOKEN = 2048  # of the embedded model


def num_blocks(num_agents: int = NUM_AGENTS) -> int:
    """Blocks of a replica's device, by `WORKING_SET`."""
    own = num_agents * (SHAPE.mean_context - SHAPE.shared_tokens) * SHAPE.token_scale
    return round(own / WORKING_SET / NUM_REPLICAS / BLOCK_SIZE)


def counted(run: Run, warm_up_s: float) -> list[Record]:
    """The answered turns that were due after the warm-up, in order of time.

    Raises
    ------
    RuntimeError
        A request failed.
    """
    errors = [record.error for record in run.records if record.error]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}")
    return sorted(
        (record for record in run.records if record.due_s >= warm_up_s), key=lambda r: r.due_s
    )


def pairs_of_turns(records: Iterable[Record]) -> list[tuple[Record, Record]]:
    """Each turn with the turn before it in its session."""
    sessions: dict[str, list[Record]] = {}
    for record in records:
        sessions.setdefault(record.session, []).append(record)
    return [pair for turns in sessions.values() for pair in pairwise(turns)]


def working_set_tokens(records: Sequence[Record], num_agents: int) -> float:
    """Mean over the turns of a session's own tokens, times the number of sessions in progress."""
    shared = SHAPE.scaled(SHAPE.shared_tokens)
    own = sum(record.prompt_tokens + record.num_tokens - shared for record in records)
    return num_agents * own / len(records)


def row_of(system: str, records: Sequence[Record], seconds: float) -> dict[str, Any]:
    """The measurements of one system.

    Parameters
    ----------
    records
        The counted turns.
    seconds
        Time in which they were due.
    """
    prompt = sum(record.prompt_tokens for record in records)
    cached = sum(record.cached_tokens for record in records)
    host = sum(record.host_cached_tokens for record in records)
    output = sum(record.num_tokens for record in records)
    pairs = pairs_of_turns(records)
    moved = sum(before.replica != after.replica for before, after in pairs)
    ttft_s = [record.ttft_s for record in records]
    busy_s = (prompt - cached) * PACE.prefill_token_s + host / BLOCK_SIZE * PACE.copied_block_s
    return {
        "system": system,
        "turns": len(records),
        "turns_per_s": round(len(records) / seconds, 2),
        "mean_prompt_tokens": round(prompt / len(records), 1),
        "prompt_per_output_token": round(prompt / output, 1),
        "hit_percent": round(100 * cached / prompt, 2),
        "device_hit_percent": round(100 * (cached - host) / prompt, 2),
        "host_hit_percent": round(100 * host / prompt, 2),
        "ttft_ms": percentiles_ms(ttft_s),
        "ttft_p99_over_p50": round(percentile(ttft_s, 99) / percentile(ttft_s, 50), 3),
        "moved_percent": round(100 * moved / len(pairs), 2),
        "sent_late_p99_ms": round(1e3 * percentile([record.lag_s for record in records], 99), 1),
        # Of a replica's time: prefill and restores that these turns needed.
        "prefill_and_restore_percent": round(100 * busy_s / seconds / NUM_REPLICAS, 1),
    }


def print_row(row: dict[str, Any]) -> None:
    """Print one line of the table."""
    ttft = row["ttft_ms"]
    print(
        f"{row['system']:13}{row['turns']:6} turns  hit {row['hit_percent']:5.1f}% (host "
        f"{row['host_hit_percent']:4.1f}%)  TTFT p50 {ttft['p50']:5.0f}, p99 {ttft['p99']:5.0f} ms, "
        f"ratio {row['ttft_p99_over_p50']:.2f}  moved {row['moved_percent']:.1f}%  busy "
        f"{row['prefill_and_restore_percent']:.0f}%  sent late {row['sent_late_p99_ms']:.0f} ms",
        flush=True,
    )


def bars_of(rows: Sequence[dict[str, Any]], virtual: str = "") -> list[Bar]:
    """Quire's bars; the details have the other systems' values. `virtual` begins the names of those in virtual time."""
    by_system = {row["system"]: row for row in rows}
    ours = by_system.pop(QUIRE)

    def others(column: str) -> dict[str, float]:
        return {system: row[column] for system, row in by_system.items()}

    return [
        Bar(
            f"kv/agents/{virtual}token_hit_percent",
            ours["hit_percent"],
            "%",
            GOAL_HIT_PERCENT,
            at_most=False,
            details=others("hit_percent"),
        ),
        Bar(
            f"kv/agents/{virtual}turn_ttft_p99_over_p50",
            ours["ttft_p99_over_p50"],
            "x",
            GOAL_TTFT_RATIO,
            details=others("ttft_p99_over_p50"),
        ),
    ]


async def run_agents(
    system: str, client: Client, options: argparse.Namespace, clock: Callable[[], float]
) -> dict[str, Any]:
    """Run the agents on one system, by the clock of its client; returns its row."""
    until_s = options.warm_up_s + options.duration_s
    turns = agents(options.agents, until_s, SHAPE, VOCAB_SIZE, options.seed)
    records = counted(
        await session_loop(client, turns, until_s=until_s, clock=clock), options.warm_up_s
    )
    row = row_of(system, records, options.duration_s)
    device_tokens = NUM_REPLICAS * num_blocks(options.agents) * BLOCK_SIZE
    working_set = working_set_tokens(records, options.agents) / device_tokens
    row["working_set_over_devices"] = round(working_set, 2)
    print_row(row)
    return row


async def measure(
    cluster: LiveCluster, systems: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of a real cluster."""
    rows = []
    for system in systems:
        url = f"http://127.0.0.1:{cluster.http_port}/{system}"
        client = OpenAIClient(url, MODEL, {"return_token_ids": True})
        rows.append(await run_agents(system, client, options, time.perf_counter))
    return rows


async def simulate(system: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a system in virtual time."""
    cluster = SimulatedCluster(
        engine_config(options.agents),
        PACE,
        POLICIES.get(system, system),
        num_replicas=NUM_REPLICAS,
        num_routers=NUM_ROUTERS,
        retain_s=RETAIN_S,
    )
    row = await run_agents(system, cluster, options, asyncio.get_running_loop().time)
    await cluster.close()
    return row


def engine_config(num_agents: int = NUM_AGENTS) -> EngineConfig:
    """The configuration that replicas of `serve_config` resolve to."""
    blocks = num_blocks(num_agents)
    return EngineConfig(
        model_name=MODEL,
        revision="",
        device="cpu",
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(2,),
        max_model_len=4096,
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        num_host_blocks=HOST_TIER * blocks,
        max_batch_tokens=MAX_BATCH_TOKENS,
        resume_margin=0.3,
        deterministic=True,
        num_threads=1,
        async_batching="on",
        session_max_share=MAX_RETAINED_SHARE,
    )


def serve_config(systems: Sequence[str], num_agents: int = NUM_AGENTS) -> dict[str, Any]:
    """The repository's cluster.yaml with one application for each system, without gRPC."""
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    config["grpc_options"]["grpc_servicer_functions"] = []
    (quire,) = config["applications"]
    num_cpus = 0.05  # so that all actors fit on two cores
    blocks = num_blocks(num_agents)
    engine = {
        "num_blocks": blocks,
        "block_size": BLOCK_SIZE,
        "node_pool_gib": HOST_TIER * blocks * BLOCK_SIZE * _KV_BYTES_PER_TOKEN / 2**30,
        "max_batch_tokens": MAX_BATCH_TOKENS,
        "async_batching": "on",  # as on a GPU
        "num_threads": 1,
    }
    sizes = {"replicas": NUM_REPLICAS, "routers": NUM_ROUTERS}
    config["applications"] = []
    for system in systems:
        application = {**quire, "name": system, "route_prefix": f"/{system}"}
        if system in POLICIES:
            application["import_path"] = "tests.perf.agents.agent_replica:build"
            application["args"] = {
                "model": MODEL,
                "device": "cpu",
                **sizes,
                "replica_resources": {"num_cpus": num_cpus},
                "router_resources": {"num_cpus": num_cpus},
                "router": {"policy": POLICIES[system]},
                "session": {"retain_s": RETAIN_S, "max_share": MAX_RETAINED_SHARE},
                "engine": engine,
            }
        else:
            application["import_path"] = "tests.perf.cluster.ray_router_app:build"
            application["runtime_env"] = {"env_vars": dict(DEPLOYMENT_VARIABLES)}
            application["args"] = {
                "router": system,
                **sizes,
                "num_cpus": num_cpus,
                "engine": {**engine, "device": "cpu"},
                "engine_class": "tests.perf.agents.agent_replica:AgentEngine",
            }
        config["applications"].append(application)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=DEFAULT_SYSTEMS)
    parser.add_argument("--agents", type=int, default=NUM_AGENTS)
    parser.add_argument("--warm-up-s", type=float, default=48.0, help="of each system")
    parser.add_argument("--duration-s", type=float, default=72.0, help="of each system, counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--virtual-time", action="store_true", help="without a cluster")
    parser.add_argument("--out", type=Path, help="default: in tests/perf/results")
    options = parser.parse_args()
    systems = list(dict.fromkeys((QUIRE, *options.systems)))
    name, virtual, how = "agent_trace", "", ""
    if options.virtual_time:
        name, virtual, how = "agent_trace_virtual", "virtual_", "--virtual-time "
        rows = [run_in_virtual_time(simulate(system, options)) for system in systems]
    else:
        with live_cluster(serve_config(systems, options.agents)) as cluster:
            rows = asyncio.run(measure(cluster, systems, options))
    report.write(
        options.out or report.RESULTS / f"{name}.json",
        f"python -m tests.perf agents {how}--systems {' '.join(systems)} --agents {options.agents} "
        f"--warm-up-s {options.warm_up_s:g} --duration-s {options.duration_s:g} --seed {options.seed}",
        bars_of(rows, virtual),
        scale={"tokens": SHAPE.token_scale, "pauses": SHAPE.time_scale},
        replicas=NUM_REPLICAS,
        device_blocks=num_blocks(options.agents),
        block_tokens=BLOCK_SIZE,
        host_tier_over_device=HOST_TIER,
        session={"retain_s": RETAIN_S, "max_share": MAX_RETAINED_SHARE},
        paced_device={
            "step_ms": 1e3 * PACE.step_s,
            "prefill_ms_per_token": 1e3 * PACE.prefill_token_s,
            "copy_ms_per_block": 1e3 * PACE.copied_block_s,
        },
        rows=rows,
    )


if __name__ == "__main__":
    main()
