"""The engine's configuration: what the user asked for, and what it was resolved to.

`EngineArgs` is what the user wrote, None meaning "choose". `EngineConfig` is the answer: complete, frozen, and
the only thing the scheduler, block manager and runner read. `resolve` lives in `sizing.py`.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Any

from quire.replica.kv_cache.groups import FULL_ATTENTION, LayerGroup, max_sequence_tokens

# Fields of `EngineArgs` that a running engine takes on between two steps.
LIGHT_FIELDS = (
    "max_waiting_requests",
    "max_prefill_ms",
    "safety_margin",
    "resume_margin",
    "step_timeout_s",
)
# Between the two marks of admission: more costs throughput and spares no preemption.
_RESUME_STEP = 0.1
SCHEDULERS = ("shortest_first", "fifo", "prefill_first", "priority")
FUSE = ("auto", "off")
WEIGHTS = ("auto", "int8", "fp8")
KV_CACHE_DTYPES = ("auto", "fp8")
ASYNC_BATCHING = ("auto", "on", "off")
CUDA_GRAPHS = ("auto", "on", "off")
RESTORE = ("auto", "always")
JSON_WHITE_SPACE = ("one_space", "none", "any")
DEMOTION_ORDERS = ("lru", "most_recent")


class SizingError(ValueError):
    """The model, or the cache asked for, does not fit; the message holds the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What the user asked for. None: choose from the checkpoint and the machine."""

    model: str = "embedded"  # "embedded", a checkpoint folder, or a Hugging Face id
    revision: str | None = None  # of a Hugging Face id: branch, tag or commit
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    block_size: int | None = None  # tokens of KV in a block; None: 64 on a GPU, 32 on a CPU
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_model_len: int | None = None  # None: the checkpoint's max_position_embeddings
    max_running_requests: int = 256
    max_waiting_requests: int = 1024
    max_memory_percent: float = 0.9
    kv_cache_gib: float | None = None
    cpu_offload_gib: float | None = None  # host tier; None: 4 GiB beside a GPU, none on the CPU
    restore: str = (
        "auto"  # auto | always: copy blocks back from the host tier; auto: if that is faster
    )
    async_batching: str = "auto"  # auto | on | off: plan a step while another runs; auto: on a GPU
    cuda_graphs: str = "auto"  # auto | on | off: replay decode steps; auto: where that is possible
    max_cached_graphs: int = 32
    # Tokens to whose multiples mixed steps are padded; 0: they are not captured; None: 256 on a GPU
    q_padding: int | None = None
    kv_padding: int | None = None  # the same of their longest row; None: to the longest possible
    check_graphs: bool = False  # for debugging: compare a graph's addresses before each replay
    nvtx: bool = False  # ranges for a profiler of a GPU: the loop's parts, and what is queued
    scheduler: str = "shortest_first"  # shortest_first | fifo | prefill_first | priority
    max_prefill_ms: float | None = 100.0  # None: no bound
    safety_margin: float = 0.2
    resume_margin: float | None = None  # None: safety_margin + 0.1, at most 1
    prefix_caching: bool = True
    demotion_order: str = "lru"  # lru | most_recent
    deterministic: bool | None = None  # None: on for float32 on the CPU
    num_threads: int | None = None
    weights: str = "auto"  # auto | int8 | fp8: of the linear layers but the output head, in memory
    kv_cache_dtype: str = "auto"  # auto | fp8: of keys and values in the cache; auto: dtype
    json_white_space: str = "one_space"  # one_space | none | any: in the output of JSON schemas
    fuse: str = "auto"  # auto | off: whether modules give way to fused ones, see `fuse`
    step_timeout_s: float = 10.0  # what every step may take before it counts as hung
    # Another name for prefix_caching, as transformers has it.
    allow_block_sharing: InitVar[bool | None] = None

    def __post_init__(self, allow_block_sharing: bool | None) -> None:
        if allow_block_sharing is None:
            return
        if allow_block_sharing and not self.prefix_caching:
            raise ValueError(
                "prefix_caching is false and allow_block_sharing true; give one of them"
            )
        object.__setattr__(self, "prefix_caching", allow_block_sharing)

    def light_fields(self) -> dict[str, Any]:
        """`LIGHT_FIELDS`, resolved: as `EngineConfig` has them."""
        fields = {name: getattr(self, name) for name in LIGHT_FIELDS}
        if self.resume_margin is None:
            fields["resume_margin"] = min(1.0, self.safety_margin + _RESUME_STEP)
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine runs with; every value is decided."""

    model_name: str  # identity of the weights in routing and cache keys
    revision: str  # of the weights: `checkpoint.weights_revision`
    device: str  # cpu | cuda
    dtype: str  # float32 | bfloat16 | float16
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # tokens of prompt and output together
    block_size: int
    num_blocks: int  # usable blocks; the pool has one more, the trash block
    max_batch_tokens: int
    max_running_requests: int
    max_waiting_requests: int
    safety_margin: float  # share of blocks kept free of new prefills while anything runs
    prefix_caching: bool
    deterministic: bool
    num_threads: int
    groups: tuple[LayerGroup, ...] = (FULL_ATTENTION,)  # those of full attention first
    num_host_blocks: int = 0  # of the host tier, of the same bytes each; 0 = there is no such tier
    restore: str = "auto"  # auto | always, see `copy_speed`
    async_batching: bool = False  # launch a step before the one before it is collected
    cuda_graphs: str = "auto"  # auto | on | off
    max_cached_graphs: int = 32
    q_padding: int | None = None  # tokens; see `mixed_shapes`; None: mixed steps are not captured
    kv_padding: int | None = None
    check_graphs: bool = False
    nvtx: bool = False
    scheduler: str = "fifo"  # shortest_first | fifo | prefill_first | priority
    max_prefill_ms: float | None = (
        None  # of prefill between two tokens of who decodes; None: no bound
    )
    resume_margin: float = (
        0.0  # share of available blocks from which admissions resume after a preemption
    )
    demotion_order: str = "lru"  # lru | most_recent
    weights: str = "auto"  # auto | int8 | fp8; fp8 also for a checkpoint that is stored so
    kv_cache_dtype: str = "auto"  # auto | fp8
    fuse: str = "auto"  # auto | off
    json_white_space: str = "one_space"  # one of JSON_WHITE_SPACE, see `grammar_source`
    step_timeout_s: float = 10.0  # see `watchdog`

    def __post_init__(self) -> None:
        full = [group.is_full for group in self.groups]
        if not full or full != sorted(full, reverse=True):
            raise ValueError("groups must be at least one, those of full attention first")

    @property
    def pool_dtype(self) -> str:
        """Of keys and values in the cache, torch's name."""
        return "float8_e4m3fn" if self.kv_cache_dtype == "fp8" else self.dtype

    @property
    def number_format(self) -> str:
        """What tokens depend on beside the weights' values: replicas that differ in it give different ones."""
        parts = [self.dtype]
        if self.weights != "auto":
            parts.append(f"weights={self.weights}")
        if self.kv_cache_dtype != "auto":
            parts.append(f"kv_cache={self.kv_cache_dtype}")
        if self.json_white_space != JSON_WHITE_SPACE[0]:
            parts.append(f"json_white_space={self.json_white_space}")
        return ",".join(parts)

    @property
    def num_rows(self) -> int:
        """Rows of the request table: one token of every decoding row must fit a step."""
        return min(self.max_running_requests, self.max_batch_tokens)

    @property
    def max_row_blocks(self) -> int:
        """Blocks that one row can have in a layer group."""
        return -(-min(self.max_model_len, self.max_cache_tokens) // self.block_size)

    @property
    def max_cache_tokens(self) -> int:
        """Tokens of one request that the whole pool could hold; at most `max_model_len` with sliding groups."""
        return max_sequence_tokens(
            self.groups, self.num_blocks, self.block_size, self.max_model_len
        )
