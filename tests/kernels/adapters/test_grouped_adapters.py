"""Adapters by row on a GPU: against double precision, bits alone and in a batch, and compilation."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from quire.kernels.adapters.grouped_adapters import add_adapters
from quire.kernels.tuning import ARCHS
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
# Relative to the largest |output|: rounding of the inner vector and of the result.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-7}
COLUMNS = (72, 33)
DEPTH = 136  # a rest of BLOCK_K


def operands(dtype: torch.dtype, num_slots: int = 3, rank: int = 16):
    random = torch.Generator().manual_seed(3)
    down = torch.randn(num_slots + 1, len(COLUMNS), rank, DEPTH, generator=random).to(dtype)
    up = torch.randn(num_slots + 1, sum(COLUMNS), rank, generator=random).to(dtype)
    scales = torch.rand(num_slots + 1, len(COLUMNS), generator=random)
    for tensor in (down, up, scales):  # slot 0 is never read
        tensor[0] = torch.nan
    return [tensor.to(DEVICE) for tensor in (down, up, scales)]


def reference(x, out, slots, down, up, scales) -> torch.Tensor:
    """In double precision, token by token."""
    result = out.cpu().double()
    for t, s in enumerate(slots.tolist()):
        first = 0
        for p, count in enumerate(COLUMNS):
            if s:
                inner = down[s, p].cpu().double() @ x[t].cpu().double()
                own = up[s, first : first + count].cpu().double()
                result[t, first : first + count] += scales[s, p].item() * (own @ inner)
            first += count
    return result


def inputs(slots: list[int], dtype: torch.dtype):
    random = torch.Generator().manual_seed(len(slots))
    x = torch.randn(len(slots), DEPTH, generator=random).to(dtype).to(DEVICE)
    out = torch.randn(len(slots), sum(COLUMNS), generator=random).to(dtype).to(DEVICE)
    return x, out, torch.tensor(slots, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[2], [0, 3, 3, 1, 0, 3, 2], [1] * 9 + [2, 1, 0] * 3])
def test_it_equals_double_precision(slots, dtype):
    down, up, scales = operands(dtype)
    x, out, token_slots = inputs(slots, dtype)
    expected = reference(x, out, token_slots, down, up, scales)
    before = out.clone()
    add_adapters(x, out, token_slots, down, up, scales, COLUMNS)
    error = (out.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCES[dtype]
    assert torch.equal(out[token_slots == 0], before[token_slots == 0])


def test_a_token_has_the_same_bits_alone_and_in_a_batch():
    down, up, scales = operands(torch.bfloat16)
    slots = [3, 1, 1, 0, 2, 3, 1]
    x, out, token_slots = inputs(slots, torch.bfloat16)
    before = out.clone()
    add_adapters(x, out, token_slots, down, up, scales, COLUMNS)
    for t in range(len(slots)):
        alone = before[t : t + 1].clone()
        add_adapters(x[t : t + 1], alone, token_slots[t : t + 1].clone(), down, up, scales, COLUMNS)
        assert torch.equal(alone[0], out[t])


def test_slots_may_be_apart_in_memory_and_no_token_is_no_work():
    down, up, scales = operands(torch.float32)
    size = down[0].numel()
    flat = torch.zeros(4, size + up[0].numel() + 5, device=DEVICE)
    flat[:, :size], flat[:, size : size + up[0].numel()] = down.flatten(1), up.flatten(1)
    far_down = flat[:, :size].unflatten(1, down.shape[1:])
    far_up = flat[:, size : size + up[0].numel()].unflatten(1, up.shape[1:])
    x, out, slots = inputs([2, 1], torch.float32)
    near = out.clone()
    add_adapters(x, near, slots, down, up, scales, COLUMNS)
    add_adapters(x, out, slots, far_down, far_up, scales, COLUMNS)
    assert torch.equal(near, out)
    add_adapters(x[:0], out[:0], slots[:0], down, up, scales, COLUMNS)


def test_arguments_that_do_not_fit_are_refused():
    down, up, scales = operands(torch.float32)
    x, out, slots = inputs([2, 1], torch.float32)
    for wrong in (dict(slots=slots[:1]), dict(up=up[:, :-1]), dict(out=out.half())):
        given = dict(x=x, out=out, slots=slots, down=down, up=up, scales=scales, columns=COLUMNS)
        with pytest.raises(ValueError, match=r"slots|down, up|out"):
            add_adapters(**{**given, **wrong})


COMPILE = """
import sys
from tests.kernels.compile.compile_entries import adapter_entries
from tests.kernels.compile.offline_compile import compile_entry
for arch in sys.argv[1].split():
    for entry in adapter_entries(arch):
        if sys.argv[2] in entry.name:
            record = compile_entry(entry)
            print(entry.name, record)
            assert record.stack_bytes == 0 and not record.problems, entry.name
"""


def compiled(folder, archs: str, part: str) -> int:
    """Compile the entries whose name has `part`, without spills, and return their number."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-c", COMPILE, archs, part]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    return run.stdout.count("adapters_")


def test_the_kernels_compile_for_hopper(tmp_path):
    assert compiled(tmp_path, "sm_90", "/16") == 2


@pytest.mark.slow
def test_the_kernels_compile_for_every_architecture(tmp_path):
    assert compiled(tmp_path, " ".join(ARCHS), "adapters") == 4 * len(ARCHS)
