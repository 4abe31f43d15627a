"""The router's policies in a simulated cluster, against other routers' policies and a pooled oracle.

`make bench ARGS="routersim --simulator FOLDER"` takes fifteen minutes of one core with three seeds and all policies;
`--cache FILE` continues an interrupted run. The policies are the product's code. The oracle gives the replicas one
shared cache with the size of all their caches, where every hit is free on every replica, and the best of three dispatch
rules; a ratio of 1 is perfect placement. A router knows the load only from reports every 50 ms and from its own
bookings.

With every router, replicas start requests in the product's order (`replica/scheduler/order.py`: the shortest prompt
first, with ageing). The oracle is the best of its runs with that order and with first come, first served. A separate
table has replicas that start requests in order of arrival, to show the effect of the policy alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from quire.cluster.bench.results.report import RESULTS, Bar, write
from quire.protos.fairness import AGEING
from quire.router.policy.by_name import POLICY_NAMES, make_policy
from tests.perf.router.routersim_stack import Stack

SEEDS = {"given": (0, 1, 2), "held out": (10, 11, 12)}
WORKLOADS = ("conv4", "conv8L", "hot8", "agent8", "uniq8")
PERTURBED = (
    "conv8L*",
    "hot8*",
    "chat8*",
)  # other lengths, rates and reuse than in the workloads used for development
ORACLES = {"least_tokens": "LeastTokens", "lmetric": "LMetric", "marginal": "Marginal"}
OTHERS = {
    "RoundRobin": {},
    "LeastLoaded": {},
    "LeastTokens": {},
    "PowerOfTwo": {},
    "RayPrefix": {"thr": 10},
    "SGLang": {},
    "CHWBL": {},
    "AIBrix": {},
    "Preble": {},
    "EPP": {},
    "Dynamo": {},
    "LMetric": {},
    "GreedyTTFT": {},
    "Marginal": {},
    "MarginalRep": {},
}
ROBUSTNESS = (
    "conv8L",
    "hot8",
)  # long prompts and hot prefixes, where accurate views of load and caches matter
OURS = "slo"
_PARTS = ("held_out", "perturbed", "fifo", "robustness")
_FIFO = "fifo"  # variant: replicas start requests in order of arrival
_LOSS_GOALS = {"16 routers": 0.02, "event lag 0.5 s": 0.01, "restart": 0.01}
_REFERENCE = ("GreedyTTFT", "MarginalRep")
PARTS = ("own_prefill_s", "wait_s", "decode_s")  # their sum is the mean end-to-end time
KEPT = ("ttft_mean", "ttft_p99", "e2e_mean", "tpot_mean", "goodput", "hit", *PARTS)


class Simulator:
    """The simulator's modules from a folder; results are kept in a file, so that a run can continue."""

    def __init__(self, folder: Path, cache: Path | None):
        sys.path.insert(0, str(folder))
        sys.dont_write_bytecode = True
        self._sim, self._gen, self._policies = map(
            importlib.import_module, ("sim", "gen", "policies")
        )
        self._trace = str(folder / "traces" / "mooncake_conversation_trace.jsonl.gz")
        self._cache = cache
        self.found: dict[str, dict[str, float]] = {}
        if cache is not None and cache.exists():
            self.found = json.loads(cache.read_text())

    def workload(self, name: str, seed: int) -> tuple[list[Any], int, Any]:
        """Requests, replicas and hardware of a workload."""
        sim, gen, small = self._sim, self._gen, self._sim.HW(block=128)
        if name == "conv4":
            return sim.load_mooncake(self._trace, seed=seed), 4, sim.HW()
        if name in ("conv8L", "conv8L*"):
            perturbed = {"dup": 2, "speed": 1.1} if name.endswith("*") else {"speed": 2.4}
            requests = sim.load_mooncake(self._trace, seed=seed, **perturbed)
            return requests, 8, sim.HW(kv_tokens=3_000_000)
        if name == "hot8":
            return gen.hot_prefix(n_req=15_000, rate=60, seed=3 + seed), 8, small
        if name == "hot8*":
            shape = {"n_pref": 900, "alpha": 0.9, "lo": 1000, "hi": 8000, "out": 250}
            return gen.hot_prefix(n_req=12_000, rate=45, seed=3 + seed, **shape), 8, small
        if name == "agent8":
            return gen.sessions(n_sess=400, rate=0.55, seed=5 + seed), 8, small
        if name == "chat8*":
            return (
                gen.chat(n_sess=2500, rate=14.0, seed=9 + seed, out=(400, 0.7, 8, 1500)),
                8,
                small,
            )
        if name == "uniq8":
            return gen.unique(n_req=10_000, rate=28, seed=7 + seed), 8, small
        raise ValueError(f"no workload {name!r}")

    def policy(self, name: str, seed: int = 1) -> Any:
        """A policy by name: `ours:NAME` is the product's, any other is a class of the simulator."""
        if name.startswith("ours:"):
            return Stack(make_policy(name.removeprefix("ours:")), seed)
        return getattr(self._policies, name)(seed=seed, **OTHERS.get(name, {}))

    def run(
        self,
        workload: str,
        seed: int,
        policy: str,
        *,
        routers: int = 1,
        variant: str = "",
        **options: Any,
    ) -> dict[str, float]:
        """The metrics of one policy on one workload.

        Parameters
        ----------
        variant
            Name of the changes that `options` (of the simulator) and `routers` make.
        """
        key = f"{workload}|{seed}|{policy}|{variant}"
        if key in self.found:
            return self.found[key]
        requests, n, hardware = self.workload(workload, seed)
        if "kill" in options:
            options["kills"] = [(requests[len(requests) // 2].t, options.pop("kill"))]
        options.setdefault("order_w", AGEING)
        policies = [self.policy(policy, router + 1) for router in range(routers)]
        simulation = self._sim.Sim(
            self._sim.fresh(requests), n, policies, hw=hardware, report_interval=0.05, **options
        )
        metrics = simulation.run() | parts(simulation.trace, hardware)
        self.found[key] = {name: metrics[name] for name in KEPT}
        if self._cache is not None:
            self._cache.write_text(json.dumps(self.found))
        goodput, ttft_s = metrics["goodput"], metrics["ttft_mean"]
        print(f"{key:40} goodput {goodput:.3f} ttft {ttft_s:.3f} s", file=sys.stderr, flush=True)
        return self.found[key]

    def oracle(self, workload: str, seed: int, *, fifo_only: bool = False) -> dict[str, float]:
        """The best of the three pooled oracles in both orders, for each metric."""
        orders = (
            {f"pooled {_FIFO}": 0.0} if fifo_only else {f"pooled {_FIFO}": 0.0, "pooled": AGEING}
        )
        runs = [
            self.run(workload, seed, name, variant=variant, pooled=True, order_w=ageing)
            for variant, ageing in orders.items()
            for name in ORACLES.values()
        ]
        names = ("ttft_mean", "e2e_mean", *PARTS)
        best = {name: min(run[name] for run in runs) for name in names}
        return best | {name: max(run[name] for run in runs) for name in ("goodput", "hit")}


class InOrderOfArrival:
    """Results of the same clusters with replicas that start requests in order of arrival."""

    def __init__(self, simulator: Simulator):
        self._simulator = simulator

    def run(self, workload: str, seed: int, policy: str) -> dict[str, float]:
        return self._simulator.run(workload, seed, policy, variant=_FIFO, order_w=0.0)

    def oracle(self, workload: str, seed: int) -> dict[str, float]:
        return self._simulator.oracle(workload, seed, fifo_only=True)


def parts(requests: list[Any], hardware: Any) -> dict[str, float]:
    """Parts of the mean end-to-end time, in seconds.

    Returns
    -------
    own_prefill_s
        Prefill of the uncached tokens on an otherwise idle replica; grows with cache misses.
    wait_s
        The rest of the time to first token: other requests' prefill before it, and decoding in the same steps.
    decode_s
        From the first token to the last.
    """
    own_s = fmean(hardware.prefill_time(r.inp - r.hit, r.hit) for r in requests)
    return {
        "own_prefill_s": own_s,
        "wait_s": fmean(r.t_first - r.t for r in requests) - own_s,
        "decode_s": fmean(r.t_end - r.t_first for r in requests),
    }


def geometric_mean(values: list[float]) -> float:
    return math.exp(fmean(map(math.log, values)))


def compare(
    simulator: Simulator | InOrderOfArrival,
    policy: str,
    workloads: tuple[str, ...],
    seeds: tuple[int, ...],
) -> dict[str, Any]:
    """A policy against the oracle: ratios of TTFT and end-to-end time, and lost goodput."""
    of_workload = {}
    for workload in workloads:
        runs = [simulator.run(workload, seed, policy) for seed in seeds]
        best = [simulator.oracle(workload, seed) for seed in seeds]

        def ratio(name: str, runs: Any = runs, best: Any = best) -> float:
            return geometric_mean([r[name] / b[name] for r, b in zip(runs, best, strict=True)])

        of_workload[workload] = {
            "ttft": ratio("ttft_mean"),
            "e2e": ratio("e2e_mean"),
            "gap": fmean(b["goodput"] - r["goodput"] for r, b in zip(runs, best, strict=True)),
            "goodput": fmean(r["goodput"] for r in runs),
            "hit": fmean(r["hit"] for r in runs),
            "parts": {p: [fmean(r[p] for r in found) for found in (runs, best)] for p in PARTS},
        }
    rows = list(of_workload.values())
    return {
        "ttft": geometric_mean([row["ttft"] for row in rows]),
        "e2e": geometric_mean([row["e2e"] for row in rows]),
        "gap": fmean(row["gap"] for row in rows),
        "worst_gap": max(row["gap"] for row in rows),
        "workloads": of_workload,
    }


def robustness(simulator: Simulator, seeds: tuple[int, ...]) -> dict[str, float]:
    """Mean goodput over workloads that is lost to many routers, late events and a restart."""
    variants: dict[str, dict[str, Any]] = {
        "16 routers": {"routers": 16},
        "event lag 0.5 s": {"kv_delay": 0.5},
        "restart": {"kill": 3},
    }
    lost = {}
    for variant, options in variants.items():
        lost[variant] = fmean(
            simulator.run(w, seed, f"ours:{OURS}")["goodput"]
            - simulator.run(w, seed, f"ours:{OURS}", variant=variant, **options)["goodput"]
            for w in ROBUSTNESS
            for seed in seeds
        )
    return lost


def bars(table: dict[str, dict[str, Any]], lost: dict[str, float]) -> list[Bar]:
    ours = table[f"ours:{OURS}"]
    listed = {name: row for name, row in table.items() if not name.startswith("ours:")}
    best_goodput = max(row["workloads"]["uniq8"]["goodput"] for row in listed.values())
    no_reuse = best_goodput - ours["workloads"]["uniq8"]["goodput"]
    mean_gap = min(row["gap"] for row in listed.values())
    return [
        Bar("router/ttft_over_oracle", ours["ttft"], "x", 1.12),
        Bar("router/e2e_over_oracle", ours["e2e"], "x", 1.03),
        Bar("router/goodput_gap_mean", ours["gap"], "", 0.012),
        Bar("router/goodput_gap_worst", ours["worst_gap"], "", 0.03),
        Bar("router/goodput_gap_over_best_other", ours["gap"] - mean_gap, "", 0.0),
        Bar("router/no_reuse_goodput_behind_best", no_reuse, "", 0.01),
        *(
            Bar(f"router/goodput_lost_to_{variant.replace(' ', '_')}", lost[variant], "", goal)
            for variant, goal in _LOSS_GOALS.items()
            if variant in lost
        ),
    ]


def plot(table: dict[str, dict[str, Any]], path: Path) -> None:
    """Bars of the three metrics with goals, best policies first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted(table, key=lambda name: table[name]["gap"], reverse=True)
    titles = {"ttft": "mean TTFT / oracle", "e2e": "mean end-to-end / oracle", "gap": "goodput gap"}
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 0.28 * len(names) + 1.2), sharey=True)
    for axis, (column, title) in zip(axes, titles.items(), strict=True):
        colours = ["tab:orange" if name.startswith("ours:") else "tab:blue" for name in names]
        values = [table[name][column] for name in names]
        axis.barh(names, values, color=colours)
        for row, value in enumerate(values):
            axis.text(value, row, f" {value:.3g}", va="center", fontsize=7)
        axis.set_title(title)
        if column != "gap":
            axis.set_xscale("log")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def markdown(tables: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The tables as Markdown."""
    lines = ["# The routing policies in a simulated cluster", ""]
    for title, table in tables.items():
        workloads = list(next(iter(table.values()))["workloads"])
        lines += [
            f"## {title}",
            "",
            "Ratios of mean TTFT / mean end-to-end time to the pooled oracle, and goodput behind it.",
            "",
            "| policy | all | " + " | ".join(workloads) + " |",
            "|---" * (len(workloads) + 2) + "|",
        ]
        for name, row in sorted(table.items(), key=lambda item: item[1]["gap"]):
            cells = [row, *row["workloads"].values()]
            text = (f"{c['ttft']:.2f} / {c['e2e']:.2f} / {c['gap']:.3f}" for c in cells)
            lines.append(f"| {name} | " + " | ".join(text) + " |")
        lines.append("")
    lines += [
        "## Where the time goes",
        "",
        f"Mean seconds of a request under `{OURS}` / the best oracle's, part by part: prefill of what it "
        "misses, waiting for others until its first token, decoding.",
        "",
        "| workload | own prefill | waiting | decoding |",
        "|---|---|---|---|",
    ]
    for table in tables.values():
        for workload, row in table[f"ours:{OURS}"]["workloads"].items():
            cells = (f"{ours:.3f} / {best:.3f}" for ours, best in row["parts"].values())
            lines.append(f"| {workload} | " + " | ".join(cells) + " |")
    lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.perf routersim", description=__doc__)
    parser.add_argument("--simulator", type=Path, required=True, help="folder of the simulator")
    parser.add_argument("--cache", type=Path, help="file of finished runs, to go on from")
    parser.add_argument("--out", type=Path, default=RESULTS / "routersim.json")
    parser.add_argument("--seeds", type=int, choices=(1, 2, 3), default=3, help="of each set")
    parser.add_argument("--others", nargs="*", choices=tuple(OTHERS), default=list(OTHERS))
    parser.add_argument("--ours", nargs="+", choices=POLICY_NAMES, default=list(POLICY_NAMES))
    parser.add_argument(
        "--parts", nargs="*", choices=_PARTS, default=list(_PARTS), help="beyond the five workloads"
    )
    options = parser.parse_args()
    simulator = Simulator(options.simulator, options.cache)
    given, held_out = (SEEDS[name][: options.seeds] for name in ("given", "held out"))
    ours = [f"ours:{name}" for name in options.ours]
    tables = {
        "Five workloads": {
            name: compare(simulator, name, WORKLOADS, given) for name in [*options.others, *ours]
        }
    }
    if "held_out" in options.parts:
        tables["Seeds that nobody looked at"] = {
            name: compare(simulator, name, WORKLOADS, held_out) for name in ours[:1]
        }
    if "perturbed" in options.parts:
        tables["Perturbed workloads"] = {
            name: compare(simulator, name, PERTURBED, given) for name in [*ours[:1], *_REFERENCE]
        }
    if "fifo" in options.parts:
        tables["Five workloads, replicas that start requests in order of arrival"] = {
            name: compare(InOrderOfArrival(simulator), name, WORKLOADS, given) for name in ours[:1]
        }
    lost = robustness(simulator, given) if "robustness" in options.parts else {}
    command = "python -m tests.perf routersim --simulator FOLDER"
    first = tables["Five workloads"]
    seeds = {"given": given, "held out": held_out}
    write(options.out, command, bars(first, lost), seeds=seeds, goodput_lost=lost, tables=tables)
    options.out.with_suffix(".md").write_text(markdown(tables))
    plot(first, options.out.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
