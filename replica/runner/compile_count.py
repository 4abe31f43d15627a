"""Counts what is compiled in this process after an engine is ready: it should be nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable


class CompileCount:
    """Graphs that torch.compile traced and kernels that Triton built since `start`."""

    def __init__(self) -> None:
        self._graphs_before = _num_traced_graphs()
        self._kernels_built = _KernelCount()

    def start(self) -> None:
        """From here on they count."""
        self._graphs_before = _num_traced_graphs()
        self._kernels_built = _KernelCount()
        if "triton" not in sys.modules:  # nothing on this device uses it
            return
        from triton import knobs

        self._kernels_built.previous = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._kernels_built

    @property
    def num_compiles(self) -> int:
        """So many."""
        return _num_traced_graphs() - self._graphs_before + self._kernels_built.num


class _KernelCount:
    """A hook of Triton that counts what it builds.

    Triton keeps it as long as the process lives, so it must not refer to the runner: the weights would live as long.
    """

    def __init__(self) -> None:
        self.num = 0
        self.previous: Callable[..., bool | None] | None = None  # the hook that was there before

    def __call__(self, **kwargs: object) -> bool | None:
        self.num += 1
        return self.previous(**kwargs) if self.previous else None


def _num_traced_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")  # absent: nothing was ever traced
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
