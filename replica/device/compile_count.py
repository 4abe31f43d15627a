"""Counts compilations in this process after an engine is ready. There should be none: each one delays a request."""

from __future__ import annotations

import sys
from collections.abc import Callable


class CompileCount:
    """Counts graphs traced by torch.compile and kernels built by Triton since `start`."""

    def __init__(self) -> None:
        self._graphs_before = _num_traced_graphs()
        self._kernels_built = _KernelCount()

    def start(self) -> None:
        """Start counting."""
        self._graphs_before = _num_traced_graphs()
        self._kernels_built = _KernelCount()
        if "triton" not in sys.modules:
            return
        from triton import knobs

        self._kernels_built.previous = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._kernels_built

    @property
    def num_compiles(self) -> int:
        """Compilations since `start`."""
        return _num_traced_graphs() - self._graphs_before + self._kernels_built.num


class _KernelCount:
    """A hook that Triton calls after each build.

    Triton keeps the hook until the process ends, so it must not refer to the runner, which holds the weights.
    """

    def __init__(self) -> None:
        self.num = 0
        self.previous: Callable[..., bool | None] | None = None  # previously installed hook

    def __call__(self, **kwargs: object) -> bool | None:
        self.num += 1
        return self.previous(**kwargs) if self.previous else None


def _num_traced_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")  # absent if nothing was ever traced
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
