"""What Linux is told of memory before it is used: to take large pages, and to back it at once.

Large pages are there where `transparent_hugepage` is `madvise` or `always`.

A page of 4 KiB needs an entry of the address cache for every 4 KiB that is read, and prefetchers stop at its end:
one thread reads packed weights 20 % faster from pages of 2 MiB (kernels/README.md).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def ask_for_huge_pages(tensor: torch.Tensor) -> None:
    """Before it is first written: let the kernel use large pages for what whole pages a contiguous tensor covers.

    A wish: where it is refused, nothing changes.
    """
    madvise = _madvise()
    if madvise is None:
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        madvise(begin, end - begin, mmap.MADV_HUGEPAGE)


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14; the mmap module does not name it


def back_with_memory(tensor: torch.Tensor) -> bool:
    """Give all pages of a contiguous tensor their memory now, not one after the other at their first writes.

    Its contents stay. Returns False where the system does not do that or has no memory left.
    """
    madvise = _madvise()
    if madvise is None:
        return False
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return madvise(begin, tensor.data_ptr() + tensor.nbytes - begin, _POPULATE_WRITE) == 0
