"""The adapters that one replica has in memory, as this router knows them."""

from __future__ import annotations

from quire.protos.adapter_ref import AdapterRef, adapter_key
from quire.protos.wire import AdapterReport

# Seconds for which a replica that was sent a request with an adapter counts as having it. A report follows in the next
# frame after the adapter has got its slot.
_BOOKED_S = 5.0


class HeldAdapters:
    """The adapters of one replica: its last report, and this router's requests since. `adapter_key` names each."""

    def __init__(self) -> None:
        self.on_device: frozenset[int] = frozenset()
        self.on_host: frozenset[int] = frozenset()
        # Whether running requests use all slots.
        self.is_full = False
        self.num_slots = 0
        # 0: not known.
        self.read_s, self.load_s = 0.0, 0.0
        # Time at which a booking ends.
        self._booked_until_s: dict[int, float] = {}

    def take(self, report: AdapterReport) -> None:
        """Take in a report."""
        self.on_device = frozenset(report.on_device.tolist())
        self.on_host = frozenset(report.on_host.tolist())
        self.num_slots = report.slots
        self.is_full = 0 < report.slots <= report.slots_in_use
        self.read_s, self.load_s = report.read_s, report.load_s
        for key in self.on_device.intersection(self._booked_until_s):
            del self._booked_until_s[key]

    def book(self, adapter: AdapterRef, now_s: float) -> None:
        """Count an adapter as present, because a request with it was just sent."""
        key, booked = adapter_key(adapter.digest), self._booked_until_s
        for ended in [other for other, until_s in booked.items() if until_s <= now_s]:
            del booked[ended]
        if key not in self.on_device:
            booked[key] = now_s + _BOOKED_S

    def has(self, key: int, now_s: float) -> bool:
        """Whether an adapter is on the device, or will be there soon."""
        return key in self.on_device or self._booked_until_s.get(key, now_s) > now_s
