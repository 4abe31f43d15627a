"""Loads and frees adapters on all replicas of the application."""

from __future__ import annotations

from quire.protos import errors
from quire.protos.adapter_ref import AdapterRef
from quire.protos.errors import QuireError
from quire.router.transport.bus import Bus

# A replica that does not answer in time reads the adapter when its first request arrives.
LOAD_TIMEOUT_S = 60.0
_FORGET_TIMEOUT_S = 5.0


class ReplicaAdapters:
    """`adapter_control.AdapterReplicas` over the bus."""

    def __init__(self, bus: Bus):
        self._bus = bus

    async def load_adapter(self, ref: AdapterRef) -> list[QuireError]:
        """See `AdapterReplicas`."""
        answers = await self._bus.ask_all("load_adapter", ref.to_wire(), timeout_s=LOAD_TIMEOUT_S)
        return [errors.from_wire(answer) for answer in answers if answer]

    async def forget_adapter(self, digest: str) -> None:
        """See `AdapterReplicas`."""
        await self._bus.ask_all("forget_adapter", digest, timeout_s=_FORGET_TIMEOUT_S)
