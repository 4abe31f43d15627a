"""The section `auth` of an application's arguments."""

from __future__ import annotations

from pydantic import Field

from quire.cluster.config.section import NodePath, Section


class AuthArgs(Section):
    """Keys: who may call, for which tenant, and how much."""

    key_file: NodePath = Field(
        min_length=1,
        description="Path to the key file on each router's node (`quire keys create`), for example a mounted "
        "Kubernetes secret. Routers read it again when it changes.",
    )
    usage_log_folder: NodePath | None = Field(
        default=None,
        min_length=1,
        description="Folder on each router's node for usage logs: one JSON line for each answered request says whose "
        "it was and how many tokens it used. Each router writes a file of its own. Default: nothing is logged.",
    )
    usage_log_bytes: int = Field(
        default=64 * 1024**2,
        ge=4096,
        le=1024**4,
        description="Size of a usage log at which the next file begins.",
    )
    usage_log_files: int = Field(
        default=10,
        ge=2,
        le=10_000,
        description="Number of usage logs that each router keeps, the current one included.",
    )
    max_tenant_labels: int = Field(
        default=50,
        ge=0,
        le=1000,
        description="Most tenants that have a label of their own in metrics, in the order of the key file; the others "
        "share the label `other`.",
    )
