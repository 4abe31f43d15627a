"""The interface of a device's part of sizing; `gpu_sizing.py` and `cpu_sizing.py` implement it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs, SizingError

GIB = 1 << 30


class AttentionBytes(NamedTuple):
    """Workspace of attention, in bytes."""

    fixed: int = 0
    per_block: int = 0  # for each block of the pool
    per_request_block: int = 0  # for each block of the longest request


class DeviceSizing(Protocol):
    """The interface of `CpuSizing` and `GpuSizing`."""

    device: str  # cpu | cuda
    batch_tokens: int  # default of `max_batch_tokens`
    # Default of `async_batching`: whether a step is launched before the previous one is collected.
    is_async: bool
    # Whether host memory is separate from device memory.
    is_host_separate: bool
    # Whether the first `resolve` is final; otherwise it runs again with measured memory.
    is_final: bool
    # Whether classes that compute attention themselves run there.
    runs_own_attention: bool
    # Whether a recurrent layer of Quire's kernels has the same bits in every batch.
    fixes_recurrences: bool
    # Default dtype of a checkpoint in 4 bits; None: as of others.
    w4_dtype: str | None

    def check_args(self, args: EngineArgs, weights: str, dtype: str) -> None:
        """Raise `SizingError` for options that the device does not support."""
        ...

    def check_deterministic(self, args: EngineArgs, weights: str, dtype: str) -> None:
        """Raise `SizingError` unless matrix products can be batch-invariant with these options."""
        ...

    def is_deterministic(self, dtype: str) -> bool:
        """Default of `deterministic`."""
        ...

    def choose_dtype(
        self, checkpoint_dtype: str, num_parameters: int, flags: frozenset[str]
    ) -> str:
        """Choose the dtype for "auto"; `flags` are the instruction sets of the CPU."""
        ...

    def choose_block_size(self, args: EngineArgs) -> int:
        """Return the block size asked for, or the device's default."""
        ...

    def default_q_padding(self, args: EngineArgs, highest: int) -> int | None:
        """Default of `q_padding`: the tokens of mixed steps are padded to a multiple of it; None: these have no graphs.

        `highest` is the smaller of the longest step and the longest request, in tokens.
        """
        ...

    def layer_width(self, spec: ModelSpec, width: int) -> int:
        """Return the elements per token that are live at once in a layer; in an unfused layer, these are `width`."""
        ...

    def attention_bytes(
        self, args: EngineArgs, spec: ModelSpec, block_size: int, element: int
    ) -> AttentionBytes:
        """Return the workspace of attention; `element` is the number of bytes of the model's dtype."""
        ...

    def num_host_blocks(self, args: EngineArgs, block: int, host_available: int) -> int:
        """Return the number of host tier blocks of `block` bytes, if `host_available` bytes of host memory are free."""
        ...

    def default_blocks(self, fits: int, block: int) -> int:
        """Return the default number of blocks of the pool; `fits` blocks of `block` bytes fit."""
        ...


def host_blocks_asked_for(gib: float, block: int) -> int:
    """Return the blocks in a host tier of `gib` GiB. Raises `SizingError` if no block fits and `gib` is not 0."""
    num_blocks = int(gib * GIB) // block
    if gib and not num_blocks:
        raise SizingError(f"cpu_offload_gib {gib} holds no block of {block} bytes; 0 turns it off")
    return num_blocks
