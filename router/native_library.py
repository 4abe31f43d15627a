"""The router's compiled library (`native/prefix.c`), if the installation had a C compiler.

Without it the router does the same in numpy, which takes longer: see `router/README.md`. What runs for a few
microseconds at a time keeps the interpreter's lock: to give it up costs an event loop more than that.
"""

from __future__ import annotations

import ctypes
import functools
import sysconfig
from pathlib import Path

import numpy as np

_ABI = 1  # QUIRE_ROUTER_ABI


class NativeLibraryError(RuntimeError):
    """The compiled library is of another version than the Python beside it."""


class Table(ctypes.Structure):
    """`struct block_table`."""

    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("has_spilled", ctypes.c_void_p),
        ("num_buckets", ctypes.c_uint64),
        ("low", ctypes.c_uint64),
        ("high", ctypes.c_uint64),
    ]


@functools.cache
def load() -> ctypes.PyDLL | None:
    """The library, or None where the installation could not compile it.

    Raises
    ------
    NativeLibraryError
        It was compiled from other sources.
    """
    path = Path(__file__).with_name("_native" + sysconfig.get_config_var("EXT_SUFFIX"))
    if not path.exists():
        return None
    library = ctypes.PyDLL(str(path))
    library.quire_router_abi.restype = ctypes.c_int64
    if library.quire_router_abi() != _ABI:
        raise NativeLibraryError(
            f"{path} has version {library.quire_router_abi()}, this package needs {_ABI}: install the package again"
        )
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.quire_prefix_hashes.restype = None
    library.quire_prefix_hashes.argtypes = [pointer, pointer, integer, ctypes.c_uint64, pointer]
    library.quire_find_blocks.restype = integer
    library.quire_find_blocks.argtypes = [pointer, pointer, integer, pointer, pointer, pointer]
    return library


def address(array: np.ndarray) -> int:
    """Where a contiguous array begins."""
    return array.__array_interface__["data"][0]
