"""The node's pool: what publishing costs decoding, what is left after a SIGKILL, what sharing saves, and damage.

| part | measures |
|---|---|
| publishing | decoding with publishing on and off, in turns in one engine: tokens per second of processor time |
| sigkill | a child decodes under contexts of 8k tokens and is killed; hits of a new engine for all its streams |
| sharing | eight engines with one pool, and with a private tier of an eighth each; the same requests, in turns |
| damage | blocks with torn writes, flipped bits, stale or foreign headers, wrong lengths: the number that was used |

The contexts of `sigkill` are longer than the embedded model's, so its config is changed to 16k positions.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire.cluster.bench.results import report
from quire.protos.sampling_params import SamplingParams
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.engine import Engine
from quire.replica.node_pool.pool_file import PoolPlace

ROOT = Path(__file__).parents[3]
BLOCK_SIZE = 32
OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "block_size": BLOCK_SIZE}
NUM_ENGINES = 8


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(length)]


# -- publishing --------------------------------------------------------------------------------------------


def publishing(folder: Path, options: argparse.Namespace) -> list[report.Bar]:
    """Decoding with publishing on against off."""
    bars, rng = [], random.Random(1)
    place = PoolPlace("publishing", folder=folder)
    with Engine(model="embedded", node_pool=place, node_pool_gib=0.25, **OPTIONS) as engine:
        own = engine.call(lambda scheduler: scheduler.memory.publishing).result()

        def turn(num_rows: int, num_tokens: int, is_on: bool) -> tuple[float, float]:
            def switch(scheduler: Any) -> None:
                scheduler.memory.publishing = own if is_on else None

            engine.call(switch).result()
            prompts = [random_prompt(rng, 16) for _ in range(num_rows)]
            began_cpu_s, began_s = time.process_time(), time.perf_counter()
            engine.generate(prompts, greedy(num_tokens), progress=False)
            cpu_s, elapsed_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
            # What is left is published while the engine is idle, and does not count.
            while is_on and len(own):
                time.sleep(0.01)
            return num_rows * num_tokens / cpu_s, num_rows * num_tokens / elapsed_s

        for num_rows, num_tokens in ((1, 512), (16, 192), (64, 128)):
            turn(num_rows, num_tokens, True), turn(num_rows, num_tokens, False)
            before = own.num_published
            found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for n in range(options.rounds):
                # Each goes first in every second round.
                for is_on in (n % 2 == 0, n % 2 == 1):
                    found[is_on].append(turn(num_rows, num_tokens, is_on))
            by_cpu, by_clock = (
                statistics.median(on[i] / off[i] for on, off in zip(*found.values(), strict=True))
                for i in (0, 1)
            )
            spreads = {
                f"{'on' if is_on else 'off'}_tokens_per_cpu_s": report.spread_json(
                    report.Spread.of([by_cpu_s for by_cpu_s, _ in values])
                )
                for is_on, values in found.items()
            }
            details = {
                "elapsed_ratio": round(by_clock, 4),
                "blocks_filled": options.rounds * num_rows * (num_tokens + 15) // BLOCK_SIZE,
                "blocks_published": own.num_published - before,
                **spreads,
            }
            name = f"kv/publishing_decode_{num_rows}"
            bars.append(report.Bar(name, by_cpu, "x", 0.98, at_most=False, details=details))
    return bars


# -- sigkill -----------------------------------------------------------------------------------------------


def long_model(folder: Path) -> Path:
    """The embedded model with 16k positions."""
    shutil.copytree(CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 16384
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def long_engine(model: Path, pool: Path) -> Engine:
    return Engine(
        model=str(model),
        node_pool=PoolPlace("sigkill", folder=pool),
        node_pool_gib=0.25,
        num_blocks=3000,
        max_model_len=10_000,
        prove=False,
        **OPTIONS,
    )


def stream_until_killed(model: Path, pool: Path, num_streams: int) -> None:
    """In the child: print the tokens of each stream so far, again and again."""
    rng = random.Random(2)
    with long_engine(model, pool) as engine:
        outputs: list[list[int]] = [[] for _ in range(num_streams)]

        def stream(i: int, prompt: list[int]) -> None:
            for output in engine.stream(prompt, greedy(1800)):
                outputs[i] += output.token_ids

        for i in range(num_streams):
            prompt = random_prompt(rng, 8000)
            threading.Thread(target=stream, args=(i, prompt), daemon=True).start()
        while True:
            time.sleep(0.02)
            print(json.dumps(outputs), flush=True)


def sigkill(folder: Path, options: argparse.Namespace) -> list[report.Bar]:
    """Hits of an engine that starts after a SIGKILL, in its first second."""
    num_streams = 8
    model, pool = long_model(folder / "model"), folder / "pool"
    pool.mkdir()
    arguments = ["--child", str(model), str(pool), str(num_streams)]
    command = [sys.executable, "-m", "tests.perf", "node_pool", *arguments]
    shares, waits_s, lost = [], [], []
    for _ in range(max(1, options.rounds // 10)):
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert child.stdout is not None
        try:
            began_s = None
            for line in child.stdout:
                streamed = json.loads(line)
                if began_s is None and all(streamed):
                    began_s = time.monotonic()
                # All have their first token, and go on for two seconds.
                if began_s is not None and time.monotonic() - began_s > 2:
                    break
        finally:
            child.kill()
            child.wait()
        rng = random.Random(2)
        continued = [random_prompt(rng, 8000) + tokens for tokens in streamed]
        with long_engine(model, pool) as engine:
            ready_s = time.monotonic()
            engine.generate(continued, greedy(1), progress=False)
            waits_s.append(time.monotonic() - ready_s)
            found = engine.snapshot()["prefix"]
            engine.check()
        shares.append(found["tokens_hit"] / found["tokens_queried"])
        lost.append((found["tokens_queried"] - found["tokens_hit"]) / num_streams)
    details = {
        "streams": num_streams,
        "context_tokens": [len(ids) for ids in continued],
        "tokens_lost_per_stream": [round(n, 1) for n in lost],
        "s_from_ready_to_all_first_tokens": [round(s, 3) for s in waits_s],
        "shares": [round(share, 4) for share in shares],
    }
    return [report.Bar("kv/sigkill_hits", min(shares), "", 0.95, at_most=False, details=details)]


# -- sharing -----------------------------------------------------------------------------------------------


def sharing(folder: Path, options: argparse.Namespace) -> list[report.Bar]:
    """Prompt tokens that eight engines compute, with one pool and with private tiers of the same total size."""
    total_gib, num_prefixes, prefix_len, suffix_len = 0.064, 24, 1024, 64
    rng = random.Random(3)
    prefixes = [random_prompt(rng, prefix_len) for _ in range(num_prefixes)]
    rounds = [
        [rng.choice(prefixes) + random_prompt(rng, suffix_len) for _ in range(NUM_ENGINES)]
        for _ in range(30)
    ]
    computed, elapsed_s = {}, {}
    for name in ("shared", "isolated"):
        with ExitStack() as stack:
            is_shared = name == "shared"
            engines = [
                stack.enter_context(
                    Engine(
                        model="embedded",
                        node_pool=PoolPlace("sharing", folder=folder) if is_shared else None,
                        node_pool_gib=total_gib / (1 if is_shared else NUM_ENGINES),
                        num_blocks=80,
                        max_model_len=1280,
                        max_running_requests=4,
                        **OPTIONS,
                    )
                )
                for _ in range(NUM_ENGINES)
            ]
            threads = stack.enter_context(ThreadPoolExecutor(NUM_ENGINES))

            def serve(engine: Engine, prompt: list[int]) -> None:
                engine.generate([prompt], greedy(8), progress=False)

            began_s = time.perf_counter()
            for prompts in rounds:
                list(threads.map(serve, engines, prompts))
            elapsed_s[name] = time.perf_counter() - began_s
            found = [engine.snapshot()["prefix"] for engine in engines]
            computed[name] = sum(f["tokens_queried"] - f["tokens_hit"] for f in found)
            for engine in engines:
                engine.check()
    num_requests = len(rounds) * NUM_ENGINES
    details = {
        "engines": NUM_ENGINES,
        "total_gib": total_gib,
        "prefixes": num_prefixes,
        "prefix_tokens": prefix_len,
        "prompt_tokens": num_requests * (prefix_len + suffix_len),
        **{f"{name}_computed_tokens": count for name, count in computed.items()},
        **{f"{name}_requests_per_s": round(num_requests / s, 2) for name, s in elapsed_s.items()},
    }
    value = computed["shared"] / computed["isolated"]
    return [report.Bar("kv/sharing_prefill", value, "x", 0.5, details=details)]


# -- damage ------------------------------------------------------------------------------------------------


def damage(folder: Path, options: argparse.Namespace) -> list[report.Bar]:
    """Damaged blocks that are used, which the test's function finds out by their bytes."""
    for part in ("tests/replica", "tests/replica/node_pool"):
        sys.path.insert(0, str(ROOT / part))
    from test_pool_deaths import damage_and_adopt

    found = damage_and_adopt(folder, options.blocks, seed=2)
    details = {"damaged": options.blocks, "found_in_the_index": found}
    return [report.Bar("kv/damaged_blocks_used", 0, "blocks", 0, details=details)]


PARTS = {
    "publishing": publishing,
    "sigkill": sigkill,
    "sharing": sharing,
    "damage": damage,
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=30, help="turns of `publishing`")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="damaged blocks")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "node_pool.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        model, pool, num_streams = options.child
        stream_until_killed(Path(model), Path(pool), int(num_streams))
    bars = []
    for name in options.only:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            bars += PARTS[name](Path(folder), options)
    report.write(options.out, "python -m tests.perf node_pool", bars)


if __name__ == "__main__":
    main()
