"""What the bodies of the HTTP API's generation endpoints share: their fields and the request for the router.

`http_completions` and `http_chats` have the endpoints' own fields, `http_body` reads a body. Bounds are the router's
(`router.params`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from quire.cluster.api_common import structured_output
from quire.protos.errors import InvalidRequest
from quire.protos.wire import Grammar
from quire.router.refused_fields import Refused
from quire.router.types import GenerationRequest

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


class Strict(BaseModel):
    """Refuses fields that it does not have, and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


# fail_fast: a million wrong items are one error, not a million.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
IdLists = Annotated[list[Ids], Field(fail_fast=True)]


class StreamOptions(Strict):
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


class StructuredOutputs(Strict):
    """Exactly one of these."""

    json_schema: dict[str, Any] | str | None = Field(
        None, alias="json", description="A JSON schema, or its text."
    )
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: str | None = Field(None, description="A regular expression for all of the text.")
    choice: Texts | None = Field(None, description="One of these texts.")
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
        assert self.grammar is not None
        return Grammar("lark", self.grammar, "structured_outputs.grammar")


class GenerationBody(Strict):
    """Fields that completions and chat completions share. null is the same as absent.

    Attributes
    ----------
    path
        Of the endpoint.
    refused
        Fields that are known and not served.
    """

    path: ClassVar[str]
    refused: ClassVar[Mapping[str, Refused]]

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
    allowed_token_ids: Ids | None = Field(None, description="No other tokens (vLLM).")
    prompt_logprobs: int | None = Field(
        None,
        description="Log-probabilities of the prompt's tokens and of so many of the likeliest in their "
        "place, at most 20; the first has none (vLLM). The prompt's prefix is then computed, not taken from "
        "the cache.",
    )
    bad_words: Texts | None = Field(
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
    stop: str | Texts | None = Field(None, description="Strings that end the answer.")
    stop_token_ids: Ids | None = Field(
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
