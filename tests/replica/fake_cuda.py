"""What `CudaDevice` calls of torch.cuda, without a GPU: real mappings, and a record of what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

SUCCESS, OUT_OF_MEMORY = 0, 2


class FakeCudart:
    """`torch.cuda.cudart()`; notes each call, and can be made to refuse.

    Parameters
    ----------
    calls
        Gets what is asked for, in order.
    """

    def __init__(self, calls: list[tuple]):
        self.calls = calls
        self.result = SUCCESS
        self.registered: dict[int, int] = {}  # address → bytes

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append(("register", num_bytes))
        if self.result == SUCCESS:
            assert address not in self.registered
            assert is_mapped(address, num_bytes)
            self.registered[address] = num_bytes
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        num_bytes = self.registered.pop(address)
        assert is_mapped(address, num_bytes), "it was unmapped while registered"
        self.calls.append(("unregister", num_bytes))
        return self.result

    def cudaGetErrorString(self, error: int) -> str:
        return {OUT_OF_MEMORY: "out of memory"}[error]


def is_mapped(address: int, num_bytes: int) -> bool:
    """Whether the process has such memory, by the kernel's own table."""
    covered = address
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            if begin <= covered < end:
                covered = end
    return covered >= address + num_bytes


class FakeCuda:
    """Stands in for torch.cuda; `install` puts it there."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.cudart = FakeCudart(self.calls)
        self.sync_debug_mode: int | str = 0
        self.is_capturing = False
        self.is_unended = False  # for torch's allocator a capture is under way
        self.is_invalidated = False  # the capture that is under way

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        outer = self

        class Graph:
            def __init__(self) -> None:
                self.is_reset = False

            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                outer.calls.append(("begin", pool, capture_error_mode))
                outer.is_capturing = outer.is_unended = True

            def capture_end(self) -> None:
                outer.calls.append(("end",))
                outer.is_capturing = False
                if outer.is_invalidated:
                    raise RuntimeError("the capture was invalidated")
                outer.is_unended = False

            def replay(self) -> None:
                outer.calls.append(("replay",))

            def reset(self) -> None:
                outer.calls.append(("reset",))

        pools = iter(range(1000))
        replaced: dict[str, Callable] = dict(
            Stream=lambda device: object(),
            CUDAGraph=Graph,
            graph_pool_handle=lambda: next(pools),
            stream=_no_context,
            device=_no_context,
            synchronize=lambda device=None: self.calls.append(("synchronize",)),
            empty_cache=self._empty_cache,
            cudart=lambda: self.cudart,
            get_sync_debug_mode=lambda: self.sync_debug_mode,
            set_sync_debug_mode=self._set_sync_debug_mode,
            mem_get_info=lambda device=None: (1 << 30, 2 << 30),
        )
        for name, replacement in replaced.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(
            torch.accelerator,
            "empty_host_cache",
            lambda: self.calls.append(("empty_host_cache",)),
            raising=False,
        )

    def _set_sync_debug_mode(self, mode: int | str) -> None:
        self.sync_debug_mode = mode

    def _empty_cache(self) -> None:
        if self.is_unended:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED at ...")
        self.calls.append(("empty_cache",))

    def item(self) -> float:
        """As `Tensor.item` of a tensor on the device."""
        if self.is_capturing:
            self.is_invalidated = True
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return 1.0

    @property
    def names(self) -> list[str]:
        """Of the calls so far."""
        return [name for name, *_ in self.calls]


def _no_context(*args: object) -> AbstractContextManager[None]:
    return nullcontext()
