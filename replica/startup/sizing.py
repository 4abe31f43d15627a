"""Resolves the user's `EngineArgs` to an `EngineConfig`: dtype, threads, batch and cache sizes.

The memory equation is in `memory_table.py`. `gpu_sizing.py` and `cpu_sizing.py` contain the parts that depend on the
device.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.kernels.rows import fp8_linear
from quire.replica.checkpoint.checkpoint import count_parameters, weights_revision
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.checkpoint.weight_bytes import ELEMENT_BYTES, loading_bytes, weight_bytes
from quire.replica.config import (
    OPTION_NAMES,
    EngineArgs,
    EngineConfig,
    SizingError,
    check_args,
    light_fields,
)
from quire.replica.device.kv_pool import block_elements
from quire.replica.device.state_pool import slot_bytes
from quire.replica.host_machine import available_bytes, cpu_flags, physical_cores
from quire.replica.kv_cache.groups import max_sequence_tokens, sequence_blocks
from quire.replica.model.layers.state_layers import split_state_layers
from quire.replica.model.loader import empty_model
from quire.replica.model.own_attention import has_own_attention
from quire.replica.model.text_part import text_tensor_names
from quire.replica.runner.graphs.mixed_shapes import LEAST_TOKENS
from quire.replica.startup.cpu_sizing import CpuSizing
from quire.replica.startup.device_sizing import GIB, DeviceSizing
from quire.replica.startup.gpu_sizing import GpuSizing
from quire.replica.startup.memory_table import (
    NO_DRAFT_MODEL,
    DraftBytes,
    MeasuredMemory,
    memory_table,
)

logger = logging.getLogger(__name__)

# Snapshots of recurrent states for each running request, if memory allows: its own newest one, that of its prompt, and
# some of earlier prompts.
_SNAPSHOTS_PER_ROW = 4


def resolve(
    args: EngineArgs,
    spec: ModelSpec,
    checkpoint_path: Path | None = None,
    measured: MeasuredMemory | None = None,
    draft: DraftBytes = NO_DRAFT_MODEL,
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
        On a GPU, measured memory of the loaded model. If None, the number of blocks is an estimate.
    draft
        Memory of the draft model.

    Raises
    ------
    SizingError
        A value is invalid, the weights do not fit, or the cache cannot hold one request of `max_model_len`.
    """
    check_args(args)
    num_threads = args.num_threads or physical_cores()
    sizing = choose_sizing(args.device, num_threads)
    if spec.has_states:
        args = _for_recurrent_layers(args, sizing)
    if args.max_loaded_adapters:
        _check_adapters(args, spec)
    if has_own_attention(spec):
        args = _for_own_attention(args, spec, sizing)
    device = sizing.device
    folder = checkpoint_path or spec.path
    weights = choose_weights(args, spec, device)
    dtype = choose_dtype(args, spec, weights, sizing, folder)
    if args.deterministic and spec.w4 is not None:
        raise SizingError(
            f"deterministic is true, and {spec.path} is stored in 4 bits ({spec.w4.method}), whose products follow the "
            "number of rows; use a checkpoint that is not quantised, or deterministic false"
        )
    if args.deterministic:
        sizing.check_deterministic(args, weights, dtype)
    sizing.check_args(args, weights, dtype)
    if weights == "fp8":
        check_fp8(device, dtype)
    if args.kv_cache_dtype == "fp8" and any(group.values_in_keys for group in spec.groups):
        raise SizingError(
            f"kv_cache_dtype is 'fp8', and {spec.architecture} has latent attention, whose kernels read latents in the "
            "model's dtype only; use 'auto'"
        )
    max_batch_tokens = args.max_batch_tokens or sizing.batch_tokens
    max_model_len = args.max_model_len or spec.short_context or spec.max_position_embeddings
    if max_model_len > spec.max_position_embeddings:
        raise SizingError(
            f"max_model_len {max_model_len} exceeds the checkpoint's max_position_embeddings "
            f"{spec.max_position_embeddings}"
        )
    block_size = sizing.choose_block_size(args)
    loaded = text_tensor_names(spec)
    available = available_bytes(device) if measured is None else measured.available
    model_bytes = int(weight_bytes(folder, dtype, weights, loaded) * spec.weight_share)
    states = StateSlots()
    if spec.has_states:
        room = int(available * args.max_memory_percent - model_bytes)
        states = _state_slots(args, spec, dtype, room, max_batch_tokens, block_size)
        args = dataclasses.replace(
            args,
            max_running_requests=states.num_rows,
            prefix_caching=states.num_snapshots > 0,
        )
    table = memory_table(
        args,
        spec,
        sizing,
        dtype,
        model_bytes,
        max_batch_tokens,
        max_model_len,
        available,
        available_bytes("cpu"),
        measured,
        states.num_bytes,
        draft,
    )
    if sizing.is_final or measured is not None:
        logger.info("memory of %s\n%s", args.model, table)
    needed = int(loading_bytes(folder, dtype, weights, loaded) * spec.weight_share)
    if needed > table.budget:
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
    num_host_blocks, num_host_snapshots = table.num_host_blocks, 0
    if states.num_snapshots:
        # A block in host memory is of use together with a snapshot there: each kind gets half of the memory.
        num_host_snapshots = table.host_tier // 2 // states.slot
        num_host_blocks = num_host_blocks // 2 if num_host_snapshots else 0
    chosen = {
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_blocks": table.num_blocks,
        "max_batch_tokens": max_batch_tokens,
        # A step decodes one token of every running request.
        "max_running_requests": min(args.max_running_requests, max_batch_tokens),
        "async_batching": choose_async_batching(args, sizing),
        "q_padding": choose_q_padding(args, sizing, min(max_batch_tokens, max_model_len)),
        "weights": weights,
        "deterministic": spec.w4 is None and sizing.is_deterministic(dtype)
        if args.deterministic is None
        else args.deterministic,
        "num_threads": num_threads,
        "reduction_splits": args.num_splits,
        **light_fields(args),
    }
    return EngineConfig(
        **{name: getattr(args, name) for name in OPTION_NAMES} | chosen,
        model_name=args.model,
        revision=weights_revision(folder),
        device=device,
        dtype=dtype,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        groups=spec.groups,
        num_host_blocks=num_host_blocks,
        session_max_share=args.session_max_share,
        has_states=spec.has_states,
        num_snapshots=states.num_snapshots,
        num_host_snapshots=num_host_snapshots,
        snapshot_spacing=states.spacing,
        hidden_size=spec.hidden_size,
        is_deterministic_by_default=args.deterministic is None,
    )


def _for_recurrent_layers(args: EngineArgs, sizing: DeviceSizing) -> EngineArgs:
    """Turn off batch-invariance unless the user asks for it: only recurrences in Quire's kernels have it, on the CPU.

    Raises
    ------
    SizingError
        The user asks for it on a GPU, where sums of torch's operations between these kernels depend on the batch.
    """
    if args.deterministic and not sizing.fixes_recurrences:
        raise SizingError(
            f"deterministic is true, which a model with recurrent layers cannot have on device {sizing.device!r}"
        )
    return dataclasses.replace(args, deterministic=bool(args.deterministic))


def _check_adapters(args: EngineArgs, spec: ModelSpec) -> None:
    """Raise `SizingError` if the model's products are not computed layer by layer for all tokens of a step."""
    kind = None
    if spec.has_states:
        kind = "recurrent layers"
    elif any(group.values_in_keys for group in spec.groups):
        kind = "latent attention"
    elif has_own_attention(spec):
        kind = "an attention of its own"
    if kind is not None:
        raise SizingError(
            f"max_loaded_adapters is {args.max_loaded_adapters}, and {spec.architecture} has {kind}, with which "
            "adapters are not supported; use 0"
        )


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of recurrent states."""

    num_rows: int = 0  # slots of running requests
    num_snapshots: int = 0
    spacing: int = 1  # in blocks; a prompt gets a snapshot after as many in any case
    slot: int = 0  # bytes of a slot

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots of the device, the trash slot included."""
        return (self.num_rows + 1 + self.num_snapshots) * self.slot


def _state_slots(
    args: EngineArgs, spec: ModelSpec, dtype: str, room: int, max_batch_tokens: int, block_size: int
) -> StateSlots:
    """Choose the number of slots.

    Slots take at most half of the memory that the weights leave, those of running requests at most half of that if
    there are snapshots. The snapshots of a long prompt are so far apart that they take as much memory as its KV.

    Parameters
    ----------
    room
        Bytes that the weights leave.
    """
    slot = slot_bytes(split_state_layers(empty_model(spec, dtype)))
    most = max(1, room // 2 // slot - 1)
    rows = most // 2 if args.prefix_caching else most
    num_rows = max(1, min(args.max_running_requests, max_batch_tokens, rows))
    num_snapshots = min(most - num_rows, _SNAPSHOTS_PER_ROW * num_rows)
    if not args.prefix_caching:
        num_snapshots = 0
    element = 1 if args.kv_cache_dtype == "fp8" else ELEMENT_BYTES[dtype]
    block = len(spec.groups) * block_elements(spec.groups, block_size) * element
    # Without layers that have KV only the ends of prompts get snapshots.
    spacing = -(-slot // block) if block else -(-spec.max_position_embeddings // block_size)
    return StateSlots(num_rows, num_snapshots, spacing, slot)


def _for_own_attention(args: EngineArgs, spec: ModelSpec, sizing: DeviceSizing) -> EngineArgs:
    """Turn off batch-invariance for a class that computes attention itself: its sums depend on the chunks of a prompt.

    Raises
    ------
    SizingError
        The user asks for it, or the device does not run such a class.
    """
    if args.deterministic or not sizing.runs_own_attention:
        name, value = ("deterministic", True) if args.deterministic else ("device", sizing.device)
        raise SizingError(
            f"{name} is {value!r}, which {spec.architecture} cannot have: it computes attention itself"
        )
    logger.warning(
        "%s computes attention itself: the requests of a step run one after the other",
        spec.architecture,
    )
    return dataclasses.replace(args, deterministic=False)


def choose_sizing(device: str, num_threads: int) -> DeviceSizing:
    """Create the sizing of a device; "auto" is a GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise SizingError("device is 'cuda', but torch sees no CUDA device; use 'cpu' or 'auto'")
    return CpuSizing(num_threads) if device == "cpu" or not has_gpu else GpuSizing()


def choose_dtype(
    args: EngineArgs, spec: ModelSpec, weights: str, sizing: DeviceSizing, folder: Path
) -> str:
    """Return the dtype asked for; `auto` follows from the storage format, or from checkpoint and machine."""
    if args.dtype != "auto":
        return args.dtype
    if weights == "fp8":
        return "bfloat16"
    if spec.w4 is not None and sizing.w4_dtype is not None:
        return sizing.w4_dtype
    return sizing.choose_dtype(spec.checkpoint_dtype, count_parameters(folder), cpu_flags())


def choose_weights(args: EngineArgs, spec: ModelSpec, device: str) -> str:
    """Return the weight format asked for, or "fp8" if the device can multiply the FP8 codes of a checkpoint.

    "auto" for an FP8 checkpoint means that its weights are decoded to the dtype.

    Raises
    ------
    SizingError
        The checkpoint is stored in 8 or 4 bits, and another format is asked for.
    """
    if spec.w4 is not None and args.weights != "auto":
        raise SizingError(
            f"weights is {args.weights!r}, and {spec.path} is stored in 4 bits ({spec.w4.method}), which is not "
            "converted; use 'auto'"
        )
    scheme = spec.scheme
    if scheme is None or not scheme.has_weights or scheme.code == "mxfp4":
        return args.weights
    refused = "int8" if scheme.code == "fp8" and scheme.is_multiplied else "fp8"
    if args.weights == refused:
        raise SizingError(
            f"weights is {refused!r}, and {spec.path} is stored in {scheme.code.upper()} ({scheme.method}), which is "
            "not converted; use 'auto'"
        )
    if scheme.code != "fp8" or not scheme.is_multiplied:
        return args.weights
    can_multiply = args.dtype in ("auto", "bfloat16") and fp8_linear.missing(device) is None
    return "fp8" if can_multiply or args.weights == "fp8" else "auto"


def check_fp8(device: str, dtype: str) -> None:
    """Raise `SizingError` unless dtype and machine support FP8 weights."""
    if dtype != "bfloat16":
        raise SizingError(f"weights is 'fp8', which needs dtype 'bfloat16'; it is {dtype!r}")
    if (missing := fp8_linear.missing(device)) is not None:
        raise SizingError(f"weights is 'fp8', which needs {missing}")


def choose_async_batching(args: EngineArgs, sizing: DeviceSizing) -> str:
    """Return `on` or `off`; `auto` becomes `on` if the device can compute while the host plans."""
    if args.async_batching != "auto":
        return args.async_batching
    return "on" if sizing.is_async else "off"


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
    if not asked:
        return None
    if not LEAST_TOKENS <= asked <= highest:
        raise SizingError(
            f"q_padding must be 0 or in [{LEAST_TOKENS}, {highest}], at most max_batch_tokens and max_model_len, got "
            f"{asked!r}"
        )
    return asked
