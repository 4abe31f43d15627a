"""Resolves the user's `EngineArgs` to an `EngineConfig`: dtype, threads, batch and cache sizes.

The memory equation is in `memory_table.py`. `gpu_sizing.py` and `cpu_sizing.py` contain the parts that depend on the
device.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch

from quire.kernels.rows import fp8_linear
from quire.replica.checkpoint.checkpoint import count_parameters, weights_revision
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.checkpoint.weight_bytes import loading_bytes, weight_bytes
from quire.replica.config import (
    ASYNC_BATCHING,
    CUDA_GRAPHS,
    DEMOTION_ORDERS,
    FUSE,
    JSON_WHITE_SPACE,
    KV_CACHE_DTYPES,
    RESTORE,
    SCHEDULERS,
    WEIGHTS,
    EngineArgs,
    EngineConfig,
    SizingError,
)
from quire.replica.kv_cache.groups import max_sequence_tokens, sequence_blocks
from quire.replica.machine import available_bytes, cpu_flags, physical_cores
from quire.replica.runner.graphs.mixed_shapes import LEAST_TOKENS
from quire.replica.startup.cpu_sizing import CpuSizing
from quire.replica.startup.device_sizing import GIB, DeviceSizing
from quire.replica.startup.gpu_sizing import GpuSizing
from quire.replica.startup.memory_table import MeasuredMemory, memory_table

logger = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16")


def resolve(
    args: EngineArgs,
    spec: ModelSpec,
    checkpoint_path: Path | None = None,
    measured: MeasuredMemory | None = None,
) -> EngineConfig:
    """Choose every value that the user left open.

    Parameters
    ----------
    args
        The user's options.
    spec
        The checkpoint.
    checkpoint_path
        Folder of the checkpoint; None for `spec.path`.
    measured
        On a GPU, measured memory of the loaded model. Without it, the number of blocks is an estimate.

    Raises
    ------
    SizingError
        A value is invalid, the weights do not fit, or the cache cannot hold one request of `max_model_len`.
    """
    check_args(args)
    num_threads = args.num_threads or physical_cores()
    sizing = choose_sizing(args.device, num_threads)
    device = sizing.device
    folder = checkpoint_path or spec.path
    weights = choose_weights(args, spec)
    dtype = args.dtype
    if dtype == "auto" and weights == "fp8":
        dtype = "bfloat16"
    elif dtype == "auto":
        num_parameters = count_parameters(folder)
        dtype = sizing.choose_dtype(spec.checkpoint_dtype, num_parameters, cpu_flags())
    if args.deterministic:
        sizing.check_deterministic(args, weights, dtype)
    sizing.check_args(args, weights, dtype)
    if weights == "fp8":
        check_fp8(device, dtype)
    max_batch_tokens = args.max_batch_tokens or sizing.batch_tokens
    max_model_len = args.max_model_len or spec.max_position_embeddings
    if max_model_len > spec.max_position_embeddings:
        raise SizingError(
            f"max_model_len {max_model_len} exceeds the checkpoint's max_position_embeddings "
            f"{spec.max_position_embeddings}"
        )
    block_size = sizing.choose_block_size(args)
    table = memory_table(
        args,
        spec,
        sizing,
        dtype,
        weight_bytes(folder, dtype, weights),
        max_batch_tokens,
        max_model_len,
        available_bytes(device) if measured is None else measured.available,
        available_bytes("cpu"),
        measured,
    )
    if sizing.is_final or measured is not None:
        logger.info("memory of %s\n%s", args.model, table)
    if (needed := loading_bytes(folder, dtype, weights)) > table.budget:
        raise SizingError(
            f"weights is {weights!r}, which needs {needed / GIB:.3f} GiB while the weights are read\n{table}"
        )
    max_cache_tokens = max_sequence_tokens(spec.groups, table.num_blocks, block_size, max_model_len)
    if max_model_len > max_cache_tokens:
        if args.max_model_len is not None:
            needed = sequence_blocks(spec.groups, max_model_len, 1, block_size)
            raise SizingError(
                f"max_model_len {max_model_len} needs {needed} blocks, the cache "
                f"has {table.num_blocks}; lower it or raise num_blocks, kv_cache_gib or the memory\n{table}"
            )
        max_model_len = max_cache_tokens
    q_padding = choose_q_padding(args, sizing, min(max_batch_tokens, max_model_len))
    return EngineConfig(
        model_name=args.model,
        revision=weights_revision(folder),
        device=device,
        dtype=dtype,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=table.num_blocks,
        max_batch_tokens=max_batch_tokens,
        # A step decodes one token of every running request.
        max_running_requests=min(args.max_running_requests, max_batch_tokens),
        **args.light_fields(),
        async_batching=args.async_batching == "on"
        or (args.async_batching == "auto" and sizing.is_async),
        cuda_graphs=args.cuda_graphs,
        max_cached_graphs=args.max_cached_graphs,
        q_padding=q_padding,
        kv_padding=args.kv_padding,
        check_graphs=args.check_graphs,
        nvtx=args.nvtx,
        restore=args.restore,
        scheduler=args.scheduler,
        fuse=args.fuse,
        json_white_space=args.json_white_space,
        weights=weights,
        kv_cache_dtype=args.kv_cache_dtype,
        demotion_order=args.demotion_order,
        prefix_caching=args.prefix_caching,
        deterministic=sizing.is_deterministic(dtype)
        if args.deterministic is None
        else args.deterministic,
        num_threads=num_threads,
        groups=spec.groups,
        num_host_blocks=table.num_host_blocks,
    )


def choose_sizing(device: str, num_threads: int) -> DeviceSizing:
    """Create the sizing of a device; "auto" is a GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise SizingError("device is 'cuda', but torch sees no CUDA device; use 'cpu' or 'auto'")
    return CpuSizing(num_threads) if device == "cpu" or not has_gpu else GpuSizing()


def choose_weights(args: EngineArgs, spec: ModelSpec) -> str:
    """Return the weight format asked for, or "fp8" for a checkpoint stored in FP8."""
    if spec.fp8 is None or not spec.fp8.has_weights:
        return args.weights
    if args.weights == "int8":
        raise SizingError(
            f"weights is 'int8', and {spec.path} is stored in FP8 ({spec.fp8.method}), which is not converted; "
            "use 'auto'"
        )
    return "fp8"


def check_fp8(device: str, dtype: str) -> None:
    """Raise `SizingError` unless dtype and machine support FP8 weights."""
    if dtype != "bfloat16":
        raise SizingError(f"weights is 'fp8', which needs dtype 'bfloat16'; it is {dtype!r}")
    if (missing := fp8_linear.missing(device)) is not None:
        raise SizingError(f"weights is 'fp8', which needs {missing}")


def choose_q_padding(args: EngineArgs, sizing: DeviceSizing, highest: int) -> int | None:
    """Choose the multiple to which tokens of mixed steps are padded; None: mixed steps are not captured.

    Parameters
    ----------
    highest
        The smaller of the longest step and the longest request, in tokens.

    Raises
    ------
    SizingError
        `q_padding` is out of bounds.
    """
    asked = args.q_padding
    if asked is None:
        return sizing.default_q_padding(args, highest)
    if type(asked) is int and asked == 0:
        return None
    if type(asked) is not int or not LEAST_TOKENS <= asked <= highest:
        raise SizingError(
            f"q_padding must be 0 or in [{LEAST_TOKENS}, {highest}], at most max_batch_tokens and max_model_len, got "
            f"{asked!r}"
        )
    return asked


def check_args(args: EngineArgs) -> None:
    """Check the bounds of the user's options; messages name field, bound and value."""
    choices = {
        "device": ("auto", "cpu", "cuda"),
        "dtype": ("auto", *_DTYPES),
        "scheduler": SCHEDULERS,
        "demotion_order": DEMOTION_ORDERS,
        "fuse": FUSE,
        "json_white_space": JSON_WHITE_SPACE,
        "restore": RESTORE,
        "weights": WEIGHTS,
        "kv_cache_dtype": KV_CACHE_DTYPES,
        "async_batching": ASYNC_BATCHING,
        "cuda_graphs": CUDA_GRAPHS,
    }
    for name, allowed in choices.items():
        if getattr(args, name) not in allowed:
            raise SizingError(
                f"{name} must be one of {', '.join(allowed)}, got {getattr(args, name)!r}"
            )
    counts = (
        *("block_size", "num_blocks", "max_batch_tokens", "max_model_len", "num_threads"),
        "kv_padding",
    )
    required = ("max_running_requests", "max_waiting_requests", "max_cached_graphs")
    for name in counts + required:
        value = getattr(args, name)
        if value is None and name in counts:
            continue
        if type(value) is not int or value < 1:
            raise SizingError(f"{name} must be an integer of at least 1, got {value!r}")
    if not 0 < args.max_memory_percent <= 1:
        raise SizingError(f"max_memory_percent must be in (0, 1], got {args.max_memory_percent!r}")
    if not 0 <= args.safety_margin < 1:
        raise SizingError(f"safety_margin must be in [0, 1), got {args.safety_margin!r}")
    resume = args.resume_margin
    if resume is not None and not args.safety_margin <= resume <= 1:
        raise SizingError(
            f"resume_margin must be in [safety_margin, 1], here [{args.safety_margin:g}, 1], got {resume!r}"
        )
    max_ms = args.max_prefill_ms
    if max_ms is not None and not (math.isfinite(max_ms) and max_ms >= 1):
        raise SizingError(
            f"max_prefill_ms must be at least 1, or None for no bound, got {max_ms!r}"
        )
    timeout_s = args.step_timeout_s
    if isinstance(timeout_s, bool) or not 0 < timeout_s < math.inf:
        raise SizingError(f"step_timeout_s must be a positive number, got {timeout_s!r}")
    gib = args.kv_cache_gib
    if gib is not None and not (math.isfinite(gib) and gib > 0):
        raise SizingError(f"kv_cache_gib must be a positive number, got {gib!r}")
    gib = args.cpu_offload_gib
    if gib is not None and not (math.isfinite(gib) and gib >= 0):
        raise SizingError(f"cpu_offload_gib must be a number of at least 0, got {gib!r}")
