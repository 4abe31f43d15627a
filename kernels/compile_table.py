"""Offline compilation of every attention configuration, without a GPU: registers, stack, shared memory.

    python -m quire.kernels.compile_table --write tests/kernels/compile_table.json     # after a change on purpose
    python -m quire.kernels.compile_table --check tests/kernels/compile_table.json     # all of it, minutes
    python -m quire.kernels.compile_table --check ... --match 'sm_90/.*/128'           # a part

Spilled registers live on the stack, so a stack of 0 bytes means no spills. Registers and stack are read from the
binary: `cuobjdump --dump-resource-usage` (Triton brings it) for NVIDIA, the code object's metadata for AMD. The
table is kept per minor version of Triton, since the compiler's choices differ between them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.kernels import attention_decode, attention_plan, attention_prefill, tuning
from quire.kernels.attention_tile import FP8_BITS, FP8_NATIVE, FP8_NONE
from quire.kernels.checks import HEAD_DIMS

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_INT32 = "*i32"
# Blackwell's, Hopper's and Ampere's instruction, CDNA's.
_MATRIX = ("tcgen05.mma", "wgmma.mma_async", "mma.sync", "v_mfma")


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel in one configuration for one architecture."""

    name: str  # arch/kernel/dtype/head_dim[/option]
    arch: str
    kernel: Any  # triton JITFunction
    types: dict[
        str, str
    ]  # types of the arguments; a missing pointer is None, a missing number int32
    constants: dict[str, Any]
    options: dict[str, Any]
    resident: int = 1  # programs that the grid expects on one processor at a time


@dataclass(frozen=True, slots=True)
class Record:
    """What the compiler made of an entry."""

    registers: int  # a thread's vector registers
    stack_bytes: int  # a thread's; 0: nothing spilled
    shared_bytes: int  # a program's
    matrix: str = ""  # the matrix instruction in the code, "" for none (float32)
    layout: str = ""  # of the products' results: which thread adds what
    problems: tuple[str, ...] = field(default=(), compare=False)


def entries() -> Iterator[Entry]:
    """Every entry of the tuning tables at every head size it serves; every option at head size 128 on Hopper."""
    for arch in tuning.ARCHS:
        for head_dim in HEAD_DIMS:
            yield from _attention(arch, torch.bfloat16, head_dim)
        for head_dim in (64, 96, 128, 256):
            yield from _attention(arch, torch.float32, head_dim)
        for head_dim in (128, 256):
            yield from _attention(arch, torch.bfloat16, head_dim, "fp8")
        yield from _attention(arch, torch.bfloat16, 128, "window")
        yield from _planners(arch)
    yield from _attention("sm_90", torch.float16, 128)
    for option in ("chunk", "softcap", "sinks", "block16"):
        yield from _attention("sm_90", torch.bfloat16, 128, option)
    for group in (1, 3, 5, 7, 12, 16):
        yield from _attention("sm_90", torch.bfloat16, 128, f"group{group}")


def _attention(arch: str, dtype: torch.dtype, head_dim: int, option: str = "") -> Iterator[Entry]:
    kv_heads, group = 8, int(option.removeprefix("group")) if option.startswith("group") else 4
    block_size = 16 if option == "block16" else 64
    fp8 = FP8_NONE
    if option == "fp8":
        fp8 = FP8_NATIVE if arch in ("sm_90", "sm_100") else FP8_BITS
    value, cache = (
        _TYPES[dtype],
        {FP8_NATIVE: "fp8e4nv", FP8_BITS: "u8"}.get(fp8.value, _TYPES[dtype]),
    )
    types = {
        **{name: f"*{value}" for name in ("out_ptr", "q_ptr")},
        **{name: f"*{cache}" for name in ("k_ptr", "v_ptr")},
        **{name: "*fp32" for name in ("partial_acc_ptr", "partial_ml_ptr")},
        **{
            f"{name}_ptr": _INT32
            for name in (
                "tables cu_q kv_len items num_items row_slot tiles num_tiles merge_rows num_rows"
            ).split()
        },
        "scale": "fp32",
    }
    if option == "sinks":
        types["sinks_ptr"] = "*fp32"
    if option == "fp8":
        types["k_scale_ptr"] = types["v_scale_ptr"] = "*fp32"
    local = dict(WINDOW=1024 if option == "window" else 0, CHUNK=8192 if option == "chunk" else 0)
    geometry = dict(
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        SOFTCAP=50.0 if option == "softcap" else 0.0,
        FP8=fp8.value,
        **local,
    )
    suffix = f"{value}/{head_dim}" + (f"/{option}" if option else "")
    config = tuning.decode_config(arch, head_dim, dtype)
    for kind, subtiles, stages, resident in (
        ("decode", 1, config.num_stages, config.programs_per_processor),
        (
            "shared",
            config.shared_subtiles,
            config.shared_num_stages,
            config.shared_programs_per_processor,
        ),
    ):
        shared = kind == "shared"
        if shared and option in ("window", "chunk"):
            continue
        yield Entry(
            f"{arch}/{kind}/{suffix}",
            arch,
            attention_decode._decode_kernel,
            {**types, "members_ptr": _INT32} if shared else types,
            dict(
                GROUP_PAD=triton.next_power_of_2(group),
                SPLIT=config.split_tokens,
                TILE=config.tile_tokens,
                SUBTILES=subtiles,
                SHARED=shared,
                **geometry,
            ),
            tuning.launch_options(arch, config.num_warps, stages, resident),
            resident,
        )
    if dtype == torch.bfloat16 and option in ("", "window", "sinks"):
        yield _merge(arch, suffix, types, local, head_dim, config)
    prefill = tuning.prefill_config(arch, head_dim, dtype)
    yield Entry(
        f"{arch}/prefill/{suffix}",
        arch,
        attention_prefill._prefill_kernel,
        types,
        dict(BLOCK_M=prefill.block_m, TILE=prefill.tile_tokens, **geometry),
        tuning.launch_options(arch, prefill.num_warps, prefill.num_stages),
    )


def _merge(
    arch: str,
    suffix: str,
    types: dict[str, str],
    local: dict[str, int],
    head_dim: int,
    config: tuning.DecodeConfig,
) -> Entry:
    return Entry(
        f"{arch}/merge/{suffix}",
        arch,
        attention_decode._merge_kernel,
        types,
        dict(
            HEADS=32,
            GROUP=4,
            HEAD_DIM=head_dim,
            DIM_BLOCK=min(triton.next_power_of_2(head_dim), attention_decode.MERGE_DIMS),
            SPLIT=config.split_tokens,
            UNROLL=config.merge_unroll,
            **local,
        ),
        tuning.launch_options(arch, 1, programs_per_processor=config.merge_programs_per_processor),
        config.merge_programs_per_processor,
    )


def _planners(arch: str) -> Iterator[Entry]:
    split, rows = 256, 512
    decode = dict(SPLIT=split, BLOCK_ROWS=rows)
    lists = {
        f"{name}_ptr": _INT32
        for name in "items counts row_slot merge_rows cu_q kv_len tiles num_tiles".split()
    }
    groups = {f"{name}_ptr": _INT32 for name in ("members", "shared_len", "cu_members")}
    for name, kernel, types, constants in (
        ("rows", attention_plan._plan_rows_kernel, lists, dict(WINDOW=0, CHUNK=0, **decode)),
        (
            "groups",
            attention_plan._plan_groups_kernel,
            {**lists, **groups},
            dict(ITEM_ROWS=8, **decode),
        ),
        (
            "prefill",
            attention_plan._plan_prefill_kernel,
            lists,
            dict(TILE_QUERIES=32, BLOCK_ROWS=rows),
        ),
    ):
        yield Entry(f"{arch}/plan_{name}/{rows}", arch, kernel, types, constants, dict(num_warps=4))


def compile_entry(entry: Entry) -> Record:
    """Compile one entry.

    Raises
    ------
    RuntimeError
        The kernels were imported for the interpreter (TRITON_INTERPRET is set).
    """
    if not isinstance(entry.kernel, triton.runtime.JITFunction):
        raise RuntimeError(f"{entry.name}: unset TRITON_INTERPRET to compile kernels")
    constants = dict(entry.constants)
    signature, attributes = {}, {}
    for index, name in enumerate(entry.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in entry.types:
            signature[name] = entry.types[name]
        elif name.endswith("_ptr"):
            signature[name], constants[name] = "constexpr", None
        else:
            signature[name] = "i32"
        # Slices such as counts[1:] are not aligned; nor are their kernels' reads wide.
        if (signature[name].startswith("*") and not name.startswith("num_")) or name.startswith(
            "stride_"
        ):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(entry.kernel, signature, constants, attributes)
    nvidia = entry.arch.startswith("sm_")
    target = (
        GPUTarget("cuda", int(entry.arch.removeprefix("sm_")), 32)
        if nvidia
        else GPUTarget("hip", entry.arch, 64)
    )
    compiled = triton.compile(source, target, entry.options)
    read = _read_cubin if nvidia else _read_amdgcn
    registers, stack_bytes = read(compiled.asm["cubin" if nvidia else "amdgcn"])
    shared_bytes = compiled.metadata.shared
    problems = []
    if stack_bytes:
        problems.append(f"spills: {stack_bytes} bytes of stack, allowed 0")
    if shared_bytes > tuning.SHARED_BYTES[entry.arch]:
        problems.append(
            f"shared memory: {shared_bytes} bytes, allowed {tuning.SHARED_BYTES[entry.arch]}"
        )
    room = _resident(entry, registers, shared_bytes)
    if room < entry.resident:
        problems.append(f"programs on a processor: {room} fit, the grid expects {entry.resident}")
    code = compiled.asm["ptx" if nvidia else "amdgcn"]
    matrix = next((name for name in _MATRIX if name in code), "")
    layout = _product_layout(compiled.asm["ttgir"])
    return Record(registers, stack_bytes, shared_bytes, matrix, layout, tuple(problems))


def _product_layout(ttgir: str) -> str:
    """Layouts of the results of `tt.dot`; with the tile's shape they fix the order of every addition."""
    definitions = dict(re.findall(r"^(#\w+) = #ttg\.(.*?)(?: loc.*)?$", ttgir, re.MULTILINE))
    results = re.findall(r"tt\.dot .* -> tensor<\w+, (#\w+)>", ttgir)
    return "; ".join(sorted({definitions[name] for name in results}))


def _resident(entry: Entry, registers: int, shared_bytes: int) -> int:
    """Programs that fit a processor at a time, by registers and shared memory."""
    by_shared = tuning.SHARED_BYTES[entry.arch] // max(
        shared_bytes + 1024, 1
    )  # 1 KiB is the system's
    if entry.arch.startswith("sm_"):
        # Given out 8 a thread at a time.
        by_registers = tuning.REGISTERS // (
            -(-registers // 8) * 8 * 32 * entry.options["num_warps"]
        )
    else:
        # 4 SIMD units with 512 registers a lane; the waves of a program are spread over them.
        by_registers = 4 * (512 // registers) // entry.options["num_warps"]
        by_shared = tuning.SHARED_BYTES[entry.arch] // max(shared_bytes, 1)
    return min(by_registers, by_shared)


def _read_cubin(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return int(usage[1]), int(usage[2]) + int(usage[3])


def _read_amdgcn(assembly: str) -> tuple[int, int]:
    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", assembly)[1])

    return number("vgpr_count"), number("private_segment_fixed_size")


def triton_minor() -> str:
    """Key of the table: "3.9" for Triton 3.9.x."""
    return ".".join(triton.__version__.split(".")[:2])


def compare(name: str, expected: dict[str, Any] | None, record: Record) -> list[str]:
    """Problems of a record, and where it departs from the committed table.

    `ptxas` and LLVM move a few registers from one build to the next: 16 are tolerated, shared memory is not.
    """
    found = [f"{name}: {problem}" for problem in record.problems]
    if expected is None:
        return found  # this minor version of Triton has no table: the limits above still hold
    if abs(record.registers - expected["registers"]) > 16:
        found.append(
            f"{name}: {record.registers} registers, the table says {expected['registers']}"
        )
    for key in ("shared_bytes", "matrix", "layout"):
        if getattr(record, key) != expected[key]:
            found.append(f"{name}: {key} {getattr(record, key)}, the table says {expected[key]}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="TABLE", help="replace this Triton's entries")
    action.add_argument("--check", type=Path, metavar="TABLE", help="compare with the table")
    parser.add_argument("--match", default="", help="regular expression on the entries' names")
    options = parser.parse_args(arguments)
    path = options.write or options.check
    table = json.loads(path.read_text()) if path.exists() else {}
    known = table.get(triton_minor(), {})
    problems, records = [], {}
    for entry in entries():
        if not re.search(options.match, entry.name):
            continue
        record = compile_entry(entry)
        records[entry.name] = {k: v for k, v in asdict(record).items() if k != "problems"}
        print(entry.name, *(f"{k}={v}" for k, v in records[entry.name].items()), flush=True)
        expected = known.get(entry.name) if options.check else None
        if options.check and known and expected is None:
            problems.append(f"{entry.name}: not in the table")
        problems += compare(entry.name, expected, record)
    if options.write:
        kept = {
            name: record for name, record in known.items() if options.match and name not in records
        }
        table[triton_minor()] = dict(sorted({**kept, **records}.items()))
        lines = (
            f'"{minor}": {{\n'
            + ",\n".join(f'  "{name}": {json.dumps(record)}' for name, record in rows.items())
            + "\n}"
            for minor, rows in sorted(table.items())
        )
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(*problems, sep="\n", file=sys.stderr)
    print(f"{len(records)} compiled, {len(problems)} problems", flush=True)
    return 1 if problems or not records else 0


if __name__ == "__main__":
    sys.exit(main())
