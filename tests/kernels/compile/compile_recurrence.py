"""Compile-table entries of the kernels of recurrent layers, at the shapes of Qwen3-Next, Bamba and LFM2."""

from __future__ import annotations

from collections.abc import Iterator

import triton

from quire.kernels.recurrence import short_conv, state_chunks, state_scan
from tests.kernels.compile.offline_compile import Entry

# Elements of a key and of a value of a head, whether it is a gated delta rule, and whether there are snapshots.
SCANS = {
    "delta": (128, 128, True, False),
    "delta/saves": (128, 128, True, True),
    "mamba2": (128, 64, False, False),
    "delta/key256": (256, 256, True, True),
}
_POINTERS = {
    **{f"{name}_ptr": "*i32" for name in ("cu_q", "kv_len")},
    **{f"{name}_ptr": "*i64" for name in ("slots", "saves", "first_save")},
}
_EXACT = dict(enable_fp_fusion=False)  # every wrapper passes this option


def recurrence_entries(arch: str) -> Iterator[Entry]:
    """Yield every kernel, with and without each of its options."""
    for name, silu, saves in (("silu", True, False), ("plain/saves", False, True)):
        pointers = {f"{x}_ptr": "*bf16" for x in ("out", "x", "states")}
        yield Entry(
            f"{arch}/short_conv/{name}",
            arch,
            short_conv._conv_kernel,
            {**_POINTERS, **pointers, "weight_ptr": "*fp32"},
            dict(
                TAPS=4 if silu else 3,
                PADDED_TAPS=4,
                SILU=silu,
                SAVES=saves,
                TOKENS=short_conv.TOKENS,
                CHANNELS=short_conv.CHANNELS,
            ),
            dict(num_warps=short_conv.NUM_WARPS, **_EXACT),
            multiples=("channels",),
        )
    for name, (key, value, is_delta, saves) in SCANS.items():
        sizes = dict(KEY=key, VALUE=value, SAVES=saves, BLOCK_K=triton.next_power_of_2(key))
        yield Entry(
            f"{arch}/state_scan/{name}",
            arch,
            state_scan._scan_kernel,
            scan_types(is_delta),
            dict(COLUMNS=state_scan.COLUMNS, **sizes),
            dict(num_warps=state_scan.NUM_WARPS, **_EXACT),
        )
        if key > state_chunks.MAX_KEY_DIM or arch in state_chunks.SMALL_ARCHS:
            continue
        yield Entry(
            f"{arch}/state_chunks/{name}",
            arch,
            state_chunks._chunk_kernel,
            scan_types(is_delta),
            dict(COLUMNS=state_chunks.COLUMNS, CHUNK=state_chunks.CHUNK, **sizes),
            dict(num_warps=state_chunks.NUM_WARPS, **_EXACT),
        )


def scan_types(is_delta: bool) -> dict[str, str]:
    """Types of a scan's pointers; without a delta rule there is no beta."""
    names = ("out", "q", "k", "v", "log_decay", "states", *(("beta",) if is_delta else ()))
    return {**_POINTERS, **{f"{name}_ptr": "*fp32" for name in names}}
