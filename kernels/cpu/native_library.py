"""Loads the compiled C library of the CPU kernels, which exists if the package was installed with a C compiler.

The library is plain C (`native/*.c`), called through ctypes. It runs on torch's threads: it calls `GOMP_parallel` of
the OpenMP runtime that torch is linked to. A second pool of threads would compete for the cores with torch's threads,
which spin for a while after each operation.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.kernels.library_loader import open_library

ABI = 20  # QUIRE_ABI of native/attention.h
ISAS = ("generic", "avx2", "avx512", "avx512_bf16", "amx_bf16")  # enum isa of native/attention.c


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library, and the instruction sets that this processor has."""

    functions: ctypes.CDLL
    best_isa: int  # index into `ISAS`: the fastest one of this processor
    last_isa: int  # index into `ISAS`: the processor has this one and all before it
    parallel: int | None  # address of GOMP_parallel; None: one thread

    def isa(self, name: str | None) -> int:
        """Index of instruction set `name` in `ISAS`; None stands for the fastest one of this processor.

        Raises
        ------
        ValueError
            This processor lacks the instruction set.
        """
        number = self.best_isa if name is None else ISAS.index(name)
        if number > self.last_isa:
            raise ValueError(f"isa: this processor has {self.isas}, got {name!r}")
        return number

    @property
    def isas(self) -> tuple[str, ...]:
        """Names of the instruction sets that this processor has."""
        return ISAS[: self.last_isa + 1]


@functools.cache
def load() -> NativeLibrary | None:
    """Load the library; None if it was not compiled.

    Raises
    ------
    NativeLibraryError
        The library was compiled from sources of another version.
    """
    functions = open_library(Path(__file__).parent, "quire_abi", ABI)
    if functions is None:
        return None
    functions.quire_best_isa.restype = ctypes.c_int64
    functions.quire_last_isa.restype = ctypes.c_int64
    functions.quire_scratch_bytes.restype = ctypes.c_int64
    functions.quire_scratch_bytes.argtypes = [ctypes.c_int64]
    functions.quire_call_bytes.restype = ctypes.c_int64
    functions.quire_partial_floats.restype = ctypes.c_int64
    functions.quire_partial_floats.argtypes = [ctypes.c_int64]
    functions.quire_attention.restype = None
    functions.quire_attention.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int64,
    ]
    functions.quire_scatter_bytes.restype = ctypes.c_int64
    functions.quire_scatter.restype = None
    functions.quire_scatter.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    functions.quire_linear_bytes.restype = ctypes.c_int64
    functions.quire_linear.restype = None
    functions.quire_linear.argtypes = functions.quire_attention.argtypes
    functions.quire_pack_bytes.restype = ctypes.c_int64
    functions.quire_pack.restype = None
    functions.quire_pack.argtypes = functions.quire_scatter.argtypes
    functions.quire_code_bytes.restype = ctypes.c_int64
    functions.quire_code_panels.restype = None
    functions.quire_code_panels.argtypes = functions.quire_scatter.argtypes
    functions.quire_unpack_rows.restype = ctypes.c_int64
    functions.quire_unpack_rows.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    functions.quire_adapter_bytes.restype = ctypes.c_int64
    for name in ("adapter_down", "adapter_up"):
        function = getattr(functions, f"quire_{name}")
        function.restype, function.argtypes = None, functions.quire_attention.argtypes
    for name in ("norm", "gated", "rotate", "sequence", "conv", "scan"):
        getattr(functions, f"quire_{name}_bytes").restype = ctypes.c_int64
        function = getattr(functions, f"quire_{name}")
        function.restype, function.argtypes = None, functions.quire_attention.argtypes
    functions.quire_sequence_max_steps.restype = ctypes.c_int64
    functions.quire_layer_bytes.restype = ctypes.c_int64
    functions.quire_stage_bytes.restype = ctypes.c_int64
    functions.quire_layers.restype = ctypes.c_int64
    functions.quire_layers.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int64),
        *(ctypes.c_void_p,) * 5,
        *functions.quire_attention.argtypes[1:],
    ]
    functions.quire_exp2.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
    ]
    return NativeLibrary(
        functions, functions.quire_best_isa(), functions.quire_last_isa(), _gomp_parallel()
    )


def installed() -> NativeLibrary:
    """Return the library. The caller has checked that it was compiled."""
    library = load()
    assert library is not None
    return library


def _gomp_parallel() -> int | None:
    """Address of `GOMP_parallel` in torch's OpenMP runtime (LLVM's and Intel's have it too); None if not found."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            # RTLD_NOLOAD: use only a library that is already loaded. Another copy would have threads of its own.
            torch_cpu = ctypes.CDLL(
                str(Path(torch.__file__).parent / "lib" / name), mode=os.RTLD_NOLOAD | os.RTLD_NOW
            )
            return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
