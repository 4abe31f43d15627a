"""First part of the GPU benchmarks: the machine's own bandwidth and rate of products."""

from __future__ import annotations

from functools import partial

import torch

from tests.perf.gpu.gpu_session import Part, Point, Row, Session, significant

COPY_BYTES = 2 << 30
GEMM_SIZE = 8192


def machine_points(rehearsal: bool) -> list[Point]:
    """The points: a copy and a matrix product."""
    if rehearsal:
        return [{"roof": "copy", "bytes": 1 << 20}, {"roof": "gemm", "size": 64}]
    return [{"roof": "copy", "bytes": COPY_BYTES}, {"roof": "gemm", "size": GEMM_SIZE}]


def measure_machine(session: Session, point: Point) -> Row:
    """Measure the roofs, which the session keeps. A copy's bytes count twice, as read and written."""
    if point["roof"] == "copy":
        source = session.normal(point["bytes"] // 2)
        calls = [partial(torch.empty_like(source).copy_, source)]
        rate = 2 * point["bytes"] / (session.timer.one(calls).median * 1e-3)
        session.copy_bytes_per_s = rate
        return {"gb_per_s": significant(rate / 1e9)}
    size = point["size"]
    x, w = session.normal(size, size), session.normal(size, size)
    calls = [partial(torch.mm, x, w, out=torch.empty_like(x))]
    rate = 2 * size**3 / (session.timer.one(calls).median * 1e-3)
    session.gemm_flops_per_s = rate
    return {"tflops": significant(rate / 1e12)}


MACHINE = Part("machine", machine_points, measure_machine)
