"""Request body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.cluster.api_common import structured_output
from quire.cluster.http.http_schema import RoutedBody, Strict
from quire.cluster.http.http_tools import allows_parallel_calls
from quire.cluster.http.responses_api.input_items import ITEMS, InputText, to_messages
from quire.cluster.http.responses_api.response_tools import (
    Objects,
    RequestTools,
    ResponsesAllowedTools,
    ResponsesFunction,
    ResponsesFunctionChoice,
    ResponsesNamespace,
    parse_tools,
    parsed,
)
from quire.protos.errors import InvalidRequest
from quire.protos.field_checks import at_most, utf8_len
from quire.protos.sampling_params import MAX_LOGPROBS, Grammar
from quire.router.refused_fields import Refused
from quire.router.types import GenerationRequest

# OpenAI's bounds: pairs of `metadata`, characters of a key and of a value.
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
LOGPROBS = "message.output_text.logprobs"
_REFERENCE = "#/components/schemas/"
_NO_STATE = "answers are not stored"

REFUSED: Mapping[str, Refused] = {
    "access_programs": Refused("access programs are not served"),
    "background": Refused("answers are not made in the background", (False,)),
    "background_options": Refused("answers are not made in the background"),
    "context_management": Refused("conversations are not shortened", ([],)),
    "conversation": Refused(_NO_STATE),
    "image": Refused("images are not served"),
    "moderation": Refused("moderation is not served"),
    "previous_response_id": Refused(_NO_STATE),
    "prompt": Refused("prompts are not stored"),
    "store": Refused(_NO_STATE, (False,)),
    "truncation": Refused("prompts are not truncated", ("disabled",)),
}


class TextFormat(Strict):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description="Of the schema; accepted and ignored.")
    description: str | None = Field(None, description="Accepted and ignored.")
    json_schema: dict[str, Any] | None = Field(
        None, alias="schema", description="With json_schema."
    )
    strict: bool | None = Field(None, description="Accepted and ignored: the form is always kept.")


class TextOptions(Strict):
    """Options of the answer's text."""

    # `parsed` checks it with `TextFormat`, in bounded time.
    format: dict[str, Any] | None = Field(
        None,
        description="The answer is guaranteed to have this form, unless max_output_tokens truncates it.",
        json_schema_extra={"anyOf": [{"$ref": f"{_REFERENCE}TextFormat"}, {"type": "null"}]},
    )
    verbosity: Literal["medium"] | None = Field(
        None, description="Other levels of verbosity are not served."
    )


class ReasoningOptions(Strict):
    """Options of the reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="`max` is xhigh. Ignored if the chat template has no switch for it. Default: the chat template's.",
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted and ignored: an answer has the reasoning itself, not a summary."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="The older name of `summary`."
    )
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Strict):
    """Options of a stream."""

    include_obfuscation: bool | None = Field(
        None, description="Accepted and ignored: events are not padded."
    )


Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


def _any_of(*models: type[Strict]) -> list[dict[str, Any]]:
    return [{"$ref": _REFERENCE + model.__name__} for model in models]


_NULL = {"type": "null"}
_ITEMS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": _any_of(*ITEMS.values())}, "minItems": 1},
    ]
}
_TOOLS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "array", "items": {"anyOf": _any_of(ResponsesFunction, ResponsesNamespace)}},
        _NULL,
    ]
}
_CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "enum": ["auto", "none", "required"]},
        *_any_of(ResponsesFunctionChoice, ResponsesAllowedTools),
        _NULL,
    ]
}
# What a request's schema refers to, besides the types of its fields.
REFERENCES: tuple[type[Strict], ...] = (
    *ITEMS.values(),
    InputText,
    ResponsesFunction,
    ResponsesNamespace,
    ResponsesFunctionChoice,
    ResponsesAllowedTools,
    TextFormat,
)


class ResponsesRequest(RoutedBody):
    """Body of POST /v1/responses."""

    path: ClassVar[str] = "/v1/responses"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED

    input: str | Objects = Field(
        description="A text of the user, or the items of the conversation, oldest first.",
        json_schema_extra=_ITEMS_SCHEMA,
    )
    instructions: str | None = Field(
        None, description="A system message before the items of `input`."
    )
    max_output_tokens: int | None = Field(
        None,
        description="Most tokens to generate, reasoning included. More than fit in the model's length are lowered to "
        "what fits. Default: up to the model's maximum length.",
    )
    temperature: float | None = Field(None, description="0 is greedy.")
    top_p: float | None = Field(None, description="In (0, 1]; 1 is off.")
    top_logprobs: int | None = Field(
        None,
        description="Number of most likely tokens to return at each position of the text, at most 20.",
    )
    include: Annotated[list[Included], Field(fail_fast=True)] | None = Field(
        None,
        description="`message.output_text.logprobs` adds log-probabilities to the text. The others have no effect: no "
        "hosted tool runs, and reasoning is returned as text.",
    )
    text: TextOptions | None = Field(None, description="Form of the answer.")
    reasoning: ReasoningOptions | None = None
    tools: Objects | None = Field(
        None,
        description="Functions, and namespaces of functions. Web search is ignored, other tools are refused.",
        json_schema_extra=_TOOLS_SCHEMA,
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None,
        description="auto (default with `tools`), none, required, a function, or allowed_tools.",
        json_schema_extra=_CHOICE_SCHEMA,
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: at most one call in an answer. Default: true."
    )
    max_tool_calls: int | None = Field(
        None, description="Accepted and ignored: it limits hosted tools, of which none is run."
    )
    stream: bool | None = Field(None, description="Server-sent events instead of one JSON object.")
    stream_options: ResponseStreamOptions | None = Field(None, description="Only with `stream`.")
    metadata: dict[str, str] | None = Field(
        None, description="At most 16 texts of at most 512 characters; repeated in the answer."
    )
    client_metadata: dict[str, Any] | None = Field(
        None, description="Accepted and ignored (Codex)."
    )
    seed: int | None = Field(
        None,
        description="The same input, parameters and seed give the same tokens. Default: random (an extension).",
    )

    def router_names(self) -> dict[str, str]:
        """Map from the router's names of fields to those of this body, where they differ."""
        return {
            "deadline_s": "timeout",
            "logprobs": "top_logprobs",
            "max_tokens": "max_output_tokens",
            "messages": "input",
            "prompt": "input",
            "reasoning_effort": "reasoning.effort",
            "session": "prompt_cache_key",
            "tenant": "cache_salt",
        }

    async def parsed_tools(self) -> RequestTools:
        """Parse the tools; raises `InvalidRequest` or `UnsupportedField`."""
        return await parse_tools(self.tools or [])

    async def to_request(self, request_id: str, tools: RequestTools) -> GenerationRequest:
        """Make the router's request.

        Raises
        ------
        InvalidRequest, UnsupportedField
            A value is not valid or not served; `parse_body` has checked the types.
        """
        self._check_metadata()
        return GenerationRequest(
            request_id=request_id,
            model=self.model,
            messages=tuple(await to_messages(self.input, self.instructions)),
            tools=tools.tools,
            tool_choice=tools.choice(self.tool_choice),
            parallel_tool_calls=allows_parallel_calls(self.parallel_tool_calls, self.tool_choice),
            reasoning_effort=self._effort(),
            max_tokens=self.max_output_tokens,
            fit_to_model=True,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self._num_logprobs(),
            grammar=self._grammar(),
            seed=self.seed,
            tenant=self.cache_salt or "",
            session=self.prompt_cache_key or "",
            priority=self.priority or 0,
            deadline_s=self.timeout,
        )

    def _effort(self) -> str | None:
        effort = self.reasoning.effort if self.reasoning else None
        return "xhigh" if effort == "max" else effort

    def _num_logprobs(self) -> int | None:
        """Number of most likely tokens to return with each token; None: no log-probabilities."""
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs must be an integer in [0, {MAX_LOGPROBS}], got {top}",
                field="top_logprobs",
            )
        return top if top or LOGPROBS in (self.include or ()) else None

    def _grammar(self) -> Grammar | None:
        given = self.text.format if self.text else None
        if given is None:
            return None
        form = parsed(TextFormat, given, "text.format")
        if form.type == "text":
            return None
        if form.type == "json_object":
            return structured_output.json_object("text.format")
        if form.json_schema is None:
            raise InvalidRequest(
                "text.format.schema is required, a JSON schema", field="text.format.schema"
            )
        return structured_output.json_schema(form.json_schema, "text.format.schema")

    def _check_metadata(self) -> None:
        given = self.metadata or {}
        at_most("metadata", len(given), MAX_METADATA, "pairs")
        for key, value in given.items():
            at_most("metadata", len(key), MAX_METADATA_KEY, "characters in a key")
            at_most("metadata", len(value), MAX_METADATA_VALUE, "characters in a value")
            utf8_len(value, "metadata")
