"""Configurations of the attention kernels: plain tables, no run-time search.

What may depend on what: `split_tokens`, `tile_tokens` and `merge_splits` fix the order of additions, so they depend
on the device and the model's shape only, never on the batch. The other fields change no bit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
INTERPRETER = "interpreter"  # Triton's, on CPU tensors
# Shared memory that one program may use, bytes (CUDA programming guide, compute capabilities; CDNA 3 ISA).
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}

PROGRAM_THREADS = 1024  # at most, on all of `ARCHS`
# Tokens of a cache block where nothing else is asked for. A prefill tile of 64 keys then is one run of memory: 357
# instead of 418 instructions a tile of its loop on Hopper. A routing block is as long. The price is half a block a
# request, 32 tokens instead of 16, and prefixes that are reused in steps of 64.
BLOCK_SIZE = 64
SPLIT_TOKENS = 256  # of every entry below: memory is counted before the device is known
REGISTERS = 1 << 16  # of a multiprocessor, 32 bits each, all of `ARCHS` that are NVIDIA's


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Shape of the decode kernels."""

    split_tokens: int  # keys of a work item, a power of two and a multiple of tile_tokens
    tile_tokens: int  # keys of one step, a power of two >= 16
    num_warps: int
    num_stages: int
    programs_per_processor: int  # size of the persistent grid
    merge_splits: int = (
        32  # partial results that are merged in order: rows of more are merged in two levels
    )
    merge_unroll: int = 4  # rounds of partial results in flight
    merge_programs_per_processor: int = 4


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Shape of the prefill kernel."""

    block_m: int  # packed (query, head of a KV group) rows of a tile
    tile_tokens: int
    num_warps: int
    num_stages: int


Config = TypeVar("Config", DecodeConfig, PrefillConfig)

# Key: (architecture, largest head_dim that it serves). bfloat16 and float16.
_DECODE = {
    ("sm_80", 64): DecodeConfig(SPLIT_TOKENS, 64, 4, 5, 4),
    ("sm_80", 128): DecodeConfig(SPLIT_TOKENS, 32, 4, 5, 3),
    ("sm_80", 256): DecodeConfig(SPLIT_TOKENS, 32, 4, 3, 2),
    ("sm_90", 64): DecodeConfig(SPLIT_TOKENS, 64, 4, 5, 3),
    ("sm_90", 128): DecodeConfig(SPLIT_TOKENS, 32, 4, 5, 3),
    ("sm_90", 256): DecodeConfig(SPLIT_TOKENS, 32, 4, 5, 2),
    ("sm_100", 64): DecodeConfig(SPLIT_TOKENS, 64, 4, 5, 3),
    ("sm_100", 128): DecodeConfig(SPLIT_TOKENS, 32, 4, 5, 3),
    ("sm_100", 256): DecodeConfig(SPLIT_TOKENS, 32, 4, 5, 2),
    ("gfx942", 64): DecodeConfig(SPLIT_TOKENS, 64, 4, 2, 2, merge_unroll=2),
    ("gfx942", 128): DecodeConfig(SPLIT_TOKENS, 32, 4, 2, 2, merge_unroll=2),
    ("gfx942", 256): DecodeConfig(SPLIT_TOKENS, 32, 4, 1, 1, merge_unroll=2),
}
_PREFILL = {
    ("sm_80", 64): PrefillConfig(128, 64, 4, 5),
    ("sm_80", 128): PrefillConfig(128, 32, 8, 5),
    ("sm_80", 256): PrefillConfig(64, 32, 8, 3),
    ("sm_90", 64): PrefillConfig(128, 64, 4, 5),
    ("sm_90", 128): PrefillConfig(128, 64, 8, 5),
    ("sm_90", 256): PrefillConfig(128, 32, 8, 3),
    ("sm_100", 64): PrefillConfig(128, 64, 4, 5),
    ("sm_100", 128): PrefillConfig(128, 64, 8, 5),
    ("sm_100", 256): PrefillConfig(128, 32, 8, 3),
    ("gfx942", 64): PrefillConfig(128, 64, 4, 1),
    ("gfx942", 128): PrefillConfig(128, 32, 4, 1),
    ("gfx942", 256): PrefillConfig(64, 32, 4, 1),
}
# float32 multiplies outside the matrix units (IEEE products): small tiles, or the operands fill the registers.
_DECODE_FLOAT32 = {
    64: DecodeConfig(SPLIT_TOKENS, 16, 8, 3, 2),
    128: DecodeConfig(SPLIT_TOKENS, 16, 8, 3, 1),
    256: DecodeConfig(SPLIT_TOKENS, 16, 8, 1, 1),
}
_PREFILL_FLOAT32 = {
    64: PrefillConfig(32, 16, 4, 2),
    128: PrefillConfig(32, 16, 8, 2),
    256: PrefillConfig(32, 16, 8, 1),
}


def decode_config(arch: str, head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """Configuration of `decode_attention` for q of `dtype`.

    Raises
    ------
    ValueError
        An architecture or head size without an entry.
    """
    if dtype == torch.float32:
        return _smallest(_DECODE_FLOAT32, head_dim)
    return _smallest(_of_arch(_DECODE, arch), head_dim)


def prefill_config(arch: str, head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """Configuration of `prefill_attention`, as `decode_config`."""
    if dtype == torch.float32:
        return _smallest(_PREFILL_FLOAT32, head_dim)
    return _smallest(_of_arch(_PREFILL, arch), head_dim)


def low_prefill_config(arch: str, head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """`prefill_config` for rows of one query token, where they have to get the bits that a prefill gives them.

    On Hopper the tile has 64 rows instead of 128: the instruction is the same, and two programs fit a processor, where
    one waits while the other computes. Fewer rows would take another instruction, which rounds in another way.

    Such a row is a program for each KV head, which walks all keys alone. 8 heads of 128 and 8192 keys are 8 programs
    with 4 MiB each. A program has two tiles of 32 KiB in flight, about 50 GB/s, so they take 85 us a layer; at the
    memory's speed it would be 11. From 33 such rows on there are two programs for each of 132 processors, and memory
    is the bound.
    """
    config = prefill_config(arch, head_dim, dtype)
    if arch not in ("sm_90", INTERPRETER) or dtype == torch.float32 or config.block_m <= 64:
        return config
    return replace(config, block_m=64, num_warps=4, num_stages=min(config.num_stages, 3))


def _of_arch(table: dict[tuple[str, int], Config], arch: str) -> dict[int, Config]:
    if arch == INTERPRETER:
        arch = "sm_90"
    if arch not in ARCHS:
        raise ValueError(f"architecture: must be one of {', '.join(ARCHS)}, got {arch}")
    return {head_dim: config for (name, head_dim), config in table.items() if name == arch}


def _smallest(table: dict[int, Config], head_dim: int) -> Config:
    fitting = [key for key in table if key >= head_dim]
    if not fitting:
        raise ValueError(f"head_dim: must be at most {max(table)}, got {head_dim}")
    return table[min(fitting)]


def launch_options(
    arch: str, num_warps: int, num_stages: int = 1, programs_per_processor: int | None = None
) -> dict[str, int | bool]:
    """Options of a launch: no fused multiply-adds but the kernels' own, and the registers that residency allows.

    A persistent grid counts on `programs_per_processor`. Without a limit `ptxas` may take a step of occupancy more
    than that and pay with a few spilled bytes.
    """
    options = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False)
    if programs_per_processor is not None and arch.startswith("sm_"):
        threads = 32 * num_warps * programs_per_processor
        options["maxnreg"] = min(REGISTERS // threads // 8 * 8, 255)
    return options


def warp_lanes(arch: str) -> int:
    """Threads of a warp (AMD: a wavefront)."""
    return 64 if arch.startswith("gfx") else 32


@functools.cache
def device_arch(device: torch.device) -> str:
    """Name of the table for a device: the newest one that is not newer than it.

    Raises
    ------
    ValueError
        A GPU older than any table.
    """
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    gcn = getattr(properties, "gcnArchName", "").split(":")[0]
    if gcn:
        return gcn
    capability = properties.major * 10 + properties.minor
    known = [int(arch.removeprefix("sm_")) for arch in ARCHS if arch.startswith("sm_")]
    fitting = [number for number in known if number <= capability]
    if not fitting:
        raise ValueError(f"device: compute capability must be at least 8.0, got {capability / 10}")
    return f"sm_{max(fitting)}"


def has_fp8_conversion(device: torch.device) -> bool:
    """Whether Triton converts float8_e4m3fn on the device; elsewhere the kernels move the bits themselves."""
    if device.type == "cpu":
        return True
    properties = torch.cuda.get_device_properties(device)
    return torch.version.hip is None and (properties.major, properties.minor) >= (8, 9)
