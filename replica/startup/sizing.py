"""From what the user asked for to what the engine runs with: dtype, threads, batch and cache sizes.

The memory equation, solved for the number of blocks::

    max_memory_percent * available = weights + activations + attention + logits + graphs
                                     + (num_blocks + 1) * block_bytes
                                     + num_host_blocks * block_bytes, if the device is the CPU

`available` is what the device, or on the CPU the machine and the container's cgroup, still have to give. On a GPU the
equation is solved twice: before the model is loaded, to refuse what cannot fit, and with what `device_memory.py` has
measured in place of the first line's terms.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.kernels import tuning
from quire.kernels.attention.decode_slots import slot_bytes_per_token
from quire.kernels.cpu import cpu_attention, cpu_attention_native, native_library
from quire.kernels.cpu.cpu_attention_torch import PREFILL_ROWS
from quire.kernels.cpu.cpu_sequence import workspace_columns
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
from quire.replica.kv_cache.groups import max_sequence_tokens, sequence_blocks
from quire.replica.machine import available_bytes, cpu_flags, physical_cores
from quire.replica.runner.graphs.mixed_shapes import CHEAP_TOKENS, LEAST_TOKENS

logger = logging.getLogger(__name__)

GIB = 1 << 30
_CPU_KV_BYTES = 1 * GIB  # default: several replicas share a machine
_HOST_TIER_BYTES = 4 * GIB  # default beside a GPU, at most a quarter of what the host has to give
_CPU_BLOCK_SIZE = 32
_CPU_BATCH_TOKENS = 512
_CUDA_BATCH_TOKENS = 8192
_SMALL_MODEL_PARAMETERS = (
    200_000_000  # below, float32 on a CPU is fast enough to have exactness for free
)


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Bytes on a device, without the KV pool."""

    available: int  # before the model was loaded
    weights: int
    workspace: int  # of the largest steps: activations, attention, logits, inputs, tables
    graphs: int  # of `max_cached_graphs`


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """The terms of the memory equation, in bytes. `str()` prints them."""

    available: int
    max_memory_percent: float
    weights: int
    activations: int
    # On the CPU the threads' tiles; without native attention: gathered keys and values, and scores, of the longest
    # request that fits. On a GPU the partial results of split decode rows, which grow with the pool.
    attention: int
    logits: int
    block: int  # one block over all layers of a group
    num_blocks: int
    block_size: int
    num_host_blocks: int  # of the host tier
    is_host_separate: bool  # its memory is not the device's
    graphs: int = 0
    # Weights, activations and graphs are measured: the activations hold the logits, and of attention's workspace all
    # that does not grow with the pool.
    is_measured: bool = False

    @property
    def budget(self) -> int:
        """Bytes the engine may use."""
        return int(self.available * self.max_memory_percent)

    @property
    def kv_cache(self) -> int:
        """Bytes of the pool, the trash block included."""
        return (self.num_blocks + 1) * self.block

    @property
    def host_tier(self) -> int:
        """Bytes of the host tier."""
        return self.num_host_blocks * self.block

    @property
    def remainder(self) -> int:
        """Bytes of the budget that nothing uses; negative when it does not fit."""
        used = self.weights + self.activations + self.attention + self.logits + self.graphs
        used += self.kv_cache
        return self.budget - used - (0 if self.is_host_separate else self.host_tier)

    def __str__(self) -> str:
        terms = [
            ("weights", self.weights, ""),
            ("activations", self.activations, "largest batch"),
            ("attention", self.attention, "workspace"),
            ("logits", self.logits, "all running requests"),
        ]
        if self.is_measured:
            terms = [
                ("weights", self.weights, "measured"),
                ("workspace", self.activations, "measured at the largest batch"),
                ("attention", self.attention, "partial results of decode rows"),
                (
                    "graphs",
                    self.graphs,
                    "as many as may be kept, from the largest that were captured",
                ),
            ]
        rows = [
            ("available", self.available, ""),
            ("budget", self.budget, f"{self.max_memory_percent:.0%} of it"),
            *terms,
            (
                "KV cache",
                self.kv_cache,
                f"{self.num_blocks} + 1 blocks of {self.block_size} tokens, {self.block / 1024:.0f} KiB each",
            ),
            (
                "host tier",
                self.host_tier,
                f"{self.num_host_blocks} blocks, "
                + ("pinned memory of the host" if self.is_host_separate else "of the same memory"),
            ),
            ("left", self.remainder, ""),
        ]
        return "\n".join(
            f"{name:<12}{size / GIB:>10.3f} GiB  {note}".rstrip() for name, size, note in rows
        )


def resolve(
    args: EngineArgs,
    spec: ModelSpec,
    checkpoint_path: Path | None = None,
    measured: MeasuredMemory | None = None,
) -> EngineConfig:
    """Decide everything the user left open.

    Parameters
    ----------
    args
        What the user wrote.
    spec
        The checkpoint.
    checkpoint_path
        Its folder; None for `spec.path`.
    measured
        On a device with memory of its own: what the model takes of it. Without, blocks are only an estimate there.

    Raises
    ------
    SizingError
        Bad values, weights that do not fit, or a cache that cannot hold one request of the length asked for.
    """
    check_args(args)
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise SizingError("device is 'cuda', but torch sees no CUDA device; use 'cpu' or 'auto'")
    if args.cuda_graphs == "on" and device == "cpu":
        raise SizingError("cuda_graphs is 'on', which needs device 'cuda'; it is 'cpu'")
    folder = checkpoint_path or spec.path
    weights = choose_weights(args, spec)
    dtype = args.dtype
    if dtype == "auto" and weights == "fp8":
        dtype = "bfloat16"
    elif dtype == "auto":
        dtype = choose_dtype(device, spec.checkpoint_dtype, count_parameters(folder), cpu_flags())
    exact = device == "cpu" and dtype == "float32"
    if args.deterministic:
        check_deterministic(args, weights, device, dtype)
    check_formats(weights, args, device, dtype)
    default_batch = _CPU_BATCH_TOKENS if device == "cpu" else _CUDA_BATCH_TOKENS
    max_batch_tokens = args.max_batch_tokens or default_batch
    max_model_len = args.max_model_len or spec.max_position_embeddings
    if max_model_len > spec.max_position_embeddings:
        raise SizingError(
            f"max_model_len {max_model_len} exceeds the checkpoint's max_position_embeddings "
            f"{spec.max_position_embeddings}"
        )
    num_threads = args.num_threads or physical_cores()
    block_size = choose_block_size(args, device)
    table = memory_table(
        args,
        spec,
        device,
        dtype,
        weight_bytes(folder, dtype, weights),
        max_batch_tokens,
        max_model_len,
        available_bytes(device) if measured is None else measured.available,
        available_bytes("cpu"),
        native_attention_bytes(spec, device, block_size, num_threads),
        measured,
    )
    if device == "cpu" or measured is not None:
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
    chosen = {
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_blocks": table.num_blocks,
        "max_batch_tokens": max_batch_tokens,
        # A step decodes one token of every running request.
        "max_running_requests": min(args.max_running_requests, max_batch_tokens),
        "async_batching": choose_async_batching(args, device),
        "q_padding": choose_q_padding(args, device, min(max_batch_tokens, max_model_len)),
        "weights": weights,
        "deterministic": exact if args.deterministic is None else args.deterministic,
        "num_threads": num_threads,
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
        num_host_blocks=table.num_host_blocks,
    )


def memory_table(
    args: EngineArgs,
    spec: ModelSpec,
    device: str,
    dtype: str,
    weight_bytes: int,
    max_batch_tokens: int,
    max_model_len: int,
    available: int,
    host_available: int,
    native_attention: int | None = None,
    measured: MeasuredMemory | None = None,
) -> MemoryTable:
    """Solve the memory equation for the number of blocks: a pure function of its arguments.

    `num_blocks` is taken as asked, else `kv_cache_gib`, else what the budget leaves; the CPU's default is at most
    1 GiB. Without `num_blocks` the pool is never larger than all running requests of full length can use.

    The host tier has `cpu_offload_gib`. On the CPU it is off by default: there it takes the memory of a larger pool,
    which holds as much without copies.

    `native_attention` is `native_attention_bytes`; None on a GPU, and on the CPU for the torch path, whose workspace
    grows with the request.
    `measured` stands in for all terms but the caches'.

    Raises
    ------
    SizingError
        The weights, or the cache asked for, do not fit, or not one block does.
    """
    element = ELEMENT_BYTES[dtype]
    block_size = choose_block_size(args, device)
    block = block_elements(spec.groups, block_size)
    block *= 1 if args.kv_cache_dtype == "fp8" else element
    num_host_blocks = _num_host_blocks(args, device, block, host_available)
    # Live at once in the widest place: the residual stream and its norm, q, k, v and the attention's output in
    # float32, or gate, up and their product.
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    width = 2 * spec.hidden_size + max(attention, 3 * spec.intermediate_size)

    if device == "cpu":  # a fused layer's input and result beside its workspace
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size)
        width = max(width, 2 * spec.hidden_size + workspace_columns(spec.hidden_size, *shape))

    # `cpu_attention_torch` widens K and V of a request to float32 and holds scores and weights of one query tile. A
    # GPU's kernels read pages where they lie, and keep partial results of split sequences.
    per_token = spec.num_kv_heads * (2 * spec.head_dim * (element + 4) + 2 * PREFILL_ROWS * 4)
    on_torch_path = device == "cpu" and native_attention is None
    workspace = per_token * block_size if on_torch_path else 0  # a block
    partials = 0 if device == "cpu" else decode_bytes_per_block(args, spec, block_size)
    # One group's layer attends at a time; a request of full length has blocks in all of them.
    longest = -(-max_model_len // block_size)  # blocks of one group
    request = sequence_blocks(spec.groups, max_model_len, max_batch_tokens, block_size)

    def table(num_blocks: int) -> MemoryTable:
        if measured is not None:
            return MemoryTable(
                available=measured.available,
                max_memory_percent=args.max_memory_percent,
                weights=measured.weights,
                activations=measured.workspace,
                attention=partials * num_blocks,
                logits=0,
                block=block,
                num_blocks=num_blocks,
                block_size=block_size,
                num_host_blocks=num_host_blocks,
                is_host_separate=device != "cpu",
                graphs=measured.graphs,
                is_measured=True,
            )
        return MemoryTable(
            available=available,
            max_memory_percent=args.max_memory_percent,
            weights=weight_bytes,
            activations=max_batch_tokens * width * max(element, 4),
            attention=(native_attention or 0)
            + workspace * min(num_blocks, longest)
            + partials * num_blocks,
            # Logits in float32, sorted values, their ids and probabilities, and the noise.
            logits=args.max_running_requests * spec.vocab_size * (4 * 4 + 8),
            block=block,
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            is_host_separate=device != "cpu",
        )

    room = table(0).remainder
    if room < 0 and room + table(0).host_tier >= 0:
        raise SizingError(
            f"cpu_offload_gib {args.cpu_offload_gib} does not fit beside the model\n{table(0)}"
        )
    if room < 0:
        raise SizingError(f"{spec.path}: the model alone does not fit\n{table(0)}")
    fits = room // (block + workspace + partials)
    if fits > longest:
        fits = (room - workspace * longest) // (block + partials)
    num_blocks = args.num_blocks
    if num_blocks is None:
        useful = args.max_running_requests * request
        wanted = fits
        if args.kv_cache_gib is not None:
            wanted = int(args.kv_cache_gib * GIB) // block - 1
        elif device == "cpu":
            wanted = min(fits, _CPU_KV_BYTES // block - 1)
        num_blocks = min(wanted, useful)
    result = table(num_blocks)
    if num_blocks < len(spec.groups):
        raise SizingError(
            f"the KV cache cannot hold one block of {block} bytes for each of {len(spec.groups)} layer "
            f"groups\n{result}"
        )
    if result.remainder < 0:
        raise SizingError(f"num_blocks {num_blocks} does not fit, at most {fits} do\n{result}")
    return result


def choose_block_size(args: EngineArgs, device: str) -> int:
    """As asked for, or the size that the device's attention reads best."""
    return args.block_size or (_CPU_BLOCK_SIZE if device == "cpu" else tuning.BLOCK_SIZE)


def decode_bytes_per_block(args: EngineArgs, spec: ModelSpec, block_size: int) -> int:
    """Bytes by which a block of the pool enlarges the partial results of all groups' decode attention on a GPU."""
    per_token = sum(
        slot_bytes_per_token(
            spec.num_heads,
            group.head_dim,
            args.prefix_caching and group.window is None and group.chunk is None,
        )
        for group in spec.groups
    )
    return math.ceil(per_token * block_size)


def native_attention_bytes(
    spec: ModelSpec, device: str, block_size: int, num_threads: int
) -> int | None:
    """Workspace of the compiled attention on the CPU, or None where some layers need the torch path."""
    if device != "cpu" or not cpu_attention.has_native():
        return None
    for group in spec.groups:
        shape = (spec.num_heads, group.num_kv_heads, group.head_dim, block_size)
        if not cpu_attention_native.fits(*shape):
            return None
    widest = max(group.head_dim for group in spec.groups)
    return cpu_attention_native.workspace_bytes(num_threads, widest)


def _num_host_blocks(args: EngineArgs, device: str, block: int, host_available: int) -> int:
    """Blocks of the host tier; on the CPU the memory equation says whether they fit."""
    gib = args.cpu_offload_gib
    if gib is None:
        return 0 if device == "cpu" else min(_HOST_TIER_BYTES, host_available // 4) // block
    num_blocks = int(gib * GIB) // block
    if gib and not num_blocks:
        raise SizingError(f"cpu_offload_gib {gib} holds no block of {block} bytes; 0 turns it off")
    bound = int(host_available * args.max_memory_percent)
    if device != "cpu" and num_blocks * block > bound:
        raise SizingError(
            f"cpu_offload_gib must be at most {bound / GIB:.3f}, which is {args.max_memory_percent:.0%} of "
            f"the host's available memory, got {gib}"
        )
    return num_blocks


def choose_weights(args: EngineArgs, spec: ModelSpec) -> str:
    """As asked for; those of a checkpoint stored in FP8 stay so."""
    if spec.fp8 is None or not spec.fp8.has_weights:
        return args.weights
    if args.weights == "int8":
        raise SizingError(
            f"weights is 'int8', and {spec.path} is stored in FP8 ({spec.fp8.method}), which stays as it is; use 'auto'"
        )
    return "fp8"


def check_deterministic(args: EngineArgs, weights: str, device: str, dtype: str) -> None:
    """Raise `SizingError` unless the products of such an engine have one order of additions."""
    if device == "cpu" and dtype != "float32":
        raise SizingError(
            f"deterministic is true, which on the CPU needs dtype 'float32'; it is {dtype!r}; use 'float32', device "
            "'cuda' with any dtype, or deterministic false"
        )
    if device == "cuda" and weights != "auto":
        raise SizingError(
            f"deterministic is true, which on device 'cuda' needs weights 'auto'; they are {weights!r}, whose products "
            "are the vendor's and follow the number of rows; use a checkpoint without FP8 weights, or deterministic "
            "false"
        )
    if device == "cuda" and args.fuse != "auto":
        raise SizingError(
            f"deterministic is true, which on device 'cuda' needs fuse 'auto'; it is {args.fuse!r}, and torch's own "
            "norms follow the number of rows; use 'auto', or deterministic false"
        )


def check_formats(weights: str, args: EngineArgs, device: str, dtype: str) -> None:
    """Raise `SizingError` unless this machine computes with such weights and such a cache."""
    if weights == "int8":
        has_library = native_library.load() is not None
        if (device, dtype, args.fuse, has_library) != ("cpu", "bfloat16", "auto", True):
            raise SizingError(
                "weights is 'int8', which needs device 'cpu', dtype 'bfloat16', fuse 'auto' and the compiled library; "
                f"they are {device!r}, {dtype!r}, {args.fuse!r} and {'there' if has_library else 'absent'}"
            )
    if weights == "fp8":
        if dtype != "bfloat16":
            raise SizingError(f"weights is 'fp8', which needs dtype 'bfloat16'; it is {dtype!r}")
        if (missing := fp8_linear.missing(device)) is not None:
            raise SizingError(f"weights is 'fp8', which needs {missing}")
    if args.kv_cache_dtype == "fp8" and device != "cuda":
        raise SizingError(
            f"kv_cache_dtype is 'fp8', which needs device 'cuda'; it is {device!r}, where attention reads pages in the "
            "model's dtype only"
        )


def choose_dtype(
    device: str, checkpoint_dtype: str, num_parameters: int, flags: frozenset[str]
) -> str:
    """The dtype `auto` stands for.

    The checkpoint's on a GPU. On a CPU float32 for small models; for larger ones bfloat16 if the CPU
    multiplies it in hardware, else float32.
    """
    if device == "cuda":
        return checkpoint_dtype
    hardware = flags & {"avx512_bf16", "amx_bf16"}
    return "bfloat16" if num_parameters >= _SMALL_MODEL_PARAMETERS and hardware else "float32"


def choose_async_batching(args: EngineArgs, device: str) -> str:
    """On or off; `auto` is on where the device can compute while the host plans."""
    if args.async_batching != "auto":
        return args.async_batching
    return "off" if device == "cpu" else "on"


def choose_q_padding(args: EngineArgs, device: str, highest: int) -> int | None:
    """Tokens to whose multiples mixed steps are padded; None: they are not captured.

    Parameters
    ----------
    highest
        Tokens of the longest step and of the longest request.

    Raises
    ------
    SizingError
        It is out of its bounds.
    """
    asked = args.q_padding
    if asked is None and device != "cpu" and args.cuda_graphs != "off" and highest >= LEAST_TOKENS:
        return min(CHEAP_TOKENS, highest)
    if not asked:
        return None
    if not LEAST_TOKENS <= asked <= highest:
        raise SizingError(
            f"q_padding must be 0 or in [{LEAST_TOKENS}, {highest}], at most max_batch_tokens and max_model_len, got "
            f"{asked!r}"
        )
    return asked


# ----------------------------------------------------------------------------------------------------------
# The machine. `root` is "/" but in tests.
# ----------------------------------------------------------------------------------------------------------
