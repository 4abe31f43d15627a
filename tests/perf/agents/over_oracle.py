"""Agents in virtual time against a pooled oracle: mean TTFT and mean end-to-end time, with pulls and without.

    python -m tests.perf over-oracle

The load is that of `agents`, but `FORK_SHARE` of the sessions fork: a branch continues the context so far while
the session does. The replicas are those of `agents --virtual-time`. With pulls each is on a node of its own, and
copying a token's KV to another node takes a quarter of the time of computing it, as over 100 Gbit/s for an 8B model.
The oracle (`pooled_oracle.py`) is the best of its rules for each metric. Its copies take no time. No router can avoid
them, because a session's blocks are in a host tier while its tool runs. So `slo+free_copies` has replicas whose copies
take no time either: its ratio is what routing alone loses. Seeds for development and hold-out seeds are reported apart.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from quire.cluster.bench.load.agent_sessions import AgentShape, agents
from quire.cluster.bench.load.load_generator import Record, session_loop
from quire.cluster.bench.results import report
from quire.cluster.bench.results.report import Bar
from tests.perf.agents.agent_replica import BLOCK_SIZE, PACE
from tests.perf.agents.agents import (
    NUM_REPLICAS,
    NUM_ROUTERS,
    RETAIN_S,
    SHAPE,
    VOCAB_SIZE,
    counted,
    engine_config,
    pairs_of_turns,
)
from tests.perf.agents.pooled_oracle import RULES, PooledOracle
from tests.perf.agents.simulated_cluster import SimulatedCluster, run_in_virtual_time
from tests.perf.agents.simulated_nodes import Network

FORK_SHARE = 0.4
SEEDS = {"development": (0, 1), "hold-out": (10, 11)}
PULLED_TOKEN_S = PACE.prefill_token_s / 4
# Such that a router's first estimate, 0.25 GB/s, is right.
NETWORK = Network(PULLED_TOKEN_S, round(PULLED_TOKEN_S * 0.25e9))
PULLS, FREE_COPIES = "+pulls", "+free_copies"
# Policies by name. Only `slo` prices pulls, so the others have none.
SYSTEMS = (f"slo{PULLS}", "slo", f"slo{FREE_COPIES}", "round_robin", "power_of_two")
GOAL = 1.15


def row_of(system: str, seed: int, records: Sequence[Record]) -> dict[str, Any]:
    """Means of the counted turns, in milliseconds, and where the time goes.

    `computed_ms`, `restored_ms` and `step_ms` are what a turn takes on an idle replica; `waiting_ms` is the rest of the
    time to first token, pulls included.
    """
    missed = [record.prompt_tokens - record.cached_tokens for record in records]
    ttft_s = fmean(record.ttft_s for record in records)
    computed_s = fmean(missed) * PACE.prefill_token_s
    host_blocks = fmean(record.host_cached_tokens for record in records) / BLOCK_SIZE
    is_free = system in RULES or system.endswith(FREE_COPIES)
    restored_s = 0.0 if is_free else host_blocks * PACE.copied_block_s
    pairs = pairs_of_turns(records)
    branches = [record for record in records if record.session.endswith("-branch")]
    return {
        "system": system,
        "seed": seed,
        "turns": len(records),
        "branch_turns": len(branches),
        "ttft_ms": round(1e3 * ttft_s, 3),
        "e2e_ms": round(1e3 * fmean(record.latency_s for record in records), 3),
        "hit_percent": round(
            100 - 100 * sum(missed) / sum(record.prompt_tokens for record in records), 2
        ),
        "moved_percent": round(
            100 * fmean(before.replica != after.replica for before, after in pairs), 2
        ),
        "computed_ms": round(1e3 * computed_s, 2),
        "restored_ms": round(1e3 * restored_s, 2),
        "step_ms": 1e3 * PACE.step_s,
        "waiting_ms": round(1e3 * (ttft_s - computed_s - restored_s - PACE.step_s), 2),
        "decoding_ms": round(
            1e3 * fmean(record.latency_s - record.ttft_s for record in records), 2
        ),
    }


async def simulate(system: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a policy, or of the oracle with one of its rules."""
    shape: AgentShape = dataclasses.replace(SHAPE, fork_share=FORK_SHARE)
    config = engine_config(options.agents)
    is_free = system.endswith(FREE_COPIES)
    pace = dataclasses.replace(PACE, copied_block_s=0.0) if is_free else PACE
    client: PooledOracle | SimulatedCluster
    if system in RULES:
        client = PooledOracle(config, PACE, system, num_replicas=NUM_REPLICAS)
    else:
        client = SimulatedCluster(
            config,
            pace,
            system.partition("+")[0],
            num_replicas=NUM_REPLICAS,
            num_routers=NUM_ROUTERS,
            retain_s=RETAIN_S,
            network=NETWORK if system.endswith(PULLS) else None,
        )
    until_s = options.warm_up_s + options.duration_s
    turns = agents(options.agents, until_s, shape, VOCAB_SIZE, seed)
    clock = asyncio.get_running_loop().time
    run = await session_loop(client, turns, until_s=until_s, clock=clock)
    row = row_of(system, seed, counted(run, options.warm_up_s))
    transports = [replica.transport for replica in client.replicas]
    row["pulled_blocks"] = sum(t.num_pulled for t in transports if t is not None)
    await client.close()
    return row


def ratios(rows: Sequence[dict[str, Any]], system: str, seeds: Sequence[int]) -> dict[str, float]:
    """Geometric means over the seeds of a system's means over those of the best oracle."""
    found = {}
    for metric in ("ttft_ms", "e2e_ms"):
        logs = []
        for seed in seeds:
            of_seed = {row["system"]: row[metric] for row in rows if row["seed"] == seed}
            logs.append(math.log(of_seed[system] / min(of_seed[rule] for rule in RULES)))
        found[metric.removesuffix("_ms")] = round(math.exp(fmean(logs)), 4)
    return found


def bars_of(table: dict[str, dict[str, dict[str, float]]]) -> list[Bar]:
    """The bars of hold-out seeds with pulls; the details have the development seeds and no pulls."""
    return [
        Bar(
            f"kv/agents/virtual_{metric}_over_oracle",
            table["hold-out"][f"slo{PULLS}"][metric],
            "x",
            GOAL,
            details={
                f"{system}, {seeds}": row[metric]
                for seeds, systems in table.items()
                for system, row in systems.items()
            },
        )
        for metric in ("ttft", "e2e")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--agents", type=int, default=192)
    parser.add_argument("--warm-up-s", type=float, default=32.0)
    parser.add_argument("--duration-s", type=float, default=24.0, help="counted")
    parser.add_argument("--num-seeds", type=int, choices=(1, 2), default=2, help="of each set")
    parser.add_argument("--cache", type=Path, help="file of finished runs, to go on from")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "agents_over_oracle.json")
    options = parser.parse_args()
    systems = list(dict.fromkeys((f"slo{PULLS}", *options.systems)))
    rows: list[dict[str, Any]] = []
    if options.cache is not None and options.cache.exists():
        rows = json.loads(options.cache.read_text())
    done = {(row["system"], row["seed"]) for row in rows}
    sets = {name: seeds[: options.num_seeds] for name, seeds in SEEDS.items()}
    for seed in (seed for seeds in sets.values() for seed in seeds):
        for system in (*RULES, *systems):
            if (system, seed) in done:
                continue
            rows.append(run_in_virtual_time(simulate(system, seed, options)))
            print(rows[-1], flush=True)
            if options.cache is not None:
                options.cache.write_text(json.dumps(rows))
    table = {
        name: {system: ratios(rows, system, seeds) for system in systems}
        for name, seeds in sets.items()
    }
    report.write(
        options.out,
        f"python -m tests.perf over-oracle --agents {options.agents} "
        f"--warm-up-s {options.warm_up_s:g} --duration-s {options.duration_s:g} "
        f"--num-seeds {options.num_seeds} --systems {' '.join(systems)}",
        bars_of(table),
        seeds={name: list(seeds) for name, seeds in sets.items()},
        fork_share=FORK_SHARE,
        pulled_ms_per_token=1e3 * PULLED_TOKEN_S,
        ratios=table,
        rows=rows,
    )


if __name__ == "__main__":
    main()
