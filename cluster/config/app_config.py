"""The arguments of the Quire application: one pydantic model, checked once, never written back.

`AppConfig` is what stands under `args:` of an application in a Serve config. Every field has a
default, a description and its unit in its name; an unknown key, a wrong type or a value out of
bounds is refused with its path, its value and, for a typo, the nearest known name. Imports neither
ray nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field, ValidationError, field_validator

from quire.cluster.config.config_problems import ConfigError, problems_from
from quire.cluster.config.engine_section import EngineArgs, option_field
from quire.cluster.config.http_section import HttpArgs
from quire.cluster.config.router_section import RouterArgs
from quire.cluster.config.scaling_sections import (
    AutoscalingArgs,
    ReplicaResources,
    RouterResources,
)
from quire.cluster.config.section import NodePath, Section
from quire.protos.errors import InvalidRequest
from quire.replica.config import Device, Dtype
from quire.router.text.template_kwargs import check_template_kwargs

EMBEDDED_MODEL = "embedded"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def names_hub_model(model: str) -> bool:
    """Whether it has the form of a Hugging Face id, owner/name."""
    return _HUB_ID.fullmatch(model) is not None


class AppConfig(Section):
    """Arguments of one Quire application, which serves one model."""

    model: NodePath = option_field("model")
    revision: str | None = option_field("revision")
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name that requests give as `model`. Default: the id, or the folder's own "
        "name.",
    )
    chat_template: NodePath | None = Field(
        None,
        min_length=1,
        description="Path to a Jinja file with the chat template. Default: the checkpoint's.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="Variables for the chat template of every request, `enable_thinking: false` for instance; a "
        "request's own `chat_template_kwargs` go over them.",
    )
    device: Device = option_field("device")
    dtype: Dtype = option_field("dtype")
    replicas: int = Field(2, ge=1, le=1024, description="Copies of the engine, one device each.")
    routers: int = Field(2, ge=1, le=64, description="Copies of the HTTP and gRPC front end.")
    autoscaling: AutoscalingArgs | None = Field(
        None,
        description="Let Serve change the number of replicas with the load; `replicas` is then the number "
        "to begin with. Default: there are always `replicas`.",
    )
    engine: EngineArgs = Field(EngineArgs(), description="Limits of each replica's engine.")
    router: RouterArgs = Field(RouterArgs(), description="Limits of each router.")
    http: HttpArgs = Field(HttpArgs(), description="The routers' HTTP front end.")
    replica_resources: ReplicaResources = Field(
        ReplicaResources(), description="What Ray reserves for each replica."
    )
    router_resources: RouterResources = Field(
        RouterResources(), description="What Ray reserves for each router."
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

    @property
    def is_folder(self) -> bool:
        """Whether `model` is a path; a relative one is written with a leading './' or '../'."""
        return self.model.startswith(("/", "./", "../"))

    @property
    def max_replicas(self) -> int:
        """The most replicas that there can be."""
        return self.autoscaling.max_replicas if self.autoscaling else self.replicas

    @property
    def model_name(self) -> str:
        """The name that clients give as `model`."""
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
            Where it stands in the file (`applications[0].args`), for the messages.

        Raises
        ------
        ConfigError
            With every problem found.
        """
        try:
            return cls.model_validate(args)
        except ValidationError as error:
            raise ConfigError(problems_from(error, cls, path)) from None
