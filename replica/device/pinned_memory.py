"""Pinned host memory of exact size: an anonymous mapping, or the node's pool, registered with CUDA.

```
 map ▸ ask for large pages ▸ cudaHostRegister ▸ tensor and its views are used
       the last view is freed ▸ wait for the device ▸ cudaHostUnregister ▸ unmap
```

torch's pinned allocator rounds up to a power of two, so a host tier of 5 GiB would pin 8 GiB. Its settings for rounding
are private and differ between versions of torch, and one combination corrupts memory.

A copy with `non_blocking=True` is a `cudaMemcpyAsync`, and the driver knows the registered range, so torch need not
know that the memory is pinned. `Tensor.is_pinned` asks the driver too.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from quire.kernels.huge_pages import ask_for_huge_pages

logger = logging.getLogger(__name__)

# cudaHostRegisterPortable: pinned for the contexts of all devices.
_PORTABLE = 1


class Cudart(Protocol):
    """The functions of `torch.cuda.cudart()` used here. They return CUDA error codes; 0 is success."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any: ...

    def cudaHostUnregister(self, address: int) -> Any: ...

    def cudaGetErrorString(self, error: Any) -> str: ...


class HostMapping:
    """A mapping of whole pages. It lives as long as `data` or any view of it.

    Parameters
    ----------
    num_bytes
        At least 1. The mapping is rounded up to whole pages.
    memory
        Memory that is mapped already; None: map anonymous memory.

    Raises
    ------
    OSError
        The system has no address range of this size.
    """

    def __init__(self, num_bytes: int, memory: mmap.mmap | None = None):
        # Private, because Linux uses huge pages for shared mappings only if `shmem_enabled` allows it.
        self._memory = memory or mmap.mmap(
            -1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE
        )
        if hasattr(mmap, "MADV_DONTFORK"):
            # After a fork, the parent's next write could move its page while the device still uses the old one.
            self._memory.madvise(mmap.MADV_DONTFORK)
        # The tensor and its views refer to this object. Unlike the mapping, it runs its finaliser before the memory is
        # unmapped.
        self._owner = (ctypes.c_char * num_bytes).from_buffer(self._memory)
        self.data = torch.frombuffer(self._owner, dtype=torch.uint8)  # [num_bytes] uint8
        ask_for_huge_pages(self.data)

    def register(
        self, cudart: Cudart, synchronize: Callable[[], None], forget_error: Callable[[], None]
    ) -> str | None:
        """Pin the memory until it is freed.

        Parameters
        ----------
        synchronize
            Waits for copies that may still use the memory when it is freed.
        forget_error
            Resets CUDA's last error, which torch would otherwise raise at its next kernel launch.

        Returns
        -------
        None on success. Otherwise CUDA's error message; the memory is usable, but not pinned.
        """
        address, size = ctypes.addressof(self._owner), len(self._memory)
        error = cudart.cudaHostRegister(address, size, _PORTABLE)
        if int(error):
            forget_error()
            return _describe(cudart, error)
        unregister = weakref.finalize(
            self._owner, _unregister, cudart, synchronize, forget_error, address, self._memory
        )
        # At process exit the driver frees the memory itself, and other threads may still copy.
        unregister.atexit = False
        return None


def _unregister(
    cudart: Cudart,
    synchronize: Callable[[], None],
    forget_error: Callable[[], None],
    address: int,
    memory: mmap.mmap,
) -> None:
    """Unpin a mapping before it is unmapped."""
    with contextlib.suppress(RuntimeError):  # the device has failed and copies no more
        synchronize()
    error = cudart.cudaHostUnregister(address)
    if int(error):
        forget_error()
        size, reason = len(memory), _describe(cudart, error)
        logger.warning("could not unpin %d bytes of host memory: %s", size, reason)


def _describe(cudart: Cudart, error: Any) -> str:
    return f"{cudart.cudaGetErrorString(error)} (CUDA error {int(error)})"
