"""Request body of POST /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from quire.cluster.http.http_schema import RoutedBody
from quire.protos.field_checks import at_most, invalid
from quire.router.refused_fields import Refused
from quire.router.request.params import DEFAULT_LIMITS
from quire.router.scoring.embedder import MAX_INPUTS
from quire.router.types import GenerationRequest

_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_INPUTS: list[dict[str, Any]] = [{"type": "string", "minLength": 1}, _IDS]
_LISTS = [
    {"type": "array", "items": item, "minItems": 1, "maxItems": MAX_INPUTS} for item in _INPUTS
]


class EmbeddingsRequest(RoutedBody):
    """Body of POST /v1/embeddings."""

    path: ClassVar[str] = "/v1/embeddings"
    refused: ClassVar[Mapping[str, Refused]] = {
        "messages": Refused("only texts and token ids are embedded"),
        "normalize": Refused("the checkpoint decides whether embeddings are normalised"),
        "stream": Refused("embeddings are not streamed", (False,)),
        "truncate_prompt_tokens": Refused("inputs are not truncated"),
    }

    # `inputs` checks it, because pydantic reports one error for each member of a union.
    input: Annotated[Any, WithJsonSchema({"anyOf": [*_INPUTS, *_LISTS]})] = Field(
        description=f"Text, token ids, or a list of either; at most {MAX_INPUTS} inputs, with at most "
        f"{DEFAULT_LIMITS.max_prompt_ids} token ids in all. No input is truncated."
    )
    dimensions: int | None = Field(
        None,
        description="Number of values of an embedding: its first ones, normalised afterwards. Default: the model's "
        "hidden size.",
        json_schema_extra={"minimum": 1},
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="A list of numbers (default), or the float32 values as base64."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds special tokens to a text; default true (vLLM).",
    )

    def router_names(self) -> dict[str, str]:
        """Map from the router's names of fields to those of this body, where they differ."""
        return {
            "deadline_s": "timeout",
            "prompt": "input",
            "prompt[]": "input[]",
            "prompt[][]": "input[][]",
            "session": "prompt_cache_key",
            "tenant": "cache_salt",
        }

    def to_request(self, request_id: str) -> GenerationRequest:
        """Make the router's request.

        Raises
        ------
        InvalidRequest
            `input` is none of its forms, or too long.
        """
        return GenerationRequest(
            request_id=request_id,
            model=self.model,
            **self._inputs(),
            add_special_tokens=self.add_special_tokens,
            max_tokens=1,
            tenant=self.cache_salt or "",
            session=self.prompt_cache_key or "",
            priority=self.priority or 0,
            deadline_s=self.timeout,
        )

    def _inputs(self) -> dict[str, Any]:
        given = self.input
        if isinstance(given, str):
            return {"prompt": _text(given, "input")}
        if not isinstance(given, list) or not given or type(given[0]) not in (str, int, list):
            raise invalid("input", "a string, a list of token ids, or a list of either", given)
        if type(given[0]) is int:
            at_most("input", len(given), DEFAULT_LIMITS.max_prompt_ids, "token ids")
            return {"prompt": _ids(given, "input")}
        at_most("input", len(given), MAX_INPUTS, "inputs")
        if type(given[0]) is str:
            return {"prompts": tuple(_text(text, f"input[{i}]") for i, text in enumerate(given))}
        num_ids = sum(len(ids) for ids in given if isinstance(ids, list))
        at_most("input", num_ids, DEFAULT_LIMITS.max_prompt_ids, "token ids in all")
        return {"prompts": tuple(_ids(ids, f"input[{i}]") for i, ids in enumerate(given))}


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str) or not given:
        raise invalid(where, "a string of at least 1 character", given)
    return given


def _ids(given: Any, where: str) -> tuple[int, ...]:
    if not isinstance(given, list) or set(map(type, given)) != {int}:
        raise invalid(where, "a list of at least 1 token id", given)
    return tuple(given)
