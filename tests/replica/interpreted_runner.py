"""Logits of runners whose kernels are Triton's, interpreted on the CPU: what a GPU runs, without one.

Run as a program, with TRITON_INTERPRET set before anything imports Triton: `interpreted_runner.py jobs.json out.npz`.
A job is {"name", "path", "config": changes of `engine_config`}. Of each, `out` gets the logits of a few
prompts and what the fuse pass reports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from step_driver import Driver, engine_config

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.kv_scales import read_kv_scales
from quire.replica.model.loader import load_model
from quire.replica.runner.runner import Runner
from tests.kernels.compile.interpreter import repair_interpreter

LENGTHS = (20, 1, 7)
CHUNK = 10


def logits_of(runner: Runner, steps: int = 1) -> np.ndarray:
    """[prompts * steps, vocab] of prompts in chunks, mixed with greedy decoding after them."""
    driver = Driver(runner)
    rng = np.random.default_rng(3)
    sequences = [driver.add(rng.integers(3, 173, n).tolist(), 3) for n in LENGTHS]
    driver.generate(sequences, steps, CHUNK)
    return np.stack([row for s in sequences for row in s.logits])


def interpreted_runner(path: Path, **changes: object) -> Runner:
    """As a GPU's, on the CPU; its pool poisoned with NaN."""
    spec = ModelSpec.from_checkpoint(path)
    config = engine_config(spec, **{"dtype": "bfloat16", "deterministic": False, **changes})
    model = load_model(spec, "cpu", config.dtype, config.weights)
    pool = KVPool(
        config.num_blocks,
        spec.groups,
        config.block_size,
        getattr(torch, config.pool_dtype),
        scales=read_kv_scales(spec) if config.kv_cache_dtype == "fp8" else None,
    )
    runner = Runner(config, spec, model, pool, attention_backend="triton")
    pool.poison()
    return runner


def main(jobs: Path, out: Path) -> None:
    repair_interpreter()
    found = {}
    for job in json.loads(jobs.read_text()):
        runner = interpreted_runner(Path(job["path"]), **job["config"])
        found[job["name"]] = logits_of(runner)
        found[f"{job['name']} report"] = np.array(json.dumps(runner.fused.to_dict()))
    np.savez(out, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
