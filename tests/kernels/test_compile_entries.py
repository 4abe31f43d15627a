"""The kernels around attention compile for real devices without spills; in a process that has no interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def compile_matching(pattern):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "quire.kernels.compile_entries", "--match", pattern],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_kernels_compile_without_spills_for_hopper():
    names = "norm/4096/llama silu_mul kv_write/norm kv_write/fp8 sample/fp32/mask prepare matmul/bf16/4096".split()
    pattern = f"sm_90/({'|'.join(names)})$"
    result = compile_matching(pattern)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "7 compiled, 0 problems" in result.stdout
    matmul = next(line for line in result.stdout.splitlines() if "/matmul/" in line)
    assert "matrix=wgmma" in matmul


@pytest.mark.slow
def test_every_kernel_compiles_for_every_architecture():
    result = compile_matching("")
    assert result.returncode == 0, result.stdout + result.stderr
