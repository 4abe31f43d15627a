"""Compile-table entries of attention: every configuration of the tuning tables."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels import tuning
from quire.kernels.argument_checks import HEAD_DIMS
from quire.kernels.attention import attention_decode, attention_prefill, decode_plan, prefill_plan
from quire.kernels.attention.attention_call import AttentionShape
from quire.kernels.attention.attention_math import FP8_BITS, FP8_NATIVE, FP8_NONE
from tests.kernels.compile.offline_compile import Entry

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_INT32 = "*i32"


def entries() -> Iterator[Entry]:
    """Yield every tuning entry at each of its head sizes, and every option at head size 128 on Hopper."""
    for arch in tuning.ARCHS:
        for head_dim in HEAD_DIMS:
            yield from _attention(arch, torch.bfloat16, head_dim)
        for head_dim in (16, 32, 64, 96, 128, 256):
            yield from _attention(arch, torch.float32, head_dim)
        # At 512 a few registers spill on the other architectures.
        for head_dim in (128, 256, 512) if arch in ("sm_80", "sm_90") else (128, 256):
            yield from _attention(arch, torch.bfloat16, head_dim, "fp8")
        yield from _attention(arch, torch.bfloat16, 128, "window")
        # The latents of DeepSeek V3 and MiniCPM3, and the keys and values of MiMo V2.
        for head_dim, option in (
            (576, "latent512"),
            (288, "latent256"),
            (192, "value128"),
            (192, "value128_fp8"),
        ):
            yield from _attention(arch, torch.bfloat16, head_dim, option)
        # Of the tiny models of a proof.
        for head_dim, option in ((56, "latent40"), (32, "value20")):
            yield from _attention(arch, torch.float32, head_dim, option)
        yield from _planners(arch)
    yield from _attention("sm_90", torch.float16, 128)
    for option in ("chunk", "softcap", "sinks", "block16", "block32"):
        yield from _attention("sm_90", torch.bfloat16, 128, option)
    for group in (1, 3, 5, 7, 12, 16):
        yield from _attention("sm_90", torch.bfloat16, 128, f"group{group}")


def _attention(arch: str, dtype: torch.dtype, head_dim: int, option: str = "") -> Iterator[Entry]:
    kv_heads, group = 8, int(option.removeprefix("group")) if option.startswith("group") else 4
    value_dim, is_latent = None, option.startswith("latent")
    if is_latent:
        kv_heads, group, value_dim = 1, 128, int(option.removeprefix("latent"))
    elif option.startswith("value"):
        kv_heads, group = 4, 16
        value_dim = int(option.removeprefix("value").removesuffix("_fp8"))
    block_size = (
        int(option.removeprefix("block")) if option.startswith("block") else tuning.BLOCK_SIZE
    )
    fp8 = FP8_NONE
    if option.endswith("fp8"):
        fp8 = FP8_NATIVE if arch in ("sm_90", "sm_100") else FP8_BITS
    value = _TYPES[dtype]
    cache = {FP8_NATIVE: "fp8e4nv", FP8_BITS: "u8"}.get(fp8, value)
    types = {
        **{name: f"*{value}" for name in ("out_ptr", "q_ptr")},
        "k_ptr": f"*{cache}",
        **({} if is_latent else {"v_ptr": f"*{cache}"}),
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
    if option.endswith("fp8"):
        types["k_scale_ptr"] = types["v_scale_ptr"] = "*fp32"
    shape = AttentionShape(
        kv_heads * group,
        kv_heads,
        head_dim,
        window=1024 if option == "window" else None,
        chunk=8192 if option == "chunk" else None,
        value_dim=value_dim,
        values_in_keys=is_latent,
    )
    geometry = dict(
        BLOCK_SIZE=block_size,
        SOFTCAP=50.0 if option == "softcap" else 0.0,
        FP8=fp8.value,
        **shape.constants(),
    )
    suffix = f"{value}/{head_dim}" + (f"/{option}" if option else "")
    config = tuning.decode_config(arch, head_dim, dtype)
    yield Entry(
        f"{arch}/decode/{suffix}",
        arch,
        attention_decode._decode_kernel,
        types,
        dict(
            GROUP_PAD=shape.group_pad,
            SPLIT=config.split_tokens,
            TILE=config.tile_tokens,
            MERGE_SPLITS=config.merge_splits,
            **geometry,
        ),
        tuning.launch_options(arch, config.num_warps, config.num_stages, config.programs_per_sm),
        config.programs_per_sm,
    )
    if dtype == torch.bfloat16 and (option in ("", "window", "sinks") or value_dim is not None):
        yield _merge(arch, suffix, types, shape, config)
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
    shape: AttentionShape,
    config: tuning.DecodeConfig,
) -> Entry:
    return Entry(
        f"{arch}/merge/{suffix}",
        arch,
        attention_decode._merge_kernel,
        types,
        dict(
            HEADS=shape.num_heads,
            GROUP=shape.group,
            VALUE_DIM=shape.value_size,
            SPLIT=config.split_tokens,
            MERGE_SPLITS=config.merge_splits,
            UNROLL=config.merge_unroll,
            **attention_decode.merge_layout(shape.value_size),
            WINDOW=shape.window or 0,
            CHUNK=shape.chunk or 0,
        ),
        tuning.launch_options(
            arch,
            attention_decode.MERGE_WARPS,
            programs_per_sm=config.merge_programs_per_sm,
        ),
        config.merge_programs_per_sm,
    )


def _planners(arch: str) -> Iterator[Entry]:
    rows = 512
    decode = dict(ITEM_ROWS=4, SPLIT=tuning.SPLIT_TOKENS, BLOCK_ROWS=rows)
    lists = {
        f"{name}_ptr": _INT32
        for name in "items counts row_slot merge_rows cu_q kv_len tiles num_tiles".split()
    }
    runs = {f"{name}_ptr": _INT32 for name in "runs num_shared num_led tables".split()}
    local = dict(MERGE_SPLITS=32, WINDOW=0, CHUNK=0)
    for name, kernel, types, constants in (
        ("rows", decode_plan._plan_rows_kernel, lists, {**local, **decode}),
        ("shared_rows", decode_plan._plan_rows_kernel, {**lists, **runs}, {**local, **decode}),
        (
            "runs",
            decode_plan._find_runs_kernel,
            {**lists, **runs},
            dict(BLOCK_SIZE=tuning.BLOCK_SIZE, **decode),
        ),
        (
            "prefill",
            prefill_plan._plan_prefill_kernel,
            lists,
            dict(TILE_QUERIES=32, BLOCK_ROWS=rows),
        ),
    ):
        yield Entry(
            f"{arch}/plan_{name}/{rows}",
            arch,
            kernel,
            types,
            constants,
            tuning.launch_options(arch, 4),
        )
