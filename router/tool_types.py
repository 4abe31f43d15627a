"""Tools that a model may call, the calls in its answer, and the client's choice between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes
    ----------
    description
        Text for the model; None: none was given.
    parameters
        JSON schema of the arguments; None: the function has no parameters.
    strict
        The arguments of each call follow `parameters`; the sampler excludes tokens that would violate it.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the model may or must call.

    Attributes
    ----------
    mode
        auto: text, calls, or both. none: no call. required: at least one call.
    names
        The only tools that may be called; empty: all. `required` with one name is OpenAI's named function.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call in an answer.

    Attributes
    ----------
    index
        Number of the call in its choice, from 0.
    call_id
        Id of the call, by which a later message answers it. A resumed or migrated stream has the same ids.
    arguments
        JSON text of an object.
    """

    index: int
    call_id: str
    name: str
    arguments: str
