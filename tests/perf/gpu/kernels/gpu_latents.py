"""Part of the GPU benchmark: decode of latent attention, where all heads read one latent of each token."""

from __future__ import annotations

from functools import partial

import torch

from quire.kernels.attention.attention_decode import decode_attention
from quire.kernels.attention.decode_plan import allocate_decode_workspace, plan_decode
from quire.kernels.tuning import SPLIT_TOKENS
from tests.perf.gpu.gpu_session import Part, Point, Row, Session, significant
from tests.perf.gpu.kernels.gpu_attention import PagedRows
from tests.perf.gpu.kernels.gpu_shapes import Model

# Of DeepSeek V2 and V3: elements of a latent, and of the rotated part behind it.
RANK, ROTATED = 512, 64
HEADS = (16, 128)  # of V2 Lite and of V3


def latent_points(rehearsal: bool) -> list[Point]:
    """The points: few and many heads, by batch and context."""
    if rehearsal:
        return [{"heads": 20, "batch": 2, "context": 40}]
    return [
        {"heads": heads, "batch": batch, "context": context}
        for batch, context in ((64, 4096), (16, 16384), (1, 131_072), (256, 1024))
        for heads in HEADS
    ]


def measure_latents(session: Session, point: Point) -> Row:
    """Measure GB/s of latents, queries and results, and TFLOP/s."""
    heads, batch, context = point["heads"], point["batch"], point["context"]
    width = RANK + ROTATED
    model = Model(heads, 1, width, hidden=0, intermediate=0, qk_norm=False)
    rows = PagedRows(session, model, [context] * batch)
    workspace = allocate_decode_workspace(
        *(batch, batch * -(-context // SPLIT_TOKENS), heads, 1, width, session.device),
        value_dim=RANK,
        values_in_keys=True,
    )
    plan = plan_decode(workspace, rows.cu_q, rows.kv_len, rows.tables, rows.block_size)
    out = torch.empty(batch, heads, RANK, dtype=rows.q.dtype, device=session.device)
    # What would be keys and values of one layer are the latents of two.
    latents = [pages[:, half] for pages in rows.pages for half in (0, 1)]
    calls = [
        partial(
            decode_attention,
            rows.q,
            cache,
            cache[..., :RANK],
            rows.tables,
            rows.scale,
            plan,
            out=out,
        )
        for cache in latents
    ]
    ms = session.timer.compare({"quire": calls})["quire"].median
    num_bytes = rows.tokens * width * 2 + rows.q.nbytes + out.nbytes
    flops = 2 * heads * (width + RANK) * rows.tokens
    return {
        "us": significant(ms * 1e3),
        "gb_per_s": significant(num_bytes / ms / 1e6),
        "percent_of_copy": significant(session.percent_of_copy(num_bytes, ms)),
        "tflops": significant(flops / ms / 1e9),
    }


LATENTS = Part("latent_decode", latent_points, measure_latents, budget_s=20)
