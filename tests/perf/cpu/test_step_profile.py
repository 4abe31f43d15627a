"""The step profile has a row for each part in every form of the layers, and removes its hooks."""

from __future__ import annotations

import pytest

from quire.cluster.bench.load.workloads import Workload
from quire.kernels.cpu.cpu_attention import has_native
from quire.replica.engine import Engine
from tests.perf.cpu import step_profile

PARTS = {"qkv", "attention", "output", "gate_up", "down", "attention_norm", "mlp_norm", "lm_head"}


@pytest.mark.skipif(not has_native(), reason="installed without a C compiler")
@pytest.mark.parametrize("is_one_call", [True, False])
def test_a_layers_parts_have_rows_with_rates(is_one_call):
    with Engine(model="embedded", num_blocks=32, num_threads=1) as engine:
        runner = engine._loop._runner
        if not is_one_call:
            runner._forward._workspace = None
        found = step_profile.measure(engine, Workload("w", 1, 0, 20, 5))
        if is_one_call:
            assert runner._forward._workspace.on_times is None
    assert found["decode"]["num_steps"] == 4 and found["prefill"]["num_steps"] == 1
    for kind in ("decode", "prefill"):
        rows = {row["part"]: row for row in found[kind]["parts"]}
        assert rows.keys() >= PARTS | {step_profile.REST, *step_profile.HOST}
        assert ("rotate and write" in rows) == is_one_call
        assert all(row["ms"] >= 0 for row in rows.values()), "parts do not overlap"
        for product in ("qkv", "output", "gate_up", "down"):
            assert rows[product]["weights_gb_per_s"] > 0
