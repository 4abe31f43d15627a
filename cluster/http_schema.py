"""The JSON bodies of the HTTP API: which fields are served, ignored or refused.

A body goes through `parse_body`: unknown fields, and known fields that are not served, are refused
by name; then pydantic checks types strictly (no "1" for 1, no true for 1). Bounds are the router's
(`router.params`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from quire.cluster import structured_output
from quire.cluster.front_end import ROLES, served_role
from quire.protos.errors import InvalidRequest, UnsupportedField, shown
from quire.protos.wire import MAX_LOGPROBS, Grammar
from quire.router import params
from quire.router.params import DEFAULT_LIMITS
from quire.router.types import GenerationRequest

# --------------------------------------------------------------------------------------------------
# Requests
# --------------------------------------------------------------------------------------------------


# Text parts are at level 4; beyond this only what is refused anyway, and could exhaust the stack.
_MAX_MESSAGES_DEPTH = 8
# Of a list or an object that is a field of the body, but not of token ids: so many that pydantic takes 20 ms for them,
# also where each has an error of its own. The router has smaller bounds for most fields.
MAX_ENTRIES = 4096


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


# fail_fast: a million wrong items are one error, not a million.
_Ids = Annotated[list[int], Field(fail_fast=True)]
_Texts = Annotated[list[str], Field(fail_fast=True)]
_IdLists = Annotated[list[_Ids], Field(fail_fast=True)]


class StreamOptions(_Strict):
    """What a stream carries besides the text."""

    include_usage: bool | None = Field(
        None, description="One more chunk before [DONE], with the usage and no choices."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="The usage so far in every chunk (vLLM)."
    )
    include_obfuscation: bool | None = Field(
        None, description="Accepted and ignored: chunks are not padded."
    )
    include_event_ids: bool | None = Field(
        None,
        description="An `id:` line in each event, from which a stream that broke continues. The header "
        "Last-Event-ID asks for it too, also an empty one.",
    )


class StructuredOutputs(_Strict):
    """Exactly one of these."""

    json_schema: dict[str, Any] | str | None = Field(
        None, alias="json", description="A JSON schema, or its text."
    )
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: str | None = Field(None, description="A regular expression for all of the text.")
    choice: _Texts | None = Field(None, description="One of these texts.")
    grammar: str | None = Field(None, description="A Lark grammar, as llguidance reads it.")

    def to_grammar(self) -> Grammar:
        """The router's form.

        Raises
        ------
        InvalidRequest
            None of the fields is given, or several are.
        """
        given = [
            name for name in type(self).model_fields if getattr(self, name) not in (None, False)
        ]
        if len(given) != 1:
            raise InvalidRequest(
                "structured_outputs must have exactly one of json, json_object, regex, choice, "
                f"grammar, got {len(given)}",
                field="structured_outputs",
            )
        if self.json_schema is not None:
            return structured_output.json_schema(self.json_schema, "structured_outputs.json")
        if self.json_object:
            return structured_output.json_object("structured_outputs.json_object")
        if self.regex is not None:
            return Grammar("regex", self.regex, "structured_outputs.regex")
        if self.choice is not None:
            return structured_output.choice(self.choice, "structured_outputs.choice")
        return Grammar("lark", self.grammar, "structured_outputs.grammar")


class _GenerationBody(_Strict):
    """Fields that completions and chat completions share. null is the same as absent."""

    model: str | None = Field(None, description="Default: the application's only model.")
    max_tokens: int | None = Field(
        None, description="Most tokens to generate. Default: up to the model's length."
    )
    min_tokens: int | None = Field(
        None, description="EOS and stop token ids are masked before so many tokens (vLLM)."
    )
    temperature: float | None = Field(None, description="0 is greedy.")
    top_p: float | None = Field(None, description="In (0, 1]; 1 is off.")
    top_k: int | None = Field(None, description="0 is off (vLLM).")
    min_p: float | None = Field(
        None, description="Leaves out what is less likely than this times the likeliest (vLLM)."
    )
    repetition_penalty: float | None = Field(
        None, description="Above 1 makes what prompt and answer contain less likely (vLLM)."
    )
    presence_penalty: float | None = Field(
        None, description="Taken from the logits of what the answer contains."
    )
    frequency_penalty: float | None = Field(
        None, description="Taken from these logits as often as the answer contains it."
    )
    logit_bias: dict[str, float] | None = Field(
        None, description="Token id to what is added to its logit."
    )
    allowed_token_ids: _Ids | None = Field(None, description="No other tokens (vLLM).")
    prompt_logprobs: int | None = Field(
        None,
        description="Log-probabilities of the prompt's tokens and of so many of the likeliest in their "
        "place, at most 20; the first has none (vLLM). The prompt's prefix is then computed, not taken from "
        "the cache.",
    )
    bad_words: _Texts | None = Field(
        None, description="Words whose token sequences the answer never contains (vLLM)."
    )
    response_format: dict[str, Any] | None = Field(
        None,
        description="`type` text, json_object, or json_schema with the schema in "
        "`json_schema.schema`. The answer is of this form by construction, unless max_tokens cuts it.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="A language that the answer must be in (vLLM)."
    )
    seed: int | None = Field(
        None, description="Same prompt, parameters and seed: same tokens. Default: drawn."
    )
    n: int | None = Field(None, description="Choices, all of the same prompt; default 1.")
    stop: str | _Texts | None = Field(None, description="Strings that end the answer.")
    stop_token_ids: _Ids | None = Field(
        None, description="Token ids that end the answer as EOS does (vLLM)."
    )
    ignore_eos: bool | None = Field(None, description="Generate on past EOS (vLLM).")
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the matched stop string in the text (vLLM)."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds BOS and the like to the text; default true for completions, false for "
        "chats, whose template writes them. A text that begins with BOS gets no second one (vLLM).",
    )
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text; default true (vLLM)."
    )
    return_token_ids: bool | None = Field(
        None, description="`token_ids` in each choice beside the text (vLLM)."
    )
    stream: bool | None = Field(None, description="Server-sent events instead of one JSON object.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    cache_salt: str | None = Field(
        None, description="Cached prefixes are shared only between equal salts (vLLM)."
    )
    prompt_cache_key: str | None = Field(
        None, description="Requests with the same key prefer the same replica; a hint."
    )
    priority: int | None = Field(None, description="Smaller is sooner (vLLM).")
    timeout: float | None = Field(
        None,
        description="Seconds from the request's arrival after which nobody waits for the answer: what is not "
        "finished then ends with the error deadline_exceeded (408). Default: that of the header "
        "X-Request-Timeout-Seconds, else none.",
    )

    def output_limit_tokens(self) -> int | None:
        """Most tokens to generate, under whichever name the client gave it."""
        return self.max_tokens

    def router_names(self) -> dict[str, str]:
        """The router's names of fields to those in this body, where they differ."""
        return {"tenant": "cache_salt", "session": "prompt_cache_key", "deadline_s": "timeout"}

    def asks_for_event_ids(self) -> bool:
        """Whether each event of the stream has an id."""
        return bool(self.stream_options and self.stream_options.include_event_ids)

    def _logit_bias(self) -> tuple[tuple[int, float], ...]:
        pairs = []
        for key, bias in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise InvalidRequest(
                    f"logit_bias: keys must be token ids, got {key[:64]!r}", field="logit_bias"
                )
            pairs.append((int(key), bias))
        return tuple(pairs)

    def _allowed_token_ids(self) -> tuple[int, ...]:
        if self.allowed_token_ids == []:
            raise InvalidRequest(
                "allowed_token_ids must have at least 1 id, got 0", field="allowed_token_ids"
            )
        return tuple(self.allowed_token_ids or ())

    def _grammar(self) -> Grammar | None:
        formatted = None
        if self.response_format is not None:
            formatted = structured_output.of_response_format(self.response_format)
        if self.structured_outputs is None:
            return formatted
        if formatted is not None:
            raise InvalidRequest(
                "structured_outputs and response_format both say what the answer must be; give one",
                field="structured_outputs",
            )
        return self.structured_outputs.to_grammar()

    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell with each token; None for no log-probabilities."""
        return None

    def num_prompt_logprobs(self) -> int | None:
        """The same of the prompt's tokens."""
        return self.prompt_logprobs

    def num_dropped_choices(self) -> int:
        """Choices of each prompt that are generated and not returned."""
        return 0

    def generation_request(self, request_id: str, **prompt: Any) -> GenerationRequest:
        """The request for the router, with `prompt` or `messages` as keyword."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return GenerationRequest(
            request_id=request_id,
            model=self.model,
            max_tokens=self.output_limit_tokens(),
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self._logit_bias(),
            allowed_token_ids=self._allowed_token_ids(),
            bad_words=tuple(self.bad_words or ()),
            logprobs=self.num_logprobs(),
            prompt_logprobs=self.num_prompt_logprobs(),
            grammar=self._grammar(),
            seed=self.seed,
            n=(1 if self.n is None else self.n) + self.num_dropped_choices(),
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            add_special_tokens=self.add_special_tokens,
            tenant=self.cache_salt or "",
            session=self.prompt_cache_key or "",
            priority=self.priority or 0,
            deadline_s=self.timeout,
            **prompt,
        )


# Most prompts of one request, and most choices of all of them.
MAX_PROMPTS = DEFAULT_LIMITS.max_prompt_choices
# What is served of a prompt; the router refuses the rest, with the number that it got.
_PROMPTS: list[dict[str, JsonValue]] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
]


class CompletionRequest(_GenerationBody):
    """Body of POST /v1/completions."""

    prompt: str | _Ids | _Texts | _IdLists = Field(
        description=f"Text, or token ids; or a list of either, at most {MAX_PROMPTS} with all choices. Choice j of "
        "prompt i has the index i * n + j.",
        json_schema_extra={
            "anyOf": [
                *_PROMPTS,
                *(
                    {"type": "array", "items": p, "minItems": 1, "maxItems": MAX_PROMPTS}
                    for p in _PROMPTS
                ),
            ]
        },
    )
    echo: bool | None = Field(
        None,
        description="The prompt before the answer, with its tokens' log-probabilities if `logprobs` is given; "
        "without them only for a prompt given as text. With `max_tokens` 0 the prompt alone.",
    )
    best_of: int | None = Field(
        None,
        description="So many choices of each prompt are generated, of which the `n` with the highest mean "
        "log-probability are returned. At least `n`; above `n` not with `stream`.",
    )

    logprobs: int | None = Field(
        None,
        description="Log-probabilities of the tokens and of so many of the likeliest in their "
        "place, at most 20; of the model's own distribution, before any parameter shapes it.",
    )

    def num_logprobs(self) -> int | None:
        """As given; the best of several choices are found by theirs."""
        return 0 if self.logprobs is None and self.num_dropped_choices() else self.logprobs

    def num_dropped_choices(self) -> int:
        """Choices of each prompt that are generated and not returned: `best_of` beyond `n`.

        Raises
        ------
        InvalidRequest
            `best_of` is out of its bounds, or above `n` with `stream`.
        """
        n = 1 if self.n is None else self.n
        if self.best_of is None or self.best_of == n:
            return 0
        if not n < self.best_of <= DEFAULT_LIMITS.max_choices:
            raise InvalidRequest(
                f"best_of must be an integer in [{n}, {DEFAULT_LIMITS.max_choices}], from n on, got {self.best_of}",
                field="best_of",
            )
        if self.stream:
            raise InvalidRequest(
                f"the best choices are known when all have ended: with stream best_of must be {n}, as n, got "
                f"{self.best_of}",
                field="best_of",
            )
        return self.best_of - n

    def num_prompt_logprobs(self) -> int | None:
        """As many as `prompt_logprobs` or `echo` with `logprobs` tell."""
        asked = self.prompt_logprobs
        if not self.echo or self.logprobs is None or (asked is not None and asked < 0):
            return asked
        return max(self.logprobs, asked or 0)

    def prompts(self) -> list[str | tuple[int, ...]]:
        """All prompts.

        Raises
        ------
        UnsupportedField
            `echo` of token ids without `logprobs`.
        """
        given = self.prompt
        if isinstance(given, str):
            return [given]
        prompts = given if given and isinstance(given[0], (str, list)) else [given]
        if isinstance(prompts[0], str):
            return prompts
        if self.echo and self.logprobs is None:
            raise UnsupportedField(
                "echo: not supported for a prompt given as token ids, unless with logprobs",
                field="echo",
            )
        return [tuple(ids) for ids in prompts]

    def to_request(self, request_id: str) -> GenerationRequest:
        """The request for the router."""
        prompts = self.prompts()
        given = {"prompt": prompts[0]} if len(prompts) == 1 else {"prompts": tuple(prompts)}
        return self.generation_request(request_id, echo=bool(self.echo), **given)


class TextPart(_Strict):
    """A part of a message's content; parts that are not text are refused."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn. Its further fields (`tool_calls`, ...) may be null; the router refuses others."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        json_schema_extra={
            "required": ["role", "content"],
            "additionalProperties": {"type": "null"},
        },
    )

    role: str = Field(
        description="system, developer (served as system), user or assistant.",
        json_schema_extra={"enum": list(ROLES)},
    )
    # Any: the router names the part at fault, and knows what the template takes.
    content: Any = Field(
        None,
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}},
            ]
        },
    )
    name: str | None = Field(
        None,
        description="Who speaks, for templates that tell them apart.",
        json_schema_extra={"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]},
    )


class ChatCompletionRequest(_GenerationBody):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(
        description="The conversation, oldest first.", json_schema_extra={"minItems": 1}
    )
    max_completion_tokens: int | None = Field(
        None, description="The newer name of `max_tokens`; both only if they are equal."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="Variables for the chat template, `enable_thinking` for instance; over those of the "
        "application's `chat_template_kwargs` (vLLM).",
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Whether the prompt ends with the beginning of an assistant's turn; default true, unless "
        "`continue_final_message` (vLLM).",
    )
    continue_final_message: bool | None = Field(
        None,
        description="The answer continues the last message, whose turn stays open. Not together with "
        "`add_generation_prompt` (vLLM).",
    )

    logprobs: bool | None = Field(
        None,
        description="Log-probabilities of the answer's tokens, of the model's own distribution, "
        "before any parameter shapes it.",
    )
    top_logprobs: int | None = Field(
        None, description="So many of the likeliest tokens, at most 20; only with `logprobs`."
    )

    def num_logprobs(self) -> int | None:
        """`top_logprobs` if log-probabilities are asked for."""
        top = self.top_logprobs
        if not self.logprobs:
            if top:
                raise InvalidRequest(
                    f"top_logprobs: only with logprobs true, got {top}", field="top_logprobs"
                )
            return None
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs must be an integer in [0, {MAX_LOGPROBS}], got {top}",
                field="top_logprobs",
            )
        return top or 0

    def output_limit_tokens(self) -> int | None:
        """Most tokens to generate, under whichever name the client gave it."""
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequest(
                f"max_completion_tokens ({self.max_completion_tokens}) and max_tokens "
                f"({self.max_tokens}) are two names of one bound; give one of them",
                field="max_completion_tokens",
            )
        return limits.pop() if limits else None

    def router_names(self) -> dict[str, str]:
        """The router's names of fields to those in this body, where they differ."""
        names = {**super().router_names(), "prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def to_request(self, request_id: str) -> GenerationRequest:
        """The request for the router."""
        messages: list[dict[str, Any]] = []
        for i, message in enumerate(self.messages):
            role = served_role(message.role, f"messages[{i}].role")
            # Not dict(message): it asks for `keys`, which may be a field of the client's.
            messages.append({**message.__dict__, **message.model_extra, "role": role})
        if not _is_shallow(messages, _MAX_MESSAGES_DEPTH):
            raise InvalidRequest(
                f"messages must not nest deeper than {_MAX_MESSAGES_DEPTH} levels", field="messages"
            )
        return self.generation_request(
            request_id,
            messages=tuple(messages),
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
        )


# --------------------------------------------------------------------------------------------------
# Fields that are known but not served
# --------------------------------------------------------------------------------------------------

# They ask for nothing that changes the answer: labels, billing, storage, hints.
IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Field → values that mean what the server does anyway, beside null. Others are refused by name.
UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True, False),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_Body = TypeVar("_Body", bound=_GenerationBody)


def parse_body(model: type[_Body], body: Any) -> _Body:
    """A decoded JSON body as `model`.

    Raises
    ------
    UnsupportedField
        A field that is not served, or that nobody knows (with the closest known name).
    InvalidRequest
        A field that is missing or of the wrong type.
    """
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {_describe(body)}")
    served = {name: value for name, value in body.items() if _is_served(model, name, value)}
    for name, value in served.items():
        is_prompt_ids = (
            name == "prompt" and isinstance(value, list) and value[:1] and type(value[0]) is int
        )
        if isinstance(value, (dict, list)) and not is_prompt_ids:
            params.at_most(name, len(value), MAX_ENTRIES, "entries")
    try:
        parsed = model.model_validate(served)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)) from None
    if parsed.stream_options is not None and not parsed.stream:
        raise InvalidRequest(
            "stream_options: only with stream true, which is not set", field="stream_options"
        )
    return parsed


def _is_served(model: type[BaseModel], name: str, value: Any) -> bool:
    """Whether the field goes on to the model; False: it is absent in effect."""
    if value is None and (name in model.model_fields or name in UNSUPPORTED_FIELDS):
        return False
    if name in model.model_fields:
        return True
    if name in IGNORED_FIELDS:
        return False
    if name in UNSUPPORTED_FIELDS:
        neutral = UNSUPPORTED_FIELDS[name]
        if not any(_same(value, known) for known in neutral):
            only = f"; only {_describe(neutral[0])} or null is accepted" if neutral else ""
            raise UnsupportedField(
                f"{name}: not supported, got {_describe(value)}{only}", field=name
            )
        return False
    raise UnsupportedField(f"{name[:64]}: unknown field{_hint(model, name)}", field=name[:64])


def _same(value: Any, known: Any) -> bool:
    """Equality that tells true from 1, as JSON does."""
    return value == known and isinstance(value, bool) == isinstance(known, bool)


def _hint(model: type[BaseModel], name: str) -> str:
    known = [*model.model_fields, *UNSUPPORTED_FIELDS, *IGNORED_FIELDS]
    close = difflib.get_close_matches(name[:64], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def refusal(errors: Sequence[ErrorDetails]) -> InvalidRequest:
    """The first problem, with the path to it in the client's spelling: ``messages[0].role``."""
    first = errors[0]
    name, *rest = first["loc"]
    if name in _UNIONS and first["type"] != "missing":
        return InvalidRequest(
            f"{name} must be {_UNIONS[name]}, got {_describe(first['input'])}", field=str(name)
        )
    path = str(name) + "".join(f"[{p}]" if isinstance(p, int) else f".{p[:64]}" for p in rest)
    if first["type"] == "missing":
        return InvalidRequest(f"{path}: required", field=path)
    if first["type"] == "extra_forbidden":
        return UnsupportedField(f"{path}: unknown field", field=path)
    expected = _TYPES.get(first["type"], first["msg"])
    return InvalidRequest(f"{path} must be {expected}, got {_describe(first['input'])}", field=path)


# pydantic reports a union once per member; this says what the field may be instead.
_UNIONS = {
    "prompt": "a string, a list of token ids, or a list of either",
    "stop": "a string or a list of strings",
}
_TYPES = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}


def _describe(value: Any) -> str:
    """A value for a message: short whatever it is, and without walking into it."""
    if isinstance(value, dict):
        return f"an object with {len(value)} fields"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shown(value)


def _is_shallow(value: Any, max_depth: int) -> bool:
    """Whether lists and objects nest at most `max_depth` levels; level by level, no recursion."""
    level = [value]
    for _ in range(max_depth):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return True
    return False
