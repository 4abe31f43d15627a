"""Adapters in host memory: read once, verified by digest, the least recently used one forgotten first."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from quire.protos.adapter_ref import AdapterRef, folder_digest
from quire.protos.errors import InvalidRequest
from quire.replica.core.adapter import Adapter
from quire.replica.device.time_counters import MeanTime

# Adapters in an engine's host memory, those in the device's memory included.
MAX_HOST_ADAPTERS = 256


class AdapterLibrary:
    """Reads adapters on demand; any thread may call it.

    A live request keeps its adapter, even if the library forgets it.

    Parameters
    ----------
    read
        Reads and checks a folder; returns the weights in the form of the runner's device. None: the engine has no
        adapters, and all are refused.
    max_adapters
        Number of adapters to keep.
    """

    def __init__(self, read: Callable[[Path], Any] | None, max_adapters: int):
        self._read = read
        self._max_adapters = max_adapters
        self._lock = threading.Lock()
        # By digest, least recently used first. A future is done when its folder is read.
        self._adapters: OrderedDict[str, Future[Adapter]] = OrderedDict()
        self.num_reads = 0
        self.read_time = MeanTime()
        # Changes of `digests` so far.
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._adapters)

    def get(self, ref: AdapterRef) -> Adapter:
        """Return an adapter; read its folder if it is not in memory. Concurrent calls read it once.

        Raises
        ------
        InvalidRequest
            The engine has no adapters; the folder cannot be used, or has other files than the reference names.
        """
        read = self._reader()
        with self._lock:
            future = self._adapters.get(ref.digest)
            is_new = future is None
            if future is None:
                future = self._adapters[ref.digest] = Future()
                self.num_reads += 1
                while len(self._adapters) > self._max_adapters:
                    self._adapters.popitem(last=False)
                    self.num_changes += 1
            self._adapters.move_to_end(ref.digest)
        if is_new:
            try:
                self._fill(future, ref, read)
            except BaseException as error:
                with self._lock:
                    if self._adapters.get(ref.digest) is future:
                        del self._adapters[ref.digest]
                future.set_exception(error)
        return future.result()

    def find(self, ref: AdapterRef) -> Adapter | None:
        """Return an adapter that is in memory; None if it is not, or not yet."""
        with self._lock:
            future = self._adapters.get(ref.digest)
            if future is None or not future.done() or future.exception() is not None:
                return None
            self._adapters.move_to_end(ref.digest)
            return future.result()

    def digests(self) -> list[str]:
        """Return the digests of the adapters in memory, without those that are being read."""
        with self._lock:
            return [digest for digest, future in self._adapters.items() if future.done()]

    def _reader(self) -> Callable[[Path], Any]:
        if self._read is None:
            raise InvalidRequest("max_loaded_adapters is 0: the engine has no adapters")
        return self._read

    def _fill(self, future: Future[Adapter], ref: AdapterRef, read: Callable[[Path], Any]) -> None:
        began = time.perf_counter()
        adapter = self._load(ref, read)
        with self._lock:
            self.read_time.add(time.perf_counter() - began)
            future.set_result(adapter)
            self.num_changes += 1

    @staticmethod
    def _load(ref: AdapterRef, read: Callable[[Path], Any]) -> Adapter:
        folder = Path(ref.path)
        try:
            found = folder_digest(folder)
        except OSError as error:
            raise InvalidRequest(f"adapter {ref.name!r}: {error}", field="model") from error
        if found != ref.digest:
            raise InvalidRequest(
                f"adapter {ref.name!r}: the files in {ref.path} have changed since it was loaded (digest {found}, "
                f"expected {ref.digest}); load it again",
                field="model",
            )
        return Adapter(ref, read(folder))

    def forget(self, digest: str) -> None:
        """Drop an adapter; unknown ones are ignored."""
        with self._lock:
            if self._adapters.pop(digest, None) is not None:
                self.num_changes += 1
