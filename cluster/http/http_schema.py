"""Request fields that completions and chat completions share, and their conversion to the router's request.

`http_completions` and `http_chats` have the fields of one endpoint; `http_body` parses a body. The router checks bounds
(`router.request.params`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.cluster.api_common import structured_output
from quire.protos.errors import InvalidRequest
from quire.protos.sampling_params import CLIENT_RANGES, Grammar
from quire.router.refused_fields import Refused
from quire.router.types import GenerationRequest

# Fields that are accepted and ignored, because they do not change the answer: labels, billing, storage, hints.
IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "prompt_cache_options",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)


# Fields with the same name and meaning in a body and in `GenerationRequest`.
_SAMPLING_NUMBERS = CLIENT_RANGES.keys() - {"max_tokens", "logprobs", "prompt_logprobs"}


class Strict(BaseModel):
    """Base class of models that refuse unknown fields and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


# `fail_fast` makes pydantic stop at the first wrong item, instead of collecting up to a million errors.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
IdLists = Annotated[list[Ids], Field(fail_fast=True)]


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = Field(
        None, description="Send one more chunk before [DONE], with the usage and without choices."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="Send the usage so far in every chunk (vLLM)."
    )
    include_obfuscation: bool | None = Field(
        None, description="Accepted and ignored: chunks are not padded."
    )
    include_event_ids: bool | None = Field(
        None,
        description="Send an `id:` line in each event, with which a broken stream can be resumed. The header "
        "Last-Event-ID, even an empty one, has the same effect.",
    )


class StructuredOutputs(Strict):
    """The form of the answer: exactly one of these fields."""

    json_schema: dict[str, Any] | str | None = Field(
        None, alias="json", description="A JSON schema, or its text."
    )
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: str | None = Field(None, description="A regular expression for the whole text.")
    choice: Texts | None = Field(None, description="Exactly one of these texts.")
    grammar: str | None = Field(None, description="A Lark grammar in llguidance's dialect.")

    def to_grammar(self) -> Grammar:
        """Convert to the router's grammar.

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


class TextPart(Strict):
    """A text part of a content; other parts are refused."""

    type: Literal["text"]
    text: str


class Prediction(Strict):
    """A guess of the answer."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def text(self) -> str:
        """The predicted text; several parts are joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class RequestBody(Strict):
    """Body of a request. null means the same as an absent field.

    Attributes
    ----------
    path
        Path of the endpoint.
    refused
        Fields of OpenAI's or vLLM's API that are not supported.
    """

    path: ClassVar[str]
    refused: ClassVar[Mapping[str, Refused]]


class RoutedBody(RequestBody):
    """Fields of all requests that run on a replica, but for those of the Messages API."""

    model: str | None = Field(
        None, description="Name of the model. Default: the application's only model."
    )
    prompt_cache_key: str | None = Field(
        None,
        description="A hint: requests with the same key are one session, which prefers one replica. Default: the "
        "header X-Session-Id.",
    )
    cache_salt: str | None = Field(
        None,
        description="Cached prefixes are shared only between requests with the same salt (vLLM).",
    )
    priority: int | None = Field(
        None, description="Requests with a smaller number are scheduled first (vLLM)."
    )
    timeout: float | None = Field(
        None,
        description="Seconds from the request's arrival. A request that has not finished by then ends with the error "
        "deadline_exceeded (408). Default: the header X-Request-Timeout-Seconds, else no limit.",
    )


class GenerationBody(RoutedBody):
    """Fields that completions and chat completions share."""

    max_tokens: int | None = Field(
        None, description="Most tokens to generate. Default: up to the model's maximum length."
    )
    min_tokens: int | None = Field(
        None, description="EOS and stop token ids cannot be chosen before this many tokens (vLLM)."
    )
    temperature: float | None = Field(None, description="0 is greedy.")
    top_p: float | None = Field(None, description="In (0, 1]; 1 is off.")
    top_k: int | None = Field(None, description="0 is off (vLLM).")
    min_p: float | None = Field(
        None, description="Exclude tokens less likely than this times the most likely token (vLLM)."
    )
    repetition_penalty: float | None = Field(
        None, description="Above 1, tokens of prompt and answer become less likely (vLLM)."
    )
    presence_penalty: float | None = Field(
        None, description="Subtracted from the logits of tokens that the answer contains."
    )
    frequency_penalty: float | None = Field(
        None,
        description="Subtracted from a token's logit for each time that the answer contains it.",
    )
    logit_bias: dict[str, float] | None = Field(
        None, description="Map from token id to a number that is added to its logit."
    )
    allowed_token_ids: Ids | None = Field(
        None, description="The only tokens that may be chosen (vLLM)."
    )
    prompt_logprobs: int | None = Field(
        None,
        description="Return log-probabilities of the prompt's tokens and of this many most likely tokens at each "
        "position, at most 20; the first token has none (vLLM). The whole prompt is then computed, without cached "
        "prefix.",
    )
    bad_words: Texts | None = Field(
        None, description="Words whose token sequences the answer never contains (vLLM)."
    )
    response_format: dict[str, Any] | None = Field(
        None,
        description="`type` text, json_object, or json_schema with the schema in "
        "`json_schema.schema`. The answer is guaranteed to have this form, unless max_tokens truncates it.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="The form that the answer must have (vLLM)."
    )
    prediction: Prediction | None = Field(
        None,
        description="A guess of the answer, such as the text before an edit. It changes no token. Where the answer "
        "follows it, several tokens come in one step, if `engine.speculation.method` is ngram, suffix or auto. At most "
        "as many tokens as the model's length.",
    )
    seed: int | None = Field(
        None,
        description="The same prompt, parameters and seed give the same tokens. Default: random.",
    )
    n: int | None = Field(None, description="Number of choices for each prompt; default 1.")
    stop: str | Texts | None = Field(None, description="Strings that end the answer.")
    stop_token_ids: Ids | None = Field(
        None, description="Token ids that end the answer as EOS does (vLLM)."
    )
    ignore_eos: bool | None = Field(None, description="Continue after EOS (vLLM).")
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the matched stop string in the text (vLLM)."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds special tokens such as BOS to the prompt. Default: true for "
        "completions, false for chats, whose template contains them. A text that begins with BOS gets no second one "
        "(vLLM).",
    )
    skip_special_tokens: bool | None = Field(
        None, description="Omit special tokens from the text; default true (vLLM)."
    )
    return_token_ids: bool | None = Field(
        None, description="Return `token_ids` in each choice (vLLM)."
    )
    stream: bool | None = Field(None, description="Server-sent events instead of one JSON object.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None,
        description="A hint: with `24h`, the conversation's blocks are retained for `session.retain_s` seconds, "
        "however the answer ends; otherwise after a tool call only.",
    )

    def output_limit_tokens(self) -> int | None:
        """Most tokens to generate."""
        return self.max_tokens

    def router_names(self) -> dict[str, str]:
        """Map from the router's names of fields to those of this body, where they differ."""
        return {"tenant": "cache_salt", "session": "prompt_cache_key", "deadline_s": "timeout"}

    def asks_for_event_ids(self) -> bool:
        """Whether the client wants an id in each event of the stream."""
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
                "structured_outputs and response_format both set the form of the answer; give one of the two",
                field="structured_outputs",
            )
        return self.structured_outputs.to_grammar()

    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to return with each token; None: no log-probabilities."""
        return None

    def num_prompt_logprobs(self) -> int | None:
        """Number of most likely tokens to return with each prompt token; None: no log-probabilities."""
        return self.prompt_logprobs

    def num_dropped_choices(self) -> int:
        """Choices of each prompt that are generated but not returned."""
        return 0

    def generation_request(self, request_id: str, **prompt: Any) -> GenerationRequest:
        """Make the router's request, with `prompt`, `prompts` or `messages` as keyword."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return GenerationRequest(
            request_id=request_id,
            model=self.model,
            max_tokens=self.output_limit_tokens(),
            **{name: getattr(self, name) for name in _SAMPLING_NUMBERS},
            logit_bias=self._logit_bias(),
            allowed_token_ids=self._allowed_token_ids(),
            bad_words=tuple(self.bad_words or ()),
            prediction="" if self.prediction is None else self.prediction.text(),
            logprobs=self.num_logprobs(),
            prompt_logprobs=self.num_prompt_logprobs(),
            grammar=self._grammar(),
            n=(1 if self.n is None else self.n) + self.num_dropped_choices(),
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            add_special_tokens=self.add_special_tokens,
            tenant=self.cache_salt or "",
            session=self.prompt_cache_key or "",
            retain=self.prompt_cache_retention == "24h",
            priority=self.priority or 0,
            deadline_s=self.timeout,
            **prompt,
        )
