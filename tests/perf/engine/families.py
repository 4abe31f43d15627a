"""Which of transformers' model types Quire serves: each as its class makes it, tiny, with random weights.

The types are those of causal classes, and of classes that take images too, whose text part is served.

    python -m tests.perf families [--only TYPE ...]
    python -m tests.perf families --variants [--only TYPE ...]
    python -m tests.perf families --ranks [--only TYPE ...]

`--variants` judges configurations of served types in other forms instead (tests/replica/proof/variants.py). `--ranks`
judges which of the served types two ranks compute as transformers does.

Each type is proven as at load (`replica/proof`). What is served is compared with `generate` as well, which the proof
does not use: greedy tokens of prompts of 5, 70 and 700 tokens, alone and in a batch. The table in docs/models.md comes
from the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from quire.cluster.bench.results.report import RESULTS, Bar, write
from quire.protos.sampling_params import SamplingParams
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.engine import Engine
from quire.replica.model.text_part import causal_model
from quire.replica.proof.model_proof import find_difference, save_random_model, tiny_entries
from quire.replica.proof.tiny_config import VOCAB_SIZE
from quire.replica.proof.verdicts import TESTED_FOR_GPU, in_ranks

LENGTHS = (5, 70, 700)
NUM_TOKENS = 12
NUM_POSITIONS = 1024
MAX_MODEL_LEN = 800
GOAL = 100
# Of 176. Refused are what a class does not take (five rope types of Phi-3), a window that Llama's class ignores, and
# attention that is not causal.
NUM_VARIANTS = 169
# Of 185. Most others have no plan in transformers.
NUM_IN_RANKS = 120

Judge = Callable[[Path], dict[str, str]]

start = functools.partial(Engine, prove=False)


def _import(name: str) -> ModuleType:
    """Import a module of the proof's tests."""
    folder = str(Path(__file__).parents[2] / "replica" / "proof")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def judge(
    entries: dict[str, Any], folder: Path, changes: dict[str, Any] | None = None
) -> dict[str, str]:
    """Prove a type, and compare it with `generate` if it is served.

    Parameters
    ----------
    changes
        Entries that the tiny model has in another form.

    Returns
    -------
    `verdict`: served, refused or wrong; `reason`, unless it is served; then `proven`: by a test, or at load only.
    """
    changes = changes or {}
    try:
        spec = ModelSpec.from_checkpoint(
            _import("families").write_config(folder / "config", entries)
        )
        difference = find_difference({**tiny_entries(spec), **changes}, "cpu", start)
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
        wrong = _differs_from_generate(
            {**tiny_entries(spec, NUM_POSITIONS), **changes}, folder / "long"
        )
    except Exception as error:  # the proof should have refused it
        wrong = f"{type(error).__name__}: {_first_line(error)}"
    if wrong:
        return {"verdict": "wrong", "reason": wrong}
    is_tested = (
        spec.architecture in TESTED_FOR_GPU
        or entries["model_type"] in _import("variants").TESTED_TYPES
    )
    return {"verdict": "served", "proven": "test" if is_tested else "load"}


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
    causal_model(model).generation_config.eos_token_id = None
    random = np.random.default_rng(9)
    prompts = [random.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    spec = ModelSpec.from_checkpoint(folder)
    options = GenerationConfig(
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        # For a window of 1, transformers' cache keeps all keys: it slices from -0.
        use_cache=1 not in spec.windows,
    )
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = causal_model(model).generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=options
        )
        expected.append(out[0, len(prompt) :].tolist())
    alone, batch = [], []
    for max_model_len, some in _by_context(prompts, spec.short_context):
        first, second = _engine_tokens(folder, max_model_len, some)
        alone += first
        batch += second
    for kind, tokens in (("alone", alone), ("in a batch", batch)):
        for length, told, right in zip(LENGTHS, tokens, expected, strict=True):
            if told != right:
                return f"a prompt of {length} tokens {kind}: {told} instead of {right}"
    return ""


def _by_context(
    prompts: list[list[int]], short_context: int | None
) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield each `max_model_len` with its prompts, shortest first.

    With `longrope`, `generate` has other factors for sequences longer than `short_context`. The engine has one set of
    factors, that of `max_model_len`.
    """
    done = 0
    for max_model_len in sorted(
        {min(short_context or MAX_MODEL_LEN, MAX_MODEL_LEN), MAX_MODEL_LEN}
    ):
        some = [prompt for prompt in prompts if done < len(prompt) + NUM_TOKENS <= max_model_len]
        if some:
            yield max_model_len, some
        done = max_model_len


def _engine_tokens(
    folder: Path, max_model_len: int, prompts: list[list[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the engine's greedy tokens of each prompt alone, and of all in one batch."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with start(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_model_len=max_model_len,
        num_blocks=120,
    ) as engine:
        alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
        return alone, [output.token_ids for output in engine.generate(prompts, params)]


def _types(only: list[str] | None) -> Iterator[tuple[str, Judge]]:
    """Yield each model type, and what judges it."""
    families = _import("families")
    types = sorted({*families.MODEL_TYPES, *families.WRAPPER_TYPES})
    for model_type in only or types:

        def run(folder: Path, model_type: str = model_type) -> dict[str, str]:
            try:
                entries = families.default_entries(model_type)
            except Exception as error:  # the class cannot be made without arguments
                return {"verdict": "no default", "reason": _first_line(error)}
            return judge(entries, folder)

        yield model_type, run


def _variants(only: list[str] | None) -> Iterator[tuple[str, Judge]]:
    """Yield each variant of the served types, and what judges it."""
    families, variants = _import("families"), _import("variants")
    for model_type in only or dict.fromkeys((*variants.VARIED_TYPES, *variants.OWN)):
        entries = families.default_entries(model_type)
        with tempfile.TemporaryDirectory(prefix="quire-families-") as folder:
            tiny = variants.tiny_of(model_type, Path(folder) / "config")
        for name, changes in variants.variants_of(model_type, tiny):
            yield (
                f"{model_type}, {name}",
                functools.partial(judge, entries, changes=changes),
            )


def _in_ranks(only: list[str] | None) -> Iterator[tuple[str, Judge]]:
    """Yield each type that one rank serves, by families.json, and what judges two ranks."""
    families = _import("families")
    verdicts = json.loads((RESULTS / "families.json").read_text())["verdicts"]
    served = [name for name, found in verdicts.items() if found["verdict"] == "served"]
    for model_type in only or served:
        entries = families.default_entries(model_type)

        def run(folder: Path, entries: dict[str, Any] = entries) -> dict[str, str]:
            try:
                spec = ModelSpec.from_checkpoint(families.write_config(folder / "config", entries))
                reason = find_difference(tiny_entries(spec), "cpu", in_ranks(start))
            except Exception as error:  # as in `judge`
                reason = f"{type(error).__name__}: {_first_line(error)}"
            return (
                {"verdict": "served"}
                if reason is None
                else {"verdict": "refused", "reason": reason}
            )

        yield model_type, run


class Kind(NamedTuple):
    """What is judged."""

    option: str
    file: str  # in the folder of results
    bar: str
    cases: Callable[[list[str] | None], Iterator[tuple[str, Judge]]]
    goal: int
    unit: str = "model types"


KINDS = (
    Kind("", "families", "families", _types, GOAL),
    Kind(
        "variants",
        "families_variants",
        "families/variants",
        _variants,
        NUM_VARIANTS,
        "configurations",
    ),
    Kind("ranks", "families_ranks", "tp/families", _in_ranks, NUM_IN_RANKS),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types")
    parser.add_argument("--variants", action="store_true", help="other forms of served types")
    parser.add_argument("--ranks", action="store_true", help="served types on two ranks")
    parser.add_argument("--output", type=Path, help="default: families.json and others")
    arguments = parser.parse_args(argv)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = next(
        (kind for kind in KINDS if kind.option and getattr(arguments, kind.option)), KINDS[0]
    )
    verdicts: dict[str, dict[str, str]] = {}
    for case, run in kind.cases(arguments.only):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="quire-families-") as folder:
            verdicts[case] = run(Path(folder))
        print(f"{case}: {verdicts[case]} {time.perf_counter() - began:.1f} s", flush=True)
    counts = Counter(entry["verdict"] for entry in verdicts.values())
    bars = [Bar(f"{kind.bar}/served", counts["served"], kind.unit, kind.goal, at_most=False)]
    if kind.cases is not _in_ranks:  # which are not compared with `generate`
        bars.append(Bar(f"{kind.bar}/wrong", counts["wrong"], kind.unit, 0))
    option = f" --{kind.option}" if kind.option else ""
    write(
        arguments.output or RESULTS / f"{kind.file}.json",
        f"python -m tests.perf families{option}",
        [dataclasses.replace(bar, details={"of": len(verdicts)}) for bar in bars],
        transformers=transformers.__version__,
        verdicts=verdicts,
    )
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
