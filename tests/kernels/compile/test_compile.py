"""Offline compilation: the committed table is complete and valid, and this machine's compiler agrees with it.

`make kernels-table` compiles all entries (five minutes on one core). These tests compile a representative part:
attention at head size 128 for every architecture, the entries on Hopper that break most often, and one configuration
of each other kernel there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quire.kernels import tuning
from tests.kernels.compile import compile_table, offline_compile

TABLE = Path(__file__).parents[1] / "compile_table.json"
ATTENTION = (
    "/(decode|merge|prefill)/bf16/128$",
    "sm_90/(plan_|prefill/bf16/256$)",
    "sm_90/(decode|prefill)/(fp32/128|bf16/128/fp8|bf16/576/latent512)$",
)
OTHERS = (
    "norm/4096/llama silu_mul kv_write/norm kv_write/fp8 survey/bf16 combine gather/fp32/edited "
    "draw/bf16 log_probs/bf16 edit_logits/bf16 edit_listed/bf16 prepare gather_last scatter "
    "matmul/bf16/apart/128 matmul/bf16/whole/128 experts/bf16 sum_splits plan_experts combine_experts "
    "short_conv/silu state_scan/delta"
).split()
SAMPLE = "|".join((*ATTENTION, f"sm_90/({'|'.join(OTHERS)})$"))


@pytest.fixture(scope="module")
def table():
    return json.loads(TABLE.read_text())


def test_table_covers_every_configuration(table):
    names = {entry.name for entry in compile_table.entries()}
    assert {"3.6", "3.9"} <= set(table)  # the oldest and the newest supported version
    for minor, records in table.items():
        assert set(records) == names, minor


def test_every_kernel_is_listed_for_every_architecture(table):
    for minor, records in table.items():
        for arch in tuning.ARCHS:
            assert all(f"{arch}/{name}" in records for name in OTHERS), (minor, arch)


def test_nothing_spills_and_everything_fits(table):
    for minor, records in table.items():
        for name, record in records.items():
            arch = name.split("/")[0]
            assert record["stack_bytes"] == 0, (minor, name)
            assert record["shared_bytes"] <= tuning.SHARED_BYTES[arch], (minor, name)


def test_prefill_and_the_fixed_product_use_the_matrix_units_of_each_architecture(table):
    expected = {
        "sm_80": "mma.sync",
        "sm_90": "wgmma.mma_async",
        "sm_100": "tcgen05.mma",
        "gfx942": "v_mfma",
    }
    for minor, records in table.items():
        for name, record in records.items():
            arch, kernel, *rest = name.split("/")
            if kernel in ("prefill", "matmul") and rest[0] != "fp32":
                # Values of 512 need tiles of 32 rows on Hopper (`tuning.py`).
                is_small = arch == "sm_90" and kernel == "prefill" and rest[1] in ("512", "576")
                unit = "mma.sync" if is_small else expected[arch]
                assert record["matrix"] == unit, (minor, name)


def test_a_sample_compiles_as_the_table_says(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.kernels.compile.compile_table",
            "--check",
            str(TABLE),
            "--match",
            SAMPLE,
        ],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert run.stdout.endswith(f"{23 + len(OTHERS)} compiled, 0 problems\n")


def test_too_many_threads_are_a_problem():
    entry = next(entry for entry in compile_table.entries() if entry.arch == "gfx942")
    assert offline_compile.thread_problems(entry) == []
    wide = replace(entry, options={**entry.options, "num_warps": 32})
    assert offline_compile.thread_problems(wide) == ["threads: 2048 a program, allowed 1024"]


def test_differences_are_reported():
    record = offline_compile.Record(100, 0, 1000, "mma.sync", "layout")
    expected = dict(
        registers=100, stack_bytes=0, shared_bytes=1000, matrix="mma.sync", layout="layout"
    )
    assert compile_table.compare("x", expected, record) == []
    assert compile_table.compare("x", expected, replace(record, registers=110)) == []
    for change in (
        dict(registers=120),
        dict(shared_bytes=1001),
        dict(matrix=""),
        dict(layout="another"),
        dict(problems=("spills",)),
    ):
        assert len(compile_table.compare("x", expected, replace(record, **change))) == 1
    assert compile_table.compare("x", None, replace(record, problems=("spills",))) == ["x: spills"]


@pytest.mark.skipif(
    not os.environ.get("TRITON_INTERPRET"), reason="the kernels are not interpreted"
)
def test_interpreted_kernels_are_refused():
    entry = next(compile_table.entries())
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        offline_compile.compile_entry(entry)
