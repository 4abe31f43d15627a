"""Sizing on a GPU: the KV cache takes all remaining device memory; the host tier is in the host's memory."""

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
    """`DeviceSizing` of a GPU."""

    device = "cuda"
    batch_tokens = 8192
    is_async = True
    is_host_separate = True
    is_final = False
    # Steps are captured, in which the host does not know the rows.
    runs_own_attention = False
    fixes_recurrences = False
    w4_dtype: str | None = None

    def check_args(self, args: EngineArgs, weights: str, dtype: str) -> None:
        """Reject int8 weights and packed ones, which only the CPU supports."""
        if args.cache_packed_weights:
            raise SizingError(
                "cache_packed_weights is True, which needs device 'cpu'; it is 'cuda'"
            )
        if weights == "int8":
            raise SizingError("weights is 'int8', which needs device 'cpu'; it is 'cuda'")

    def check_deterministic(self, args: EngineArgs, weights: str, dtype: str) -> None:
        """Reject FP8 weights and unfused models: the vendor's FP8 products and torch's norms vary with the batch."""
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
        """Default of `deterministic`: false, because the vendor's matrix products depend on the number of rows."""
        return False

    def choose_dtype(
        self, checkpoint_dtype: str, num_parameters: int, flags: frozenset[str]
    ) -> str:
        """Return the checkpoint's dtype."""
        return checkpoint_dtype

    def choose_block_size(self, args: EngineArgs) -> int:
        """Return the block size asked for; the default is the size for which the kernels are tuned."""
        return args.block_size or tuning.BLOCK_SIZE

    def default_q_padding(self, args: EngineArgs, highest: int) -> int | None:
        """Return the default; None, so that mixed steps have no graphs, if graphs are off or steps are too small."""
        if args.cuda_graphs == "off" or highest < LEAST_TOKENS:
            return None
        return min(CHEAP_TOKENS, highest)

    def layer_width(self, spec: ModelSpec, width: int) -> int:
        """Return `width`: a fused layer needs as much as an unfused one."""
        return width

    def attention_bytes(
        self, args: EngineArgs, spec: ModelSpec, block_size: int, element: int
    ) -> AttentionBytes:
        """Return the partial results of decode rows that are split over programs; they grow with the pool."""
        return AttentionBytes(per_block=decode_bytes_per_block(args, spec, block_size))

    def num_host_blocks(self, args: EngineArgs, block: int, host_available: int) -> int:
        """Return the blocks asked for; the default is 4 GiB, or a quarter of the host's free memory if that is less."""
        gib = args.node_pool_gib
        if gib is None:
            return min(_HOST_TIER_BYTES, host_available // 4) // block
        num_blocks = host_blocks_asked_for(gib, block)
        bound = int(host_available * args.max_memory_percent)
        if num_blocks * block > bound:
            raise SizingError(
                f"node_pool_gib must be at most {bound / GIB:.3f}, which is {args.max_memory_percent:.0%} of "
                f"the host's available memory, got {gib}"
            )
        return num_blocks

    def default_blocks(self, fits: int, block: int) -> int:
        """Return all blocks that fit."""
        return fits


def decode_bytes_per_block(args: EngineArgs, spec: ModelSpec, block_size: int) -> int:
    """Return the bytes of partial results of decode attention, over all layer groups, per block of the pool."""
    per_token = sum(
        partial_bytes_per_token(
            group.num_heads or spec.num_heads,
            group.value_size,
            args.prefix_caching and group.window is None and group.chunk is None,
        )
        for group in spec.groups
    )
    return math.ceil(per_token * block_size)
