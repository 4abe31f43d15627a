"""Parts of the GPU benchmark: sampling, batch preparation, and the fixed-tile product."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from quire.cluster.bench.results import report
from quire.kernels.attention.decode_plan import allocate_decode_workspace, plan_decode
from quire.kernels.attention.prefill_plan import plan_prefill
from quire.kernels.rows.batch_prep import apply_differences, gather_last_tokens, prepare_batch
from quire.kernels.rows.matmul_fixed import FixedProduct
from quire.kernels.sampling.log_probs import log_probs
from quire.kernels.sampling.noise import noise_keys
from quire.kernels.sampling.row_survey import Workspace
from quire.kernels.sampling.sampling_kernel import sample_tokens
from quire.kernels.tuning import BLOCK_SIZE
from tests.kernels.reference import pack_limits
from tests.perf.gpu.gpu_session import Part, Point, Row, Session, significant, worst
from tests.perf.gpu.gpu_timing import Call
from tests.perf.gpu.kernels.gpu_shapes import model_of

VOCAB = 151_936  # Qwen3
SAMPLED_ROWS = 256
# (temperature, top_k, top_p, min_p)
MODES = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "top_k_top_p": (0.8, 50, 0.95, 0.0),
    "top_p": (0.8, 0, 0.9, 0.0),
    "min_p": (0.8, 0, 1.0, 0.05),
}
LIKELY = 32  # ids per row with large logits
MAX_PASSES = 2
STEP_ROWS = 512
PREFILL_TOKENS = 8192


def sampling_points(rehearsal: bool) -> list[Point]:
    """The points: every truncation, and log-probs."""
    shape = {"rows": 2, "vocab": 300} if rehearsal else {"rows": SAMPLED_ROWS, "vocab": VOCAB}
    return [
        {"mode": mode, "dtype": dtype, **shape}
        for mode in (*MODES, "log_probs")
        for dtype in ("float32", "bfloat16")
    ]


def measure_sampling(session: Session, point: Point) -> Row:
    """Measure sampling in passes: its time divided by the time to read the logits at copy bandwidth.

    The logits are normal with deviation 2, and 32 ids of each row are larger by up to 12, as in a model. `bytes_passes`
    is the largest number of reads by the kernels, see `quire.kernels.sampling.sampling_kernel`'s docstring.
    """
    logits = _logits(session, point)
    layers = [_logits(session, point) for _ in range(session.layers(logits.nbytes) - 1)]
    calls = [_sampling_call(session, x, point["mode"]) for x in (logits, *layers)]
    ms = session.timer.one(calls).median
    truncates = point["mode"] not in ("greedy", "temperature")
    return {
        "us": significant(ms * 1e3),
        "passes": significant(ms * 1e-3 * session.copy_bytes_per_s / logits.nbytes),
        "bytes_passes": 2 if truncates else 1,
    }


def _logits(session: Session, point: Point) -> torch.Tensor:
    rows, vocab = point["rows"], point["vocab"]
    logits = session.normal(rows, vocab, dtype=torch.float32) * 2
    raised = torch.rand(rows, vocab, device=session.device).topk(LIKELY).indices
    height = torch.linspace(12, 2, LIKELY, device=session.device)
    logits.scatter_add_(1, raised, height.expand(rows, -1))
    return logits.to(getattr(torch, point["dtype"]))


def _sampling_call(session: Session, logits: torch.Tensor, mode: str) -> Call:
    (rows, vocab), device = logits.shape, session.device
    workspace = Workspace.allocate(rows, vocab, device)
    if mode == "log_probs":
        tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        out = torch.empty(rows, 41, device=device)
        return partial(
            log_probs, logits, tokens, session.ids([20] * rows), out=out, workspace=workspace
        )
    keys = noise_keys(np.arange(rows, dtype=np.uint64), np.zeros(rows, int), np.arange(rows))
    temperature, top_k, top_p, min_p = MODES[mode]
    limits = pack_limits(
        torch.full((rows,), temperature, device=device),
        session.ids([top_k] * rows),
        torch.full((rows,), top_p, device=device),
        torch.full((rows,), min_p, device=device),
    )
    return partial(
        sample_tokens,
        logits,
        limits,
        torch.from_numpy(keys.view(np.int64)).to(device),
        workspace=workspace,
        out=torch.empty(rows, dtype=torch.int64, device=device),
    )


def sampling_bars(rows: list[Row]) -> list[report.Bar]:
    """The bar of the slowest way to sample."""
    sampled = [row for row in rows if row["mode"] in MODES]
    return [worst("gpu/sampling_worst", sampled, "passes", "passes", MAX_PASSES, at_most=True)]


def step_points(rehearsal: bool) -> list[Point]:
    """The points: kernels that run once per step and move few bytes, so their microseconds count."""
    rows, tokens = (3, 40) if rehearsal else (STEP_ROWS, PREFILL_TOKENS)
    return [
        {"kernel": "prepare_batch", "rows": rows, "tokens": rows},
        {"kernel": "prepare_batch", "rows": 1, "tokens": tokens},
        {"kernel": "gather_last_tokens", "rows": rows, "tokens": rows},
        {"kernel": "apply_differences", "rows": rows, "tokens": rows},
        {"kernel": "plan_decode", "rows": rows, "tokens": rows},
        {"kernel": "plan_decode, half shared", "rows": rows, "tokens": rows},
        {"kernel": "plan_prefill", "rows": 1, "tokens": tokens},
    ]


def measure_step(session: Session, point: Point) -> Row:
    """Measure microseconds of one launch in a graph."""
    layers = 1 if session.rehearsal else 16
    spread = session.timer.one([_step_call(session, point)] * layers)
    return {"us": significant(spread.median * 1e3), "p90_us": significant(spread.p90 * 1e3)}


def _step_call(session: Session, point: Point) -> Call:
    rows, tokens = point["rows"], point["tokens"]
    model, width = model_of("Llama-3.1-8B", session.rehearsal), 64
    ids, device = session.ids, session.device
    order = ids(torch.randperm(rows))
    cu_q = ids([i * tokens // rows for i in range(rows + 1)])
    kv_len = ids([width * BLOCK_SIZE] * rows)
    tables = ids(torch.randperm(rows * width).view(rows, width))
    match point["kernel"]:
        case "prepare_batch":
            batch = dict(
                positions=ids([0] * tokens),
                kv_len=ids([0] * rows),
                slots=torch.zeros(tokens, dtype=torch.int64, device=device),
                batch_tables=torch.zeros(rows, width, dtype=torch.int32, device=device),
            )
            computed = ids([0 if tokens > rows else 1000] * rows)
            return partial(prepare_batch, order, cu_q, computed, tables, BLOCK_SIZE, **batch)
        case "gather_last_tokens":
            decodes = torch.ones(rows, dtype=torch.bool, device=device)
            return partial(
                gather_last_tokens, ids([0] * tokens), ids([7] * rows), order, cu_q, decodes
            )
        case "apply_differences":
            table = torch.zeros(rows, width, dtype=torch.int32, device=device)
            return partial(apply_differences, table, order, ids([3] * rows), ids([5] * rows))
        case "plan_decode" | "plan_decode, half shared" as kernel:
            if "shared" in kernel:
                tables[:, : width // 2] = tables[0, : width // 2]
            slots = rows * width * BLOCK_SIZE // 256
            workspace = allocate_decode_workspace(
                rows,
                slots,
                *(model.heads, model.kv_heads, model.head_dim),
                device,
                share_prefixes=True,
            )
            return partial(plan_decode, workspace, cu_q, kv_len, tables, BLOCK_SIZE)
    tiles = torch.empty(tokens + rows + 1, 2, dtype=torch.int32, device=device)
    heads = (model.heads, model.kv_heads, model.head_dim)
    return partial(plan_prefill, cu_q, kv_len, tokens, *heads, tiles=tiles)


def matmul_points(rehearsal: bool) -> list[Point]:
    """The points: output, gate-up and down products of an 8B model, in every form, with few rows and many."""
    if rehearsal:
        return [{"rows": 3, "columns": 40, "depth": 48}, {"rows": 3, "columns": 40, "depth": 520}]
    return [
        {"rows": rows, "columns": columns, "depth": depth}
        for rows in (1, 64, 256, 4096)
        for columns, depth in ((4096, 4096), (28672, 4096), (4096, 14336))
    ]


def measure_matmul(session: Session, point: Point) -> Row:
    """Measure against the vendor's product of the same operands, whose results may depend on the batch."""
    rows, columns, depth = point["rows"], point["columns"], point["depth"]
    num_bytes = 2 * (rows * depth + columns * depth + rows * columns)
    x = session.normal(rows, depth)
    weights = [session.normal(columns, depth) for _ in range(session.layers(num_bytes))]
    out = x.new_empty(rows, columns)
    spreads = session.timer.compare(
        {
            "quire": [partial(FixedProduct(weight), x, out) for weight in weights],
            "vendor": [partial(torch.mm, x, weight.T, out=out) for weight in weights],
        }
    )
    ms, vendor_ms = spreads["quire"].median, spreads["vendor"].median
    rate = 2 * rows * columns * depth / (ms * 1e-3)
    return {
        "us": significant(ms * 1e3),
        "vendor_us": significant(vendor_ms * 1e3),
        "of_vendor": significant(vendor_ms / ms),
        "tflops": significant(rate / 1e12),
        "percent_of_gemm": significant(100 * rate / session.gemm_flops_per_s),
        "percent_of_copy": significant(session.percent_of_copy(num_bytes, ms)),
    }


PARTS = (
    Part("sampling", sampling_points, measure_sampling, sampling_bars, 30),
    Part("step", step_points, measure_step, budget_s=15),
    Part("matmul_fixed", matmul_points, measure_matmul, budget_s=15),
)
