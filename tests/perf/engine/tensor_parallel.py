"""Tokens per second of two ranks against one on the same cores, in float32.

Three engines of one checkpoint of random weights alternate over the same requests: one rank with as many threads as the
others have ranks, the same with sums in two parts (`reduction_splits: 2`), and two ranks with one thread each. Bars are
ratios of medians to the first. Two ranks on one machine do not add cores, so that the second ratio is the cost of
divided sums, and the third that of the messages as well.

Then one rank and two serve two adapters in turns with room for one, so that each request loads its adapter.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import tempfile
import time
from pathlib import Path

from quire.cluster.bench.results import report
from quire.protos.sampling_params import SamplingParams
from quire.replica.engine import Engine
from tests.perf.engine.deterministic import WORKLOADS, build_random, tokens_per_s
from tests.perf.engine.lora import load_adapters

# Set before the first measurement.
GOALS = {"one_rank_two_parts": 0.8, "two_ranks": 0.7}
GOAL_LOAD_MS = 50.0
ADAPTER_RANK = 16
OPTIONS = {
    "one_rank": dict(num_threads=2),
    "one_rank_two_parts": dict(num_threads=2, reduction_splits=2),
    "two_ranks": dict(num_threads=1, tensor_parallel=2),
}


def measure(checkpoint: str, rounds: int) -> list[report.Bar]:
    """The bars of one model."""
    common = dict(
        model=checkpoint,
        dtype="float32",
        device="cpu",
        num_blocks=128,
        max_model_len=512,
        prefix_caching=False,
    )
    bars = []
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(Engine(**common, **options))
            for name, options in OPTIONS.items()
        }
        for workload in WORKLOADS:
            candidates = {
                name: functools.partial(tokens_per_s, engine, workload)
                for name, engine in engines.items()
            }
            report.alternate(candidates, 1)  # warm-up
            found = report.alternate(candidates, rounds)
            medians = {name: statistics.median(values) for name, values in found.items()}
            details = {
                f"{name}_tokens_per_s": report.spread_json(report.Spread.of(values))
                for name, values in found.items()
            }
            bars += [
                report.Bar(
                    f"tp/{name}_{workload}",
                    medians[name] / medians["one_rank"],
                    "x",
                    goal,
                    at_most=False,
                    details=details if name == "two_ranks" else {},
                )
                for name, goal in GOALS.items()
            ]
    return bars


def measure_loads(checkpoint: Path, rounds: int) -> report.Bar:
    """The bar of loads of an adapter into a slot."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    loads_ms, requests_ms = {}, {}
    for name in ("one_rank", "two_ranks"):
        engine = Engine(
            model=str(checkpoint),
            dtype="float32",
            device="cpu",
            num_blocks=128,
            max_model_len=512,
            max_loaded_adapters=1,
            max_adapter_rank=ADAPTER_RANK,
            **OPTIONS[name],
        )
        with engine, tempfile.TemporaryDirectory() as folder:
            adapters = load_adapters(engine, checkpoint, Path(folder), 2, ADAPTER_RANK)
            spent_s = []
            for _ in range(4 * rounds):
                for adapter in adapters:
                    began = time.perf_counter()
                    engine.generate([[5, 6, 7]], params, adapter=adapter, progress=False)
                    spent_s.append(time.perf_counter() - began)
            requests_ms[name] = round(1e3 * statistics.median(spent_s), 2)
            loads_ms[name] = round(1e3 * engine._loop._runner.adapted.load_time.mean_s, 2)
    details = {"loads_ms": loads_ms, "requests_of_4_tokens_ms": requests_ms, "rank": ADAPTER_RANK}
    return report.Bar(
        "tp/two_ranks_adapter_load", loads_ms["two_ranks"], "ms", GOAL_LOAD_MS, details=details
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "tp_throughput.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = build_random(Path(folder))
        bars = [*measure(str(checkpoint), args.rounds), measure_loads(checkpoint, args.rounds)]
    report.write(
        args.out,
        f"python -m tests.perf tensor_parallel --rounds {args.rounds}",
        bars,
        method="tokens per second of whole requests, two cores, medians; alternated",
    )


if __name__ == "__main__":
    main()
