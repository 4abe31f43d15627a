"""Time of a routing decision and of the prefix index, against the numbers of replicas and blocks.

A decision is the work of `RouterService` for each request: hash the prompt's tokens, match the hashes in the index,
score every replica, rank. Between two decisions requests are booked, as in a router; that time is listed separately.
The prompts exceed the processor's caches, so a decision reads its blocks from memory.

Times are wall times and contain the load of the machine, most of all in the tail; the result has the load average. The
CPU time of a decision is listed too: it excludes other processes' time slices, but not their effect on the caches.

In a *burst* each prompt has just been sent to two replicas that do not hold all of it, so a decision finds their
bookings. One of the two replicas has confirmed the first blocks.

The largest fleet and index are measured alternately with and without the compiled library, or only without it if this
installation has none.

`python -m tests.perf router_index --plot FILE` draws a result.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import random
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from quire.cluster.bench.results.report import RESULTS, Bar, write
from quire.protos.routing_hash import ROUTING_BLOCK_TOKENS, RoutingHasher
from quire.protos.wire import CacheEvents, Frame, Load
from quire.router import compiled_router
from quire.router.fleet.replicas import ReplicaTable
from quire.router.fleet.request_bookings import RequestBooking
from quire.router.index.prefix_hashes import prefix_hashes
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.policy.policy import RouteRequest

_BATCHES = (1, 4, 16, 64, 256, 4096)  # blocks of one report, from a decode step to a snapshot
_PROMPT_TOKENS = 16_384
_MAX_PROMPTS = 2500  # kept in memory, 160 MB of tokens
_MAX_BURST = 1000  # prompts of a burst
_IN_FLIGHT = 64  # requests without a first token
_FLEETS = (4, 32, 256)
_TURNS = 4
COMPILED, PLAIN = "router", "router/without_compiler"  # prefixes of the bars' names
_PARTS = ("hash", "match", "score", "decision", "decision_cpu", "book")
# Goals of a decision. Without costs in C the median may take 150 us; with them it took half of that.
_GOALS_US = {50: 150, 99: 500}


class Filled:
    """A replica table with `num_blocks` distinct cached blocks, in chains as long as prompts.

    A few replicas hold each chain, each to a different depth, as after some evictions.
    """

    def __init__(self, num_replicas: int, num_blocks: int, copies: int = 3):
        self.rng = np.random.default_rng(0)
        self.table = ReplicaTable(PrefixIndex(max_blocks=2 * num_blocks), lost_after_s=1e9)
        self.hasher = RoutingHasher("model")
        self.names = [f"replica-{i}" for i in range(num_replicas)]
        self._seq = dict.fromkeys(self.names, 0)
        for i, name in enumerate(self.names):
            self.table.add(name, "e", 32)
            self.table.on_frame(name, Frame("e", load=self._load(i)), 0.0)
        chain = _PROMPT_TOKENS // ROUTING_BLOCK_TOKENS
        num_chains = -(-num_blocks // chain)
        self.prompts: list[np.ndarray] = []  # [tokens] int32, of the cached chains
        pick = random.Random(0)
        every = -(-num_chains // _MAX_PROMPTS)
        took_bytes = 0
        for i in range(num_chains):
            if i % every == 0:
                tokens = self.rng.integers(0, 100_000, _PROMPT_TOKENS, dtype=np.int32)
                self.prompts.append(tokens)
                took_bytes += tokens.nbytes
                hashes = self.hasher.hashes(tokens)
            else:
                hashes = self.rng.integers(0, 2**64, chain, dtype=np.uint64)
            if i == 0:
                before = _resident_bytes() - took_bytes
            for copy, name in enumerate(pick.sample(self.names, min(copies, num_replicas))):
                self._replay(name, hashes[: chain - copy * pick.randrange(chain // copies)])
        gc.collect()
        taken = _resident_bytes() - before - took_bytes
        self.bytes_per_block = taken / max(1, len(self.table.index))

    def _load(self, i: int) -> Load:
        return Load(
            num_running=int(self.rng.integers(1, 64)),
            queued_prefill_tokens=int(self.rng.integers(0, 20_000)),
            num_decode_tokens=int(self.rng.integers(1000, 500_000)),
            blocks_free=1000,
            blocks_in_use=1000,
            blocks_total=2000,
            prefill_s_per_token=1e-4,
            decode_step_s=0.01,
            num_steps=i,
        )

    def _replay(self, name: str, stored: np.ndarray = (), removed: np.ndarray = ()) -> None:
        self._seq[name] += 1
        events = CacheEvents(
            self._seq[name], np.asarray(stored, np.uint64), np.asarray(removed, np.uint64)
        )
        self.table.index.apply(name, "e", events)

    def decisions(self, num: int) -> dict[str, np.ndarray]:
        """[num] microseconds of each part of a decision, of the whole, of its CPU time, and of its booking."""
        policy, rng = make_policy("slo"), random.Random(1)
        order = random.Random(2).sample(self.prompts, len(self.prompts))
        taken: dict[str, list[float]] = {name: [] for name in _PARTS}
        in_flight: deque[RequestBooking] = deque()
        gc.collect()
        gc.freeze()  # as a router does after its start
        for i in range(num):
            now_s = 0.1 + 1e-4 * i
            tokens = order[i % len(order)].copy()  # a copy, as the tokeniser has just written it
            began_cpu = time.thread_time()
            times = [time.perf_counter()]
            hashes = prefix_hashes(self.hasher, tokens)
            times.append(time.perf_counter())
            fleet = self.table.fleet(hashes, len(tokens), now_s)
            times.append(time.perf_counter())
            ranking = policy.choose(RouteRequest(len(tokens)), fleet, now_s, rng)
            ranking.names()
            times.append(time.perf_counter())
            taken["decision_cpu"].append(time.thread_time() - began_cpu)
            times.append(time.perf_counter())
            in_flight.append(self.table.book(ranking, hashes, len(tokens), now_s))
            if len(in_flight) > _IN_FLIGHT:
                self.table.end(in_flight.popleft(), now_s, 200)
            times.append(time.perf_counter())
            parts = ("hash", "match", "score", "", "book")
            for part, began, ended in zip(parts, times[:-1], times[1:], strict=True):
                if part:
                    taken[part].append(ended - began)
            taken["decision"].append(times[3] - times[0])
        gc.unfreeze()
        for booking in in_flight:
            self.table.end(booking, now_s)
        return {name: np.array(seconds) * 1e6 for name, seconds in taken.items()}

    @contextmanager
    def burst(self) -> Iterator[None]:
        """During the block, prompts are on their way to two replicas each, and `prompts` holds only those."""
        index, pick, prompts = self.table.index, random.Random(3), self.prompts
        self.prompts = prompts[:_MAX_BURST]
        bookings = []
        for tokens in self.prompts:
            hashes = self.hasher.hashes(tokens)
            held = index.match(hashes)
            for name, num_confirmed in zip(pick.sample(self.names, 2), (0, 16), strict=True):
                begin = max(0, held.get(name, 0) - num_confirmed)
                bookings.append(index.book(name, hashes[begin:]))
        yield
        self.prompts = prompts
        for booking in bookings:
            index.unbook(booking)

    def events_per_s(self, batch: int) -> float:
        """Stored and removed blocks per second in reports of this size, on an index of this size."""
        num_batches = max(1, min(2000, 200_000 // batch))
        fresh = self.rng.integers(0, 2**64, num_batches * batch, dtype=np.uint64)
        batches, name = np.split(fresh, num_batches), self.names[0]

        def all_of_them() -> None:
            for stored in batches:
                self._replay(name, stored)
            for removed in batches:
                self._replay(name, removed=removed)

        return 2 * len(fresh) / min(_timed(all_of_them) for _ in range(3))


def _timed(call: Callable[[], None]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _by(library: ctypes.PyDLL | None) -> AbstractContextManager[Any]:
    """During the block, the router uses this compiled library, or none."""
    return mock.patch.object(compiled_router, "load", lambda: library)


def measure(
    num_replicas: int, num_blocks: int, num_decisions: int, both: bool
) -> dict[str, dict[str, Any]]:
    """Measure a fleet and an index of this size. Returns a row for this installation and, if `both`, one without the
    compiled library."""
    filled = Filled(num_replicas, num_blocks)
    compiled = compiled_router.load()
    ways = {} if compiled is None else {COMPILED: compiled}
    if both or not ways:
        ways[PLAIN] = None
    taken: dict[str, list[dict[str, np.ndarray]]] = {way: [] for way in ways}
    rows: dict[str, dict[str, Any]] = {}
    for library in ways.values():
        with _by(library):
            filled.decisions(min(200, num_decisions))  # warm-up
    for _ in range(_TURNS):
        for way, library in ways.items():
            with _by(library):
                taken[way].append(filled.decisions(-(-num_decisions // _TURNS)))
    for way, library in ways.items():
        row: dict[str, Any] = {"replicas": num_replicas, "blocks": len(filled.table.index)}
        for name in _PARTS:
            row |= _percentiles(name, [turn[name] for turn in taken[way]])
        row["bytes_per_block"] = round(filled.bytes_per_block, 1)
        with _by(library):
            rates = {str(batch): round(filled.events_per_s(batch)) for batch in _BATCHES}
        rows[way] = row | {"events_per_s": rates}
    if both:
        bursts: dict[str, list[np.ndarray]] = {way: [] for way in ways}
        with filled.burst():
            for _ in range(_TURNS):
                for way, library in ways.items():
                    with _by(library):
                        decisions = filled.decisions(-(-num_decisions // _TURNS))
                    bursts[way].append(decisions["decision"])
        for way, turns in bursts.items():
            rows[way] |= _percentiles("burst", turns)
    return rows


def _percentiles(name: str, turns: list[np.ndarray]) -> dict[str, float]:
    """The columns of a row from the microseconds of several turns."""
    found = np.percentile(np.concatenate(turns), (50, 99)).tolist()
    return {f"{name}_p{p}_us": round(value, 1) for p, value in zip((50, 99), found, strict=True)}


def bars(row: dict[str, Any], path: str) -> list[Bar]:
    """Bars of the largest index and fleet."""
    events = row["events_per_s"]
    return [
        *(
            Bar(
                f"{path}/decision_p{percentile}_us",
                row[f"decision_p{percentile}_us"],
                "us",
                goal,
                details={"processor_us": row[f"decision_cpu_p{percentile}_us"]},
            )
            for percentile, goal in _GOALS_US.items()
        ),
        *(
            Bar(
                f"{path}/decision_in_burst_p{percentile}_us",
                row[f"burst_p{percentile}_us"],
                "us",
                goal,
            )
            for percentile, goal in _GOALS_US.items()
        ),
        Bar(f"{path}/index_bytes_per_block", row["bytes_per_block"], "B", 120),
        Bar(
            f"{path}/block_events_per_s",
            events["4096"],
            "/s",
            1e6,
            at_most=False,
            details={"by_blocks_in_a_report": events},
        ),
    ]


def plot(curve: list[dict[str, Any]], path: Path) -> None:
    """Plot a decision's parts against replicas and blocks, and events per second against the size of a report."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4))
    fewest, most = curve[0]["blocks"], max(row["replicas"] for row in curve)
    _plot_parts(axes[0], [row for row in curve if row["blocks"] == fewest], "replicas")
    axes[0].set_title(f"one decision, {fewest:,} blocks")
    _plot_parts(axes[1], [row for row in curve if row["replicas"] == most], "blocks")
    axes[1].set_title(f"one decision, {most:,} replicas")
    for row in curve[-1:]:
        sizes = [int(size) for size in row["events_per_s"]]
        axes[2].plot(sizes, [rate / 1e6 for rate in row["events_per_s"].values()], marker="o")
        axes[2].set_title(f"events, {row['blocks']:,} blocks")
    axes[2].set(xscale="log", xlabel="blocks in a report", ylabel="million blocks a second", ylim=0)
    axes[2].axhline(1, color="grey", linestyle=":")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _plot_parts(axis: Any, rows: list[dict[str, Any]], column: str) -> None:
    sizes = [row[column] for row in rows]
    for part in ("hash", "match", "score", "decision"):
        axis.plot(sizes, [row[f"{part}_p50_us"] for row in rows], marker="o", label=f"{part}, p50")
    axis.plot(
        sizes, [row["decision_p99_us"] for row in rows], marker="o", ls="--", label="decision, p99"
    )
    axis.axhline(_GOALS_US[50], color="grey", linestyle=":")
    axis.set(xscale="log", yscale="log", xlabel=column, ylabel="microseconds")
    axis.legend(fontsize=7)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.perf router_index", description=__doc__)
    parser.add_argument("--blocks", type=int, default=10_000_000, help="in the largest index")
    parser.add_argument("--replicas", type=int, default=1000, help="in the largest fleet")
    parser.add_argument("--decisions", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=RESULTS / "router_index.json")
    parser.add_argument("--plot", type=Path, help="only draw the result that is there")
    options = parser.parse_args()
    if options.plot is not None:
        plot(json.loads(options.out.read_text())["curve"], options.plot)
        return 0
    small = min(100_000, options.blocks)
    shapes = [(n, small) for n in _FLEETS if n < options.replicas]
    shapes += [(options.replicas, n) for n in (small, 1_000_000) if n < options.blocks]
    shapes.append((options.replicas, options.blocks))
    curve = []
    # One process per measurement, so that none reuses the memory that another has freed.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for shape in shapes:
            last = pool.apply(measure, (*shape, options.decisions, shape is shapes[-1]))
            curve.append(next(iter(last.values())))
            for row in last.values():
                print(row, file=sys.stderr, flush=True)
    command = f"python -m tests.perf router_index --blocks {options.blocks}"
    found = [bar for way, row in last.items() for bar in bars(row, way)]
    write(options.out, command, found, curve=curve, without_compiler=last[PLAIN])
    return 0


if __name__ == "__main__":
    sys.exit(main())
