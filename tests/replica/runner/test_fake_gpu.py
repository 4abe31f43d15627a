"""The fake GPU sees what Triton's JIT specialises on, and compiles where it is asked to.

As a program this file launches a kernel in several ways and prints what came of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from fake_gpu import FakeGpu


@triton.jit(do_not_specialize=["free"], do_not_specialize_on_alignment=["loose_ptr"])
def _example_kernel(out_ptr, loose_ptr, size, free, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    held = (offset < size) & (offset < free)
    x = tl.load(loose_ptr + offset, mask=held, other=0.0)
    tl.store(out_ptr + offset, x, mask=held)


def main() -> None:
    gpu = FakeGpu()
    gpu.install()
    memory = torch.ones(64)

    def launch(out_at: int, loose_at: int, size: int, free: int, block: int = 32) -> None:
        _example_kernel[(1,)](memory[out_at:], memory[loose_at:], size, free, BLOCK=block)

    launch(0, 0, 5, 5)
    launch(0, 1, 7, 1)  # nothing that counts
    launch(0, 0, 6, 16)
    launch(0, 0, 1, 5)
    launch(0, 0, 16, 5)
    launch(1, 0, 5, 5)
    launch(0, 0, 5, 5, block=64)
    found: dict[str, Any] = {"late": gpu.describe(0), "memory": memory.sum().item()}
    gpu.forget()
    launch(0, 0, 5, 5)
    found["after forgetting"] = len(gpu.variants)
    gpu.compiles = True
    launch(0, 0, 16, 5)
    found["compiled"] = asdict(gpu.variants[1])
    found["zero"] = float(torch.empty(1000).abs().max() + memory.new_empty(9).abs().max())
    print(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, __file__],
        env=environment
        | {
            "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[1],
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout)


def test_a_variant_is_told_by_the_arguments_that_are_new_about_it(found):
    first, *others = found["late"]
    assert first == "_example_kernel: was never launched before"
    assert others == [
        "_example_kernel: size is 1 (value 1), before i32 (value 5)",
        "_example_kernel: size i32 % 16 (value 16), before i32 (value 5)",
        "_example_kernel: out_ptr *fp32 (value address % 16 = 4), before *fp32 % 16 (value address % 16 = 0)",
        "_example_kernel: BLOCK is 64 (value 64), before is 32 (value 32)",
    ]


def test_launches_do_nothing_and_new_memory_is_zero(found):
    assert (found["memory"], found["zero"]) == (64.0, 0.0)


def test_what_it_forgets_is_asked_for_again(found):
    assert found["after forgetting"] == 1


def test_it_compiles_to_machine_code_where_that_is_wanted(found):
    compiled = found["compiled"]
    assert compiled["registers"] > 0 and compiled["seconds"] > 0 and compiled["stack_bytes"] == 0


if __name__ == "__main__":
    main()
