"""The engine's options: their declaration, the arguments of a user and the resolved configuration.

`EngineOptions` declares each option once: name, type, default, bounds and description. `EngineArgs` is what a user
gives; None and "auto" mean "choose". `EngineConfig` is the result of `startup.sizing.resolve`: complete, frozen, and
the only configuration that the scheduler, the block manager and the runner read. The YAML section `engine`
(`cluster/config/engine_section.py`), its JSON schema and the checks below are derived from the declaration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, Literal, get_args

from quire.replica import option_fields
from quire.replica.kv_cache.groups import FULL_ATTENTION, LayerGroup, max_sequence_tokens
from quire.replica.option_conflicts import block_size_problem, conflicts
from quire.replica.option_fields import option
from quire.replica.speculation_options import SpeculationOptions

SchedulerName = Literal["shortest_first", "fifo", "prefill_first", "priority"]
DemotionOrder = Literal["lru", "most_recent"]
JsonWhiteSpace = Literal["one_space", "none", "any"]
Switch = Literal["auto", "on", "off"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# Options that a running engine can change between two steps.
LIGHT_FIELDS = (
    "max_waiting_requests",
    "max_prefill_ms",
    "safety_margin",
    "resume_margin",
    "step_timeout_s",
)
# Why the old name of an option is refused.
CPU_OFFLOAD_GIB = (
    "cpu_offload_gib is now node_pool_gib: the size of one pool for all replicas of a node"
)
# The default of resume_margin exceeds safety_margin by this. A larger value lowers throughput and saves no preemption.
_RESUME_STEP = 0.1
# Samples of a step that an engine of few rows has memory for, so that its rows may have drafts.
_DRAFT_SAMPLES = 32


class SizingError(ValueError):
    """The model or the requested cache does not fit, or an option is out of its bounds; the message has the numbers."""


# ----------------------------------------------------------------------------------------------------------
# The declaration
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of one replica's engine."""

    block_size: int | None = option(
        None,
        "Tokens of KV cache in one block, the unit of allocation and of prefix reuse; a power of two. "
        "Default: 64 on a GPU, 32 on a CPU.",
        ge=8,
        le=256,
    )
    num_blocks: int | None = option(
        None,
        "Number of blocks in the KV cache. Default: as many as fit into kv_cache_gib if that is given, else into the "
        "memory that max_memory_percent leaves.",
        ge=2,
    )
    kv_cache_gib: float | None = option(
        None,
        "Size of the KV cache in GiB. Default: on a GPU all memory that max_memory_percent leaves, on a CPU at most "
        "1 GiB of it.",
        gt=0,
    )
    node_pool_gib: float | None = option(
        None,
        "Size in GiB of the node's pool of KV blocks in /dev/shm, which all replicas of a node share and which "
        "outlives them. Blocks that requests fill, blocks of preempted requests and cached prefixes that a full KV "
        "cache evicts are copied there, and any replica of the node can restore them without computing them again. 0 "
        "turns the pool off. Default: on a GPU what the node's memory leaves after weights and a reserve of a quarter "
        "(at most four times the memory of its GPUs, and half of what /dev/shm has free); 0.25 on a CPU, where it is a "
        "copy in the memory of the KV cache. An engine without a cluster has a private pool; its default is 4 on a "
        "GPU, at most a quarter of the available memory, and 0 on a CPU.",
        ge=0,
    )
    peer_transport: Literal["off", "grpc", "nixl"] = option(
        "off",
        "How KV blocks travel from the node's pool to that of another node. grpc: over TCP, to replicas of the same "
        "application, on a port that the system chooses; a router then lets a replica pull a prefix that another node "
        "holds, where copying takes less time than computing. nixl: the same over NVIDIA's NIXL (`quire[nixl]`), which "
        "reads the other pool's memory itself, by RDMA where there is any; only in a network that no stranger reaches. "
        "off: every node computes.",
    )
    restore: Literal["auto", "always"] = option(
        "auto",
        "When blocks are restored from the host tier. auto: where copying them is faster than computing them again, "
        "by the copy and prefill speeds measured so far. always: regardless of the measured speeds.",
    )
    max_memory_percent: float = option(
        0.9,
        "Fraction (0 to 1) of the device's memory that a replica may use for weights, activations and KV cache "
        "together.",
        gt=0,
        le=1,
    )
    max_batch_tokens: int | None = option(
        None,
        "Maximum number of tokens in one step, prefill and decode together. Default: 8192 on a GPU, 512 on a CPU.",
        ge=8,
    )
    max_model_len: int | None = option(
        None,
        "Maximum length of a request in tokens, prompt and output together. Default: the checkpoint's limit, or what "
        "the KV cache can hold if that is less.",
        ge=2,
    )
    max_running_requests: int = option(
        256, "Maximum number of requests that hold KV cache at the same time.", ge=1, le=65536
    )
    max_waiting_requests: int = option(
        1024,
        "Maximum number of requests that wait at a replica. Routers keep further requests in their own queues. If "
        "several routers send at the same moment, the replica refuses the excess as overloaded (HTTP 429).",
        ge=0,
        le=1_000_000,
    )
    scheduler: SchedulerName = option(
        "shortest_first",
        "Order in which requests are scheduled. fifo: decodes first, then prompts that have started, then new prompts "
        "in order of arrival. shortest_first: as fifo, but new prompts are ordered by arrival plus four times the "
        "estimated seconds of their prefill. prefill_first: started prompts, then decodes, then new prompts. priority: "
        "as fifo, with prompts ordered by priority (smaller first), deadline and arrival; at least every eighth "
        "request that starts is the one that has waited longest.",
    )
    weights: Literal["auto", "int8", "fp8"] = option(
        "auto",
        "Storage format of the weights of linear layers, without the output head and without the experts of a "
        "mixture, which stay in `dtype`. auto: `dtype`, or FP8 if the checkpoint is stored in it. int8: 8 bits, and "
        "a scale for 64 input features of each output feature, on a CPU with dtype bfloat16; loading needs the memory "
        "of bfloat16. fp8: E4M3 with one scale per output feature, and activations with one scale per token, with "
        "dtype bfloat16 on a GPU of compute capability 8.9 or later; weights are quantized while they are read, so "
        "loading needs no further memory.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = option(
        "auto",
        "Type of keys and values in the KV cache. auto: `dtype`. fp8: E4M3, which takes half the memory of bfloat16, "
        "on a GPU only; each head has one fixed scale, the checkpoint's k_scale and v_scale or 1.",
    )
    fuse: Literal["auto", "off"] = option(
        "auto",
        "Whether modules of the model are replaced by fused ones; each replacement is checked on random input first. "
        "auto: replace every module of a known structure, on a GPU or where the package was compiled. off: replace "
        "none.",
    )
    json_white_space: JsonWhiteSpace = option(
        "one_space",
        "White space that output with a JSON schema may contain. one_space: at most one space after a comma and a "
        "colon. none: no white space. any: all that JSON allows, in any amount; a small model may then generate "
        "nothing but white space. A schema can override this option with x-guidance.",
    )
    step_timeout_s: float = option(
        10.0,
        "Seconds after which a step counts as hung, if they are also more than five times the step's predicted time. "
        "The replica's process then ends, Serve starts another one, and the streams continue on other replicas.",
        ge=1,
        le=3600,
    )
    async_batching: Switch = option(
        "auto",
        "Whether a step is planned and launched while the previous one still runs, so that the device does not wait "
        "for the host. auto: on a GPU only; on a CPU there is nothing to overlap.",
    )
    cuda_graphs: Switch = option(
        "auto",
        "Whether steps in which every request decodes are captured as CUDA graphs; replaying a graph takes a fraction "
        "of the host's work. auto: on a GPU, if the model can be captured; otherwise the log states the reason. on: "
        "a replica whose model cannot be captured does not start. off: no graphs.",
    )
    max_cached_graphs: int = option(
        32,
        "Maximum number of CUDA graphs in the cache, one for each captured batch size; the least recently used one is "
        "dropped.",
        ge=1,
        le=1024,
    )
    q_padding: int | None = option(
        None,
        "Steps that contain prefill are captured as CUDA graphs too if they have at most 1024 tokens; the number of "
        "tokens is padded to a multiple of this value, which must be at least 4. 0: such steps run without graphs. "
        "Default: 256 on a GPU unless cuda_graphs is off, otherwise 0.",
        ge=0,
    )
    kv_padding: int | None = option(
        None,
        "The length in tokens of a captured step's longest request is padded to a multiple of this value. Default: "
        "to the maximum length, so that one graph serves all lengths.",
        ge=1,
    )
    check_graphs: bool = option(
        False,
        "For debugging: before each replay of a CUDA graph, compare the addresses of all its inputs and outputs with "
        "those at capture time.",
    )
    max_loaded_adapters: int = option(
        0,
        "Maximum number of adapters that running requests may have at once; as many stay in the device's memory. 0: no "
        "adapters.",
        ge=0,
        le=1024,
    )
    max_adapter_rank: int = option(
        16, "Largest rank of an adapter. On a GPU each slot has room for this rank.", ge=1, le=64
    )
    nvtx: bool = option(
        False,
        "For debugging on a GPU: mark the parts of the engine's loop and the work that they queue as NVTX ranges, "
        "which Nsight Systems shows.",
    )
    max_prefill_ms: float | None = option(
        100.0,
        "Milliseconds of prefill between two tokens of a decoding request, by measured speed: the time between two "
        "tokens is at most this and one decode step. At least 16 prompt tokens are computed in any case. null: only "
        "max_batch_tokens limits the prefill.",
        ge=1,
    )
    safety_margin: float = option(
        0.2,
        "Fraction (0 to 1) of the blocks that must stay free for a new prompt to be admitted while other requests "
        "decode. A stream that comes from another replica does not need them.",
        ge=0,
        lt=1,
    )
    resume_margin: float | None = option(
        None,
        "Fraction (0 to 1) of the blocks that must be free for new prompts to be admitted again after a request was "
        "preempted because the cache was full. Default: safety_margin + 0.1.",
        ge=0,
        le=1,
    )
    prefix_caching: bool = option(
        True,
        "Reuse the KV cache of prompts that begin with the same tokens. allow_block_sharing is another name of this "
        "option.",
    )
    demotion_order: DemotionOrder = option(
        "lru",
        "Order in which cached blocks are evicted. lru: those of the least recently used prompt first. most_recent: "
        "those of the most recently used prompt first. In both orders the end of a prompt is evicted before its "
        "beginning.",
    )
    deterministic: bool | None = option(
        None,
        "Generate bit-equal tokens for any batch, chunking, cache content and replica on devices of the same kind. On "
        "a GPU this works with any dtype, on a CPU with float32. Default: true for float32 on a CPU, otherwise false.",
    )
    num_threads: int | None = option(
        None,
        "Number of CPU threads for one replica's matrix products, in each of its ranks. Default: the machine's cores, "
        "divided by the number of replicas and by tensor_parallel.",
        ge=1,
        le=1024,
    )
    cache_packed_weights: bool = option(
        False,
        "On a CPU, keep the packed weights in the cache folder (QUIRE_CACHE), in as many bytes as they take in memory. "
        "Later starts of the same model on this node read them, instead of reading, packing and verifying the "
        "checkpoint's.",
    )
    tensor_parallel: int = option(
        1,
        "Number of processes of one machine, called ranks, that compute one model together: 1, 2, 4 or 8. Each has a "
        "part of weights and KV cache, and on GPUs a GPU of its own. Classes that two ranks would compute otherwise "
        "than transformers are refused at the start.",
        ge=1,
        le=8,
    )
    reduction_splits: int | None = option(
        None,
        "Parts, a power of two, of sums over ranks. Only it decides the order of additions. Default: tensor_parallel.",
        ge=1,
        le=64,
    )
    speculation: SpeculationOptions = option(
        SpeculationOptions(),
        "Speculative decoding: a step verifies drafted tokens, and may then give a request several tokens.",
    )

    @property
    def num_splits(self) -> int:
        """Number of parts of sums over ranks; 1: the model is not divided."""
        return self.reduction_splits or self.tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs(EngineOptions):
    """The model and the options that a user asks for. None or "auto": choose by checkpoint and machine."""

    model: str = option(
        "embedded",
        "The model to serve: 'embedded' (the small model inside the package), a checkpoint folder, or a Hugging Face "
        "id. Weights are read from safetensors files only, and no code of a checkpoint is run.",
        min_length=1,
    )
    revision: str | None = option(
        None,
        "Branch, tag or commit of a Hugging Face id. Default: its main branch.",
        min_length=1,
    )
    device: Device = option(
        "auto", "Device of the replicas. auto: a GPU if the cluster has one, otherwise the CPU."
    )
    dtype: Dtype = option(
        "auto",
        "Type of weights and KV cache. auto: the checkpoint's own type on a GPU; on a CPU float32, or bfloat16 for "
        "models of at least 200 million parameters if the CPU multiplies it in hardware.",
    )
    session_max_share: float = option(
        0.5,
        "Maximum fraction (0 to 1) of the KV cache, and of the host tier, that is retained for sessions. Beyond it, "
        "the blocks that have been retained longest become ordinary cached blocks. 0: nothing is retained.",
        ge=0,
        le=1,
    )
    # Another name of prefix_caching, as in transformers.
    allow_block_sharing: InitVar[bool | None] = None
    # Its old name is refused with the new one.
    cpu_offload_gib: InitVar[float | None] = None

    def __post_init__(
        self, allow_block_sharing: bool | None, cpu_offload_gib: float | None
    ) -> None:
        if cpu_offload_gib is not None:
            raise SizingError(CPU_OFFLOAD_GIB)
        if isinstance(self.speculation, Mapping):
            object.__setattr__(self, "speculation", SpeculationOptions(**self.speculation))
        if allow_block_sharing is None:
            return
        if allow_block_sharing and not self.prefix_caching:
            raise ValueError(
                "prefix_caching is false and allow_block_sharing true; give one of them"
            )
        object.__setattr__(self, "prefix_caching", allow_block_sharing)


OPTION_NAMES = tuple(field.name for field in dataclasses.fields(EngineOptions))


# ----------------------------------------------------------------------------------------------------------
# The checks
# ----------------------------------------------------------------------------------------------------------


def check_args(args: EngineArgs) -> None:
    """Check each option against its declaration, and the options against one another.

    Raises
    ------
    SizingError
        The message names the option, its bound and the value.
    """
    for message in option_fields.problems(args):
        raise SizingError(message)
    if (problem := block_size_problem(args.block_size)) is not None:
        raise SizingError(f"block_size {problem}")
    for message in conflicts(args):
        raise SizingError(message)


def light_fields(args: EngineArgs) -> dict[str, Any]:
    """Return the values of `LIGHT_FIELDS` in an `EngineConfig`."""
    fields = {name: getattr(args, name) for name in LIGHT_FIELDS}
    if args.resume_margin is None:
        fields["resume_margin"] = min(1.0, args.safety_margin + _RESUME_STEP)
    return fields


# ----------------------------------------------------------------------------------------------------------
# The resolved configuration
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineOptions):
    """The options after `resolve`, in which every choice is made, and the facts of model and device.

    The options that are declared again here are never None. `kv_cache_gib`, `node_pool_gib` and `max_memory_percent`
    are as the user gave them; the resulting sizes are `num_blocks` and `num_host_blocks`.
    """

    block_size: int
    num_blocks: int  # usable blocks; the pool has one more, the trash block
    max_batch_tokens: int
    max_model_len: int
    resume_margin: float
    deterministic: bool
    num_threads: int
    model_name: str  # identity of the weights in routing and cache keys
    revision: str  # of the weights: `checkpoint.weights_revision`
    device: str  # cpu | cuda
    dtype: str  # float32 | bfloat16 | float16
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    groups: tuple[LayerGroup, ...] = (FULL_ATTENTION,)  # full-attention first; heads of one rank
    reduction_splits: int = 1
    num_host_blocks: int = 0  # blocks of the host tier, of the same size; 0: no host tier
    # Whether nobody asked for `deterministic`: then a model that cannot keep the promise is served without it.
    is_deterministic_by_default: bool = False
    # Whether some layers are recurrent: they keep a state of each running request instead of blocks.
    has_states: bool = False
    # Number of slots for snapshots of the states, and number of blocks after which a prompt gets one in any case.
    num_snapshots: int = 0
    num_host_snapshots: int = 0  # slots in host memory
    snapshot_spacing: int = 1
    # The fraction of each tier's blocks that may be retained for sessions.
    session_max_share: float = 0.0
    hidden_size: int = 0

    def __post_init__(self) -> None:
        full = [group.is_full for group in self.groups]
        if not full or full != sorted(full, reverse=True):
            raise ValueError("at least one layer group is needed, those with full attention first")

    @property
    def plans_ahead(self) -> bool:
        """Whether a step is launched before the previous one is collected."""
        return self.async_batching == "on"

    @property
    def pool_dtype(self) -> str:
        """Dtype of keys and values in the cache, by torch's name."""
        return "float8_e4m3fn" if self.kv_cache_dtype == "fp8" else self.dtype

    @property
    def number_format(self) -> str:
        """The options that change sampled tokens, as one string; replicas with other formats may give other tokens."""
        parts = [self.dtype]
        if self.weights != "auto":
            parts.append(f"weights={self.weights}")
        if self.kv_cache_dtype != "auto":
            parts.append(f"kv_cache={self.kv_cache_dtype}")
        parts += [f"reduction_splits={self.reduction_splits}"] * (self.reduction_splits > 1)
        if self.json_white_space != get_args(JsonWhiteSpace)[0]:
            parts.append(f"json_white_space={self.json_white_space}")
        return ",".join(parts)

    @property
    def num_rows(self) -> int:
        """Number of rows (request slots) in the request table: a step must have room for one token of each."""
        return min(self.max_running_requests, self.max_batch_tokens)

    @property
    def max_samples(self) -> int:
        """Maximum number of samples of a step. A row with a draft has several; few rows must have room for drafts."""
        return max(self.num_rows, min(_DRAFT_SAMPLES, self.max_batch_tokens))

    @property
    def max_row_blocks(self) -> int:
        """Maximum number of blocks of one row in a layer group."""
        return -(-min(self.max_model_len, self.max_cache_tokens) // self.block_size)

    @property
    def max_cache_tokens(self) -> int:
        """Longest request that fits into the whole pool, in tokens.

        With sliding-window layer groups the result is at most `max_model_len`.
        """
        return max_sequence_tokens(
            self.groups, self.num_blocks, self.block_size, self.max_model_len
        )
