"""Time from a new process to its first token, and the memory that it holds after work.

    python -m tests.perf startup CHECKPOINT

A new Python process imports, loads, warms up and answers one prompt of 16 tokens; the clock starts before the process.
Then the process works until every block of its cache has been written, so that the whole cache is resident. Its peak
resident memory is compared with the size of weights and cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from quire.cluster.bench.results import report
from quire.cluster.bench.results.report import Bar, Spread, spread_json

GOAL_S = 10.0
GOAL_MB = 500.0


def child(checkpoint: str, dtype: str, kv_cache_gib: float) -> None:
    """The measured process: prints a JSON line at its first token, and one at its end."""
    from quire.protos.sampling_params import SamplingParams
    from quire.replica.engine import Engine

    with Engine(
        model=checkpoint, dtype=dtype, max_model_len=2048, kv_cache_gib=kv_cache_gib
    ) as engine:
        vocab, config = engine.config.vocab_size, engine.config
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.generate([[5 + i for i in range(16)]], params, progress=False)
        print(json.dumps({"startup_s": engine.startup_s}), flush=True)
        # The pool hands out unused blocks first, so as many tokens as the cache holds fill every block.
        length = config.max_model_len - 1
        count = -(-config.num_blocks * config.block_size // length)
        for i in range(count):
            engine.generate([[(7 * j + 13 * i) % vocab for j in range(length)]], params)
        status = Path("/proc/self/status").read_text()
        pool = engine._loop._runner.pool
        weights_bytes = _weights_bytes(engine._loop._runner.model)
        print(
            json.dumps(
                {
                    "peak_rss_bytes": 1024 * int(status.partition("VmHWM:")[2].split()[0]),
                    "weights_bytes": weights_bytes,
                    "cache_bytes": pool.data.numel() * pool.data.element_size(),
                    # The half-filled block of the last prompt was written too.
                    "blocks_without_content": engine.call(lambda s: s.load().blocks_free).result(),
                }
            ),
            flush=True,
        )


def _weights_bytes(model: Any) -> int:
    """Bytes of the parameters, and of packed weights that replace them on the CPU."""
    held = (getattr(module, "packed", None) for module in model.modules())
    packed = {id(weight): weight.num_bytes for weight in held if weight is not None}
    return sum(packed.values()) + sum(parameter.nbytes for parameter in model.parameters())


def measure(checkpoint: str, dtype: str, kv_cache_gib: float) -> dict[str, Any]:
    """Run one new process."""
    command = [sys.executable, "-m", "tests.perf.engine.startup", checkpoint, "--dtype", dtype]
    command += ["--kv-cache-gib", str(kv_cache_gib), "--child"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stdout:
            if line.startswith("{"):
                lines.append(json.loads(line) | {"at_s": time.perf_counter() - began})
    if process.returncode or len(lines) != 2:
        raise RuntimeError(f"the measured process ended with status {process.returncode}")
    first, last = lines
    return {"first_token_s": first["at_s"], "startup_s": first["startup_s"], **last}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-gib", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "startup.json")
    options = parser.parse_args()
    if options.child:
        child(options.checkpoint, options.dtype, options.kv_cache_gib)
        return
    found = [
        measure(options.checkpoint, options.dtype, options.kv_cache_gib)
        for _ in range(options.rounds)
    ]
    first_s = Spread.of([one["first_token_s"] for one in found])
    extra_mb = [
        (one["peak_rss_bytes"] - one["weights_bytes"] - one["cache_bytes"]) / 1e6 for one in found
    ]
    phases = {
        name: [round(one["startup_s"][name], 2) for one in found] for name in found[0]["startup_s"]
    }
    facts = {
        name: round(found[-1][name] / 1e6)
        for name in ("peak_rss_bytes", "weights_bytes", "cache_bytes")
    }
    bars = [
        Bar(
            "cpu/start_to_first_token_s",
            first_s.median,
            "s",
            GOAL_S,
            details={**spread_json(first_s), "phases_s": phases},
        ),
        Bar(
            "cpu/resident_beyond_weights_and_cache_mb",
            max(extra_mb),
            "MB",
            GOAL_MB,
            details={name.replace("bytes", "mb"): value for name, value in facts.items()}
            | {"blocks_without_content": found[-1]["blocks_without_content"]},
        ),
    ]
    name = Path(options.checkpoint).name
    report.write(options.out, f"python -m tests.perf startup {name}", bars, checkpoint=name)


if __name__ == "__main__":
    main()
