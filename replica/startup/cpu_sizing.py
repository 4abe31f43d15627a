"""Sizing on a CPU, where several replicas may share the machine, and the host tier uses the memory of the KV pool."""

from __future__ import annotations

from quire.kernels.cpu import cpu_attention, cpu_attention_native, native_library
from quire.kernels.cpu.cpu_attention_torch import PREFILL_ROWS
from quire.kernels.cpu.cpu_decoder_layer import workspace_columns
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs, SizingError
from quire.replica.model.own_attention import has_own_attention
from quire.replica.startup.device_sizing import GIB, AttentionBytes, host_blocks_asked_for

_KV_BYTES = 1 * GIB
_BLOCK_SIZE = 32
# Smaller models use float32, which is fast enough for them and exact.
_SMALL_MODEL_PARAMETERS = 200_000_000


class CpuSizing:
    """`DeviceSizing` of a CPU.

    Parameters
    ----------
    num_threads
        Threads of the engine.
    """

    device = "cpu"
    batch_tokens = 512
    is_async = False
    is_host_separate = False
    is_final = True
    runs_own_attention = True
    fixes_recurrences = True
    # The compiled library multiplies 4-bit weights with bfloat16 only.
    w4_dtype: str | None = "bfloat16"

    def __init__(self, num_threads: int):
        self._num_threads = num_threads

    def check_args(self, args: EngineArgs, weights: str, dtype: str) -> None:
        """Reject graphs and an FP8 cache, and int8 weights without bfloat16, fused modules and the compiled library."""
        if args.cuda_graphs == "on":
            raise SizingError("cuda_graphs is 'on', which needs device 'cuda'; it is 'cpu'")
        if weights == "int8":
            has_library = native_library.load() is not None
            if (dtype, args.fuse, has_library) != ("bfloat16", "auto", True):
                raise SizingError(
                    "weights is 'int8', which needs dtype 'bfloat16', fuse 'auto' and the compiled library; they are "
                    f"{dtype!r}, {args.fuse!r} and {'there' if has_library else 'absent'}"
                )
        if args.kv_cache_dtype == "fp8":
            raise SizingError(
                "kv_cache_dtype is 'fp8', which needs device 'cuda'; it is 'cpu', where attention reads pages in the "
                "model's dtype only"
            )

    def check_deterministic(self, args: EngineArgs, weights: str, dtype: str) -> None:
        """Raise unless `dtype` is float32: matrix products in other dtypes are not batch-invariant."""
        if dtype != "float32":
            raise SizingError(
                f"deterministic is true, which on the CPU needs dtype 'float32'; it is {dtype!r}; use 'float32', "
                "device 'cuda' with any dtype, or deterministic false"
            )

    def is_deterministic(self, dtype: str) -> bool:
        """Default of `deterministic`: true for float32."""
        return dtype == "float32"

    def choose_dtype(
        self, checkpoint_dtype: str, num_parameters: int, flags: frozenset[str]
    ) -> str:
        """Choose bfloat16 for large models if the CPU has instructions for it, else float32."""
        hardware = flags & {"avx512_bf16", "amx_bf16"}
        return "bfloat16" if num_parameters >= _SMALL_MODEL_PARAMETERS and hardware else "float32"

    def choose_block_size(self, args: EngineArgs) -> int:
        """Return the block size asked for; the default is the size that CPU attention reads fastest."""
        return args.block_size or _BLOCK_SIZE

    def default_q_padding(self, args: EngineArgs, highest: int) -> int | None:
        """None: the CPU has no graphs."""
        return None

    def layer_width(self, spec: ModelSpec, width: int) -> int:
        """Return `width`, or the input, result and workspace of a fused layer if they need more."""
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size)
        return max(width, 2 * spec.hidden_size + workspace_columns(spec.hidden_size, *shape))

    def attention_bytes(
        self, args: EngineArgs, spec: ModelSpec, block_size: int, element: int
    ) -> AttentionBytes:
        """Return the workspace of attention: tiles of each thread, or in torch the memory of the longest request.

        `cpu_attention_torch` is used if the compiled library does not support the model. It converts the keys and
        values of a request to float32 and keeps scores and weights of one tile of queries.
        """
        if has_own_attention(spec):
            return self._own_attention_bytes(args, spec, block_size, element)
        native = self.native_attention_bytes(spec, block_size)
        if native is not None:
            return AttentionBytes(fixed=native)
        per_token = spec.num_kv_heads * (2 * spec.head_dim * (element + 4) + 2 * PREFILL_ROWS * 4)
        return AttentionBytes(per_request_block=per_token * block_size)

    def _own_attention_bytes(
        self, args: EngineArgs, spec: ModelSpec, block_size: int, element: int
    ) -> AttentionBytes:
        """Return the workspace of a class that computes attention itself.

        It has keys and values of one request in all layers, and copies of them when tokens are added; and for each head
        scores, scores with a mask, and weights, in float32.
        """
        cached = 2 * element * sum(kind.token_elements for kind in spec.kv_kinds.values())
        scores = 3 * 4 * spec.num_heads * (args.max_batch_tokens or self.batch_tokens)
        return AttentionBytes(per_request_block=block_size * (cached + scores))

    def native_attention_bytes(self, spec: ModelSpec, block_size: int) -> int | None:
        """Return the workspace of attention in the compiled library; None if some layers need torch's."""
        if not cpu_attention.has_native():
            return None
        for group in spec.groups:
            num_heads = group.num_heads or spec.num_heads
            shape = (num_heads, group.num_kv_heads, group.head_dim, block_size)
            if not group.has_equal_sizes or not cpu_attention_native.fits(*shape):
                return None
        widest = max(group.head_dim for group in spec.groups)
        return cpu_attention_native.workspace_bytes(self._num_threads, widest)

    def num_host_blocks(self, args: EngineArgs, block: int, host_available: int) -> int:
        """Off by default: a larger pool holds the same number of blocks without copies."""
        return host_blocks_asked_for(args.cpu_offload_gib or 0.0, block)

    def default_blocks(self, fits: int, block: int) -> int:
        """Return at most 1 GiB of blocks, because several replicas may share the machine."""
        return min(fits, _KV_BYTES // block - 1)
