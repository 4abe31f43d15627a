"""Recurrent layers on the CPU: Quire's kernels against the modules of transformers, in turns.

One layer of each kind at the size of a small model, with its products, in steps of 1, 16 and 64 rows that decode and of
a chunk of 512 tokens that continues a prompt. A bar is the time of the module divided by the time of the kernels. Both
get the same rows and slots; the module's rows of equal length are one batch.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.bamba.configuration_bamba import BambaConfig
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from quire.cluster.bench.results import report
from quire.kernels.cpu import native_library
from quire.kernels.recurrence import cpu_recurrence
from quire.replica.device.state_pool import StatePool
from quire.replica.model.layers.state_layers import StepCache, call_recurrent, split_state_layers
from quire.replica.model.recurrence.recurrent_fusion import fuse_recurrences
from quire.replica.model.recurrence.recurrent_mixers import RecurrenceKernels
from tests.perf.cpu.cpu_linear import CLOCKS, seconds

HIDDEN = 1024
_SIZES: dict[str, Any] = dict(
    hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8,
    num_key_value_heads=2, vocab_size=128,
)  # fmt: skip
# Heads of 128 (delta rule, lightning), and of 64 with a state of 128 (Mamba-2), in widths of checkpoints of this size.
CONFIGS = {
    "gated_delta": lambda: Qwen3_5TextConfig(
        **_SIZES, layer_types=["linear_attention"], linear_num_key_heads=16,
        linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
    ),
    "mamba2": lambda: BambaConfig(
        **_SIZES, attn_layer_indices=[], mamba_n_heads=32, mamba_d_head=64, mamba_d_state=128,
    ),
    "short_conv": lambda: Lfm2Config(**_SIZES, layer_types=["conv"]),
    "lightning": lambda: MiniMaxConfig(
        **_SIZES, layer_types=["linear_attention"], num_local_experts=1, num_experts_per_tok=1,
    ),
}  # fmt: skip
# Rows, tokens of each, and the goal for recurrences with large states.
STEPS = {
    "decode_1": (1, 1, 1.0),
    "decode_16": (16, 1, 1.5),
    "decode_64": (64, 1, 2.0),
    "chunk_512": (1, 512, 1.2),
}
# The products are nearly all of a short convolution's time.
CONV_GOAL = 1.0


def layer_of(model: nn.Module) -> nn.Module:
    """The recurrent module of a model with one."""
    (module,) = [m for m in model.modules() if getattr(m.forward, "splits_rows", False)]
    return module


def measure(kind: str, rounds: int, clock: str) -> list[report.Bar]:
    """The bars of one kind of layer."""
    models, layout = {}, []
    for name in ("module", "kernels"):
        torch.manual_seed(0)
        models[name] = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).eval()
        layout = split_state_layers(models[name])
    kernels = RecurrenceKernels(cpu_recurrence.short_conv, cpu_recurrence.state_scan)
    fused = fuse_recurrences(models["kernels"], layout, kernels)
    assert not fused.dropped, fused
    bars = []
    for step, (rows, count, goal) in STEPS.items():
        hidden = torch.randn(1, rows * count, HIDDEN)

        def run(module: nn.Module, pool: StatePool, hidden=hidden, rows=rows, count=count) -> None:
            counts = np.full(rows, count)
            cache = StepCache.of(pool, np.arange(rows), counts, counts + 512, np.empty((0, 3), int))
            call_recurrent(module, hidden, cache)

        turns = {
            name: functools.partial(
                seconds,
                CLOCKS[clock],
                functools.partial(run, layer_of(model), StatePool(layout, 64)),
            )
            for name, model in models.items()
        }
        found = report.alternate(turns, rounds)
        medians = {name: statistics.median(values) for name, values in found.items()}
        bars.append(
            report.Bar(
                f"families/recurrent_{kind}_{step}",
                medians["module"] / medians["kernels"],
                "x",
                CONV_GOAL if kind == "short_conv" else goal,
                at_most=False,
                details={f"{name}_ms": round(1e3 * value, 3) for name, value in medians.items()},
            )
        )
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="as of cpu_linear")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "families_recurrent.json")
    args = parser.parse_args()
    library = native_library.load()
    if library is None:
        parser.error("needs the compiled library: install with a C compiler")
    if args.clock == "cpu" and args.threads != 1:
        parser.error(f"--clock cpu needs --threads 1, got {args.threads}")
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        bars = [bar for kind in CONFIGS for bar in measure(kind, args.rounds, args.clock)]
    report.write(
        args.out,
        f"python -m tests.perf cpu_recurrent --rounds {args.rounds} --threads {args.threads} --clock {args.clock}",
        bars,
        instructions=native_library.ISAS[library.best_isa],
        method=f"one layer of hidden size {HIDDEN} with its products; {args.clock} time, medians, alternated",
    )


if __name__ == "__main__":
    main()
