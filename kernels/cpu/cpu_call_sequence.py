"""Calls into C that one team of threads runs in order, and the memory between them.

`native/sequence.c` has the barriers between the calls. The call structures are prepared once; before a run only what
changes from step to step is set. This saves each call's way through Python and the start and end of a team.

A cache line lies between the rows that products read or write: at multiples of 2 KiB 16 rows fall into two of the
first-level cache's 64 sets, and push each other out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from quire.kernels.cpu import native_library
from quire.kernels.cpu.cpu_attention_native import AttentionCall
from quire.kernels.cpu.cpu_linear import LinearCall, PackedWeight
from quire.kernels.cpu.cpu_row_ops import GatedCall, NormCall, RotateCall

_KINDS = (
    NormCall,
    LinearCall,
    RotateCall,
    AttentionCall,
    GatedCall,
)  # enum kind of native/sequence.c
ALIGNMENT_BYTES = 64
ROW_GAP = 32  # elements between rows, a cache line of the narrowest dtype


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
    """Calls that one team runs in order.

    Parameters
    ----------
    calls
        By name; they may be changed between runs.

    Raises
    ------
    ValueError
        More of them than C takes, or one twice.
    """

    def __init__(self, calls: Mapping[str, ctypes.Structure]):
        self._library = native_library.load()
        most = self._library.functions.quire_sequence_max_steps()
        if len(calls) > most:
            raise ValueError(f"calls: must be at most {most}, got {len(calls)}")
        if len({id(call) for call in calls.values()}) < len(calls):  # its counters serve one step
            raise ValueError("calls: must each be another, got one twice")
        self._calls = dict(calls)
        steps = [_Step(_KINDS.index(type(call)), ctypes.addressof(call)) for call in calls.values()]
        self._steps = (_Step * len(steps))(*steps)
        self._sequence = _Sequence(ctypes.addressof(self._steps), len(steps), None)
        self._reference = ctypes.byref(self._sequence)

    def __len__(self) -> int:
        """Calls."""
        return len(self._calls)

    @property
    def address(self) -> int:
        """Of `struct sequence`."""
        return ctypes.addressof(self._sequence)

    def run(self, num_threads: int, isa: str | None = None) -> None:
        """On at most so many threads; `isa` as in `cpu_linear.packed_linear`."""
        library = self._library
        library.functions.quire_sequence(
            self._reference, library.isa(isa), library.parallel, num_threads
        )

    def run_timed(self, num_threads: int, isa: str | None = None) -> dict[str, float]:
        """As `run`; seconds of each call, from the end of the one before to its own."""
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
    """Memory of what passes between the parts of a layer. One for the layers of a model, which run one at a time.

    It grows to what the largest step needs.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._address = 0
        # Told the seconds of a layer's parts by name, after each call; for measurements.
        self.on_times: Callable[[dict[str, float]], None] | None = None

    def reserve(self, num_bytes: int) -> int:
        """Address of so many bytes, aligned; what was in them before may be lost."""
        if num_bytes + ALIGNMENT_BYTES > len(self.memory):
            self.memory = torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
            self._address = aligned(self.memory.data_ptr())
        return self._address


class NormPart(NamedTuple):
    """An RMS norm."""

    weight: torch.Tensor  # `cpu_row_ops.pad_weight` of it
    eps: float


class ProductPart(NamedTuple):
    """A packed product."""

    weight: PackedWeight
    bias: torch.Tensor | None  # `weight.pad_bias` of it


def run_parts(
    sequence: CallSequence, workspace: Workspace, num_threads: int, isa: str | None
) -> dict[str, float]:
    """Seconds of each call by name; none where nobody wants them."""
    if workspace.on_times is not None:
        return sequence.run_timed(num_threads, isa)
    sequence.run(num_threads, isa)
    return {}


def aligned(address: int) -> int:
    return -(-address // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
