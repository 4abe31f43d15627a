"""Imports transformers' attention interface without loading Triton if there is no GPU.

`transformers.modeling_utils` imports `torch._dynamo`, which imports Triton if it finds it: on a CPU, 66 MB of a
compiler that is never called. A later import of Triton by name still works. torch caches the result of its search and
does not use Triton in this process (`torch.utils._triton`).
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
