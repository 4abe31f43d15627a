"""Compile-table entries of all kernels except attention, with the arguments that their wrappers use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton

from quire.kernels.adapters import grouped_adapters
from quire.kernels.rows import (
    activation,
    batch_prep,
    experts_fixed,
    fp8_rows,
    kv_write,
    matmul_fixed,
    norm,
    w4_matmul,
)
from quire.kernels.sampling import log_probs, logit_edits, row_survey, sampling_kernel
from quire.kernels.tuning import ARCHS, BLOCK_SIZE, launch_options
from tests.kernels.compile.compile_recurrence import recurrence_entries
from tests.kernels.compile.offline_compile import Entry

VOCAB = 151_936  # Qwen3
_EXACT = dict(enable_fp_fusion=False)  # every wrapper passes this option


def entries() -> Iterator[Entry]:
    """Yield every kernel at the shapes of Llama 3.1 8B and Qwen3, and every option once for each architecture."""
    for arch in ARCHS:
        yield from _rows(arch)
        yield from _kv_write(arch)
        yield from _sampling(arch)
        yield from _batch(arch)
        yield from recurrence_entries(arch)
        yield from matmul_entries(arch)


def _pointers(value: str, *names: str) -> dict[str, str]:
    return {f"{name}_ptr": f"*{value}" for name in names}


def matmul_entries(arch: str) -> Iterator[Entry]:
    """Yield the GEMM kernels: every form of `matmul_fixed` with every tile height, and the experts' kernels.

    "rest" in a name stands for a depth that is not a multiple of BLOCK_K.
    """
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        config = matmul_fixed.matmul_config(arch, dtype)
        options = dict(BLOCK_N=config.block_n, BLOCK_K=config.block_k)
        for form in ("whole", "apart", "in turn"):
            result = "fp32" if form == "apart" else name
            types = {**_pointers(name, "x", "w"), **_pointers(result, "out")}
            if form != "apart":
                types |= _pointers(name, "bias")
            for tile in (config.in_turn,) if form == "in turn" else config.tiles:
                for rest in ("", "/rest"):
                    yield Entry(
                        f"{arch}/matmul/{name}/{form.replace(' ', '_')}/{tile.block_m}{rest}",
                        arch,
                        matmul_fixed._matmul_kernel,
                        types,
                        dict(
                            BLOCK_M=tile.block_m,
                            BAND=matmul_fixed.GROUP_M,
                            FORM=form,
                            EVEN_K=not rest,
                            **options,
                        ),
                        dict(num_warps=tile.num_warps, num_stages=tile.num_stages, **_EXACT),
                        multiples=("depth",),
                    )
        tile = config.tiles[0]
        for order in ("", "/transposed"):
            yield Entry(
                f"{arch}/experts/{name}{order}",
                arch,
                experts_fixed._experts_kernel,
                {**_pointers(name, "out", "x", "w", "bias"), **_pointers("i32", "pairs", "tiles")},
                dict(
                    PAIRS_A_ROW=4,
                    BLOCK_M=tile.block_m,
                    EVEN_K=True,
                    **{"stride_n" if order else "stride_k": 1},
                    **options,
                ),
                dict(num_warps=tile.num_warps, num_stages=tile.num_stages, **_EXACT),
                multiples=("depth", "num_columns"),
            )
    sums = {**_pointers("bf16", "out", "bias"), **_pointers("fp32", "sums")}
    yield Entry(
        f"{arch}/sum_splits",
        arch,
        matmul_fixed._sum_splits_kernel,
        sums,
        dict(SPLITS=matmul_fixed.MAX_SPLITS, BLOCK=matmul_fixed.SUM_BLOCK),
        dict(num_warps=matmul_fixed.SUM_WARPS, **_EXACT),
        multiples=("num_columns",),
    )
    yield Entry(
        f"{arch}/plan_experts",
        arch,
        experts_fixed._plan_experts_kernel,
        {**_pointers("i32", "pairs", "tiles"), **_pointers("i64", "experts")},
        dict(BLOCK_M=64, BLOCK=experts_fixed.PLAN_BLOCK),
        dict(num_warps=experts_fixed.PLAN_WARPS),
    )
    yield Entry(
        f"{arch}/combine_experts",
        arch,
        experts_fixed._combine_kernel,
        _pointers("bf16", "out", "x", "weights"),
        dict(CHOICES=8, BLOCK=experts_fixed.COMBINE_BLOCK),
        dict(num_warps=experts_fixed.COMBINE_WARPS, **_EXACT),
        multiples=("num_columns",),
    )


def _rows(arch: str) -> Iterator[Entry]:
    for hidden in (1024, 4096, norm.MAX_HIDDEN):
        for gemma in (False, True):
            block = triton.next_power_of_2(hidden)
            yield Entry(
                f"{arch}/norm/{hidden}/{'gemma' if gemma else 'llama'}",
                arch,
                norm._rms_norm_kernel,
                {**_pointers("bf16", "out", "sum", "x", "residual", "weight"), "eps": "fp32"},
                dict(HIDDEN=hidden, BLOCK=block, GEMMA=gemma),
                dict(num_warps=norm.norm_warps(block, arch), **_EXACT),
            )
    for gelu in (False, True):
        yield Entry(
            f"{arch}/{'gelu' if gelu else 'silu'}_mul",
            arch,
            activation._gated_kernel,
            _pointers("bf16", "out", "x"),
            dict(SIZE=14336, GELU=gelu, BLOCK=activation.BLOCK),
            dict(num_warps=activation.NUM_WARPS, **_EXACT),
        )


def fp8_entries() -> Iterator[Entry]:
    """Yield the kernels for FP8 weights on GPUs with FP8 matrix units.

    The table lacks these entries: a test of their own compiles them.
    """
    for arch in ("sm_90", "sm_100"):
        for columns in (1024, 4096, fp8_rows.MAX_BLOCK, 14336):
            yield Entry(
                f"{arch}/quantise_rows/{columns}",
                arch,
                fp8_rows._quantise_rows_kernel,
                {
                    **_pointers("u8", "codes"),
                    **_pointers("fp32", "scales"),
                    **_pointers("bf16", "x"),
                    "bound": "fp32",
                },
                dict(COLUMNS=columns, BLOCK=fp8_rows.row_block(columns)),
                dict(num_warps=fp8_rows.NUM_WARPS, **_EXACT),
            )


def adapter_entries(arch: str) -> Iterator[Entry]:
    """Yield the kernels of adapters with the least and the largest rank.

    The table lacks these entries: a test of their own compiles them.
    """
    for rank in (16, 64):
        shape = dict(RANK=rank, BLOCK_T=grouped_adapters.BLOCK_T)
        kernels: dict[str, tuple[Any, dict[str, str], dict[str, int], int]] = {
            "down": (
                grouped_adapters._down_kernel,
                {
                    **_pointers("bf16", "inner", "x", "down"),
                    **_pointers("fp32", "scales"),
                    **_pointers("i32", "slots"),
                },
                dict(BLOCK_K=grouped_adapters.BLOCK_K),
                3,
            ),
            "up": (
                grouped_adapters._up_kernel,
                {**_pointers("bf16", "out", "inner", "up"), **_pointers("i32", "slots")},
                dict(BLOCK_N=grouped_adapters.BLOCK_N),
                2,
            ),
        }
        for name, (kernel, types, blocks, num_stages) in kernels.items():
            yield Entry(
                f"{arch}/adapters_{name}/{rank}",
                arch,
                kernel,
                types,
                {**shape, **blocks},
                dict(num_warps=4, num_stages=num_stages, **_EXACT),
            )


def w4_entries() -> Iterator[Entry]:
    """Yield the kernel for weights of 4 bits on Hopper: the lowest and the highest tile.

    The table lacks these entries: a test of their own compiles them.
    """
    for tile, size in ((w4_matmul.TILES[0], 32), (w4_matmul.TILES[-1], 128)):
        block_k, group_steps = w4_matmul.step_of(4096, 4096 // size)
        yield Entry(
            f"sm_90/w4_linear/{tile.block_m}/{size}",
            "sm_90",
            w4_matmul._w4_kernel,
            {
                **_pointers("bf16", "out", "x", "bias"),
                **_pointers("i32", "words"),
                **_pointers("fp16", "scales"),
                **_pointers("u8", "zeros"),
            },
            dict(
                GROUP_STEPS=group_steps,
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                BLOCK_K=block_k,
            ),
            dict(num_warps=tile.num_warps, num_stages=tile.num_stages, **_EXACT),
            multiples=("depth", "num_columns"),
        )


def _kv_write(arch: str) -> Iterator[Entry]:
    tables = _pointers("fp32", "cos", "sin")
    for name, head_dim, rotary, extra, fp8 in (
        ("llama", 128, 128, tables, False),
        ("partial", 80, 32, tables, False),
        ("norm", 128, 128, {**tables, **_pointers("bf16", "q_weight", "k_weight")}, False),
        ("fp8", 128, 128, {**tables, **_pointers("fp32", "k_scale", "v_scale")}, True),
        ("wide", 256, 256, {**tables, **_pointers("bf16", "q_weight", "k_weight")}, False),
        ("plain", 64, 0, {}, False),
    ):
        types = {
            **_pointers("bf16", "q_out", "q", "k", "v"),
            **_pointers("u8" if fp8 else "bf16", "k_cache", "v_cache"),
            **_pointers("i64", "slots"),
            **extra,
            "eps": "fp32",
        }
        if rotary:
            types["positions_ptr"] = "*i32"
        yield Entry(
            f"{arch}/kv_write/{name}",
            arch,
            kv_write._kv_write_kernel,
            types,
            dict(
                HEADS=32,
                KV_HEADS=8,
                BLOCK_SIZE=BLOCK_SIZE,
                HEAD_BLOCK=kv_write.HEAD_BLOCK,
                GEMMA=False,
                FP8=fp8,
                **kv_write.head_layout(head_dim, rotary),
            ),
            dict(num_warps=kv_write.NUM_WARPS, **_EXACT),
        )


def _sampling(arch: str) -> Iterator[Entry]:
    for value in ("fp32", "bf16"):
        for kind in ("", "/edited", "/top"):
            yield from _survey(arch, value, kind)
        yield from _edits(arch, value)


def _survey(arch: str, value: str, kind: str) -> Iterator[Entry]:
    """Kernels of one sampler call (plain or with edited rows), or of one call for the largest log-probabilities."""
    config = row_survey.DEFAULT_CONFIG
    parts = config.num_parts(VOCAB)
    shape: dict[str, Any] = dict(VOCAB=VOCAB, PARTS=parts, CHUNKS=config.part_chunks)
    padded = dict(PADDED=triton.next_power_of_2(parts))
    lists = dict(PART_SLOTS=config.part_slots, TILE=config.tile, **shape, **padded)
    work = {**_pointers("fp32", "stats", "values"), **_pointers("i32", "marks", "ids")}
    rows = {**work, **_pointers(value, "logits")}
    if kind:
        rows |= _pointers("i32", "source")
    if kind == "/edited":
        rows |= _pointers("fp32", "edited")
    limits = _pointers("i32", "top_k")
    if kind != "/top":
        limits = {**_pointers("i32", "limits", "noise"), **_pointers("i64", "tokens")}
    resident = row_survey.SURVEY_RESIDENT, row_survey.GATHER_RESIDENT
    wide = [launch_options(arch, config.num_warps, 1, count) for count in resident]
    name = f"{value}{kind}"

    yield Entry(
        f"{arch}/survey/{name}",
        arch,
        row_survey._survey_kernel,
        {**rows, **limits},
        dict(CHUNK=config.chunk, **shape),
        wide[0],
        resident[0],
    )
    if value == "bf16" and kind != "/edited":
        yield Entry(
            f"{arch}/combine{kind}",
            arch,
            row_survey._combine_kernel,
            {**work, **limits},
            dict(FULL=row_survey.full_chunks(VOCAB, config), **shape, **padded),
            launch_options(arch, row_survey.COMBINE_WARPS),
        )
    if kind != "/top":
        yield Entry(
            f"{arch}/gather/{name}",
            arch,
            row_survey._gather_kernel,
            rows,
            dict(
                CHUNK=config.chunk, PART_SLOTS=config.part_slots, TILE=config.gather_tile, **shape
            ),
            wide[1],
            resident[1],
        )
    if kind == "/top":
        yield Entry(
            f"{arch}/log_probs/{value}",
            arch,
            log_probs._log_probs_kernel,
            {
                **rows,
                **_pointers("fp32", "scores"),
                **_pointers("i32", "num_top"),
                **_pointers("i64", "tokens"),
            },
            lists,
            launch_options(arch, config.num_warps, 1, log_probs.RESIDENT),
            log_probs.RESIDENT,
        )
    if kind:
        return
    yield Entry(
        f"{arch}/draw/{name}",
        arch,
        sampling_kernel._sample_kernel,
        {**rows, **limits, **_pointers("fp32", "edited")},
        dict(PIVOTS=config.pivots, **lists),
        launch_options(arch, config.num_warps, 1, sampling_kernel.RESIDENT),
        sampling_kernel.RESIDENT,
    )


def _edits(arch: str, value: str) -> Iterator[Entry]:
    types = {
        **_pointers(value, "logits"),
        **_pointers("fp32", "edited", "bias", "repetition", "presence", "frequency"),
        **_pointers("i32", "rows", "masks", "mask_rows", "starts", "ids", "counts", "count_rows"),
    }
    options = dict(num_warps=logit_edits.NUM_WARPS, **_EXACT)
    blocks = triton.cdiv(VOCAB, logit_edits.BLOCK)
    yield Entry(
        f"{arch}/edit_logits/{value}",
        arch,
        logit_edits._edit_kernel,
        types,
        dict(VOCAB=VOCAB, BLOCKS=blocks, BLOCK=logit_edits.BLOCK),
        options,
    )
    yield Entry(
        f"{arch}/edit_listed/{value}",
        arch,
        logit_edits._edit_listed_kernel,
        types,
        dict(VOCAB=VOCAB, BLOCK=logit_edits.LIST_BLOCK),
        options,
    )


def _batch(arch: str) -> Iterator[Entry]:
    block = dict(BLOCK=batch_prep.BLOCK)
    rows = _pointers("i32", "rows", "cu_q")
    columns = _pointers("i32", "positions", "kv_len", "batch_tables", "num_computed", "tables")
    for name, kernel, types, constants, num_warps in (
        (
            "prepare",
            batch_prep._prepare_kernel,
            {**rows, **columns, **_pointers("i64", "slots")},
            dict(BLOCK_SIZE=BLOCK_SIZE, **block),
            4,
        ),
        (
            "gather_last",
            batch_prep._gather_last_kernel,
            {**rows, **_pointers("i32", "input_ids", "last_token", "decodes")},
            block,
            4,
        ),
        (
            "scatter",
            batch_prep._scatter_kernel,
            _pointers("i32", "table", "rows", "columns", "values"),
            block,
            4,
        ),
    ):
        yield Entry(
            f"{arch}/{name}", arch, kernel, types, constants, dict(num_warps=num_warps, **_EXACT)
        )
