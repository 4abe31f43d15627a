"""What transformers' models import, without Triton where there is no GPU to use it.

`transformers.modeling_utils` imports `torch._dynamo`, and that looks for Triton: on a CPU 66 MB of a compiler for GPUs,
which nothing calls. Whoever imports Triton by name afterwards gets it; torch itself remembers that there was none, and
goes without it in this process (`torch.utils._triton`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Meanwhile it cannot be imported, unless it has been."""
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
