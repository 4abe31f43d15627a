"""CPU attention of one layer on fixed shapes, against other implementations and the machine's floor.

    python -m tests.perf cpu_attention [--threads 2] [--rounds 7] [--slow] [--out FILE]

Candidates, in alternation, on the same paged cache (16 query heads, 8 KV heads of 128, blocks of 32 in random order):

native    the compiled library, and its narrower instruction sets
torch     the path without a compiler: products of gathered tiles
sdpa      torch's own kernel, once per request, on gathered keys (it does not support pages)
flex      `flex_attention` under torch.compile on the same gathered keys; only with --slow (it compiles for minutes)

The floor is the larger of two times: to read the keys and values once at the copy bandwidth of the same round (bytes
read and written both count), and to compute the products at the rate of a 1536^3 matrix product. A ratio compares times
of one round, so that other load on the machine affects both; the result is the median over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quire.cluster.bench.results import report
from quire.kernels.cpu import cpu_attention_native, native_library
from quire.kernels.cpu.cpu_attention import has_native, paged_attention, plan_attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 32
# (query tokens, tokens in the cache) of each request
SHAPES = {
    "decode_64x500": [(1, 500)] * 64,
    "decode_8x4096": [(1, 4096)] * 8,
    "prefill_1x2048": [(2048, 2048)],
    "prefill_4x512_on_1024": [(512, 1536)] * 4,
}
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
MIN_SPEEDUP = 1.5  # relative to the torch path
MIN_FLOOR = {"decode": 0.7, "prefill": 0.5}
COPY_BYTES = 64 << 20
GEMM_SIZE = 1536


@dataclass(frozen=True)
class Case:
    """Data of one shape; K and V are views of a pool with several layers, as in serving."""

    q: torch.Tensor  # [tokens, heads, head_dim]
    k: torch.Tensor  # [blocks, kv_heads, block_size, head_dim]
    v: torch.Tensor
    block_tables: np.ndarray  # [rows, max blocks] int64
    cu_q: np.ndarray  # [rows + 1] int64
    kv_len: np.ndarray  # [rows] int64

    @property
    def scale(self) -> float:
        """Factor of q . k."""
        return HEAD_DIM**-0.5

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values, read once."""
        return int(self.kv_len.sum()) * 2 * KV_HEADS * HEAD_DIM * self.q.element_size()

    @property
    def flops(self) -> int:
        """Floating-point operations of both products, over the keys that each query sees."""
        q_len = np.diff(self.cu_q)
        return int(4 * HEADS * HEAD_DIM * (q_len * self.kv_len - q_len * (q_len - 1) // 2).sum())


def make_case(rows: list[tuple[int, int]], dtype: torch.dtype) -> Case:
    """Random data in randomly ordered blocks."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-kv // BLOCK_SIZE) for _, kv in rows]
    order = np.random.default_rng(0).permutation(sum(counts))
    tables = np.zeros((len(rows), max(counts)), np.int64)
    for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        tables[row, :count] = order[end - count : end]
    shape = (len(order), 2, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    pool = torch.randn(shape, generator=generator).to(dtype)
    cu_q = np.concatenate([[0], np.cumsum([q for q, _ in rows])]).astype(np.int64)
    q = torch.randn(int(cu_q[-1]), HEADS, HEAD_DIM, generator=generator).to(dtype)
    return Case(q, pool[:, 1, 0], pool[:, 1, 1], tables, cu_q, np.array([kv for _, kv in rows]))


def planned(case: Case, backend: str, isa: str | None = None) -> Callable[[], torch.Tensor]:
    """The call of one layer. All layers share the plan, so it is built outside of the call."""
    arguments = (case.cu_q, case.kv_len, case.block_tables, case.k, HEADS)
    plan = plan_attention(*arguments, backend=backend)
    out = torch.empty_like(case.q)

    def call() -> torch.Tensor:
        if isa is None:
            tensors = (case.q, case.k, case.v, None, None, None)
            return paged_attention(*tensors, case.scale, plan=plan, out=out)
        tensors = (case.q, case.k, case.v)
        cpu_attention_native.attend(
            *tensors, case.scale, plan, softcap=None, sinks=None, out=out, isa=isa
        )
        return out

    return call


def per_request(case: Case, attend: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Gather a request's pages for a kernel without pages; if q_len < kv_len, the causal mask is aligned at the end."""
    masks = []
    for row, kv_len in enumerate(case.kv_len):
        q_len = int(case.cu_q[row + 1] - case.cu_q[row])
        mask = torch.ones(q_len, int(kv_len), dtype=torch.bool).tril(int(kv_len) - q_len)
        masks.append(mask if 1 < q_len < kv_len else None)
    tables = [torch.from_numpy(table) for table in case.block_tables]

    def call() -> torch.Tensor:
        out = torch.empty_like(case.q)
        for row, kv_len in enumerate(case.kv_len):
            k, v = (
                cache.index_select(0, tables[row][: -(-int(kv_len) // BLOCK_SIZE)])
                .transpose(0, 1)
                .reshape(1, KV_HEADS, -1, HEAD_DIM)[:, :, :kv_len]
                for cache in (case.k, case.v)
            )
            tokens = slice(case.cu_q[row], case.cu_q[row + 1])
            q = case.q[tokens].transpose(0, 1)[None]
            out[tokens] = attend(q, k, v, masks[row])[0].transpose(0, 1)
        return out

    return call


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """torch's fused kernel; [1, heads, tokens, head_dim]."""
    causal = mask is None and q.shape[2] > 1
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
    )


def make_flex() -> Callable[..., torch.Tensor]:
    """`flex_attention`, compiled, causal by positions counted from the end."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    masks: dict[tuple[int, int], object] = {}

    def attend(q, k, v, _):
        q_len, kv_len = q.shape[2], k.shape[2]
        if (q_len, kv_len) not in masks:

            def causal(_b, _h, i, j):
                return j <= i + (kv_len - q_len)

            masks[q_len, kv_len] = create_block_mask(
                causal, None, None, q_len, kv_len, device="cpu"
            )
        block_mask = masks[q_len, kv_len]
        return compiled(q, k.contiguous(), v.contiguous(), block_mask=block_mask, enable_gqa=True)

    return attend


def candidates(case: Case, slow: bool) -> dict[str, Callable[[], torch.Tensor]]:
    """Candidates by name; all must give the same results."""
    found = {"torch": planned(case, "torch"), "sdpa": per_request(case, sdpa)}
    if has_native():
        found["native"] = planned(case, "native")
        library = native_library.load()
        best = native_library.ISAS[library.best_isa]
        for isa in (isa for isa in library.isas[1:] if isa != best):
            found[f"native_{isa}"] = planned(case, "native", isa)
    if slow:
        found["flex"] = per_request(case, make_flex())
    return found


def timed(call: Callable[[], object]) -> float:
    """Seconds of a clock; with one thread its CPU time, which excludes other processes' time slices."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


def machine(dtype: torch.dtype) -> tuple[Callable[[], float], Callable[[], float]]:
    """Functions that each measure once: bytes/s of a copy, and flop/s of a matrix product."""
    source, target = (
        torch.ones(COPY_BYTES, dtype=torch.uint8),
        torch.empty(COPY_BYTES, dtype=torch.uint8),
    )
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype) for _ in range(2))
    return (
        lambda: 2 * COPY_BYTES / timed(lambda: target.copy_(source)),
        lambda: 2 * GEMM_SIZE**3 / timed(lambda: a @ b),
    )


def measure(name: str, dtype_name: str, rounds: int, slow: bool) -> list[report.Bar]:
    """Measure all candidates on one shape."""
    case = make_case(SHAPES[name], DTYPES[dtype_name])
    calls = candidates(case, slow)
    expected = calls["torch"]().float()
    for candidate, call in calls.items():
        error = float((call().float() - expected).abs().max())  # also the warm-up
        assert error < (1e-4 if dtype_name == "float32" else 5e-2), (candidate, error)
    copy, gemm = machine(DTYPES[dtype_name])
    times: dict[str, list[float]] = {candidate: [] for candidate in calls}
    floors: list[float] = []
    bandwidth, rate = [copy()], [gemm()]
    for _ in range(rounds):
        bandwidth.append(copy())
        rate.append(gemm())
        for candidate, call in calls.items():
            times[candidate].append(timed(call))
        floors.append(max(case.bytes / bandwidth[-1], case.flops / rate[-1]))

    details = {
        "ms": {
            n: report.spread_json(report.Spread.of([1e3 * x for x in t])) for n, t in times.items()
        },
        "copy_gb_s": report.spread_json(report.Spread.of([x / 1e9 for x in bandwidth])),
        "gemm_gflop_s": report.spread_json(report.Spread.of([x / 1e9 for x in rate])),
        "mbytes": round(case.bytes / 1e6, 1),
        "gflop": round(case.flops / 1e9, 2),
    }
    if "native" not in times:
        return [
            report.Bar(
                f"kernels/cpu_{name}_{dtype_name}/native", 0, "x", MIN_SPEEDUP, False, details
            )
        ]

    def ratio(others: list[float]) -> float:
        return statistics.median(o / n for o, n in zip(others, times["native"], strict=True))

    bars = [
        report.Bar(
            f"kernels/cpu_{name}_{dtype_name}/over_{other}", ratio(times[other]), "x", goal, False
        )
        for other, goal in (("torch", MIN_SPEEDUP), ("sdpa", 1.0), ("flex", 1.0))
        if other in times
    ]
    # Also against the machine's best rates of any round.
    best = max(case.bytes / max(bandwidth), case.flops / max(rate))
    details["floor_of_best_round"] = round(best / min(times["native"]), 3)
    goal = MIN_FLOOR[name.partition("_")[0]]
    value = ratio(floors)
    bars.append(
        report.Bar(f"kernels/cpu_{name}_{dtype_name}/floor", value, "", goal, False, details)
    )
    return bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--slow", action="store_true", help="flex_attention too")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "cpu_attention.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    isa = native_library.ISAS[native_library.load().best_isa] if has_native() else None
    bars = []
    for name in args.shapes:
        for dtype_name in args.dtypes:
            bars += measure(name, dtype_name, args.rounds, args.slow)
            print(f"{bars[-1].name}: {bars[-1].value:.2f}", flush=True)
    command = f"python -m tests.perf cpu_attention --threads {args.threads} --rounds {args.rounds}"
    command += " --slow" if args.slow else ""
    report.write(args.out, command, bars, native=isa)
    return 0 if all(bar.holds for bar in bars) else 1
