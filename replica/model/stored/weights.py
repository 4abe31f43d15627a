"""Reads weights from safetensors files into tensors on a device, piece by piece.

```
 file ──read──▶ tensor                                     CPU, stored dtype: no intermediate copy
 file ──read──▶ staging (≤ 64 MiB) ──convert, copy──▶ tensor     another dtype, or a GPU: two alternating pinned buffers
```

Apart from the tensors, the host needs at most two staging buffers, each at most 64 MiB and at most as large as the
largest tensor. Files are read sequentially, because this is fastest on disks. They are not mapped into memory, because
mapped pages would count as memory of this process.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Protocol

import torch
from tqdm import tqdm

from quire.replica.checkpoint.checkpoint import check_header
from quire.replica.checkpoint.model_spec import CheckpointError

logger = logging.getLogger(__name__)

_STAGING_BYTES = 64 << 20
_LOG_INTERVAL_S = 5.0
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # exponents; not all devices have operations for torch's own dtype
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor in a file."""

    name: str
    file: Path
    offset: int  # bytes from the beginning of the file
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None if `_DTYPES` lacks the stored dtype
    # If only a part of each row of a matrix is read: the bytes of a part, and from its beginning to the next one's.
    row_bytes: int = 0
    row_stride: int | None = None

    def named(self, name: str) -> StoredTensor:
        """Return the tensor under another name."""
        return replace(self, name=name)

    def rows(self, name: str, begin: int, end: int) -> StoredTensor:
        """Return rows [begin, end) as a tensor of their own.

        Raises
        ------
        CheckpointError
            There are fewer rows.
        """
        if end > self.shape[0]:
            raise CheckpointError(
                f"{self.file}: {self.name!r} has {self.shape[0]} rows, expected at least {end}"
            )
        row_bytes = self.num_bytes // self.shape[0]
        return replace(
            self,
            name=name,
            offset=self.offset + begin * row_bytes,
            num_bytes=(end - begin) * row_bytes,
            shape=(end - begin, *self.shape[1:]),
        )

    def as_matrix(self, num_rows: int) -> StoredTensor:
        """Return the same elements as a matrix with `num_rows` rows."""
        num_elements = math.prod(self.shape)
        return replace(self, shape=(num_rows, num_elements // num_rows))

    def columns(self, name: str, begin: int, end: int) -> StoredTensor:
        """Return columns [begin, end) of a matrix as a tensor of their own."""
        num_rows, num_columns = self.shape
        stride = self.num_bytes // num_rows
        element = stride // num_columns
        return replace(
            self,
            name=name,
            offset=self.offset + begin * element,
            num_bytes=num_rows * (end - begin) * element,
            shape=(num_rows, end - begin),
            row_bytes=(end - begin) * element,
            row_stride=stride,
        )


def list_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """List the tensors of safetensors files by name, in storage order; checks the headers."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        header = check_header(file)
        with file.open("rb") as stream:
            data_begin = 8 + int.from_bytes(stream.read(8), "little")
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            dtype = _DTYPES.get(entry["dtype"])
            found[name] = StoredTensor(
                name, file, data_begin + begin, end - begin, tuple(entry["shape"]), dtype
            )
    return found


def read_tensors(
    stored: Iterable[StoredTensor],
    make_target: Callable[[StoredTensor], torch.Tensor],
    *,
    on_bytes: Callable[[int], object] = lambda count: None,
) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    """Read tensors one after the other; yield each with its filled target.

    Parameters
    ----------
    stored
        In the order of `list_tensors`.
    make_target
        Returns the tensor to fill: contiguous, of the stored shape, on any device, of any dtype to which the stored one
        converts.
    on_bytes
        Called with the number of bytes read since the last call.

    Raises
    ------
    CheckpointError
        A file is too short.
    """
    staging: _Staging | None = None
    stream: FileIO | None = None
    try:
        for tensor in stored:
            if stream is None or Path(stream.name) != tensor.file:
                if stream is not None:
                    stream.close()
                stream = tensor.file.open("rb", buffering=0)
            stream.seek(tensor.offset)
            source = stream if tensor.row_stride is None else _RowParts(stream, tensor)
            target = make_target(tensor)
            if target.device.type == "cpu" and target.dtype == tensor.dtype:
                for piece in target.view(-1).view(torch.uint8).split(_STAGING_BYTES):
                    _fill(source, piece, tensor)
                    on_bytes(len(piece))
            else:
                size = min(_STAGING_BYTES, tensor.num_bytes)
                if staging is None or staging.size < size:
                    staging = (_PinnedStaging if target.is_cuda else _Staging)(size)
                _convert(source, tensor, target, staging, on_bytes)
            yield tensor, target
    finally:
        if stream is not None:
            stream.close()
        if staging is not None:
            staging.finish()


class _Staging:
    """One pageable host buffer. A copy from it has ended when the call that copies returns."""

    def __init__(self, size: int):
        self.size = size
        self._buffer = torch.empty(size, dtype=torch.uint8)

    def next(self) -> torch.Tensor:
        """Return a buffer that may be overwritten: no copy reads it any more."""
        return self._buffer

    def sent(self) -> None:
        """Record that the copy from the buffer which `next` returned is queued."""

    def finish(self) -> None:
        """Wait for all copies from the buffers."""


class _PinnedStaging(_Staging):
    """Two alternating pinned buffers: the GPU copies from one while the host fills the other."""

    def __init__(self, size: int):
        self.size = size
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._turn = 0

    def next(self) -> torch.Tensor:
        self._turn = (self._turn + 1) % len(self._buffers)
        self._copied[self._turn].synchronize()
        return self._buffers[self._turn]

    def sent(self) -> None:
        self._copied[self._turn].record()

    def finish(self) -> None:
        for event in self._copied:
            event.synchronize()


class _Source(Protocol):
    """A file at the beginning of a tensor, or parts of its rows."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read the next bytes, not necessarily as many as fit; return their number."""
        ...


class _RowParts:
    """Reads a part of each row of a matrix, one after the other."""

    def __init__(self, stream: FileIO, tensor: StoredTensor):
        assert tensor.row_stride is not None
        self._stream = stream
        self._row = tensor.offset
        self._stride = tensor.row_stride
        self._width = tensor.row_bytes
        self._done = 0

    def readinto(self, buffer: memoryview, /) -> int | None:
        """See `_Source.readinto`."""
        if self._done == self._width:
            self._row += self._stride
            self._stream.seek(self._row)
            self._done = 0
        count = self._stream.readinto(buffer[: self._width - self._done])
        self._done += count or 0
        return count


def _convert(
    stream: _Source,
    tensor: StoredTensor,
    target: torch.Tensor,
    staging: _Staging,
    on_bytes: Callable[[int], object],
) -> None:
    assert tensor.dtype is not None
    itemsize = tensor.dtype.itemsize
    flat = target.view(-1)
    count = staging.size // itemsize
    for begin in range(0, flat.numel(), count):
        part = flat[begin : begin + count]
        piece = staging.next()[: part.numel() * itemsize]
        _fill(stream, piece, tensor)
        part.copy_(piece.view(tensor.dtype), non_blocking=True)
        staging.sent()
        on_bytes(len(piece))


def _fill(stream: _Source, piece: torch.Tensor, tensor: StoredTensor) -> None:
    """Read exactly the bytes of `piece` [n] uint8."""
    rest = memoryview(piece.numpy())
    while rest:
        count = stream.readinto(rest)
        if not count:
            raise CheckpointError(
                f"{tensor.file}: ends {len(rest)} bytes before the end of {tensor.name!r}"
            )
        rest = rest[count:]


@dataclass(slots=True)
class LoadProgress:
    """Logs the progress of loading every 5 s."""

    total_bytes: int
    clock: Callable[[], float] = time.monotonic
    done_bytes: int = 0
    began_s: float = field(init=False)
    _said_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_s = self._said_s = self.clock()

    def add(self, num_bytes: int) -> None:
        """Count bytes read, and log if the last log line is old enough."""
        self.done_bytes += num_bytes
        now = self.clock()
        if now - self._said_s >= _LOG_INTERVAL_S:
            self._said_s = now
            logger.info("%s", str(self))

    def __str__(self) -> str:
        elapsed_s = max(self.clock() - self.began_s, 1e-9)
        speed = self.done_bytes / elapsed_s
        rest_s = (self.total_bytes - self.done_bytes) / max(speed, 1.0)
        return (
            f"loading weights: {self.done_bytes / 1e9:.2f} of {self.total_bytes / 1e9:.2f} GB, "
            f"{speed / 1e9:.2f} GB/s, {rest_s:.0f} s left"
        )


@contextmanager
def load_progress(total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Yield a function that takes the bytes read and shows progress: a bar on a terminal, else log lines."""
    if sys.stderr.isatty():
        with tqdm(
            total=total_bytes, unit="B", unit_scale=True, desc="loading weights", leave=False
        ) as bar:
            yield bar.update
        return
    progress = LoadProgress(total_bytes)
    yield progress.add
    elapsed_s = max(progress.clock() - progress.began_s, 1e-9)
    logger.info(
        "loaded %.2f GB of weights in %.1f s, %.2f GB/s",
        progress.done_bytes / 1e9,
        elapsed_s,
        progress.done_bytes / 1e9 / elapsed_s,
    )
