"""The base of all sections of the configuration: strict, frozen pydantic models. Imports neither ray nor torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

# A path on the node that reads it; a leading ~ is the home folder of the user that runs Quire.
NodePath = Annotated[str, AfterValidator(os.path.expanduser)]


class Section(BaseModel):
    """Base of the sections. Types are checked strictly, because YAML has types: `"2"` for 2 is a mistake."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True
    )
    aliases: ClassVar[dict[str, str]] = {}  # other name to field name

    @model_validator(mode="before")
    @classmethod
    def _resolve_aliases(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not cls.aliases.keys() & data.keys():
            return data
        for alias, name in cls.aliases.items():
            if alias in data and name in data:
                raise ValueError(f"{alias} is another name of {name}; give one of them")
        return {cls.aliases.get(key, key): value for key, value in data.items()}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for alias, name in cls.aliases.items():
            properties[alias] = {**properties[name], "description": f"The same as {name}."}
        return schema

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for problem in self.conflicts():
            raise ValueError(problem)
        return self

    def conflicts(self) -> Iterator[str]:
        """Yield a message for each set of values that are within their bounds but do not fit together."""
        yield from ()
