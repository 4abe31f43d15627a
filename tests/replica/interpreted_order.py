"""One request, computed in many ways by runners whose kernels are Triton's, interpreted: does it get the same bits?

Run as a program, with TRITON_INTERPRET set before anything imports Triton: `interpreted_order.py jobs.json out.json`.
A job is {"path", "config": changes of `engine_config`}. Of each, `out` gets the ways that differed from the request
alone, proof that they were taken, and the kinds of the model's modules.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from interpreted_runner import interpreted_runner
from test_bit_equality import fresh, prompt, run

from quire.kernels.rows import matmul_fixed
from quire.kernels.rows.matmul_fixed import MatmulConfig, Tile
from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.runner.runner import Runner
from tests.kernels.compile.interpreter import repair_interpreter

LENGTH, MAX_TOKENS = 21, 4
LIMITS = dict(max_running_requests=8, max_batch_tokens=48)


def use_small_tiles() -> None:
    """Tiny weights are cut, steps of 17 tokens take another height, and those of 33 compute splits in turn."""
    matmul_fixed.MIN_SPLIT_DEPTH, matmul_fixed.PROGRAMS = 32, 2
    small = MatmulConfig(256, 32, (Tile(16, 4, 2), Tile(32, 4, 2)), Tile(32, 4, 2))
    matmul_fixed._CONFIG["sm_90"] = matmul_fixed._CONFIG_FLOAT32 = small


def asked(**changes: Any) -> Request:
    params = SamplingParams(
        max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=1, temperature=0.0
    )
    return Request("a", prompt(LENGTH), dataclasses.replace(params, **changes))


def strangers(lengths: list[int], max_tokens: int) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(("stranger", i), prompt(n, seed=100 + i), params) for i, n in enumerate(lengths)
    ]


def compare(runner: Runner) -> dict[str, Any]:
    """Ways that gave other tokens or log-probabilities than the request alone, and proof that they were taken."""
    expected = run(fresh(runner), runner, [asked()])
    assert len(expected[0]) == MAX_TOKENS and len(expected[1]) == LENGTH - 1
    found = {}
    crowd = strangers([9, 1, 13], 3)
    found["among others"] = run(fresh(runner), runner, [*crowd[:2], asked(), *crowd[2:]])
    found["in chunks of 5"] = run(fresh(runner, max_batch_tokens=5), runner, [asked()])
    scheduler = fresh(runner)
    run(scheduler, runner, [asked(max_tokens=1)])
    warm = run(scheduler, runner, [asked(prompt_logprobs=None)])
    found["after a prefix hit"] = (warm[0], expected[1])
    proof = {"hits": scheduler.book.counters.num_prefix_tokens_hit}
    scheduler = fresh(runner, num_blocks=4 * len(runner.config.groups), safety_margin=0.0)
    growing = strangers([14, 14], 5)
    found["after soft resets"] = run(scheduler, runner, [*growing, asked()])
    proof["preemptions"] = scheduler.book.counters.num_preemptions
    return {
        "different": [way for way, told in found.items() if told != expected],
        **proof,
        "workspace": sorted({name for a in runner._attentions for name in a.buffers()}),
        "modules": sorted({type(module).__name__ for module in runner.model.modules()}),
    }


def main(jobs: Path, out: Path) -> None:
    repair_interpreter()
    use_small_tiles()
    found = [
        compare(interpreted_runner(Path(job["path"]), **LIMITS, **job["config"]))
        for job in json.loads(jobs.read_text())
    ]
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
