"""Sizing on a GPU: all that is left is KV cache, and the host tier is memory of another machine part."""

from __future__ import annotations

import math

from quire.kernels import tuning
from quire.kernels.attention.decode_workspace_size import partial_bytes_per_token
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs, SizingError
from quire.replica.runner.graphs.mixed_shapes import CHEAP_TOKENS, LEAST_TOKENS
from quire.replica.startup.device_sizing import GIB, AttentionBytes, host_blocks_asked_for

# Default of the host tier, at most a quarter of what the host has to give.
_HOST_TIER_BYTES = 4 * GIB


class GpuSizing:
    """See `DeviceSizing`."""

    device = "cuda"
    batch_tokens = 8192
    is_async = True
    is_host_separate = True
    is_final = False

    def check_args(self, args: EngineArgs, weights: str, dtype: str) -> None:
        """int8 is the CPU's."""
        if weights == "int8":
            raise SizingError("weights is 'int8', which needs device 'cpu'; it is 'cuda'")

    def check_deterministic(self, args: EngineArgs, weights: str, dtype: str) -> None:
        """Any dtype, but not with the vendor's FP8 products or torch's own norms."""
        if weights != "auto":
            raise SizingError(
                f"deterministic is true, which on device 'cuda' needs weights 'auto'; they are {weights!r}, whose "
                "products are the vendor's and follow the number of rows; use a checkpoint without FP8 weights, or "
                "deterministic false"
            )
        if args.fuse != "auto":
            raise SizingError(
                f"deterministic is true, which on device 'cuda' needs fuse 'auto'; it is {args.fuse!r}, and torch's "
                "own norms follow the number of rows; use 'auto', or deterministic false"
            )

    def is_deterministic(self, dtype: str) -> bool:
        """Never: the vendor's products follow the number of rows."""
        return False

    def choose_dtype(
        self, checkpoint_dtype: str, num_parameters: int, flags: frozenset[str]
    ) -> str:
        """The checkpoint's."""
        return checkpoint_dtype

    def choose_block_size(self, args: EngineArgs) -> int:
        """As asked for, or what the kernels are tuned for."""
        return args.block_size or tuning.BLOCK_SIZE

    def default_q_padding(self, args: EngineArgs, highest: int) -> int | None:
        """Mixed steps are captured wherever graphs are."""
        if args.cuda_graphs == "off" or highest < LEAST_TOKENS:
            return None
        return min(CHEAP_TOKENS, highest)

    def layer_width(self, spec: ModelSpec, width: int) -> int:
        """As unfused."""
        return width

    def attention_bytes(
        self, args: EngineArgs, spec: ModelSpec, block_size: int, element: int
    ) -> AttentionBytes:
        """Partial results of split decode rows, which grow with the pool; keys and values are read where they lie."""
        return AttentionBytes(per_block=decode_bytes_per_block(args, spec, block_size))

    def num_host_blocks(self, args: EngineArgs, block: int, host_available: int) -> int:
        """By default 4 GiB, or a quarter of the host's memory if that is less."""
        gib = args.cpu_offload_gib
        if gib is None:
            return min(_HOST_TIER_BYTES, host_available // 4) // block
        num_blocks = host_blocks_asked_for(gib, block)
        bound = int(host_available * args.max_memory_percent)
        if num_blocks * block > bound:
            raise SizingError(
                f"cpu_offload_gib must be at most {bound / GIB:.3f}, which is {args.max_memory_percent:.0%} of "
                f"the host's available memory, got {gib}"
            )
        return num_blocks

    def default_blocks(self, fits: int, block: int) -> int:
        """All."""
        return fits


def decode_bytes_per_block(args: EngineArgs, spec: ModelSpec, block_size: int) -> int:
    """Bytes by which a block of the pool enlarges the partial results of all groups' decode attention."""
    per_token = sum(
        partial_bytes_per_token(
            spec.num_heads,
            group.head_dim,
            args.prefix_caching and group.window is None and group.chunk is None,
        )
        for group in spec.groups
    )
    return math.ceil(per_token * block_size)
