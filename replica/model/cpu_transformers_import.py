"""Imports transformers' attention interface without loading Triton if there is no GPU.

`transformers.modeling_utils` imports `torch._dynamo`, which imports Triton if Triton is installed. On a machine without
a GPU this takes 66 MB for a compiler that is never called. A later import of Triton by name still works. torch
remembers that it did not find Triton and does not use it in this process (`torch.utils._triton`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Make a module unavailable for import inside the block, unless it is already loaded."""
    if module in sys.modules:
        yield
        return
    # None makes an import fail.
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.pop(module, None)


with contextlib.nullcontext() if torch.cuda.is_available() else _without("triton"):
    from transformers import AttentionInterface

__all__ = ["AttentionInterface"]
