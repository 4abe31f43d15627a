"""Samples of a running Quire's cache occupancy over time, read over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

_PERIOD_MS = 200


@dataclass(frozen=True, slots=True)
class CacheSample:
    """Blocks of the device tier, summed over all replicas."""

    at_s: float  # time.perf_counter
    free: int
    cached: int
    in_use: int
    total: int


@asynccontextmanager
async def watching(
    target: str | None, headers: Mapping[str, str]
) -> AsyncIterator[list[CacheSample]]:
    """Collect samples of `quire.v1.Control/WatchCache` while the `with` block runs; without a target the list is empty.

    Parameters
    ----------
    target
        HOST:PORT of Quire's gRPC server, or None.
    headers
        Metadata of the call.
    """
    samples: list[CacheSample] = []
    if target is None:
        yield samples
        return
    import grpc

    from quire.protos import control_pb2, control_pb2_grpc

    async with grpc.aio.insecure_channel(target) as channel:
        stub = control_pb2_grpc.ControlStub(channel)

        async def watch() -> None:
            request = control_pb2.WatchCacheRequest(period_ms=_PERIOD_MS)
            async for response in stub.WatchCache(request, metadata=tuple(headers.items())):
                tiers = [
                    tier
                    for replica in response.replicas
                    for tier in replica.cache.tiers
                    if tier.tier == control_pb2.TIER_DEVICE
                ]
                samples.append(
                    CacheSample(
                        time.perf_counter(),
                        sum(tier.blocks_free for tier in tiers),
                        sum(tier.blocks_cached for tier in tiers),
                        sum(tier.blocks_in_use for tier in tiers),
                        sum(tier.blocks_total for tier in tiers),
                    )
                )

        task = asyncio.ensure_future(watch())
        try:
            yield samples
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
