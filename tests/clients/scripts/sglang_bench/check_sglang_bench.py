"""SGLang's `bench_serving`, chat and completions.

The wheel's benchmark runs as it is. The packages above it import torch and the engine, so they are put in place without
their `__init__`. Of the engine's module there is the one constant that the benchmark takes.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

from checks import Count, Target, run

REQUESTS = 16
OUTPUT_LEN = 16


def _import_serving() -> types.ModuleType:
    root = Path(importlib.util.find_spec("sglang").origin).parent
    for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    engine = types.ModuleType("sglang.srt.disaggregation.utils")
    engine.FAKE_BOOTSTRAP_HOST = ""
    sys.modules[engine.__name__] = engine
    return importlib.import_module("sglang.benchmark.serving")


SERVING = _import_serving()


def _count(target: Target, backend: str) -> Count:
    """Successful requests, where the numbers of tokens are right."""
    path = target.work / f"{backend}.jsonl"
    sys.argv = ["bench_serving", "--backend", backend, "--base-url", target.url]
    sys.argv += ["--model", target.tokenizer, "--served-model-name", target.model]
    sys.argv += ["--dataset-name", "random-ids", "--random-range-ratio", "1"]
    sys.argv += ["--random-input-len", "32", "--random-output-len", str(OUTPUT_LEN)]
    sys.argv += ["--num-prompts", str(REQUESTS), "--max-concurrency", "8", "--disable-tqdm"]
    sys.argv += ["--output-file", str(path), "--output-details"]
    SERVING.cli_main()
    results = json.loads(path.read_text())
    facts = {name: results[name] for name in ("completed", "total_output_tokens")}
    num = sum(n == OUTPUT_LEN for n in results["output_lens"])
    is_summed = results["total_output_tokens"] == REQUESTS * OUTPUT_LEN
    return Count(min(num, results["completed"]) if is_summed else 0, REQUESTS, "requests", facts)


def completions(target: Target) -> Count:
    return _count(target, "sglang-oai")


def chat(target: Target) -> Count:
    return _count(target, "sglang-oai-chat")


run([completions, chat])
