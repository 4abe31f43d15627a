"""Sequences of calls into C that one team of threads runs in order, and the memory between the calls.

`native/sequence.c` implements the barriers between the calls. The call structures are prepared once; before a run only
the fields that change from step to step are set. This saves each call's way through Python and the start and end of a
team.

The rows that GEMMs read or write are one cache line further apart than their length. At a distance that is a multiple
of 2 KiB, 16 rows would share two of the 64 sets of the L1 cache and evict each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from quire.kernels.cpu import native_library
from quire.kernels.cpu.cpu_attention_native import AttentionCall
from quire.kernels.cpu.cpu_linear import LinearCall, PackedWeight
from quire.kernels.cpu.cpu_row_ops import (
    AdapterDownCall,
    AdapterUpCall,
    GatedCall,
    NormCall,
    RotateCall,
)

# In the order of `enum kind` of native/sequence.c.
_KINDS = (
    NormCall,
    LinearCall,
    RotateCall,
    AttentionCall,
    GatedCall,
    AdapterDownCall,
    AdapterUpCall,
)
ALIGNMENT_BYTES = 64
ROW_GAP = 32  # elements between rows: a cache line of the narrowest dtype


class _Step(ctypes.Structure):
    """`struct step` of native/sequence.c."""

    _fields_ = [("kind", ctypes.c_int64), ("call", ctypes.c_void_p)]


class _Sequence(ctypes.Structure):
    """`struct sequence` of native/sequence.c."""

    _fields_ = [
        ("steps", ctypes.c_void_p),
        ("num_steps", ctypes.c_int64),
        ("finished_ns", ctypes.c_void_p),
    ]


class CallSequence:
    """Calls that one team of threads runs in order.

    Parameters
    ----------
    calls
        The calls by name. Their fields may be changed between runs.

    Raises
    ------
    ValueError
        There are more calls than C supports, or one call occurs twice.
    """

    def __init__(self, calls: Mapping[str, ctypes.Structure]):
        self._library = native_library.installed()
        most = self._library.functions.quire_sequence_max_steps()
        if len(calls) > most:
            raise ValueError(f"calls: must be at most {most}, got {len(calls)}")
        # Each call has its own counters, and a run uses them for one entry of the sequence only.
        if len({id(call) for call in calls.values()}) < len(calls):
            raise ValueError("calls: must be distinct, got one twice")
        self._calls = dict(calls)
        steps = [_Step(_KINDS.index(type(call)), ctypes.addressof(call)) for call in calls.values()]
        self._steps = (_Step * len(steps))(*steps)
        self._sequence = _Sequence(ctypes.addressof(self._steps), len(steps), None)
        self._reference = ctypes.byref(self._sequence)

    def __len__(self) -> int:
        """Number of calls."""
        return len(self._calls)

    @property
    def address(self) -> int:
        """Address of `struct sequence`."""
        return ctypes.addressof(self._sequence)

    def run(self, num_threads: int, isa: str | None = None) -> None:
        """Run the calls on at most `num_threads` threads with instruction set `isa` (None: the processor's best)."""
        library = self._library
        library.functions.quire_sequence(
            self._reference, library.isa(isa), library.parallel, num_threads
        )

    def run_timed(self, num_threads: int, isa: str | None = None) -> dict[str, float]:
        """Run the calls and return the seconds of each, from the end of the previous call to its own end."""
        finished_ns = (ctypes.c_int64 * (len(self._calls) + 1))()
        self._sequence.finished_ns = ctypes.addressof(finished_ns)
        try:
            self.run(num_threads, isa)
        finally:
            self._sequence.finished_ns = None
        ends = list(finished_ns)
        spans = zip(self._calls, ends, ends[1:], strict=False)
        return {name: (end - begin) / 1e9 for name, begin, end in spans}


class Workspace:
    """Memory for results that pass between the parts of a layer.

    The layers of a model share one workspace, because they run one at a time. It grows to the size that the largest
    step needs.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._address = 0
        # For measurements: called after each run with the seconds of its parts by name.
        self.on_times: Callable[[dict[str, float]], None] | None = None

    def reserve(self, num_bytes: int) -> int:
        """Return the aligned address of at least `num_bytes` bytes. The previous contents may be lost."""
        if num_bytes + ALIGNMENT_BYTES > len(self.memory):
            self.memory = torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
            self._address = aligned(self.memory.data_ptr())
        return self._address


class NormPart(NamedTuple):
    """An RMS norm of a model."""

    weight: torch.Tensor  # `cpu_row_ops.pad_weight` of the norm's weight
    eps: float


class ProductPart(NamedTuple):
    """A linear layer of a model, or several with the same input, with a packed weight."""

    weight: PackedWeight
    bias: torch.Tensor | None  # `weight.pad_bias` of the layer's bias


def run_parts(
    sequence: CallSequence, workspace: Workspace, num_threads: int, isa: str | None
) -> dict[str, float]:
    """Run a sequence; return the seconds of each call by name, or an empty dict without `workspace.on_times`."""
    if workspace.on_times is not None:
        return sequence.run_timed(num_threads, isa)
    sequence.run(num_threads, isa)
    return {}


def aligned(address: int) -> int:
    return -(-address // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
