"""The section `auth` of an application's arguments."""

from __future__ import annotations

from pydantic import Field

from quire.cluster.config.section import NodePath, Section


class UsageLogArgs(Section):
    """One JSON line for each answered request: who used how many tokens."""

    folder: NodePath = Field(
        min_length=1,
        description="Folder on each router's node; each router writes a file of its own there.",
    )
    max_bytes: int = Field(
        default=64 * 1024**2,
        ge=4096,
        le=1024**4,
        description="Size at which a file is full and the next one begins.",
    )
    files: int = Field(
        default=10, ge=2, le=10_000, description="Files that are kept of each router."
    )


class AuthArgs(Section):
    """Keys: who may call, for which tenant, and how much."""

    key_file: NodePath = Field(
        min_length=1,
        description="Path to the key file on each router's node (`quire keys create`), for example a mounted "
        "Kubernetes secret. Routers read it again when it changes.",
    )
    usage_log: UsageLogArgs | None = Field(
        default=None, description="Log what each request used. Default: nothing is logged."
    )
    max_tenant_labels: int = Field(
        default=50,
        ge=0,
        le=1000,
        description="Most tenants that have a label of their own in metrics, in the order of the key file; the others "
        "share the label `other`.",
    )
