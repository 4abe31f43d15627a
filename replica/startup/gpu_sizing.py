"""Sizing on a GPU: the KV cache takes all remaining memory; the host tier is in host memory."""

from __future__ import annotations

import math

from quire.kernels import tuning
from quire.kernels.attention.decode_workspace_size import partial_bytes_per_token
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs, SizingError
from quire.replica.runner.graphs.mixed_shapes import CHEAP_TOKENS, LEAST_TOKENS
from quire.replica.startup.device_sizing import GIB, AttentionBytes, host_blocks_asked_for

# Default of the host tier, at most a quarter of the host's free memory.
_HOST_TIER_BYTES = 4 * GIB


class GpuSizing:
    """See `DeviceSizing`."""

    device = "cuda"
    batch_tokens = 8192
    is_async = True
    is_host_separate = True
    is_final = False

    def check_args(self, args: EngineArgs, weights: str, dtype: str) -> None:
        """int8 weights are only supported on the CPU."""
        if weights == "int8":
            raise SizingError("weights is 'int8', which needs device 'cpu'; it is 'cuda'")

    def check_deterministic(self, args: EngineArgs, weights: str, dtype: str) -> None:
        """Any dtype works; the vendor's FP8 products and torch's norms do not."""
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
        """Off: the vendor's products depend on the number of rows."""
        return False

    def choose_dtype(
        self, checkpoint_dtype: str, num_parameters: int, flags: frozenset[str]
    ) -> str:
        """The checkpoint's dtype."""
        return checkpoint_dtype

    def choose_block_size(self, args: EngineArgs) -> int:
        """The default is the size that the kernels are tuned for."""
        return args.block_size or tuning.BLOCK_SIZE

    def default_q_padding(self, args: EngineArgs, highest: int) -> int | None:
        """Mixed steps are captured unless graphs are off."""
        if args.cuda_graphs == "off" or highest < LEAST_TOKENS:
            return None
        return min(CHEAP_TOKENS, highest)

    def layer_width(self, spec: ModelSpec, width: int) -> int:
        """The same as unfused."""
        return width

    def attention_bytes(
        self, args: EngineArgs, spec: ModelSpec, block_size: int, element: int
    ) -> AttentionBytes:
        """Partial results of split decode rows, in proportion to the pool. Keys and values are read in place."""
        return AttentionBytes(per_block=decode_bytes_per_block(args, spec, block_size))

    def num_host_blocks(self, args: EngineArgs, block: int, host_available: int) -> int:
        """The default is 4 GiB, or a quarter of the host's free memory if that is less."""
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
        """All blocks that fit."""
        return fits


def decode_bytes_per_block(args: EngineArgs, spec: ModelSpec, block_size: int) -> int:
    """Bytes of partial results of decode attention, all groups, for each block of the pool."""
    per_token = sum(
        partial_bytes_per_token(
            spec.num_heads,
            group.head_dim,
            args.prefix_caching and group.window is None and group.chunk is None,
        )
        for group in spec.groups
    )
    return math.ceil(per_token * block_size)
