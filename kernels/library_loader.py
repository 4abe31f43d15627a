"""Loads the C library of a package, which exists if the package was installed with a C compiler."""

from __future__ import annotations

import ctypes
import sysconfig
from pathlib import Path


class NativeLibraryError(RuntimeError):
    """The version of a compiled library differs from the version that its Python package needs."""


def open_library(
    folder: Path, version: str, needed: int, kind: type[ctypes.CDLL] = ctypes.CDLL
) -> ctypes.CDLL | None:
    """Load the library `_native` of a package.

    Parameters
    ----------
    folder
        Folder of the package.
    version
        Name of the C function that returns the library's version, an int64.
    needed
        Version that the caller supports.
    kind
        Whether calls release the interpreter's lock (`CDLL`) or keep it (`PyDLL`).

    Returns
    -------
    The library; None if it was not compiled.

    Raises
    ------
    NativeLibraryError
        The library was compiled from sources of another version.
    """
    path = folder / ("_native" + sysconfig.get_config_var("EXT_SUFFIX"))
    if not path.exists():
        return None
    library = kind(str(path))
    tell = getattr(library, version)
    tell.restype = ctypes.c_int64
    if tell() != needed:
        raise NativeLibraryError(
            f"{path} has version {tell()}, this package needs {needed}: install the package again"
        )
    return library
