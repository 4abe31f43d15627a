"""Host memory of exact size that a GPU copies to and from: an anonymous mapping, registered with CUDA.

```
 map ▸ ask for large pages ▸ cudaHostRegister ▸ tensor and its views are used
       the last view is freed ▸ wait for the device ▸ cudaHostUnregister ▸ unmap
```

torch's own pinned allocator rounds up to a power of two: a host tier of 5 GiB would pin 8. Its settings for that are
private, differ between versions of torch, and one combination of them corrupts memory.

A copy with `non_blocking=True` does not ask torch whether its memory is pinned: it is `cudaMemcpyAsync`, and the driver
knows the registered range. `Tensor.is_pinned` asks the driver too.
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
    """The part of `torch.cuda.cudart()` that is used here; results are CUDA's error codes, 0 is success."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any: ...

    def cudaHostUnregister(self, address: int) -> Any: ...

    def cudaGetErrorString(self, error: Any) -> str: ...


class HostMapping:
    """An anonymous mapping of the process, rounded up to whole pages.

    The memory lives as long as `data`, or any view of it.

    Parameters
    ----------
    num_bytes
        At least 1.

    Raises
    ------
    OSError
        The system has no such address range.
    """

    def __init__(self, num_bytes: int):
        # Private, because Linux gives large pages to shared mappings only where `shmem_enabled` allows it.
        self._memory = mmap.mmap(
            -1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE
        )
        if hasattr(mmap, "MADV_DONTFORK"):
            # After a fork the parent's next write could move its page, while the device still uses the old one.
            self._memory.madvise(mmap.MADV_DONTFORK)
        # The tensor refers to this object, and so do its views. Unlike a mapping, it runs its finaliser before the
        # memory is unmapped.
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
            Waits for the copies that may still use the memory when it is freed.
        forget_error
            Resets CUDA's last error, which torch would raise at its next kernel as if that had failed.

        Returns
        -------
        CUDA's error where it refuses; then the memory can be used, but is not pinned.
        """
        address, size = ctypes.addressof(self._owner), len(self._memory)
        error = cudart.cudaHostRegister(address, size, _PORTABLE)
        if int(error):
            forget_error()
            return _describe(cudart, error)
        unregister = weakref.finalize(
            self._owner, _unregister, cudart, synchronize, forget_error, address, self._memory
        )
        # At the process' end the driver frees everything itself, and threads may still copy.
        unregister.atexit = False
        return None


def _unregister(
    cudart: Cudart,
    synchronize: Callable[[], None],
    forget_error: Callable[[], None],
    address: int,
    memory: mmap.mmap,
) -> None:
    """Unpin a mapping that only this call still refers to."""
    with contextlib.suppress(RuntimeError):  # a device that has failed copies nothing any more
        synchronize()
    error = cudart.cudaHostUnregister(address)
    if int(error):
        forget_error()
        size, reason = len(memory), _describe(cudart, error)
        logger.warning("%d bytes of the host's memory cannot be unpinned: %s", size, reason)


def _describe(cudart: Cudart, error: Any) -> str:
    return f"{cudart.cudaGetErrorString(error)} (CUDA error {int(error)})"
