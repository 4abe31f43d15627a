"""Cost of `deterministic: true`: tokens per second with and without it, on one core in float32.

Two engines of the same checkpoint alternate over the same requests: a prefill of four prompts, decoding a batch, and
decoding one request. The models are the embedded model and one of about 110 M random parameters. Each bar is the ratio
of the medians, with the option to without it.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from pathlib import Path

from quire.cluster.bench.results import report
from quire.protos.sampling_params import SamplingParams
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.engine import Engine

# Goals, set before the first measurement: the largest acceptable cost of bit equality.
GOALS = {"prefill": 0.5, "decode_16": 0.4, "decode_1": 0.2}
WORKLOADS = {  # number of prompts, tokens of each, new tokens of each
    "prefill": (4, 192, 1),
    "decode_16": (16, 8, 24),
    "decode_1": (1, 8, 24),
}


def build_random(folder: Path) -> Path:
    """A checkpoint of about 110 M random parameters: 12 Llama layers of 768, a vocabulary of 32k."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tokens_per_s(engine: Engine, workload: str) -> list[float]:
    """Run once; returns prompt tokens per second of a prefill, output tokens per second of decoding."""
    count, length, new = WORKLOADS[workload]
    vocab_size = engine.config.vocab_size
    prompts = [
        [3 + (7 * i + 11 * j) % (vocab_size - 3) for j in range(length)] for i in range(count)
    ]
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    engine.generate(prompts, params, progress=False)
    elapsed_s = time.perf_counter() - began
    return [count * (length if workload == "prefill" else new) / elapsed_s]


def measure(name: str, checkpoint: str, rounds: int) -> list[report.Bar]:
    """The bars of one model."""
    options = dict(
        model=checkpoint,
        dtype="float32",
        num_blocks=128,
        max_model_len=512,
        num_threads=1,
        prefix_caching=False,
    )
    bars = []
    with (
        Engine(deterministic=True, **options) as exact,
        Engine(deterministic=False, **options) as plain,
    ):
        for workload, goal in GOALS.items():
            candidates = {
                which: functools.partial(tokens_per_s, engine, workload)
                for which, engine in (("deterministic", exact), ("plain", plain))
            }
            report.alternate(candidates, 1)  # warm-up
            found = report.alternate(candidates, rounds)
            medians = {which: statistics.median(values) for which, values in found.items()}
            details = {
                f"{which}_tokens_per_s": report.spread_json(report.Spread.of(values))
                for which, values in found.items()
            }
            bars.append(
                report.Bar(
                    f"engine/deterministic_{name}_{workload}",
                    medians["deterministic"] / medians["plain"],
                    "x",
                    goal,
                    at_most=False,
                    details=details,
                )
            )
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "deterministic.json")
    args = parser.parse_args()
    bars = measure("embedded", str(CHECKPOINT), args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        bars += measure("random_110m", str(build_random(Path(folder))), args.rounds)
    report.write(
        args.out,
        f"python -m tests.perf deterministic --rounds {args.rounds}",
        bars,
        method="tokens per second of whole requests, one thread, medians; alternated",
    )


if __name__ == "__main__":
    main()
