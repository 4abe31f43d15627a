"""Parts of the GPU benchmark for norm, activation and KV write; their roof is the copy bandwidth."""

from __future__ import annotations

from functools import partial

import torch

from quire.cluster.bench.results import report
from quire.kernels.rows.activation import gelu_tanh_mul, silu_mul
from quire.kernels.rows.kv_write import write_kv
from quire.kernels.rows.norm import rms_norm
from quire.kernels.tuning import BLOCK_SIZE
from tests.perf.gpu.gpu_session import Part, Point, Row, Session, significant, worst
from tests.perf.gpu.gpu_timing import Call
from tests.perf.gpu.kernels.gpu_shapes import MODELS, Model, model_of

TOKENS = (4096, 16384, 512)
BAR_TOKENS = 4096  # least tokens for the bars
BAR_PERCENT = 85
ROPE_POSITIONS = 8192


def _tokens(rehearsal: bool) -> tuple[int, ...]:
    return (3,) if rehearsal else TOKENS


def _found(session: Session, calls: list[Call], num_bytes: float) -> Row:
    spread = session.timer.one(calls)
    return {
        "us": significant(spread.median * 1e3),
        "gb_per_s": significant(num_bytes / spread.median / 1e6),
        "percent_of_copy": significant(session.percent_of_copy(num_bytes, spread.median)),
    }


def _bar(name: str, rows: list[Row]) -> list[report.Bar]:
    required = [row for row in rows if row["tokens"] >= BAR_TOKENS]
    return [worst(name, required, "percent_of_copy", "%", BAR_PERCENT)]


def norm_points(rehearsal: bool) -> list[Point]:
    """The points: add + RMSNorm in both forms with the models' hidden sizes."""
    return [
        {"tokens": tokens, "hidden": hidden, "form": form}
        for tokens in _tokens(rehearsal)
        for hidden in sorted({model.hidden for model in MODELS.values()})
        for form in ("llama", "gemma")
    ]


def measure_norm(session: Session, point: Point) -> Row:
    """Measure a norm, which reads or writes four tensors of [tokens, hidden]."""
    tokens, hidden = point["tokens"], point["hidden"]
    num_bytes = 8 * tokens * hidden
    weight = session.normal(hidden)

    def call() -> Call:
        x, residual = session.normal(tokens, hidden), session.normal(tokens, hidden)
        return partial(
            rms_norm,
            x,
            weight,
            1e-6,
            residual=residual,
            gemma=point["form"] == "gemma",
            out=torch.empty_like(x),
            residual_out=torch.empty_like(x),
        )

    return _found(session, [call() for _ in range(session.layers(num_bytes))], num_bytes)


def activation_points(rehearsal: bool) -> list[Point]:
    """The points: SiLU and GELU with the models' intermediate sizes."""
    return [
        {"tokens": tokens, "size": size, "form": form}
        for tokens in _tokens(rehearsal)
        for size in sorted({model.intermediate for model in MODELS.values()})
        for form in ("silu", "gelu")
    ]


def measure_activation(session: Session, point: Point) -> Row:
    """Measure an activation, which reads two tensors of [tokens, size] and writes one."""
    tokens, size = point["tokens"], point["size"]
    function = gelu_tanh_mul if point["form"] == "gelu" else silu_mul
    num_bytes = 6 * tokens * size

    def call() -> Call:
        gate_up = session.normal(tokens, 2 * size)
        return partial(function, gate_up, out=gate_up.new_empty(tokens, size))

    return _found(session, [call() for _ in range(session.layers(num_bytes))], num_bytes)


def kv_write_points(rehearsal: bool) -> list[Point]:
    """The points: every model's heads and norm, with a bfloat16 and an FP8 cache."""
    return [
        {"tokens": tokens, "model": model, "cache": cache}
        for tokens in _tokens(rehearsal)
        for model in MODELS
        for cache in ("bfloat16", "float8_e4m3fn")
    ]


def measure_kv_write(session: Session, point: Point) -> Row:
    """Measure the KV write: q, k and v are read and written, k and v to randomly ordered slots; tables are in L2."""
    model, tokens = model_of(point["model"], session.rehearsal), point["tokens"]
    dtype = getattr(torch, point["cache"])
    per_head = 2 * 2 * model.heads + 2 * model.kv_heads * (2 + dtype.itemsize)
    num_bytes = tokens * (model.head_dim * per_head + 8 + 4)
    options = _kv_options(session, model, tokens, dtype)
    calls = [
        _kv_call(session, model, tokens, dtype, options) for _ in range(session.layers(num_bytes))
    ]
    return _found(session, calls, num_bytes)


def _kv_options(
    session: Session, model: Model, tokens: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    angle = session.normal(ROPE_POSITIONS, model.head_dim, dtype=torch.float32)
    options = {
        "positions": session.ids(torch.randint(0, ROPE_POSITIONS, (tokens,))),
        "cos": angle.cos(),
        "sin": angle.sin(),
    }
    if model.qk_norm:
        options |= {name: session.normal(model.head_dim) for name in ("q_norm", "k_norm")}
    if dtype == torch.float8_e4m3fn:
        ones = torch.ones(model.kv_heads, device=session.device)
        options |= {"k_scale": ones, "v_scale": ones}
    return options


def _kv_call(
    session: Session,
    model: Model,
    tokens: int,
    dtype: torch.dtype,
    options: dict[str, torch.Tensor],
) -> Call:
    heads = (model.heads, model.kv_heads, model.kv_heads)
    q, k, v = session.normal(tokens, sum(heads), model.head_dim).split(heads, dim=1)
    blocks = -(-tokens // BLOCK_SIZE)
    shape = (blocks, 2, model.kv_heads, BLOCK_SIZE, model.head_dim)
    cache = torch.empty(shape, dtype=dtype, device=session.device)
    slots = torch.randperm(blocks * BLOCK_SIZE)[:tokens].to(session.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return partial(write_kv, q, k, v, cache[:, 0], cache[:, 1], slots, q_out=out, **options)


PARTS = (
    Part("kv_write", kv_write_points, measure_kv_write, partial(_bar, "gpu/kv_write_worst"), 15),
    Part("norm", norm_points, measure_norm, partial(_bar, "gpu/norm_worst"), 10),
    Part(
        "activation",
        activation_points,
        measure_activation,
        partial(_bar, "gpu/activation_worst"),
        10,
    ),
)
