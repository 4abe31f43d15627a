"""The parts of `gpu_engine`: tokens against transformers, decode steps, prefill, and the start."""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from quire.bench import checkpoints, report
from quire.bench.gpu_session import Part, Point, Row, Session, significant, worst
from quire.protos.wire import SamplingParams
from quire.replica.engine import Engine

_COMMON = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=0,
)
ARCHITECTURES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON),
    "mistral": lambda: transformers.MistralConfig(**_COMMON, sliding_window=64),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_COMMON, sliding_window=64, query_pre_attn_scalar=64
    ),
}
# A cache of few blocks, so that requests give way to each other and come back from the host.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no graphs": {"cuda_graphs": "off"},
    "step by step": {"async_batching": "off"},
    "offload": {"num_blocks": 44, "cpu_offload_gib": 0.25, "max_model_len": 256},
}
PROMPTS = (5, 17, 40, 64, 65, 90, 120, 31)  # tokens
NEW_TOKENS = 48
CONTEXT = 1024
STEPS = (8, 72)  # the difference is what is measured


def parts(folder: Path) -> list[Part]:
    """In the order in which they run.

    Parameters
    ----------
    folder
        Where checkpoints of random weights are kept.
    """
    measured = (("decode", decode_points, measure_decode, decode_bars),)
    measured += (("prefill", prefill_points, measure_prefill, prefill_bars),)
    measured += (("start", start_points, measure_start, start_bars),)
    return [
        Part("tokens", tokens_points, measure_tokens, tokens_bars, budget_s=240),
        *(
            Part(name, points, functools.partial(measure, folder), bars, budget_s=240)
            for name, points, measure, bars in measured
        ),
    ]


def _random_ids(rows: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, vocab_size, (rows, length)).tolist()


def _generate(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [output.token_ids for output in engine.generate(prompts, params, progress=False)]


# -- tokens --------------------------------------------------------------------------------------------------


def tokens_points(rehearsal: bool) -> list[Point]:
    """Every architecture with every setting; two of each in a rehearsal."""
    names, settings = list(ARCHITECTURES), list(SETTINGS)
    if rehearsal:
        names, settings = ["llama"], ["default", "offload"]
    return [{"model": name, "setting": setting} for name in names for setting in settings]


@functools.cache
def _reference(
    name: str, device: str
) -> tuple[tempfile.TemporaryDirectory, list[list[int]], list[list[int]]]:
    """A checkpoint in float32, gone with the process; prompts, and what `generate` continues them with."""
    folder = tempfile.TemporaryDirectory(prefix="quire-bench-")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        ARCHITECTURES[name](), dtype=torch.float32
    )
    model.save_pretrained(folder.name)
    model = model.to(device).eval()
    prompts = [_random_ids(1, length, 512, length)[0] for length in PROMPTS]
    answers = []
    for ids in prompts:
        out = model.generate(
            torch.tensor([ids], device=device),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        answers.append(out[0, len(ids) :].tolist())
    return folder, prompts, answers


def measure_tokens(session: Session, point: Point) -> Row:
    """How many requests are answered with other tokens than by `generate`, both in float32."""
    folder, prompts, expected = _reference(point["model"], session.device.type)
    options = {"block_size": 16, "max_model_len": 512, **SETTINGS[point["setting"]]}
    with Engine(
        model=folder.name, device=session.device.type, dtype="float32", fuse="auto", **options
    ) as engine:
        # Nothing that either of them leaves out: `generate` is asked not to end early too.
        params = SamplingParams(
            max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=False
        )
        outputs = engine.generate(prompts, params, progress=False)
        told = engine.telemetry()
    differ = sum(out.token_ids != ids for out, ids in zip(outputs, expected, strict=True))
    graphs = told.get("graphs", {})
    return {"different": differ, "requests": len(prompts), "replays": graphs.get("num_hits", 0)}


def tokens_bars(rows: list[Row]) -> list[report.Bar]:
    return [worst("gpu/engine/different_tokens", rows, "different", "requests", 0, at_most=True)]


# -- speed ---------------------------------------------------------------------------------------------------


def _engine(session: Session, folder: Path, model: str, **options: Any) -> Engine:
    dtype = "float32" if session.rehearsal else "bfloat16"
    path = checkpoints.build(model, folder / f"{model}-{dtype}", dtype)
    return Engine(model=str(path), device=session.device.type, dtype=dtype, **options)


def _shape(model: str) -> tuple[int, int]:
    """Parameters that a step reads, the embedding once as the output head; elements of KV of a token."""
    s = checkpoints.SHAPES[model]
    hidden, heads, kv = s["hidden_size"], s["num_attention_heads"], s["num_key_value_heads"]
    attention = hidden * s["head_dim"] * (2 * heads + 2 * kv)
    layer = attention + 3 * hidden * s["intermediate_size"]
    parameters = s["num_hidden_layers"] * layer + checkpoints.VOCAB_SIZE * hidden
    return parameters, 2 * s["num_hidden_layers"] * kv * s["head_dim"]


def decode_points(rehearsal: bool) -> list[Point]:
    """The batches that the bars are about, the small model first: its steps show the host."""
    if rehearsal:
        return [{"model": "tiny", "rows": 2, "context": 32}]
    return [
        {"model": model, "rows": rows, "context": CONTEXT}
        for model in ("halfb", "8b")
        for rows in (1, 64, 128, 256)
    ]


def measure_decode(folder: Path, session: Session, point: Point) -> Row:
    """A decode step beside reading weights and KV at the measured copy's speed."""
    rows, context = point["rows"], point["context"]
    short, long = (2, 6) if session.rehearsal else STEPS
    options = dict(max_model_len=context + long + 1, max_running_requests=rows)
    prompts = _random_ids(rows, context, checkpoints.VOCAB_SIZE, rows)
    with _engine(session, folder, point["model"], **options) as engine:
        _generate(engine, prompts, short)  # from here on the prompts are cached
        times = {}
        for max_tokens in (short, long):
            before = engine.telemetry()
            began = time.perf_counter()
            _generate(engine, prompts, max_tokens)
            times[max_tokens] = time.perf_counter() - began
        told = engine.telemetry()
    step_ms = 1e3 * (times[long] - times[short]) / (long - short)
    parameters, kv_elements = _shape(point["model"])
    num_bytes = 2 * (parameters + kv_elements * rows * (context + (short + long) / 2))
    # A copy reads and writes: its bandwidth counts both.
    floor_ms = 1e3 * num_bytes / session.copy_bytes_per_s
    row = {"ms": significant(step_ms), "percent_of_floor": significant(100 * floor_ms / step_ms)}
    return row | _device_facts(before, told)


def _device_facts(before: dict[str, Any], told: dict[str, Any]) -> Row:
    """Of the steps between two readings; nothing where work runs when it is queued."""
    if "device" not in told:
        return {}
    was, now = before["device"], told["device"]
    gaps = now["num_gaps"] - was["num_gaps"]
    total_us = now["gap_us"] * now["num_gaps"] - was["gap_us"] * was["num_gaps"]
    return {
        "gap_us": significant(total_us / max(gaps, 1)),
        "padding_percent": significant(100 * told["graphs"]["padding"]),
        "misses": told["graphs"]["num_misses"] - before["graphs"]["num_misses"],
        **{name: significant(value) for name, value in told["host"].items() if name != "num_steps"},
    }


def decode_bars(rows: list[Row]) -> list[report.Bar]:
    return [
        worst("gpu/engine/decode_percent_of_floor", rows, "percent_of_floor", "%", 85),
        worst("gpu/engine/decode_gap_us", rows, "gap_us", "us", 50, at_most=True),
    ]


def prefill_points(rehearsal: bool) -> list[Point]:
    """8k tokens in two prompts: the shapes' limit is 4096 positions."""
    if rehearsal:
        return [{"model": "tiny", "prompts": 1, "tokens": 64}]
    return [{"model": "8b", "prompts": 2, "tokens": 4000}]


def measure_prefill(folder: Path, session: Session, point: Point) -> Row:
    """The share of the measured matrix product's speed."""
    count, length = point["prompts"], point["tokens"]
    options = dict(max_model_len=length + 8, max_running_requests=count, prefix_caching=False)
    with _engine(session, folder, point["model"], **options) as engine:
        seconds = []
        for seed in range(4):
            prompts = _random_ids(count, length, checkpoints.VOCAB_SIZE, seed)
            began = time.perf_counter()
            _generate(engine, prompts, 1)
            seconds.append(time.perf_counter() - began)
    parameters, _ = _shape(point["model"])
    shape = checkpoints.SHAPES[point["model"]]
    width = shape["num_attention_heads"] * shape["head_dim"] * shape["num_hidden_layers"]
    flops = count * (2 * parameters * length + 2 * width * length**2)
    rate = flops / float(np.median(seconds[1:]))
    return {
        "tokens_per_s": significant(count * length / float(np.median(seconds[1:]))),
        "percent_of_gemm": significant(100 * rate / session.gemm_flops_per_s),
    }


def prefill_bars(rows: list[Row]) -> list[report.Bar]:
    return [worst("gpu/engine/prefill_percent_of_gemm", rows, "percent_of_gemm", "%", 65)]


def start_points(rehearsal: bool) -> list[Point]:
    """A checkpoint that lies on the disk already."""
    return [{"model": "tiny" if rehearsal else "8b"}]


def measure_start(folder: Path, session: Session, point: Point) -> Row:
    """From nothing to the first token, in this process: imports are not in it."""
    dtype = "float32" if session.rehearsal else "bfloat16"
    checkpoints.build(point["model"], folder / f"{point['model']}-{dtype}", dtype)
    began = time.perf_counter()
    with _engine(session, folder, point["model"]) as engine:
        _generate(engine, [[3, 4, 5]], 1)
        total = time.perf_counter() - began
        phases = {f"{name}_s": significant(s) for name, s in engine.startup_s.items()}
    return {"seconds": significant(total), **phases}


def start_bars(rows: list[Row]) -> list[report.Bar]:
    return [worst("gpu/engine/start_to_first_token_s", rows, "seconds", "s", 25, at_most=True)]
