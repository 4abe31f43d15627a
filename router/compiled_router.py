"""The router's compiled library (`native/`), if it could be compiled at installation.

Without it the router does the same in numpy, more slowly. Calls keep the GIL
(`PyDLL`): they run for a few microseconds, and releasing the GIL would cost the event loop more than that.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np

from quire.kernels.library_loader import open_library

_ABI = 5  # QUIRE_ROUTER_ABI
_AnyBuffer = ctypes.c_char * 0


class Table(ctypes.Structure):
    """`struct block_table` of `native/prefix.c`."""

    _fields_ = [
        ("lines", ctypes.c_void_p),
        ("num_buckets", ctypes.c_uint64),
        ("low", ctypes.c_uint64),
        ("high", ctypes.c_uint64),
        ("secret", ctypes.c_uint64),
    ]


class Holders(ctypes.Structure):
    """`struct holders` of `native/prefix.c`."""

    _fields_ = [
        ("table", ctypes.c_void_p),
        ("sets", ctypes.c_void_p),
        ("words", ctypes.c_int64),
        ("live", ctypes.c_void_p),
        ("live_words", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("alive", ctypes.c_void_p),
    ]


class Ends(ctypes.Structure):
    """`struct ends` of `native/prefix.c`."""

    _fields_ = [
        ("hashes", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
    ]


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library, or None if the installation could not compile it.

    Raises
    ------
    NativeLibraryError
        The library was compiled from another version of the sources.
    """
    library = open_library(Path(__file__).parent, "quire_router_abi", _ABI, ctypes.PyDLL)
    if library is None:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.quire_prefix_hashes.restype = None
    library.quire_prefix_hashes.argtypes = [
        *(pointer, pointer, pointer, pointer, integer, ctypes.c_uint64, pointer)
    ]
    library.quire_find_blocks.restype = None
    library.quire_find_blocks.argtypes = [pointer, pointer, integer, pointer, pointer]
    library.quire_find_runs.restype = integer
    library.quire_find_runs.argtypes = [pointer, pointer, integer, pointer, pointer]
    library.quire_match.restype = integer
    library.quire_match.argtypes = [
        *(pointer, pointer, integer, ctypes.c_double, ctypes.c_double, pointer, integer, pointer)
    ]
    return library


def address(array: np.ndarray) -> int:
    """Return the address of a contiguous array, for a writable one in a third of the time of `array.ctypes.data`."""
    if array.flags.writeable:
        return ctypes.addressof(_AnyBuffer.from_buffer(array))
    return int(array.__array_interface__["data"][0])
