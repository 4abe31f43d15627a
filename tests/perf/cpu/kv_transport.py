"""KV blocks from node to node: bytes per second of the transport, and a pulled prefix against a computed one.

Two processes of this machine stand for two nodes, each with a pool of its own, so the network is the loopback: the
numbers are what the two hosts' processors allow. The goal of the bandwidth is what a router assumes before its first
pull. The second part measures the time to the first token of a prompt that the node has never seen: with its prefix
pulled from the other node, and computed, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from quire.cluster.bench.engines import checkpoints
from quire.cluster.bench.results import report
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import BlockSource, PullHint
from quire.replica.engine import Engine
from quire.replica.kv_transport.block_messages import WantedBlock
from quire.replica.kv_transport.kv_transport import KvTransport
from quire.replica.node_pool.node_pool import open_node_pool
from quire.replica.node_pool.pool_file import PoolPlace
from quire.replica.node_pool.pool_layout import KEY_BYTES, PoolLayout
from quire.replica.node_pool.slot_content import Content
from quire.replica.serving.peer_pulls import PeerPulls
from quire.replica.serving.prompt_publishing import kv_token_bytes

HOST = "127.0.0.1"
GOAL_GB_PER_S = 0.25
# A pull that takes more than half of the computed time is hardly worth its risk.
GOAL_RATIO = 0.5
SLOT_BYTES = {"64_KiB": 64 << 10, "1_MiB": 1 << 20, "8_MiB": 8 << 20}
POSITIONS = 16_384
FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@contextmanager
def exporter(run: Any, *args: Any) -> Iterator[Connection]:
    """A process that runs `run(connection, ...)` until the connection is closed."""
    context = multiprocessing.get_context("spawn")
    own, others = context.Pipe()
    process = context.Process(target=run, args=(others, *args))
    process.start()
    others.close()
    try:
        yield own
    finally:
        own.close()
        process.join(60)


def keys_of(count: int, round_number: int) -> list[bytes]:
    chance = random.Random(round_number)
    return [chance.randbytes(KEY_BYTES) for _ in range(count)]


def export_blocks(
    connection: Connection, folder: Path, layout: PoolLayout, uses_nixl: bool
) -> None:
    """Fill a pool with blocks of each round that is asked for, and answer with the processor time so far."""
    pool = open_node_pool("bench", layout, folder=folder)
    transport = KvTransport("bench", folder, layout, HOST, uses_nixl=uses_nixl)
    connection.send(tuple(transport.source))
    noise = np.frombuffer(random.Random(0).randbytes(layout.slot_bytes), np.uint8)
    try:
        while True:
            keys = keys_of(*connection.recv())
            while (slots := pool.claim(len(keys))) is None:
                time.sleep(0.001)  # the last round's are still lent
            for slot in slots:
                pool.slots[slot] = noise
            sum_ = pool.checksum(slots[0])
            pool.publish([Content(s, k, 0, sum_) for s, k in zip(slots, keys, strict=True)], slots)
            connection.send(time.process_time())
            connection.recv()
            connection.send(time.process_time())
    except EOFError:
        transport.close()
        pool.close()


def bandwidth(
    root: Path, name: str, rounds: int, num_bytes: int, *, uses_nixl: bool = False
) -> report.Bar:
    """The bar of one block size."""
    slot_bytes = SLOT_BYTES[name]
    count = num_bytes // slot_bytes
    # Room for a round's blocks, so that each round evicts the one before.
    layout = PoolLayout(count + count // 8 + 2, slot_bytes)
    kind = "transport_nixl" if uses_nixl else "transport"
    folders = [root / f"{kind}-{name}-{side}" for side in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    pool = open_node_pool("bench", layout, folder=folders[1])
    transport = KvTransport("bench", folders[1], layout, HOST, uses_nixl=uses_nixl)
    speeds, exporting, importing = [], [], []
    with exporter(export_blocks, folders[0], layout, uses_nixl) as connection:
        source = BlockSource(*connection.recv())
        for i in range(rounds + 1):
            connection.send((count, i))
            before_s = connection.recv()
            wanted = [WantedBlock(key) for key in keys_of(count, i)]
            own_s = time.process_time()
            result = transport.import_blocks(source, wanted, 120)
            own_s = time.process_time() - own_s
            assert result.num_blocks == count, result
            connection.send(None)
            exported_s = connection.recv() - before_s
            if i:  # the first one warms up
                speeds.append(1e-9 * result.num_bytes / result.seconds)
                exporting.append(1e9 * exported_s / result.num_bytes)
                importing.append(1e9 * own_s / result.num_bytes)
    transport.close()
    pool.close()
    return report.Bar(
        f"kv/{kind}_{name}",
        statistics.median(speeds),
        "GB/s",
        GOAL_GB_PER_S,
        at_most=False,
        details={
            "blocks": count,
            "gb_per_s": report.spread_json(report.Spread.of(speeds)),
            "exporter_cpu_s_per_gb": report.spread_json(report.Spread.of(exporting)),
            "importer_cpu_s_per_gb": report.spread_json(report.Spread.of(importing)),
        },
    )


def checkpoint_of(shape: str, folder: Path) -> Path:
    """A checkpoint with random weights for contexts of 16k tokens."""
    path = checkpoints.build(shape, folder)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    return path


def start_engine(model: Path, folder: Path) -> tuple[Engine, PoolPlace]:
    folder.mkdir()
    place = PoolPlace("bench", folder=folder)
    engine = Engine(
        model=str(model),
        node_pool=place,
        node_pool_gib=0.5,
        num_threads=1,
        max_model_len=POSITIONS,
        num_blocks=2 * POSITIONS // 32,
    )
    return engine, place


def prompt_of(length: int, number: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(number).integers(3, vocab_size, length).tolist()


def compute_prefixes(connection: Connection, model: Path, folder: Path) -> None:
    """Compute and publish each prompt that arrives."""
    engine, place = start_engine(model, folder)
    # As if the prompt had been computed a while ago.
    engine.call(lambda scheduler: setattr(scheduler.memory.publishing, "_rate", 1e12)).result()
    pulls = PeerPulls(engine, place, HOST)
    connection.send(tuple(pulls.source))
    try:
        while True:
            engine.generate([connection.recv()], FIRST_TOKEN, progress=False)
            while engine.call(lambda scheduler: len(scheduler.memory.publishing)).result():
                time.sleep(0.01)
            connection.send(None)
    except EOFError:
        pulls.close()
        engine.close()


def prefix(root: Path, model: Path, shape: str, length: int, rounds: int) -> report.Bar:
    """The bar of a pulled prefix."""
    engine, place = start_engine(model, root / f"{shape}-b")
    pulls = PeerPulls(engine, place, HOST)
    numbers = iter(range(10**6))
    pulled_s: list[float] = []

    def first_token_s(prompt: list[int]) -> float:
        began_s = time.perf_counter()
        engine.generate([prompt], FIRST_TOKEN, progress=False)
        return time.perf_counter() - began_s

    with exporter(compute_prefixes, model, root / f"{shape}-a") as connection:
        source = BlockSource(*connection.recv())

        def pull() -> list[float]:
            prompt = prompt_of(length, next(numbers), engine.config.vocab_size)
            connection.send(prompt)
            connection.recv()
            hint = PullHint(source, 0, length, 60.0)
            began_s = time.perf_counter()
            result = asyncio.run(pulls.run("bench", np.array(prompt), "", hint))
            assert not result.reason, result
            pulled_s.append(result.seconds)
            first_token_s(prompt)
            return [time.perf_counter() - began_s]

        def compute() -> list[float]:
            return [first_token_s(prompt_of(length, next(numbers), engine.config.vocab_size))]

        candidates = {"pulled": pull, "computed": compute}
        report.alternate(candidates, 1)  # warm-up
        pulled_s.clear()
        found = report.alternate(candidates, rounds)
    token_bytes = kv_token_bytes(engine)
    pulls.close()
    engine.close()
    medians = {which: statistics.median(values) for which, values in found.items()}
    return report.Bar(
        f"kv/pulled_prefix_{shape}",
        medians["pulled"] / medians["computed"],
        "x",
        GOAL_RATIO,
        details={
            "tokens": length,
            "bytes": length * token_bytes,
            "pulled_ttft_s": report.spread_json(report.Spread.of(found["pulled"])),
            "computed_ttft_s": report.spread_json(report.Spread.of(found["computed"])),
            "import_s": report.spread_json(report.Spread.of(pulled_s)),
        },
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["tiny"], choices=tuple(checkpoints.SHAPES))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="of each bandwidth's round")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "kv_transport.json")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory() as disk,
    ):
        root = Path(memory)
        kinds = (False, True) if importlib.util.find_spec("nixl") else (False,)
        bars = [
            bandwidth(root, name, options.rounds, options.mib << 20, uses_nixl=uses_nixl)
            for uses_nixl in kinds
            for name in SLOT_BYTES
        ]
        for shape in options.shapes:
            model = checkpoint_of(shape, Path(disk) / shape)
            bars.append(prefix(root, model, shape, options.tokens, options.rounds))
    report.write(
        options.out,
        f"python -m tests.perf kv_transport --shapes {' '.join(options.shapes)} --tokens {options.tokens} "
        f"--rounds {options.rounds} --mib {options.mib}",
        bars,
        method="two processes on one machine over the loopback; medians; pulled and computed in turns",
    )


if __name__ == "__main__":
    main()
