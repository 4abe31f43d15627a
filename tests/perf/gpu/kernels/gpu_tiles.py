"""Parts of the tuning benchmark: alternating candidates for the attention kernels' tiles on the same operands.

A row has the current configuration's time, the best time, and all candidates with their times and their results'
difference from the current ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch

from quire.kernels import tuning
from quire.kernels.attention.attention_prefill import prefill_attention
from quire.kernels.attention.prefill_plan import plan_prefill
from quire.kernels.tuning import Config, device_arch
from tests.perf.gpu.gpu_session import Part, Point, Row, Session, describe, significant
from tests.perf.gpu.gpu_timing import Call
from tests.perf.gpu.kernels.gpu_attention import PagedRows
from tests.perf.gpu.kernels.gpu_shapes import model_of
from tests.perf.gpu.kernels.gpu_step import MODES, VOCAB, measure_sampling

MODEL = "Llama-3.1-8B"
TODAY = "today"
MAX_OFF = 0.05  # several times the rounding of bfloat16 results of magnitude 1
BLOCK_SIZES = (32, 64)
Changes = dict[str, int]
PREFILL: dict[str, Changes] = {
    "64x64, 4 warps, 3 stages": dict(block_m=64, tile_tokens=64, num_warps=4, num_stages=3),
    "64x64, 4 warps, 2 stages": dict(block_m=64, tile_tokens=64, num_warps=4, num_stages=2),
    "64x128, 4 warps, 2 stages": dict(block_m=64, tile_tokens=128, num_warps=4, num_stages=2),
    "128x64, 8 warps, 3 stages": dict(block_m=128, tile_tokens=64, num_warps=8, num_stages=3),
    "128x128, 8 warps, 2 stages": dict(block_m=128, tile_tokens=128, num_warps=8, num_stages=2),
    "128x128, 8 warps, 3 stages": dict(block_m=128, tile_tokens=128, num_warps=8, num_stages=3),
}
DECODE: dict[str, Changes] = {
    "7 stages": dict(num_stages=7),
    "4 programs": dict(programs_per_sm=4),
    "tile 64": dict(tile_tokens=64, num_warps=8, num_stages=4, programs_per_sm=2),
    "split 512": dict(split_tokens=512),
    "merge 4": dict(merge_unroll=4),
    "merge 8": dict(merge_unroll=8),
    "merge 4, 16 programs": dict(merge_unroll=4, merge_programs_per_sm=16),
    "merge 8, 16 programs": dict(merge_unroll=8, merge_programs_per_sm=16),
}
_SHAPE = ("block_size", "tokens", "batch", "context")  # keys of a row that describe the point
# The interpreter takes about a millisecond per operation.
_TINY_PREFILL: dict[str, Changes] = {"32x16": dict(block_m=32, tile_tokens=16)}
_TINY_DECODE: dict[str, Changes] = {"tile 16": dict(tile_tokens=16)}


def prefill_points(rehearsal: bool) -> list[Point]:
    """The points: one new request, with the engine's default block size and larger ones."""
    sizes, lengths = ((32,), (40,)) if rehearsal else (BLOCK_SIZES, (8192, 2048))
    return [{"block_size": size, "tokens": length} for length in lengths for size in sizes]


def decode_points(rehearsal: bool) -> list[Point]:
    """The points: many rows, some long rows, one row."""
    sizes = (32,) if rehearsal else BLOCK_SIZES
    shapes = ((2, 70),) if rehearsal else ((64, 1088), (256, 1088), (16, 8192), (1, 65536))
    return [
        {"block_size": size, "batch": batch, "context": context}
        for batch, context in shapes
        for size in sizes
    ]


def sampling_points(rehearsal: bool) -> list[Point]:
    """The points: few rows and many, since the kernel's grid depends on them."""
    vocab = 300 if rehearsal else VOCAB
    modes = ("greedy",) if rehearsal else [mode for mode in MODES if mode != "min_p"]
    return [
        {"mode": mode, "dtype": "bfloat16", "rows": rows, "vocab": vocab}
        for rows in ((2,) if rehearsal else (1, 16, 256))
        for mode in modes
    ]


def measure_prefill(session: Session, point: Point) -> Row:
    """Measure microseconds of each candidate, and TFLOP/s of the current and the best one."""
    model, tokens = model_of(MODEL, session.rehearsal), point["tokens"]
    rows = PagedRows(session, model, [tokens], point["block_size"])
    pages = rows.pages[0]
    q = session.normal(tokens, model.heads, model.head_dim)
    cu_q = session.ids([0, tokens])
    heads = (model.heads, model.kv_heads, model.head_dim)

    def calls(config: Config) -> tuple[list[Call], torch.Tensor]:
        out = torch.empty_like(q)
        plan = plan_prefill(cu_q, rows.kv_len, tokens, *heads, config=config)
        call = partial(
            *(prefill_attention, q, pages[:, 0], pages[:, 1], rows.tables, rows.scale, plan),
            out=out,
        )
        return [call], out

    row = _compare(session, prefill_configs(session), calls)
    flops = 2 * model.heads * model.head_dim * tokens * (tokens + 1)
    return row | {
        "tflops": significant(flops / row["us"] / 1e6),
        "best_tflops": significant(flops / row["best_us"] / 1e6),
    }


def measure_decode(session: Session, point: Point) -> Row:
    """Measure microseconds of each candidate, and percent of the copy of the current and the best one."""
    model = model_of(MODEL, session.rehearsal)
    rows = PagedRows(session, model, [point["context"]] * point["batch"], point["block_size"])

    def calls(config: Config) -> tuple[list[Call], torch.Tensor]:
        rows.out = torch.empty_like(rows.q)
        return rows.calls(rows.plan(session, model, config=config)), rows.out

    row = _compare(session, decode_configs(session), calls)
    num_bytes = rows.tokens * model.token_bytes + 2 * rows.q.nbytes
    percent = partial(session.percent_of_copy, num_bytes)
    return row | {
        "percent_of_copy": significant(percent(row["us"] / 1e3)),
        "best_percent_of_copy": significant(percent(row["best_us"] / 1e3)),
    }


def prefill_configs(session: Session) -> dict[str, Config]:
    """The calls of the current configuration and the candidates."""
    today = tuning.prefill_config(*_arch_and_head(session), torch.bfloat16)
    return with_changes(today, _TINY_PREFILL if session.rehearsal else PREFILL)


def decode_configs(session: Session) -> dict[str, Config]:
    """The calls of the current configuration and the candidates."""
    today = tuning.decode_config(*_arch_and_head(session), torch.bfloat16)
    return with_changes(today, _TINY_DECODE if session.rehearsal else DECODE)


def _arch_and_head(session: Session) -> tuple[str, int]:
    return device_arch(session.device), model_of(MODEL, session.rehearsal).head_dim


def with_changes(today: Config, changes: dict[str, Changes]) -> dict[str, Config]:
    """The current configuration and the candidates that differ from it."""
    changed = {name: replace(today, **fields) for name, fields in changes.items()}
    return {TODAY: today} | {name: config for name, config in changed.items() if config != today}


def _compare(
    session: Session,
    configs: dict[str, Config],
    calls_of: Callable[[Config], tuple[list[Call], torch.Tensor]],
) -> Row:
    """Times of the candidates that run, and the errors of the others.

    Raises
    ------
    Exception
        The current configuration failed; in a rehearsal any configuration.
    """
    usable: dict[str, list[Call]] = {}
    candidates: dict[str, Row] = {}
    expected: torch.Tensor | None = None
    for name, config in configs.items():
        try:
            calls, out = calls_of(config)
            calls[0]()
            expected = out.clone() if expected is None else expected
            off = float((out.float() - expected.float()).abs().max())
            session.timer.capture(calls)
        except Exception as error:
            if session.rehearsal or name == TODAY:
                raise
            candidates[name] = {"error": describe(error)}
            continue
        candidates[name] = {"off": significant(off)}
        usable[name] = calls
    for name, spread in session.timer.compare(usable).items():
        candidates[name]["us"] = significant(spread.median * 1e3)
    fit = {name: row["us"] for name, row in candidates.items() if _is_right(row)}
    best = min(fit, key=lambda name: fit[name])
    return {"us": fit[TODAY], "best": best, "best_us": fit[best], "candidates": candidates}


def _is_right(candidate: Row) -> bool:
    """Whether a candidate ran and its results equal the current ones up to rounding; NaN does not."""
    return candidate.get("off", math.inf) <= MAX_OFF


def best_overall(rows: list[Row]) -> tuple[str, float]:
    """The candidate with the best mean over the rows, and its speed relative to the current configuration.

    A candidate must be correct in every row. The geometric mean weighs long and short rows equally.
    """
    gains = {}
    for name in rows[0]["candidates"]:
        found = [row["candidates"].get(name, {}) for row in rows]
        if all(map(_is_right, found)):
            logs = [math.log(row["us"] / x["us"]) for row, x in zip(rows, found, strict=True)]
            gains[name] = math.exp(sum(logs) / len(logs))
    best = max(gains, key=lambda name: gains[name])
    return best, gains[best]


def entry(arch: str, head_dim: int, config: Any) -> str:
    """A configuration as a line of `kernels/tuning.py`."""
    values = ", ".join(map(str, astuple(config)))
    return f'("{arch}", {head_dim}): {type(config).__name__}({values}),'


def summary(session: Session, rows: dict[str, list[Row]]) -> str:
    """Format all candidates' times, then the faster entries for `kernels/tuning.py`."""
    lines, entries = [], []
    tables = {"prefill_tiles": prefill_configs, "decode_tiles": decode_configs}
    for part, configs_of in tables.items():
        measured = [row for row in rows.get(part, []) if "candidates" in row]
        for row in measured:
            shape = ", ".join(f"{k} {v}" for k, v in row.items() if k in _SHAPE)
            lines.append(f"{part}, {shape}: today {row['us']:g} us, best {row['best']}")
            lines += [f"  {name:28}{_candidate(x)}" for name, x in row["candidates"].items()]
        configs = configs_of(session)
        for size in dict.fromkeys(row["block_size"] for row in measured):
            of_size = [row for row in measured if row["block_size"] == size]
            best, gain = best_overall(of_size)
            line = entry(*_arch_and_head(session), configs[best])
            entries.append(f"{line}  # {best}, blocks of {size}: {gain:.3f} times as fast")
    return "\n".join([*lines, "kernels/tuning.py:", *entries])


def _candidate(row: Row) -> str:
    return row["error"] if "error" in row else f"{row['us']:10g} us   off {row['off']:g}"


PARTS = (
    Part("prefill_tiles", prefill_points, measure_prefill, budget_s=50),
    Part("decode_tiles", decode_points, measure_decode, budget_s=70),
    Part("sampling", sampling_points, measure_sampling, budget_s=20),
)
