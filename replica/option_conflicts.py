"""Options of an engine that are each within their bounds but contradict one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.replica import speculation_options


def block_size_problem(block_size: int | None) -> str | None:
    """Return why a block size cannot be used, or None.

    A power of two divides the 64 tokens of a routing block (`protos/routing_hash.py`) or is a multiple of them.
    """
    if block_size is not None and block_size & (block_size - 1):
        return f"must be a power of two from 8 to 256, got {block_size}"
    return None


def conflicts(options: Any) -> Iterator[str]:
    """Yield the problems of options that are each within their bounds but contradict one another.

    Parameters
    ----------
    options
        An object with the attributes of `EngineOptions`.
    """
    if options.resume_margin is not None and options.resume_margin < options.safety_margin:
        yield (
            f"resume_margin ({options.resume_margin}) must be at least safety_margin "
            f"({options.safety_margin})"
        )
    if options.num_blocks is not None and options.kv_cache_gib is not None:
        yield (
            f"num_blocks ({options.num_blocks}) and kv_cache_gib ({options.kv_cache_gib}) both set "
            "the size of the KV cache; give one of them"
        )
    ranks, splits = options.tensor_parallel, options.reduction_splits or options.tensor_parallel
    if ranks & (ranks - 1) or splits & (splits - 1) or splits < ranks:
        yield f"tensor_parallel ({ranks}) and reduction_splits ({splits}) must be powers of two, in ascending order"
    yield from speculation_options.conflicts(options.speculation)
