"""The compiled library of a package, if the installation had a C compiler: plain C beside the Python that calls it."""

from __future__ import annotations

import ctypes
import sysconfig
from pathlib import Path


class NativeLibraryError(RuntimeError):
    """A compiled library is of another version than the Python beside it."""


def open_library(
    folder: Path, version: str, needed: int, kind: type[ctypes.CDLL] = ctypes.CDLL
) -> ctypes.CDLL | None:
    """Load a package's `_native`.

    Parameters
    ----------
    folder
        The package's.
    version
        Name of the function that tells the library's version, an int64.
    needed
        The version that the caller is written for.
    kind
        Whether its functions give up the interpreter's lock (`CDLL`) or keep it (`PyDLL`).

    Returns
    -------
    None where the installation could not compile it.

    Raises
    ------
    NativeLibraryError
        It was compiled from other sources.
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
