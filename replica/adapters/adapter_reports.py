"""Reports to the routers which adapters an engine has in memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quire.protos.adapter_ref import adapter_key
from quire.protos.wire import AdapterReport
from quire.replica.adapters.adapter_library import AdapterLibrary
from quire.replica.core.adapter import AdapterSlots
from quire.replica.device.time_counters import MeanTime


class AdapterReports:
    """Makes a report after each change. The engine's thread, which owns the slots, calls it.

    Parameters
    ----------
    load_time
        Time to put an adapter into a slot.
    """

    def __init__(self, slots: AdapterSlots, library: AdapterLibrary, load_time: MeanTime):
        self._slots = slots
        self._library = library
        self._load_time = load_time
        self._report: AdapterReport | None = None
        self._seen = self._num_changes()

    def latest(self) -> AdapterReport | None:
        """Return the newest report; None while the engine has had no adapter."""
        # Read before the contents: other threads change the library, and a change in between causes a further report.
        num_changes = self._num_changes()
        if num_changes != self._seen:
            self._seen = num_changes
            self._report = AdapterReport(
                seq=1 if self._report is None else self._report.seq + 1,
                on_device=_keys(self._slots.digests()),
                on_host=_keys(self._library.digests()),
                slots=self._slots.num_slots,
                slots_in_use=self._slots.num_used,
                read_s=self._library.read_time.mean_s,
                load_s=self._load_time.mean_s,
            )
        return self._report

    def _num_changes(self) -> int:
        return self._slots.num_changes + self._library.num_changes


def _keys(digests: Iterable[str]) -> np.ndarray:
    return np.array([adapter_key(digest) for digest in digests], np.uint64)
