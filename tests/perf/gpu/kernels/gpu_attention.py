"""Attention parts of the GPU benchmark: decode, prefill, and decode with shared prefixes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from quire.cluster.bench.results import report
from quire.kernels.attention.attention_decode import decode_attention
from quire.kernels.attention.attention_prefill import prefill_attention
from quire.kernels.attention.decode_plan import DecodePlan, allocate_decode_workspace, plan_decode
from quire.kernels.attention.prefill_plan import plan_prefill
from quire.kernels.tuning import BLOCK_SIZE, DecodeConfig, decode_config, device_arch
from tests.perf.gpu.gpu_session import Part, Point, Row, Session, describe, significant, worst
from tests.perf.gpu.gpu_timing import Call
from tests.perf.gpu.kernels.gpu_peers import decode_peers, paged_decode_peers, prefill_peers
from tests.perf.gpu.kernels.gpu_shapes import ATTENTION_MODELS, LENGTHS, Model, model_of

PeerMaker = Callable[[], dict[str, list[Call]]]

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
LONG_CONTEXTS = (65536, 131072)  # for a single row, which has no other point above `BAR_TOKENS`
PREFILLS = (8192, 512, 1024, 2048, 4096, 16384, 32768)
PEER_BATCHES = (1, 16, 128)  # batch sizes at which peers are measured, with uniform lengths
BAR_TOKENS = 64 * 1024  # least tokens of a batch for the decode bar
BAR_PREFILL = 8192


def decode_points(rehearsal: bool) -> list[Point]:
    """The points: every batch and context, first the large batches of the bars."""
    models = ATTENTION_MODELS[:1] if rehearsal else ATTENTION_MODELS
    batches, contexts = ((2,), (96,)) if rehearsal else (BATCHES, CONTEXTS)
    points = [
        {"model": model, "lengths": lengths, "batch": batch, "context": context}
        for model in models
        for batch in batches
        for context in (*contexts, *(LONG_CONTEXTS if batch == 1 else ()))
        for lengths in (LENGTHS if batch > 1 else ("uniform",))
    ]
    return sorted(points, key=lambda p: p["batch"] * p["context"] < BAR_TOKENS)


class PagedRows:
    """Rows of given lengths over a permuted pool, with one layer per call of a candidate."""

    def __init__(
        self, session: Session, model: Model, lengths: list[int], block_size: int = BLOCK_SIZE
    ):
        self.lengths = lengths
        self.block_size = block_size
        self.tokens = sum(lengths)
        self.layers = session.layers(self.tokens * model.token_bytes)
        counts = torch.tensor([-(-length // block_size) for length in lengths])
        blocks = int(counts.sum())
        size = block_size * model.head_dim * model.kv_heads * 2
        # The layout of the engine's pool: a block holds all layers.
        pool = session.pool(blocks * self.layers * size).view(
            blocks, self.layers, 2, model.kv_heads, block_size, model.head_dim
        )
        self.pages = [pool[:, layer] for layer in range(self.layers)]
        tables = torch.zeros(len(lengths), int(counts.max()), dtype=torch.int32)
        tables[torch.arange(tables.shape[1])[None] < counts[:, None]] = torch.randperm(blocks).int()
        self.tables = session.ids(tables)
        self.kv_len = session.ids(lengths)
        self.cu_q = session.ids(range(len(lengths) + 1))
        self.q = session.normal(len(lengths), model.heads, model.head_dim)
        self.out = torch.empty_like(self.q)
        self.scale = model.head_dim**-0.5

    def plan(
        self,
        session: Session,
        model: Model,
        share_prefixes: bool = False,
        config: DecodeConfig | None = None,
    ) -> DecodePlan:
        """A plan with slots for every split, with the current configuration or another one."""
        arch = device_arch(session.device)
        config = config or decode_config(arch, model.head_dim, torch.bfloat16)
        slots = sum(-(-length // config.split_tokens) for length in self.lengths)
        workspace = allocate_decode_workspace(
            len(self.lengths),
            slots,
            *(model.heads, model.kv_heads, model.head_dim),
            session.device,
            share_prefixes=share_prefixes,
            config=config,
        )
        return plan_decode(workspace, self.cu_q, self.kv_len, self.tables, self.block_size)

    def calls(self, plan: DecodePlan) -> list[Call]:
        """One call per layer."""
        return [
            partial(
                decode_attention,
                self.q,
                pages[:, 0],
                pages[:, 1],
                self.tables,
                self.scale,
                plan,
                out=self.out,
            )
            for pages in self.pages
        ]


def measure_decode(session: Session, point: Point) -> Row:
    """Measure GB/s of keys, values, queries and results; at some batch sizes also the peers'."""
    model = model_of(point["model"], session.rehearsal)
    rows = PagedRows(session, model, LENGTHS[point["lengths"]](point["batch"], point["context"]))
    makers: dict[str, PeerMaker] = {}
    if point["lengths"] == "uniform" and (session.rehearsal or point["batch"] in PEER_BATCHES):
        flat = session.pool(2 * rows.layers * rows.tokens * model.kv_heads * model.head_dim)
        context = point["context"]
        makers = {
            "contiguous": lambda: decode_peers(rows.q, flat, model.kv_heads, context, rows.layers),
            "paged": lambda: paged_decode_peers(rows.q, rows.pages, rows.tables, rows.lengths),
        }
    peers, failed = _usable(session, makers)
    spreads = session.timer.compare({"quire": rows.calls(rows.plan(session, model)), **peers})
    num_bytes = rows.tokens * model.token_bytes + 2 * rows.q.nbytes

    def found(ms: float) -> dict[str, float]:
        return {
            "us": significant(ms * 1e3),
            "gb_per_s": significant(num_bytes / ms / 1e6),
            "percent_of_copy": significant(session.percent_of_copy(num_bytes, ms)),
        }

    own = spreads.pop("quire")
    return {
        **found(own.median),
        "p90_us": significant(own.p90 * 1e3),
        **_peer_rows({name: found(spread.median) for name, spread in spreads.items()}, failed),
    }


def decode_bars(rows: list[Row]) -> list[report.Bar]:
    """Bars per model and kind of lengths: the slowest batch of at least 64k tokens."""
    return [
        worst(
            f"gpu/decode/{model}_{lengths}",
            [
                row
                for row in rows
                if (row["model"], row["lengths"]) == (model, lengths)
                and row["batch"] * row["context"] >= BAR_TOKENS
            ],
            "percent_of_copy",
            "%",
            90,
        )
        for model in ATTENTION_MODELS
        for lengths in LENGTHS
    ]


def prefill_points(rehearsal: bool) -> list[Point]:
    """One fresh request of each length."""
    models = ATTENTION_MODELS[1:] if rehearsal else ATTENTION_MODELS
    return [
        {"model": model, "tokens": tokens}
        for tokens in ((40,) if rehearsal else PREFILLS)
        for model in models
    ]


def measure_prefill(session: Session, point: Point) -> Row:
    """Measure TFLOP/s of causal attention, counting only visible (query, key) pairs."""
    model, tokens = model_of(point["model"], session.rehearsal), point["tokens"]
    rows = PagedRows(session, model, [tokens])
    # Flops grow with the square of the length, so beyond 4k tokens one call is long enough.
    rows.pages = rows.pages[: max(4096 // tokens, 1)]
    layers = len(rows.pages)
    q = session.normal(tokens, model.heads, model.head_dim)
    out = torch.empty_like(q)
    cu_q = session.ids([0, tokens])
    plan = plan_prefill(cu_q, rows.kv_len, tokens, model.heads, model.kv_heads, model.head_dim)
    own = [
        partial(
            prefill_attention,
            q,
            pages[:, 0],
            pages[:, 1],
            rows.tables,
            rows.scale,
            plan,
            out=out,
        )
        for pages in rows.pages
    ]
    flat = session.pool(2 * layers * tokens * model.kv_heads * model.head_dim)
    peers, failed = _usable(
        session, {"contiguous": lambda: prefill_peers(q, flat, model.kv_heads, layers)}
    )
    spreads = session.timer.compare({"quire": own, **peers})
    flops = 2 * model.heads * model.head_dim * tokens * (tokens + 1)

    def found(ms: float) -> dict[str, float]:
        rate = flops / (ms * 1e-3)
        return {
            "us": significant(ms * 1e3),
            "tflops": significant(rate / 1e12),
            "percent_of_gemm": significant(100 * rate / session.gemm_flops_per_s),
        }

    mine = spreads.pop("quire")
    return {
        **found(mine.median),
        **_peer_rows({name: found(spread.median) for name, spread in spreads.items()}, failed),
    }


def prefill_bars(rows: list[Row]) -> list[report.Bar]:
    """Bars of TFLOP/s at 8k tokens."""
    return [
        worst(
            f"gpu/prefill/{model}_8k",
            [row for row in rows if (row["model"], row["tokens"]) == (model, BAR_PREFILL)],
            "tflops",
            "TFLOP/s",
            450,
        )
        for model in ATTENTION_MODELS
    ]


def shared_points(rehearsal: bool) -> list[Point]:
    """The points: rows with a shared prefix and some own tokens."""
    if rehearsal:
        return [{"model": "Qwen3-0.6B", "batch": 2, "prefix": 256, "own": 20}]
    return [
        {"model": model, "batch": batch, "prefix": prefix, "own": 512}
        for model in ATTENTION_MODELS
        for batch in (16, 64, 256)
        for prefix in (2048, 8192, 32768)
    ]


def measure_shared(session: Session, point: Point) -> Row:
    """Measure decode with and without sharing, and the time to read every distinct key once."""
    model, batch = model_of(point["model"], session.rehearsal), point["batch"]
    rows = PagedRows(session, model, [point["prefix"] + point["own"]] * batch)
    common = point["prefix"] // BLOCK_SIZE
    rows.tables[:, :common] = rows.tables[0, :common]
    spreads = session.timer.compare(
        {
            "apart": rows.calls(rows.plan(session, model)),
            "shared": rows.calls(rows.plan(session, model, share_prefixes=True)),
        }
    )
    apart, once = spreads["apart"].median, spreads["shared"].median
    distinct = (point["prefix"] + batch * point["own"]) * model.token_bytes
    return {
        "us": significant(once * 1e3),
        "apart_us": significant(apart * 1e3),
        "speed_up": significant(apart / once),
        "percent_of_copy": significant(session.percent_of_copy(distinct, once)),
    }


def _usable(
    session: Session, makers: dict[str, PeerMaker]
) -> tuple[dict[str, list[Call]], dict[str, dict[str, str]]]:
    """Times of the peers that run, and the errors of those that refuse this shape or device."""
    usable: dict[str, list[Call]] = {}
    failed: dict[str, dict[str, str]] = {}

    def attempt(name: str, action: Callable[[], object]) -> object:
        try:
            return action()
        except Exception as error:
            if session.rehearsal:
                raise
            failed[name] = {"error": describe(error)}
            return None

    for kind, maker in makers.items():
        for name, calls in (attempt(kind, maker) or {}).items():
            attempt(name, partial(session.timer.capture, calls))
            if name not in failed:
                usable[name] = calls
    return usable, failed


def _peer_rows(found: dict[str, Any], failed: dict[str, Any]) -> dict[str, Any]:
    peers = {**found, **failed}
    return {"peers": peers} if peers else {}


PARTS = (
    Part("decode", decode_points, measure_decode, decode_bars, 110),
    Part("prefill", prefill_points, measure_prefill, prefill_bars, 40),
    Part("shared_prefix", shared_points, measure_shared, budget_s=20),
)
