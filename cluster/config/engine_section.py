"""The section `engine` of an application's arguments, derived from `replica.config.EngineOptions`."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field, create_model, field_validator

from quire.cluster.config.section import NodePath, Section
from quire.replica import config as replica_config
from quire.replica import option_conflicts
from quire.replica.speculation_options import SpeculationOptions


def option_field(name: str) -> Any:
    """Make the pydantic field of one argument of `replica.config.EngineArgs`: default, bounds and description."""
    (field,) = (f for f in dataclasses.fields(replica_config.EngineArgs) if f.name == name)
    return Field(default=field.default, **field.metadata)


def _options(options: type[Any], **sections: type[Section]) -> Any:
    """Make a section class with every field of a dataclass of options; `sections` are its nested ones."""
    hints = typing.get_type_hints(options)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        kind, default = hints[field.name], field.default
        if field.name in sections:
            kind = sections[field.name]
            default = kind()
        fields[field.name] = (kind, Field(default=default, **field.metadata))
    return create_model(options.__name__, __base__=Section, **fields)


class AdapterArgs(Section):
    """An adapter that requests may name as their model."""

    name: str = Field(
        min_length=1, max_length=256, description="Name of the adapter in requests (`model`)."
    )
    path: NodePath = Field(
        min_length=1,
        description="Folder in PEFT's format, readable by every router and replica: adapter_config.json and "
        "adapter_model.safetensors.",
    )


# A type checker sees no fields here: they exist only at run time.
class SpeculationArgs(_options(SpeculationOptions)):  # type: ignore[misc]
    """Speculative decoding: several tokens in a step, without a change of any token."""

    @field_validator("method", mode="before")
    @classmethod
    def _undo_yaml(cls, value: Any) -> Any:
        """YAML 1.1 reads off as false."""
        return "off" if value is False else value


class EngineArgs(_options(replica_config.EngineOptions, speculation=SpeculationArgs)):  # type: ignore[misc]
    """Options of each replica's engine."""

    aliases: ClassVar[dict[str, str]] = {"allow_block_sharing": "prefix_caching"}

    # Options of the replica's actor, not of its engine.
    fault_injection: bool = Field(
        default=False,
        description="For tests only: requests with certain ids crash, hang or fail the engine that runs them.",
    )
    heartbeat_ms: int = Field(
        default=100,
        ge=100,
        le=1000,
        description="Milliseconds between the first heartbeats of an idle replica; the interval grows up to 1000.",
    )

    @field_validator("async_batching", "cuda_graphs", mode="before")
    @classmethod
    def _undo_yaml(cls, value: Any) -> Any:
        """YAML 1.1 reads on and off as true and false."""
        return ("on" if value else "off") if isinstance(value, bool) else value

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int | None) -> int | None:
        if (problem := option_conflicts.block_size_problem(value)) is not None:
            raise ValueError(problem)
        return value

    def conflicts(self) -> Iterator[str]:
        return option_conflicts.conflicts(self)

    def engine_options(self) -> dict[str, Any]:
        """The values of `EngineOptions`."""
        options = {name: getattr(self, name) for name in replica_config.OPTION_NAMES}
        speculation = SpeculationOptions(**self.speculation.model_dump())
        return options | {"speculation": speculation}
