"""A checkpoint from another node: bytes per second, against the same copy without Ray.

    python -m tests.perf checkpoint-copy [--rounds 5]

Two Ray nodes on this machine, with homes of their own. One has the 0.6B shape in the hub's cache. In turns the other
node gets it, and one process copies it with the same functions: it reads, verifies and writes. The files are in the
page cache.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quire.cluster.bench.engines.checkpoints import build
from quire.cluster.bench.results import report
from quire.cluster.bench.results.report import Bar
from quire.replica.checkpoint.cache_folder import copies_folder
from quire.replica.checkpoint.checkpoint_copy import (
    Listing,
    Piece,
    PieceBytes,
    copy_checkpoint,
    list_checkpoint,
    read_piece,
)
from quire.replica.serving.node_checkpoints import bring_checkpoint

HUB_ID, COMMIT = "quire/halfb", "0" * 40
LEAST_RATIO = 0.5
STORE_BYTES = 256 << 20


@ray.remote(num_cpus=0)
def bring() -> float:
    """Copy the model to this node; returns the seconds."""
    began_s = time.perf_counter()
    bring_checkpoint(HUB_ID, None)
    seconds = time.perf_counter() - began_s
    shutil.rmtree(copies_folder(HUB_ID, None, weights=True))
    return seconds


@ray.remote(num_cpus=0)
def copy_alone(folder: str) -> float:
    """Copy a folder of this machine as `bring` does, in one process; returns the seconds."""
    began_s = time.perf_counter()
    listing = list_checkpoint(folder, None, True)
    assert listing is not None

    def read(pieces: Sequence[Piece], listing: Listing = listing) -> Iterator[PieceBytes]:
        return (read_piece(listing.folder, piece) for piece in pieces)

    copy_checkpoint("alone", None, listing, read, weights=True)
    seconds = time.perf_counter() - began_s
    shutil.rmtree(copies_folder("alone", None, weights=True))
    return seconds


def measure(folder: Path, rounds: int) -> tuple[list[float], list[float], int]:
    """The seconds of both kinds, and the checkpoint's bytes."""
    homes = [folder / "without", folder / "with"]
    cache = homes[1] / ".cache/huggingface/hub" / f"models--{HUB_ID.replace('/', '--')}"
    snapshot = cache / "snapshots" / COMMIT
    homes[0].mkdir()
    snapshot.parent.mkdir(parents=True)
    build("halfb", snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    num_bytes = sum(path.stat().st_size for path in snapshot.iterdir())
    offline = {"HF_HUB_OFFLINE": "1"}
    without, having = ({"HOME": str(home), **offline} for home in homes)
    options = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    nodes = Cluster(initialize_head=True, head_node_args={**options, "env_vars": without})
    try:
        nodes.add_node(**options, env_vars=having)
        nodes.wait_for_nodes()
        ray.init(nodes.address, log_to_driver=False)
        affinity = NodeAffinitySchedulingStrategy(nodes.head_node.node_id, soft=False)
        calls = [
            lambda: bring.options(scheduling_strategy=affinity).remote(),
            lambda: copy_alone.options(scheduling_strategy=affinity).remote(str(snapshot)),
        ]
        seconds: tuple[list[float], list[float]] = ([], [])
        for i in range(rounds):
            for kind in (0, 1) if i % 2 == 0 else (1, 0):
                seconds[kind].append(ray.get(calls[kind]()))
        return *seconds, num_bytes
    finally:
        ray.shutdown()
        nodes.shutdown()


def main() -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        brought_s, alone_s, num_bytes = measure(Path(folder), options.rounds)
    ratio = statistics.median(a / b for a, b in zip(alone_s, brought_s, strict=True))
    speed = num_bytes / statistics.median(brought_s) / 1e9
    details = {
        "gigabytes": round(num_bytes / 1e9, 2),
        "seconds": [round(s, 2) for s in brought_s],
        "alone_seconds": [round(s, 2) for s in alone_s],
        "gb_per_s": round(speed, 2),
    }
    goal = dict(goal=LEAST_RATIO, at_most=False, details=details)
    bars = [Bar("start/copy_from_another_node", ratio, "of a copy without Ray", **goal)]
    report.write(
        Path(__file__).parents[1] / "results" / "checkpoint_copy.json",
        "python -m tests.perf checkpoint-copy",
        bars,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
