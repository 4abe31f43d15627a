"""The memory equation, solved for the number of blocks::

    max_memory_percent * available = weights + activations + attention + logits + graphs
                                     + slots of states, if layers are recurrent
                                     + (num_blocks + 1) * (block_bytes + block_bytes of the draft model, if any)
                                     + num_host_blocks * block_bytes, if the device is the CPU

`available` is the free memory of the GPU, or of the machine within the container's cgroup. On a GPU the equation is
solved twice: before the model is loaded, to reject models that cannot fit, and afterwards, when the values that
`device_memory.py` measures replace the estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.checkpoint.weight_bytes import ELEMENT_BYTES
from quire.replica.config import EngineArgs, SizingError
from quire.replica.device.kv_pool import block_elements
from quire.replica.kv_cache.groups import sequence_blocks
from quire.replica.startup.device_sizing import GIB, DeviceSizing


class DraftBytes(NamedTuple):
    """Bytes of the model that drafts: its weights, and its part of each block."""

    weights: int = 0
    block: int = 0


NO_DRAFT_MODEL = DraftBytes()


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Measured bytes on a GPU, without the KV pool."""

    available: int  # before the model was loaded
    weights: int
    workspace: int  # of the largest steps: activations, attention, logits, inputs, tables
    graphs: int  # estimate for `max_cached_graphs`


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """The terms of the memory equation, in bytes. `str()` formats them as a table."""

    available: int
    max_memory_percent: float
    weights: int
    activations: int
    # Workspace. CPU: tiles of each thread; if attention runs in torch, keys, values and scores of the longest request
    # that fits. GPU: partial results of decode rows that are split over programs; they grow with the pool.
    attention: int
    logits: int
    block: int  # one block over all layers of a group
    num_blocks: int
    block_size: int
    num_host_blocks: int  # of the host tier
    is_host_separate: bool  # whether host memory and device memory are separate
    graphs: int = 0
    states: int = 0  # slots of recurrent layers
    draft_block: int = 0  # of the draft model, for each block of the pool
    # Whether weights, activations and graphs are measured. Then activations include logits, states, and the part of
    # attention's workspace that does not grow with the pool.
    is_measured: bool = False

    @property
    def budget(self) -> int:
        """Bytes the engine may use."""
        return int(self.available * self.max_memory_percent)

    @property
    def kv_cache(self) -> int:
        """Bytes of the pool, including the trash block."""
        return (self.num_blocks + 1) * (self.block + self.draft_block)

    @property
    def host_tier(self) -> int:
        """Bytes of the host tier."""
        return self.num_host_blocks * self.block

    @property
    def remainder(self) -> int:
        """Unused bytes of the budget; negative if the terms do not fit."""
        used = self.weights + self.activations + self.attention + self.logits + self.graphs
        used += self.states + self.kv_cache
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
        if self.states:
            terms.append(("states", self.states, "of running requests, and snapshots"))
        rows = [
            ("available", self.available, ""),
            ("budget", self.budget, f"{self.max_memory_percent:.0%} of it"),
            *terms,
            (
                "KV cache",
                self.kv_cache,
                f"{self.num_blocks} + 1 blocks of {self.block_size} tokens, {self.block / 1024:.0f} KiB each"
                + (
                    f", and {self.draft_block / 1024:.0f} KiB of the draft model"
                    * bool(self.draft_block)
                ),
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


def memory_table(
    args: EngineArgs,
    spec: ModelSpec,
    sizing: DeviceSizing,
    dtype: str,
    weight_bytes: int,
    max_batch_tokens: int,
    max_model_len: int,
    available: int,
    host_available: int,
    measured: MeasuredMemory | None = None,
    states: int = 0,
    draft: DraftBytes = NO_DRAFT_MODEL,
) -> MemoryTable:
    """Solve the memory equation for the number of blocks. Reads and changes no state.

    The number of blocks is `args.num_blocks` if given. Otherwise it follows from `args.kv_cache_gib`, or is the
    device's default for the remaining budget; but it is at most the number that all running requests of full length
    can use.

    `measured` replaces all terms except those of the caches. `states` is the number of bytes of all
    slots of recurrent states. The draft model computes while the other model does not, so it shares the terms of
    intermediate results.

    Raises
    ------
    SizingError
        The weights, or the requested cache, or a single block per group do not fit.
    """
    element = ELEMENT_BYTES[dtype]
    block_size = sizing.choose_block_size(args)
    block = block_elements(spec.groups, block_size)
    block *= 1 if args.kv_cache_dtype == "fp8" else element
    num_host_blocks = sizing.num_host_blocks(args, block, host_available)
    # Elements per token that are live at once: residual stream and its norm, and either q, k, v and attention's output
    # in float32, or gate, up and their product.
    attention = max(
        ((2 * spec.num_heads + 2 * k.num_kv_heads) * k.head_dim for k in spec.kv_kinds.values()),
        default=0,
    )
    width = 2 * spec.hidden_size + max(attention, 3 * spec.intermediate_size)
    width = sizing.layer_width(spec, width)
    extra = sizing.attention_bytes(args, spec, block_size, element)
    # Attention's workspace is for one layer at a time, so for one group; a request has blocks in all groups.
    longest = -(-max_model_len // block_size)  # blocks of one group
    request = sequence_blocks(spec.groups, max_model_len, max_batch_tokens, block_size)

    def table(num_blocks: int) -> MemoryTable:
        if measured is not None:
            return MemoryTable(
                available=measured.available,
                max_memory_percent=args.max_memory_percent,
                weights=measured.weights,
                activations=measured.workspace,
                attention=extra.per_block * num_blocks,
                logits=0,
                block=block,
                draft_block=draft.block,
                num_blocks=num_blocks,
                block_size=block_size,
                num_host_blocks=num_host_blocks,
                is_host_separate=sizing.is_host_separate,
                graphs=measured.graphs,
                is_measured=True,
            )
        return MemoryTable(
            available=available,
            max_memory_percent=args.max_memory_percent,
            weights=weight_bytes + draft.weights,
            activations=max_batch_tokens * width * max(element, 4),
            attention=extra.fixed
            + extra.per_request_block * min(num_blocks, longest)
            + extra.per_block * num_blocks,
            # Logits in float32, sorted logits, their ids, probabilities, and noise.
            logits=args.max_running_requests * spec.vocab_size * (4 * 4 + 8),
            states=states,
            block=block,
            draft_block=draft.block,
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            is_host_separate=sizing.is_host_separate,
        )

    room = table(0).remainder
    if room < 0 and room + table(0).host_tier >= 0:
        raise SizingError(
            f"node_pool_gib {args.node_pool_gib} does not fit beside the model\n{table(0)}"
        )
    if room < 0:
        raise SizingError(f"{spec.path}: the model alone does not fit\n{table(0)}")
    both = block + draft.block
    fits = room // (both + extra.per_request_block + extra.per_block)
    if fits > longest:
        fits = (room - extra.per_request_block * longest) // (both + extra.per_block)
    num_blocks = args.num_blocks
    if num_blocks is None:
        useful = args.max_running_requests * request
        wanted = sizing.default_blocks(fits, both)
        if args.kv_cache_gib is not None:
            wanted = int(args.kv_cache_gib * GIB) // both - 1
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
