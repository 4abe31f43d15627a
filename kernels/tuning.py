"""Configurations of the attention kernels: plain tables, no search at run time.

`split_tokens`, `tile_tokens` and `merge_splits` fix the order of additions, so they depend on the device and the
model's shape only, never on the batch. The other fields do not change the bits of a result.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
INTERPRETER = "interpreter"  # Triton's interpreter, on CPU tensors
# Shared memory that one program may use, bytes (CUDA programming guide, compute capabilities; CDNA 3 ISA).
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}

# Most threads of one program, on all of `ARCHS`.
PROGRAM_THREADS = 1024
# Default number of tokens of a cache block, the same as of a routing block (the unit in which the router hashes prompts
# to find cached prefixes). A prefill tile of 64 keys is then one contiguous run: 357 instead of 418 instructions per
# tile of the kernel's loop on Hopper. Blocks of 32 would waste half as many slots (on average half a block per request)
# and reuse prefixes in finer steps.
BLOCK_SIZE = 64
# Every decode configuration below uses the same value, because the workspace is sized before the device is known.
SPLIT_TOKENS = 256
# 32-bit registers of an SM, on all NVIDIA architectures in `ARCHS`.
REGISTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Shape of the decode kernels."""

    split_tokens: int  # keys of a work item, a power of two and a multiple of tile_tokens
    tile_tokens: int  # keys of one loop iteration, a power of two >= 16
    num_warps: int
    num_stages: int
    programs_per_sm: int  # programs of the persistent grid per SM (AMD: compute unit)
    # Partial results merged in one level. Rows with more splits are merged in two levels.
    merge_splits: int = 32
    merge_unroll: int = 4  # partial results that are loaded at the same time
    merge_programs_per_sm: int = 4


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Shape of the prefill kernel."""

    block_m: int  # rows of a tile: pairs of a query token and a head of the KV group
    tile_tokens: int
    num_warps: int
    num_stages: int


Config = TypeVar("Config", DecodeConfig, PrefillConfig)

# For bfloat16 and float16. Key: (architecture, largest head_dim of the entry; of unequal sizes, the larger one counts).
# 320 and 576 are latent attention with latents of 256 and 512. One load serves keys and values, so that more stages fit
# than for keys and values of 512.
_DECODE = {
    ("sm_80", 64): DecodeConfig(SPLIT_TOKENS, 64, 4, 5, 4),
    ("sm_80", 128): DecodeConfig(SPLIT_TOKENS, 32, 4, 5, 3),
    ("sm_80", 256): DecodeConfig(SPLIT_TOKENS, 32, 4, 3, 2),
    ("sm_80", 320): DecodeConfig(SPLIT_TOKENS, 32, 4, 3, 2),
    ("sm_80", 512): DecodeConfig(SPLIT_TOKENS, 16, 8, 2, 1),
    ("sm_80", 576): DecodeConfig(SPLIT_TOKENS, 16, 8, 5, 1),
    ("sm_90", 64): DecodeConfig(SPLIT_TOKENS, 64, 4, 5, 3),
    ("sm_90", 128): DecodeConfig(SPLIT_TOKENS, 32, 4, 5, 3),
    ("sm_90", 256): DecodeConfig(SPLIT_TOKENS, 32, 4, 5, 2),
    ("sm_90", 320): DecodeConfig(SPLIT_TOKENS, 32, 4, 5, 2),
    ("sm_90", 512): DecodeConfig(SPLIT_TOKENS, 32, 8, 2, 1),
    ("sm_90", 576): DecodeConfig(SPLIT_TOKENS, 32, 8, 5, 1),
    ("sm_100", 64): DecodeConfig(SPLIT_TOKENS, 64, 4, 5, 3),
    ("sm_100", 128): DecodeConfig(SPLIT_TOKENS, 32, 4, 5, 3),
    ("sm_100", 256): DecodeConfig(SPLIT_TOKENS, 32, 4, 5, 2),
    ("sm_100", 320): DecodeConfig(SPLIT_TOKENS, 32, 4, 5, 2),
    ("sm_100", 512): DecodeConfig(SPLIT_TOKENS, 32, 8, 2, 1),
    ("sm_100", 576): DecodeConfig(SPLIT_TOKENS, 32, 8, 5, 1),
    ("gfx942", 64): DecodeConfig(SPLIT_TOKENS, 64, 4, 2, 2, merge_unroll=2),
    ("gfx942", 128): DecodeConfig(SPLIT_TOKENS, 32, 4, 2, 2, merge_unroll=2),
    ("gfx942", 256): DecodeConfig(SPLIT_TOKENS, 32, 4, 1, 1, merge_unroll=2),
    ("gfx942", 320): DecodeConfig(SPLIT_TOKENS, 32, 4, 1, 1, merge_unroll=2),
    ("gfx942", 512): DecodeConfig(SPLIT_TOKENS, 16, 8, 1, 1, merge_unroll=2),
    ("gfx942", 576): DecodeConfig(SPLIT_TOKENS, 16, 4, 1, 1, merge_unroll=2),
}
_PREFILL = {
    ("sm_80", 64): PrefillConfig(128, 64, 4, 5),
    ("sm_80", 128): PrefillConfig(128, 32, 8, 5),
    ("sm_80", 256): PrefillConfig(64, 32, 8, 3),
    ("sm_80", 320): PrefillConfig(64, 32, 8, 3),
    ("sm_80", 512): PrefillConfig(32, 32, 8, 2),
    ("sm_80", 576): PrefillConfig(32, 32, 8, 2),
    ("sm_90", 64): PrefillConfig(128, 64, 4, 5),
    ("sm_90", 128): PrefillConfig(128, 64, 8, 5),
    ("sm_90", 256): PrefillConfig(128, 32, 8, 3),
    ("sm_90", 320): PrefillConfig(128, 32, 8, 3),
    # The accumulators of 64 rows, the least of a `wgmma`, do not fit the registers: `mma.sync` computes 32.
    ("sm_90", 512): PrefillConfig(32, 32, 8, 2),
    ("sm_90", 576): PrefillConfig(32, 32, 8, 5),
    ("sm_100", 64): PrefillConfig(128, 64, 4, 5),
    ("sm_100", 128): PrefillConfig(128, 64, 8, 5),
    ("sm_100", 256): PrefillConfig(128, 32, 8, 3),
    ("sm_100", 320): PrefillConfig(128, 32, 8, 3),
    ("sm_100", 512): PrefillConfig(64, 32, 8, 2),
    ("sm_100", 576): PrefillConfig(64, 32, 8, 2),
    ("gfx942", 64): PrefillConfig(128, 64, 4, 1),
    ("gfx942", 128): PrefillConfig(128, 32, 4, 1),
    ("gfx942", 256): PrefillConfig(64, 32, 4, 1),
    ("gfx942", 320): PrefillConfig(64, 32, 4, 1),
    ("gfx942", 512): PrefillConfig(64, 16, 8, 1),
    ("gfx942", 576): PrefillConfig(32, 16, 8, 1),
}
# `tl.dot` in float32 runs outside the matrix units (IEEE arithmetic): larger tiles would not fit the registers.
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
        The tables have no entry for the architecture or head size.
    """
    if dtype == torch.float32:
        return _smallest(_DECODE_FLOAT32, head_dim)
    return _smallest(_of_arch(_DECODE, arch), head_dim)


def prefill_config(arch: str, head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """Configuration of `prefill_attention` for q of `dtype`; raises ValueError if the tables have no entry."""
    if dtype == torch.float32:
        return _smallest(_PREFILL_FLOAT32, head_dim)
    return _smallest(_of_arch(_PREFILL, arch), head_dim)


def low_prefill_config(arch: str, head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """`prefill_config` for batches of decode rows that need the bits of a prefill (`PagedAttention(uniform=True)`).

    On Hopper the tile has 64 rows instead of 128. The matrix instruction is the same, and two programs fit an SM, so
    one computes while the other waits. Fewer rows would need another instruction, which rounds differently.

    Each such row is one program per KV head, which reads all keys alone. Example: 8 KV heads of 128 and 8192 keys are
    8 programs of 4 MiB each. A program has two tiles of 32 KiB in flight, about 50 GB/s, so they take 85 us for each
    layer instead of 11 us at full memory speed. From 33 rows on there are two programs for each of 132 SMs, and the
    memory's speed is the limit.
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
    arch: str, num_warps: int, num_stages: int = 1, programs_per_sm: int | None = None
) -> dict[str, int | bool]:
    """Launch options: no fused multiply-adds except the kernels' explicit ones, and a limit on registers.

    The limit lets `programs_per_sm` programs of a persistent grid reside on an SM. Without it `ptxas` may aim at
    a higher occupancy and spill a few bytes.
    """
    options = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False)
    if programs_per_sm is not None and arch.startswith("sm_"):
        threads = 32 * num_warps * programs_per_sm
        options["maxnreg"] = min(REGISTERS // threads // 8 * 8, 255)
    return options


def warp_lanes(arch: str) -> int:
    """Threads of a warp (on AMD, of a wavefront)."""
    return 64 if arch.startswith("gfx") else 32


@functools.cache
def device_arch(device: torch.device) -> str:
    """Key of the tables for a device: on NVIDIA the newest architecture in `ARCHS` that is not newer than the device.

    Raises
    ------
    ValueError
        The GPU is older than all architectures in `ARCHS`.
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
    """Whether Triton can convert float8_e4m3fn on the device; otherwise the kernels decode the bits."""
    if device.type == "cpu":
        return True
    properties = torch.cuda.get_device_properties(device)
    return torch.version.hip is None and (properties.major, properties.minor) >= (8, 9)
