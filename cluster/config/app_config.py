"""The arguments of a Quire application: one frozen pydantic model, checked once.

`AppConfig` describes the mapping under `args:` of an application in a Serve config. Every field has a default, a
description and its unit in its name. An error names the path and the value and, for a typo, the nearest known name.
Imports neither ray nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field, ValidationError, field_validator

from quire.cluster.config.auth_section import AuthArgs
from quire.cluster.config.config_problems import ConfigError, problems_from
from quire.cluster.config.engine_section import AdapterArgs, EngineArgs, option_field
from quire.cluster.config.http_section import HttpArgs, MetricsArgs, TracingArgs
from quire.cluster.config.router_section import RouterArgs
from quire.cluster.config.scaling_sections import (
    AutoscalingArgs,
    ReplicaResources,
    RouterResources,
)
from quire.cluster.config.section import NodePath, Section
from quire.cluster.config.session_section import SessionArgs
from quire.cluster.config.tls_section import TlsArgs
from quire.protos.errors import InvalidRequest
from quire.replica.config import Device, Dtype
from quire.router.text.template_kwargs import check_template_kwargs

EMBEDDED_MODEL = "embedded"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def names_hub_model(model: str) -> bool:
    """Whether `model` has the form of a Hugging Face id, owner/name."""
    return _HUB_ID.fullmatch(model) is not None


class AppConfig(Section):
    """Arguments of one Quire application, which serves one model."""

    model: NodePath = option_field("model")
    revision: str | None = option_field("revision")
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Name of the model in requests (`model`). Default: the Hugging Face id, or the name of the "
        "folder.",
    )
    adapters: list[AdapterArgs] = Field(
        default=[],
        max_length=1024,
        description="Adapters that requests may name as their model. They need `engine.max_loaded_adapters`.",
    )
    adapter_folder: NodePath | None = Field(
        default=None,
        min_length=1,
        description="Folder in which adapters must lie that are loaded at run time (`POST /v1/adapters`), readable by "
        "every router and replica. Default: adapters cannot be loaded at run time.",
    )
    chat_template: NodePath | None = Field(
        default=None,
        min_length=1,
        description="Path to a Jinja file with the chat template. Default: the checkpoint's.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        description="Variables for the chat template of every request, for example `enable_thinking: false`. A "
        "request's own `chat_template_kwargs` take precedence.",
    )
    device: Device = option_field("device")
    dtype: Dtype = option_field("dtype")
    replicas: int = Field(
        default=2, ge=1, le=1024, description="Number of replicas, one engine and one device each."
    )
    routers: int = Field(
        default=2, ge=1, le=64, description="Number of routers, which serve HTTP and gRPC."
    )
    autoscaling: AutoscalingArgs | None = Field(
        default=None,
        description="Let Serve change the number of replicas with the load; `replicas` is then the initial number. "
        "Default: the number of replicas is constant.",
    )
    engine: EngineArgs = Field(
        default=EngineArgs(), description="Options of each replica's engine."
    )
    router: RouterArgs = Field(default=RouterArgs(), description="Options of each router.")
    session: SessionArgs = Field(
        default=SessionArgs(), description="Retention of conversations between two requests."
    )
    http: HttpArgs = Field(default=HttpArgs(), description="The routers' HTTP front end.")
    metrics: MetricsArgs = Field(
        default=MetricsArgs(), description="The metrics that Prometheus scrapes."
    )
    auth: AuthArgs | None = Field(
        default=None,
        description="Keys, which every call then needs. Default: no keys; everybody who reaches the ports may do "
        "everything.",
    )
    tracing: TracingArgs | None = Field(
        default=None,
        description="Traces of requests for OpenTelemetry; needs the extra `quire[otel]`. Default: no traces.",
    )
    tls: TlsArgs | None = Field(
        default=None,
        description="TLS for clients, on further ports. Default: no TLS; the plain ports are the only ones.",
    )
    replica_resources: ReplicaResources = Field(
        default=ReplicaResources(), description="Resources that Ray reserves for each replica."
    )
    router_resources: RouterResources = Field(
        default=RouterResources(), description="Resources that Ray reserves for each router."
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _plain_kwargs(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            check_template_kwargs(kwargs)
        except InvalidRequest as error:
            raise ValueError(error.message) from None
        return kwargs

    def conflicts(self) -> Iterator[str]:
        if self.model != EMBEDDED_MODEL and not self.is_folder and not names_hub_model(self.model):
            yield (
                f"model {self.model!r} is neither 'embedded', nor a folder (a path that begins "
                "with '/', './', '../' or '~'), nor a Hugging Face id such as 'Qwen/Qwen3-8B'"
            )
        if self.revision is not None and (self.is_folder or self.model == EMBEDDED_MODEL):
            yield (
                f"revision {self.revision!r} needs a Hugging Face id, but model is {self.model!r}"
            )
        names = [adapter.name for adapter in self.adapters]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"adapters has the name {name!r} {names.count(name)} times"
        if self.model_name in names:
            yield f"adapters has the model's name {self.model_name!r}"
        if (names or self.adapter_folder) and not self.engine.max_loaded_adapters:
            yield "adapters and adapter_folder need engine.max_loaded_adapters of at least 1, got 0"
        scaling = self.autoscaling
        if scaling and not scaling.min_replicas <= self.replicas <= scaling.max_replicas:
            yield (
                f"replicas must be from autoscaling.min_replicas ({scaling.min_replicas}) to "
                f"autoscaling.max_replicas ({scaling.max_replicas}), got {self.replicas}"
            )
        if self.device == "cpu" and self.replica_resources.num_gpus:
            yield (
                f"replica_resources.num_gpus must be 0 with device 'cpu', got "
                f"{self.replica_resources.num_gpus}"
            )
        if self.device == "cuda" and self.replica_resources.num_gpus == 0:
            yield "replica_resources.num_gpus must be above 0 with device 'cuda', got 0"
        if self.engine.tensor_parallel > 1 and (self.replica_resources.num_gpus or 0) % 1:
            yield (
                "replica_resources.num_gpus must be a whole number with engine.tensor_parallel "
                f"{self.engine.tensor_parallel}, because each rank has a GPU of its own, got "
                f"{self.replica_resources.num_gpus}"
            )
        if self.router.pool_share and self.engine.node_pool_gib == 0:
            yield "router.policy 'disaggregated' needs engine.node_pool_gib above 0, got 0"

    @property
    def is_folder(self) -> bool:
        """Whether `model` is a path. A relative path starts with './' or '../'."""
        return self.model.startswith(("/", "./", "../"))

    @property
    def max_replicas(self) -> int:
        """Maximum number of replicas."""
        return self.autoscaling.max_replicas if self.autoscaling else self.replicas

    @property
    def model_name(self) -> str:
        """Name of the model in requests."""
        if self.served_model_name is not None:
            return self.served_model_name
        return self.model.rstrip("/").rpartition("/")[2] if self.is_folder else self.model

    @classmethod
    def from_args(cls, args: dict[str, Any], path: str = "") -> AppConfig:
        """Check the `args` of an application.

        Parameters
        ----------
        args
            The mapping as read from YAML.
        path
            Path of the mapping in the file (`applications[0].args`), for messages.

        Raises
        ------
        ConfigError
            With every problem found.
        """
        try:
            return cls.model_validate(args)
        except ValidationError as error:
            raise ConfigError(problems_from(error, cls, path)) from None
