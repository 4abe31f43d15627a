"""Which of transformers' causal model types Quire serves: each as its class makes it, tiny, with random weights.

    python -m tests.perf families [--only TYPE ...]

Each type is proven as at load (`replica/proof`). What is served is compared with `generate` as well, which the proof
does not use: greedy tokens of prompts of 5, 70 and 700 tokens, alone and in a batch. The table in docs/models.md comes
from the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from quire.cluster.bench.results.report import RESULTS, Bar, write
from quire.protos.wire import SamplingParams
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.engine import Engine
from quire.replica.proof.model_proof import find_difference, save_random_model, tiny_entries

LENGTHS = (5, 70, 700)
NUM_TOKENS = 12
NUM_POSITIONS = 1024
GOAL = 100

start = functools.partial(Engine, prove=False)


def _families() -> ModuleType:
    path = Path(__file__).parents[2] / "replica" / "proof" / "families.py"
    spec = importlib.util.spec_from_file_location("families", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(model_type: str, entries: dict[str, Any], folder: Path) -> dict[str, str]:
    """Prove a type, and compare it with `generate` if it is served.

    Returns
    -------
    `verdict`: served, refused or wrong; `reason`, unless it is served.
    """
    families = _families()
    try:
        spec = ModelSpec.from_checkpoint(families.write_config(folder / "config", entries))
        tiny = tiny_entries(spec)
        difference = find_difference(tiny, "cpu", start)
    except CheckpointError as error:
        reason = _first_line(error).replace(f"{folder / 'config'}/", "")
        return {"verdict": "refused", "reason": reason}
    except (
        Exception
    ) as error:  # each class fails in its own way; a replica refuses it with this text
        return {"verdict": "refused", "reason": f"{type(error).__name__}: {_first_line(error)}"}
    if difference is not None:
        return {"verdict": "refused", "reason": difference}
    try:
        wrong = _differs_from_generate(tiny_entries(spec, NUM_POSITIONS), folder / "long")
    except Exception as error:  # the proof should have refused it
        wrong = f"{type(error).__name__}: {_first_line(error)}"
    return {"verdict": "wrong", "reason": wrong} if wrong else {"verdict": "served"}


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:200]


def _differs_from_generate(tiny: dict[str, Any], folder: Path) -> str:
    """Return how greedy tokens differ from transformers' `generate`; empty: they do not."""
    import torch
    from transformers import GenerationConfig

    folder.mkdir()
    model = save_random_model(tiny, folder)
    # Else it ends a sequence, whatever the options say.
    model.generation_config.eos_token_id = None
    random = np.random.default_rng(9)
    prompts = [random.integers(3, tiny["vocab_size"], length).tolist() for length in LENGTHS]
    options = GenerationConfig(
        max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        expected.append(out[0, len(prompt) :].tolist())
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with start(
        model=str(folder), device="cpu", dtype="float32", max_model_len=800, num_blocks=120
    ) as engine:
        alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
        batch = [output.token_ids for output in engine.generate(prompts, params)]
    for kind, tokens in (("alone", alone), ("in a batch", batch)):
        for length, told, right in zip(LENGTHS, tokens, expected, strict=True):
            if told != right:
                return f"a prompt of {length} tokens {kind}: {told} instead of {right}"
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types")
    parser.add_argument("--output", type=Path, default=RESULTS / "families.json")
    arguments = parser.parse_args(argv)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    families = _families()
    verdicts: dict[str, dict[str, str]] = {}
    for model_type in arguments.only or families.MODEL_TYPES:
        began = time.perf_counter()
        try:
            entries = families.default_entries(model_type)
        except Exception as error:  # the class cannot be made without arguments
            verdicts[model_type] = {"verdict": "no default", "reason": _first_line(error)}
            continue
        with tempfile.TemporaryDirectory(prefix="quire-families-") as folder:
            verdicts[model_type] = judge(model_type, entries, Path(folder))
        print(
            f"{model_type}: {verdicts[model_type]} {time.perf_counter() - began:.1f} s", flush=True
        )
    counts = Counter(entry["verdict"] for entry in verdicts.values())
    bars = [
        Bar("families/served", counts["served"], "model types", GOAL, at_most=False),
        Bar("families/wrong", counts["wrong"], "model types", 0),
    ]
    write(
        arguments.output,
        "python -m tests.perf families",
        [dataclasses.replace(bar, details={"of": len(verdicts)}) for bar in bars],
        transformers=transformers.__version__,
        verdicts=verdicts,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
