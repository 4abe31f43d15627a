"""The attention benchmark: equal candidates, and correct counts of bytes and operations."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.cpu_attention import has_native
from tests.perf.cpu import cpu_attention as bench


def test_bytes_and_flops_are_those_of_the_keys_that_are_seen():
    case = bench.make_case([(1, 3), (2, 5)], torch.bfloat16)
    assert case.bytes == (3 + 5) * 2 * bench.KV_HEADS * bench.HEAD_DIM * 2
    assert case.flops == (3 + 4 + 5) * 4 * bench.HEADS * bench.HEAD_DIM


@pytest.mark.parametrize("dtype", list(bench.DTYPES))
def test_every_candidate_computes_the_same_attention(dtype, monkeypatch):
    rows = [(1, 40), (20, 20), (30, 70)]
    case = bench.make_case(rows, bench.DTYPES[dtype])
    outputs = {name: call().float() for name, call in bench.candidates(case, slow=False).items()}
    assert {"torch", "sdpa"} <= set(outputs) and ("native" in outputs) == has_native()
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    for name, out in outputs.items():
        torch.testing.assert_close(
            out, outputs["torch"], atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    monkeypatch.setitem(bench.SHAPES, "decode_64x500", rows)
    monkeypatch.setattr(bench, "GEMM_SIZE", 256)  # torch's products of bfloat16 can be slow
    bars = {bar.name: bar for bar in bench.measure("decode_64x500", dtype, rounds=2, slow=False)}
    last = list(bars.values())[-1]
    assert set(last.details["ms"]) == set(outputs)
    assert last.details["ms"]["torch"]["num"] == 2
    assert all(bar.value > 0 for bar in bars.values()) == has_native()
