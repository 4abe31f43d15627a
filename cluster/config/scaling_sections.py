"""The sections `autoscaling`, `replica_resources` and `router_resources` of an application's arguments."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from quire.cluster.config.section import Section


class AutoscalingArgs(Section):
    """How many replicas there are, by what the engines have to do (`cluster/autoscaling.py`)."""

    min_replicas: int = Field(1, ge=1, le=1024, description="Fewest replicas.")
    max_replicas: int = Field(4, ge=1, le=1024, description="Most replicas.")
    target_queued_prefill_s: float | None = Field(
        2.0,
        gt=0,
        le=3600,
        description="Seconds of prefill queued for one replica, there and at the routers, above which more "
        "replicas are wanted. null: does not count.",
    )
    target_kv_in_use: float | None = Field(
        0.8,
        gt=0,
        le=1,
        description="Fraction (0 to 1) of a replica's KV cache held by requests above which more replicas are "
        "wanted. null: does not count.",
    )
    target_requests: float | None = Field(
        None,
        gt=0,
        description="Requests on one replica, running and waiting, above which more replicas are wanted: for "
        "decoding that gets too slow. Default: does not count.",
    )
    upscale_delay_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="Seconds for which more replicas must be wanted until they are started.",
    )
    downscale_delay_s: float = Field(
        300.0,
        ge=0,
        le=86400,
        description="Seconds for which fewer replicas must be wanted until some are drained: a cache is lost "
        "with each.",
    )
    look_back_s: float = Field(
        10.0, ge=1, le=3600, description="Seconds over which replicas' reports are averaged."
    )
    report_interval_s: float = Field(
        2.0, ge=0.1, le=600, description="Seconds between two reports of a replica to Serve."
    )

    def conflicts(self) -> Iterator[str]:
        if self.min_replicas > self.max_replicas:
            yield (
                f"min_replicas ({self.min_replicas}) must be at most max_replicas "
                f"({self.max_replicas})"
            )
        targets = (self.target_queued_prefill_s, self.target_kv_in_use, self.target_requests)
        if targets == (None, None, None):
            yield "at least one target_* must be given"


class ReplicaResources(Section):
    """What Ray reserves for one replica when it places it; a reservation, not a limit."""

    num_cpus: float = Field(
        0.25,
        ge=0,
        description="CPUs reserved per replica. Small, so that two replicas and two routers fit "
        "one core.",
    )
    num_gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs reserved per replica. Default: 1 where the device is cuda, otherwise 0.",
    )
    memory_gib: float | None = Field(
        None, gt=0, description="Memory reserved per replica in GiB. Default: none."
    )


class RouterResources(Section):
    """What Ray reserves for one router when it places it; a reservation, not a limit."""

    num_cpus: float = Field(0.1, ge=0, description="CPUs reserved per router.")
    memory_gib: float | None = Field(
        None, gt=0, description="Memory reserved per router in GiB. Default: none."
    )
