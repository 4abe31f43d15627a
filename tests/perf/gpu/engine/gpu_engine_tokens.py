"""Part of the engine's GPU benchmark: tokens compared with transformers' `generate`.

In float32 the tokens must be equal. In bfloat16 two logits may differ by less than the rounding of the products, and
then both tokens are correct. The test is therefore the distance of the chosen token's logit from the largest logit *in
float32*, with the same bfloat16 weights and the same preceding tokens. The allowed distance is measured: twice the
largest deviation of transformers' own bfloat16 logits from the float32 logits at the same positions, because two logits
with that deviation each may change order.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from quire.cluster.bench.results import report
from quire.protos.sampling_params import SamplingParams
from quire.replica.engine import Engine
from tests.perf.gpu import gpu_tiny_models
from tests.perf.gpu.engine.gpu_crowd import random_prompts
from tests.perf.gpu.gpu_session import Part, Point, Row, Session, free_memory, significant, worst

ARCHITECTURES = ("llama", "qwen3", "mistral", "gemma3")
# The cache has so few blocks that requests preempt each other and are restored from the host in any order of arrival.
_TIGHT_BLOCKS = {"llama": 44, "qwen3": 44, "mistral": 30, "gemma3": 34}
_TIGHT: dict[str, Any] = dict(
    node_pool_gib=0.25,
    max_model_len=176,
    max_batch_tokens=128,
    safety_margin=0.0,
    resume_margin=0.0,
)
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no graphs": {"cuda_graphs": "off"},
    "step by step": {"async_batching": "off"},
    "neither": {"cuda_graphs": "off", "async_batching": "off"},
    "offload": _TIGHT,
    "offload, neither": {**_TIGHT, "cuda_graphs": "off", "async_batching": "off"},
}
DTYPES = ("float32", "bfloat16")
PROMPTS = (5, 17, 40, 64, 65, 90, 120, 31)  # lengths in tokens
NEW_TOKENS = 48


def tokens_points(rehearsal: bool) -> list[Point]:
    """Every architecture with every setting in both dtypes; only a few in a rehearsal.

    Points of one setting follow each other, so that every architecture has some rows if the time ends early.
    """
    if rehearsal:
        return [
            {"model": "llama", "dtype": "float32", "setting": "offload"},
            {"model": "gemma3", "dtype": "float32", "setting": "default"},
            {"model": "qwen3", "dtype": "bfloat16", "setting": "step by step"},
        ]
    return [
        {"model": name, "dtype": dtype, "setting": setting}
        for setting in SETTINGS
        for dtype in DTYPES
        for name in ARCHITECTURES
    ]


@dataclass(frozen=True)
class Reference:
    """A temporary checkpoint with transformers' models and answers."""

    folder: tempfile.TemporaryDirectory
    model: torch.nn.Module  # in the checkpoint's dtype
    exact: torch.nn.Module  # the same weights in float32
    prompts: list[list[int]]
    answers: list[list[int]]


@functools.lru_cache(maxsize=len(ARCHITECTURES) * len(DTYPES))
def reference(name: str, dtype: str, device: str) -> Reference:
    """Random weights, prompts, and the answers of `generate`."""
    folder = tempfile.TemporaryDirectory(prefix="quire-bench-")
    gpu_tiny_models.write(name, Path(folder.name), getattr(torch, dtype))
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder.name, dtype=getattr(torch, dtype)).to(device).eval()
    model.generation_config.eos_token_id = None  # neither engine ends early
    exact = load(folder.name, dtype=torch.float32).to(device).eval()
    vocab_size = gpu_tiny_models.VOCAB_SIZE
    prompts = [random_prompts(1, length, vocab_size, length)[0] for length in PROMPTS]
    answers = []
    for ids in prompts:
        out = model.generate(
            torch.tensor([ids], device=device),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        answers.append(out[0, len(ids) :].tolist())
    return Reference(folder, model, exact, prompts, answers)


def measure_tokens(session: Session, point: Point) -> Row:
    """Count requests with other tokens than those of `generate`, and in bfloat16 the tokens beyond the margin.

    Raises
    ------
    RuntimeError
        The setting had no effect: nothing was offloaded, or no graph was replayed.
    """
    found = reference(point["model"], point["dtype"], session.device.type)
    # Small, because the reference is in the same memory and many engines are created.
    options = {"block_size": 16, "max_model_len": 512, "kv_cache_gib": 0.25}
    options |= {"max_running_requests": 16, "node_pool_gib": 0.0}
    options |= SETTINGS[point["setting"]]
    if point["setting"].startswith("offload"):
        options |= {"num_blocks": _TIGHT_BLOCKS[point["model"]], "kv_cache_gib": None}
    with Engine(
        model=found.folder.name,
        device=session.device.type,
        dtype=point["dtype"],
        fuse="auto",
        **options,
    ) as engine:
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        outputs = [out.token_ids for out in engine.generate(found.prompts, params, progress=False)]
        load, told = engine.load(), engine.telemetry()
    free_memory()
    row: Row = {
        "requests": len(outputs),
        "different": sum(a != b for a, b in zip(outputs, found.answers, strict=True)),
        "offloads": load.num_offloads,
        "restores": load.num_restores,
        "replays": told.get("graphs", {}).get("num_hits", 0),
    }
    _check_setting(point["setting"], "graphs" in told, row)
    if point["dtype"] == "bfloat16":
        row |= _margins(found, outputs)
    return row


def _check_setting(setting: str, may_replay: bool, row: Row) -> None:
    if setting.startswith("offload") and not (row["offloads"] and row["restores"]):
        raise RuntimeError(f"{setting}: no request gave way and came back; the cache is too large")
    may_replay = may_replay and SETTINGS[setting].get("cuda_graphs") != "off"
    if may_replay != bool(row["replays"]):
        raise RuntimeError(f"{setting}: {row['replays']} steps were replayed as graphs")


@torch.inference_mode()
def _margins(found: Reference, outputs: list[list[int]]) -> Row:
    """Distances of the chosen tokens from the best ones in float32, and transformers' own deviation."""
    deviation, gaps = 0.0, []
    for prompt, output in zip(found.prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output], device=found.exact.device)
        first, last = (
            len(prompt) - 1,
            ids.shape[1] - 1,
        )  # positions of the logits that chose the output
        exact = found.exact(ids).logits[0, first:last]
        rounded = found.model(ids).logits[0, first:last].float()
        deviation = max(deviation, float((rounded - exact).abs().max()))
        gap = exact.max(dim=1).values - exact.gather(1, ids[0, len(prompt) :, None])[:, 0]
        gaps += gap.tolist()
    margin = 2 * deviation
    return {
        "margin": significant(margin),
        "worst_gap": significant(max(gaps)),
        "tokens": len(gaps),
        "beyond_margin": sum(gap > margin for gap in gaps),
    }


def tokens_bars(rows: list[Row]) -> list[report.Bar]:
    exact = [row for row in rows if row["dtype"] == "float32"]
    rounded = [row for row in rows if row["dtype"] == "bfloat16"]
    return [
        worst("gpu/engine/different_tokens", exact, "different", "requests", 0, at_most=True),
        worst("gpu/engine/beyond_tie_margin", rounded, "beyond_margin", "tokens", 0, at_most=True),
    ]


TOKENS = Part("tokens", tokens_points, measure_tokens, tokens_bars, budget_s=200)
