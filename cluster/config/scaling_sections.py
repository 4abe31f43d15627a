"""The sections `autoscaling`, `replica_resources` and `router_resources` of an application's arguments."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from quire.cluster.config.section import Section


class AutoscalingArgs(Section):
    """Number of replicas, chosen by the engines' load (`cluster/autoscaling.py`)."""

    min_replicas: int = Field(default=1, ge=1, le=1024, description="Minimum number of replicas.")
    max_replicas: int = Field(default=4, ge=1, le=1024, description="Maximum number of replicas.")
    target_queued_prefill_s: float | None = Field(
        default=2.0,
        gt=0,
        le=3600,
        description="Seconds of prefill queued per replica, at the replica and at the routers, above which more "
        "replicas are requested. null: not considered.",
    )
    target_kv_in_use: float | None = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Fraction (0 to 1) of a replica's KV cache in use by requests above which more replicas are "
        "requested. null: not considered.",
    )
    target_requests: float | None = Field(
        default=None,
        gt=0,
        description="Number of requests per replica, running and waiting, above which more replicas are requested; "
        "useful where decoding gets too slow. Default: not considered.",
    )
    upscale_delay_s: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        description="Seconds for which more replicas must be needed before they are started.",
    )
    downscale_delay_s: float = Field(
        default=300.0,
        ge=0,
        le=86400,
        description="Seconds for which fewer replicas must be needed before some are drained. Each drained replica "
        "loses its cache.",
    )
    look_back_s: float = Field(
        default=10.0,
        ge=1,
        le=3600,
        description="Seconds over which the replicas' reports are averaged.",
    )
    report_interval_s: float = Field(
        default=2.0,
        ge=0.1,
        le=600,
        description="Seconds between two reports of a replica to Serve.",
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
    """Resources that Ray reserves for one replica when it places it; a reservation, not a limit."""

    num_cpus: float = Field(
        default=0.25,
        ge=0,
        description="Number of CPUs reserved per replica, in each of its ranks. The default is small, so that two "
        "replicas and two routers fit on one core.",
    )
    num_gpus: float | None = Field(
        default=None,
        ge=0,
        description="Number of GPUs reserved per replica. Default: 1 if the device is cuda, otherwise 0.",
    )
    memory_gib: float | None = Field(
        default=None, gt=0, description="Memory reserved per replica in GiB. Default: none."
    )


class RouterResources(Section):
    """Resources that Ray reserves for one router when it places it; a reservation, not a limit."""

    num_cpus: float = Field(default=0.1, ge=0, description="Number of CPUs reserved per router.")
    memory_gib: float | None = Field(
        default=None, gt=0, description="Memory reserved per router in GiB. Default: none."
    )
