"""Offline compilation of one kernel for a device that this machine need not have.

It reports registers, stack, shared memory and matrix instructions. Spilled registers are stored on the stack, so a
stack of 0 bytes means no spills. For NVIDIA, registers and stack are read from the binary by `cuobjdump
--dump-resource-usage`, a tool that ships with Triton. For AMD, they are read from the metadata in the assembly listing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from quire.kernels import tuning

# The matrix instructions of Blackwell, Hopper, Ampere and CDNA.
_MATRIX = ("tcgen05.mma", "wgmma.mma_async", "mma.sync", "v_mfma")


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel in one configuration for one architecture."""

    name: str  # arch/kernel/dtype/head_dim[/option]
    arch: str
    kernel: Any  # triton JITFunction
    types: dict[
        str, str
    ]  # types of arguments by name; an unlisted argument is None if its name ends in `_ptr`, else int32
    constants: dict[str, Any]
    options: dict[str, Any]
    resident: int = 1  # programs that must fit one SM (AMD: compute unit) at the same time
    multiples: tuple[
        str, ...
    ] = ()  # scalar arguments, besides the strides, that are known to be multiples of 16


@dataclass(frozen=True, slots=True)
class Record:
    """Result of compiling an entry."""

    registers: int  # vector registers of a thread
    stack_bytes: int  # stack of a thread; 0: no spills
    shared_bytes: int  # shared memory of a program
    matrix: str = ""  # matrix instruction in the code; "" for none (float32)
    layout: str = ""  # layouts of the results of `tl.dot`; with the tile's shape they fix the order of additions
    problems: tuple[str, ...] = field(default=(), compare=False)


def compile_kernel(entry: Entry) -> CompiledKernel:
    """Compile one entry.

    Raises
    ------
    RuntimeError
        TRITON_INTERPRET was set when the kernels were imported, so they can only be interpreted.
    """
    if not isinstance(entry.kernel, triton.runtime.JITFunction):
        raise RuntimeError(f"{entry.name}: unset TRITON_INTERPRET to compile kernels")
    constants = dict(entry.constants)
    signature, attributes = {}, {}
    for index, (name, parameter) in enumerate(
        zip(entry.kernel.arg_names, entry.kernel.params, strict=True)
    ):
        if name in constants:
            signature[name] = "constexpr"
        elif name in entry.types:
            signature[name] = entry.types[name]
        elif name.endswith("_ptr"):
            signature[name], constants[name] = "constexpr", None
        else:
            signature[name] = "i32"
        if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
            continue
        # Tensor arguments are 16-byte aligned, except `num_*`: the caller may pass a slice such as counts[1:], which is
        # not aligned. The kernels only read scalars through these pointers.
        is_array = signature[name].startswith("*") and not name.startswith("num_")
        if is_array or name.startswith("stride_") or name in entry.multiples:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(entry.kernel, signature, constants, attributes)
    nvidia = entry.arch.startswith("sm_")
    target = (
        GPUTarget("cuda", int(entry.arch.removeprefix("sm_")), 32)
        if nvidia
        else GPUTarget("hip", entry.arch, 64)
    )
    return triton.compile(source, target, entry.options)


def matrix_instructions(entry: Entry) -> set[str]:
    """Names and shapes of an NVIDIA kernel's matrix instructions, such as "wgmma.mma_async m64n128k16"."""
    found = re.findall(
        r"(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\S*?\.(m\d+n\d+k\d+)\.",
        compile_kernel(entry).asm["ptx"],
    )
    return {" ".join(parts) for parts in found}


def compile_entry(entry: Entry) -> Record:
    """Compile one entry, read its resource usage and list the limits that it exceeds.

    Raises RuntimeError if the kernels were imported for the interpreter (`compile_kernel`).
    """
    nvidia = entry.arch.startswith("sm_")
    compiled = compile_kernel(entry)
    read = read_cubin if nvidia else _read_amdgcn
    registers, stack_bytes = read(compiled.asm["cubin" if nvidia else "amdgcn"])
    shared_bytes = compiled.metadata.shared
    problems = []
    if stack_bytes:
        problems.append(f"spills: {stack_bytes} bytes of stack, allowed 0")
    if shared_bytes > tuning.SHARED_BYTES[entry.arch]:
        problems.append(
            f"shared memory: {shared_bytes} bytes, allowed {tuning.SHARED_BYTES[entry.arch]}"
        )
    problems += thread_problems(entry)
    room = _resident(entry, registers, shared_bytes)
    if room < entry.resident:
        problems.append(f"programs on a processor: {room} fit, the grid expects {entry.resident}")
    code = compiled.asm["ptx" if nvidia else "amdgcn"]
    matrix = next((name for name in _MATRIX if name in code), "")
    layout = _product_layout(compiled.asm["ttgir"])
    return Record(registers, stack_bytes, shared_bytes, matrix, layout, tuple(problems))


def thread_problems(entry: Entry) -> list[str]:
    """Report a program with more threads than the device supports: compilers accept it, but its launch fails."""
    threads = entry.options["num_warps"] * tuning.warp_lanes(entry.arch)
    if threads <= tuning.PROGRAM_THREADS:
        return []
    return [f"threads: {threads} a program, allowed {tuning.PROGRAM_THREADS}"]


def _product_layout(ttgir: str) -> str:
    """Layouts of the results of `tl.dot` (in Triton's IR: `tt.dot`).

    Together with the tile's shape they fix the order of additions.
    """
    definitions = dict(re.findall(r"^(#\w+) = #ttg\.(.*?)(?: loc.*)?$", ttgir, re.MULTILINE))
    results = re.findall(r"tt\.dot .* -> tensor<\w+, (#\w+)>", ttgir)
    return "; ".join(sorted({definitions[name] for name in results}))


def _resident(entry: Entry, registers: int, shared_bytes: int) -> int:
    """Number of programs that fit one SM (AMD: compute unit) at the same time, by registers and shared memory."""
    # An NVIDIA GPU reserves 1 KiB of shared memory for each program. For AMD, `by_shared` is computed again below.
    by_shared = tuning.SHARED_BYTES[entry.arch] // max(shared_bytes + 1024, 1)
    if entry.arch.startswith("sm_"):
        # Registers are allocated in units of 8 per thread.
        by_registers = tuning.REGISTERS // (
            -(-registers // 8) * 8 * 32 * entry.options["num_warps"]
        )
    else:
        # 4 SIMD units with 512 registers for each lane; the waves of a program are distributed over them.
        by_registers = 4 * (512 // registers) // entry.options["num_warps"]
        by_shared = tuning.SHARED_BYTES[entry.arch] // max(shared_bytes, 1)
    return min(by_registers, by_shared)


def read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert usage is not None, text
    return int(usage[1]), int(usage[2]) + int(usage[3])


def _read_amdgcn(assembly: str) -> tuple[int, int]:
    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        assert found is not None, key
        return int(found[1])

    return number("vgpr_count"), number("private_segment_fixed_size")
