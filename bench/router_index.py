"""Speed of one routing decision and of the index: scaling in replicas and blocks.

A decision is what `RouterService` does for each request: hash the prompt's tokens, match them in the
index, score every replica, rank. Times are of the wall clock: what else the machine does is in them, most of all in the
tail, and the load average stands in the result.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quire.bench.report import RESULTS, Bar, write
from quire.protos.wire import ROUTING_BLOCK_TOKENS, CacheEvents, Frame, Load, RoutingHasher
from quire.router.index import PrefixIndex
from quire.router.policy import RouteRequest, make_policy
from quire.router.replicas import ReplicaTable

_BATCH = 4096  # hashes in one event batch
_PROMPT_TOKENS = 16_384


class Filled:
    """A table of replicas whose caches hold `num_blocks` distinct blocks, in chains as long as prompts.

    Each chain is held to a different depth by a few replicas, as after some evictions.
    """

    def __init__(self, num_replicas: int, num_blocks: int, copies: int = 3):
        self.rng = np.random.default_rng(0)
        self.table = ReplicaTable(
            PrefixIndex(max_blocks=2 * num_blocks, leaf_first=True), lost_after_s=1e9
        )
        self.hasher = RoutingHasher("model")
        self.names = [f"replica-{i}" for i in range(num_replicas)]
        for i, name in enumerate(self.names):
            self.table.add(name, "e", 32)
            load = Load(
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
            self.table.on_frame(name, Frame("e", load=load), 0.0)
        self._seq = dict.fromkeys(self.names, 0)
        chain = _PROMPT_TOKENS // ROUTING_BLOCK_TOKENS
        pick = random.Random(0)
        self.prompts: list[np.ndarray] = []  # [tokens] int32, of the chains that are known
        before = _resident_bytes()
        for i in range(0, num_blocks, chain):
            if i % (64 * chain) == 0:
                tokens = self.rng.integers(0, 100_000, _PROMPT_TOKENS, dtype=np.int32)
                self.prompts.append(tokens)
                hashes = self.hasher.hashes(tokens)
            else:
                hashes = self.rng.integers(0, 2**63, chain, dtype=np.int64).astype(np.uint64)
            for copy, name in enumerate(pick.sample(self.names, min(copies, num_replicas))):
                self._store(name, hashes[: chain - copy * pick.randrange(chain // copies)])
        gc.collect()
        self.bytes_per_block = (_resident_bytes() - before) / max(1, len(self.table.index))

    def _store(self, name: str, hashes: np.ndarray) -> None:
        self._seq[name] += 1
        events = CacheEvents(self._seq[name], hashes, np.empty(0, np.uint64))
        self.table.index.apply(name, "e", events)

    def decisions(self, num: int) -> dict[str, np.ndarray]:
        """[num] microseconds of each part of a decision, and of all of it."""
        policy, rng = make_policy("slo"), random.Random(1)
        taken: dict[str, list[float]] = {"hash": [], "match": [], "score": [], "decision": []}
        for i in range(num):
            tokens = self.prompts[i % len(self.prompts)]
            times = [time.perf_counter()]
            hashes = self.hasher.hashes(tokens)
            times.append(time.perf_counter())
            fleet = self.table.fleet(hashes, len(tokens), 0.1)
            times.append(time.perf_counter())
            policy.choose(RouteRequest(len(tokens)), fleet, 0.1, rng)[0]
            times.append(time.perf_counter())
            for name, then, now in zip(taken, times, times[1:], strict=False):
                taken[name].append(now - then)
            taken["decision"].append(times[-1] - times[0])
        return {name: np.array(seconds) * 1e6 for name, seconds in taken.items()}

    def events_per_s(self) -> float:
        """Stored and removed blocks a second, on an index of this size."""
        fresh = self.rng.integers(0, 2**63, 50 * _BATCH, dtype=np.int64).astype(np.uint64)
        none, name = np.empty(0, np.uint64), self.names[0]

        def replay(stored: np.ndarray, removed: np.ndarray) -> None:
            self._seq[name] += 1
            self.table.index.apply(name, "e", CacheEvents(self._seq[name], stored, removed))

        batches = np.split(fresh, 50)

        def all_of_them() -> None:
            for batch in batches:
                replay(batch, none)
            for batch in batches:
                replay(none, batch)

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


def measure(num_replicas: int, num_blocks: int, num_decisions: int) -> dict[str, float]:
    filled = Filled(num_replicas, num_blocks)
    taken = filled.decisions(num_decisions)
    row = {"replicas": num_replicas, "blocks": len(filled.table.index)}
    for name, micros in taken.items():
        row[f"{name}_p50_us"] = round(float(np.percentile(micros, 50)), 1)
        row[f"{name}_p99_us"] = round(float(np.percentile(micros, 99)), 1)
    row["bytes_per_block"] = round(filled.bytes_per_block, 1)
    row["events_per_s"] = round(filled.events_per_s())
    return row


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m quire.bench router_index", description=__doc__)
    parser.add_argument("--blocks", type=int, default=10_000_000, help="in the largest index")
    parser.add_argument("--replicas", type=int, default=1000, help="in the largest fleet")
    parser.add_argument("--decisions", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=RESULTS / "router_index.json")
    options = parser.parse_args()
    small = min(100_000, options.blocks)
    shapes = [(n, small) for n in (4, 32, 256) if n < options.replicas]
    shapes += [(options.replicas, n) for n in (small, 1_000_000) if n < options.blocks]
    shapes.append((options.replicas, options.blocks))
    curve = []
    for shape in shapes:
        curve.append(measure(*shape, options.decisions))
        print(curve[-1], file=sys.stderr, flush=True)
        gc.collect()
    last = curve[-1]
    write(
        options.out,
        f"python -m quire.bench router_index --blocks {options.blocks}",
        [
            Bar("router/decision_p50_us", last["decision_p50_us"], "us", 100),
            Bar("router/decision_p99_us", last["decision_p99_us"], "us", 500),
            Bar("router/index_bytes_per_block", last["bytes_per_block"], "B", 120),
            Bar("router/block_events_per_s", last["events_per_s"], "/s", 1e6, at_most=False),
        ],
        curve=curve,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
