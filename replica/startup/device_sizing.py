"""How an engine is sized on one kind of device: `gpu_sizing.py`, `cpu_sizing.py`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs, SizingError

GIB = 1 << 30


class AttentionBytes(NamedTuple):
    """Memory of attention beside the KV cache."""

    fixed: int = 0
    per_block: int = 0  # of the pool
    per_request_block: int = 0  # of the longest request


class DeviceSizing(Protocol):
    """What `CpuSizing` and `GpuSizing` offer."""

    device: str  # cpu | cuda
    batch_tokens: int  # of the largest step, by default
    # Whether a step is launched before the one before it is collected, by default.
    is_async: bool
    # Whether the host tier takes memory that is not the device's.
    is_host_separate: bool
    # Whether `resolve` is final; else it runs again with what the loaded model takes.
    is_final: bool

    def check_args(self, args: EngineArgs, weights: str, dtype: str) -> None:
        """Raise `SizingError` for what the device does not have."""
        ...

    def check_deterministic(self, args: EngineArgs, weights: str, dtype: str) -> None:
        """Raise `SizingError` unless the products of such an engine have one order of additions."""
        ...

    def is_deterministic(self, dtype: str) -> bool:
        """Whether products have one order of additions without being asked to."""
        ...

    def choose_dtype(
        self, checkpoint_dtype: str, num_parameters: int, flags: frozenset[str]
    ) -> str:
        """The dtype `auto` stands for; `flags` are the processor's instruction sets."""
        ...

    def choose_block_size(self, args: EngineArgs) -> int:
        """As asked for, or the size that the device's attention reads best."""
        ...

    def default_q_padding(self, args: EngineArgs, highest: int) -> int | None:
        """Tokens to whose multiples mixed steps are padded if nothing is asked for; see `choose_q_padding`."""
        ...

    def layer_width(self, spec: ModelSpec, width: int) -> int:
        """Elements of a token that are live at once in a layer, given those of the unfused layer."""
        ...

    def attention_bytes(
        self, args: EngineArgs, spec: ModelSpec, block_size: int, element: int
    ) -> AttentionBytes:
        """`element`: bytes of a number in the model's dtype."""
        ...

    def num_host_blocks(self, args: EngineArgs, block: int, host_available: int) -> int:
        """Blocks of the host tier, of `block` bytes each."""
        ...

    def default_blocks(self, fits: int, block: int) -> int:
        """Blocks of the pool if nothing is asked for, of those that fit."""
        ...


def host_blocks_asked_for(gib: float, block: int) -> int:
    """Blocks of a host tier of `gib`; 0 only for 0."""
    num_blocks = int(gib * GIB) // block
    if gib and not num_blocks:
        raise SizingError(f"cpu_offload_gib {gib} holds no block of {block} bytes; 0 turns it off")
    return num_blocks
