"""Throughput of many adapters over one model, against the model alone, on the CPU.

One engine serves the same prompts in turns: all requests with the model alone, and each request with one of N adapters,
so that a batch has as many adapters as requests. The bar is the ratio of processor time for a token (the time of all
threads, which other work on the machine does not lengthen); the elapsed time is in the details.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quire.cluster.bench.engines import checkpoints
from quire.cluster.bench.results import report
from quire.protos.adapter_ref import AdapterRef
from quire.protos.sampling_params import SamplingParams
from quire.replica.core.adapter import Adapter
from quire.replica.engine import Engine

GOAL = 0.8
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WORKLOADS = {  # prompt tokens and new tokens of each request
    "decode": (16, 24),
    "chat": (96, 24),
}


def save_adapter(folder: Path, shapes: dict[str, list[int]], rank: int, seed: int) -> Path:
    """Save a random adapter of all linear layers."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (columns, depth) in shapes.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        down = torch.randn(rank, depth, generator=random) / math.sqrt(depth)
        up = torch.randn(columns, rank, generator=random) / 10
        tensors[f"{layer}.lora_A.weight"] = down.bfloat16()
        tensors[f"{layer}.lora_B.weight"] = up.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(LAYERS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def load_adapters(
    engine: Engine, checkpoint: Path, folder: Path, count: int, rank: int
) -> list[Adapter]:
    """Make and read adapters; keep the files of one at a time."""
    with safe_open(checkpoint / "model.safetensors", "pt") as stored:
        shapes = {
            name: list(stored.get_slice(name).get_shape())
            for name in stored.keys()
            if name.split(".")[-2] in LAYERS
        }
    adapters = []
    for i in range(count):
        path = save_adapter(folder / str(i), shapes, rank, i)
        adapters.append(engine.adapter(AdapterRef.of_folder(str(i), str(path))))
        (path / "adapter_model.safetensors").unlink()
    return adapters


def run_once(
    engine: Engine, adapters: list[Adapter], workload: str, num_requests: int
) -> tuple[float, float]:
    """Serve all requests at once; return output tokens per second of processor time, and per second."""
    length, new = WORKLOADS[workload]
    vocab_size = engine.config.vocab_size
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    ready = threading.Barrier(num_requests + 1)

    def request(i: int) -> None:
        prompt = [3 + (7 * i + 11 * j) % (vocab_size - 3) for j in range(length)]
        adapter = adapters[i % len(adapters)] if adapters else None
        ready.wait()
        engine.generate([prompt], params, adapter=adapter, progress=False)

    with ThreadPoolExecutor(num_requests) as pool:
        calls = [pool.submit(request, i) for i in range(num_requests)]
        ready.wait()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for call in calls:
            call.result()
        elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return num_requests * new / cpu_s, num_requests * new / elapsed_s


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="halfb", choices=tuple(checkpoints.SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "lora.json")
    options = parser.parse_args()
    bars = []
    with tempfile.TemporaryDirectory() as root:
        checkpoint = checkpoints.build(options.shape, Path(root) / "model")
        engine = Engine(
            model=str(checkpoint),
            dtype=options.dtype,
            deterministic=False,
            num_threads=options.threads,
            num_blocks=512,
            max_model_len=512,
            max_running_requests=options.requests,
            prefix_caching=False,
            max_loaded_adapters=options.adapters,
            max_adapter_rank=max(16, options.rank),
        )
        with engine:
            adapters = load_adapters(
                engine, checkpoint, Path(root) / "adapters", options.adapters, options.rank
            )
            for workload in WORKLOADS:
                bars.append(measure(engine, adapters, workload, options))
    report.write(
        options.out,
        f"python -m tests.perf lora --shape {options.shape} --rounds {options.rounds}",
        bars,
        method="tokens of whole requests per second of processor time, medians; alternated",
    )


def measure(
    engine: Engine, adapters: list[Adapter], workload: str, options: argparse.Namespace
) -> report.Bar:
    """The bar of one workload."""
    elapsed: dict[str, list[float]] = {"adapters": [], "alone": []}

    def candidate(which: str, own: list[Adapter]) -> Callable[[], list[float]]:
        def run() -> list[float]:
            per_cpu_s, per_s = run_once(engine, own, workload, options.requests)
            elapsed[which].append(per_s)
            return [per_cpu_s]

        return run

    candidates = {"adapters": candidate("adapters", adapters), "alone": candidate("alone", [])}
    report.alternate(candidates, 1)  # warm-up
    for values in elapsed.values():
        values.clear()
    found = report.alternate(candidates, options.rounds)
    medians = {which: statistics.median(values) for which, values in found.items()}
    details: dict[str, object] = {
        **{name: getattr(options, name) for name in ("shape", "dtype", "adapters", "rank")},
        **{name: getattr(options, name) for name in ("requests", "threads")},
    }
    for which, values in found.items():
        details[f"{which}_tokens_per_cpu_s"] = report.spread_json(report.Spread.of(values))
        elapsed_spread = report.Spread.of(elapsed[which])
        details[f"{which}_tokens_per_s"] = report.spread_json(elapsed_spread)
    return report.Bar(
        f"lora/{options.adapters}_adapters_{workload}",
        medians["adapters"] / medians["alone"],
        "x",
        GOAL,
        at_most=False,
        details=details,
    )


if __name__ == "__main__":
    main()
