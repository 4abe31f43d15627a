"""Check a client's request and convert it to the engine's `SamplingParams`, for both HTTP and gRPC.

`check` runs before the prompt is tokenized, `resolve` after it, with the facts of the model. Errors name the field, its
bound and the value. `protos/sampling_params.py` has the bounds that routers and replicas share.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.protos.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, shown
from quire.protos.field_checks import (
    INT32_MAX,
    UINT64_MAX,
    Range,
    at_most,
    check_ids,
    invalid,
    utf8_len,
)
from quire.protos.sampling_params import (
    CLIENT_RANGES,
    GREEDY_TEMPERATURE,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_STOP_TOKEN_IDS,
    PRIORITY,
    Column,
    Grammar,
    SamplingParams,
    annotated,
    check_sampling,
)
from quire.router.chat.tool_checks import check_tools
from quire.router.text.template_kwargs import check_template_kwargs
from quire.router.text.tokenizer import check_prompt_len, read_json_object
from quire.router.types import GenerationRequest

# `_check_max_tokens` allows 0 in one case.
_NUMBERS = {name: bounds for name, bounds in CLIENT_RANGES.items() if name != "max_tokens"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on requests that do not depend on the model."""

    max_stop_strings: int = 16
    max_stop_string_bytes: int = 256
    max_label_bytes: int = 256  # tenant, session
    max_choices: int = 32  # n
    max_prompt_choices: int = 256  # number of prompts in one request, multiplied by n
    max_messages: int = 4096
    max_message_parts: int = 4096  # parts of all messages together
    # Log-probabilities of all choices of a request. An answer that is not streamed keeps each as an object of about
    # 200 bytes.
    max_scores: int = 4 << 20
    max_prompt_ids: int = 512 * 1024


DEFAULT_LIMITS = Limits()


# Parameters with a default that a checkpoint may replace.
_IN_CHECKPOINT = [
    name for name, column in annotated(SamplingParams, Column).items() if column.in_checkpoint
]


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values for fields that the client does not give, where they differ from those of `SamplingParams`."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None  # None: up to the model's length

    def __post_init__(self) -> None:
        for name, value in self.numbers.items():
            CLIENT_RANGES[name].check(name, value)
        if self.max_tokens is not None:
            CLIENT_RANGES["max_tokens"].check("max_tokens", self.max_tokens)

    @classmethod
    def load(cls, folder: str | Path) -> GenerationDefaults:
        """Load a checkpoint's `generation_config.json`; missing values keep their defaults.

        Raises
        ------
        ValueError
            The file is not a JSON object or a value is out of its bounds.
        """
        path = Path(folder) / "generation_config.json"
        config = read_json_object(path)
        given = {name: config.get(name) for name in _IN_CHECKPOINT}
        try:
            return cls({name: value for name, value in given.items() if value is not None})
        except InvalidRequest as error:
            raise ValueError(f"{path}: {error}") from error


def check(request: GenerationRequest, limits: Limits = DEFAULT_LIMITS) -> None:
    """Check everything that does not depend on the model.

    Raises
    ------
    InvalidRequest
        A value has a wrong type or is out of its bounds.
    DeadlineExceeded
        The deadline has passed.
    """
    check_prompt(request, limits)
    _check_template_fields(request)
    check_tools(request)
    _check_max_tokens(request)
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words", "stop"):
        if not isinstance(getattr(request, name), tuple):
            raise invalid(name, "a list", getattr(request, name))
    # The vocabulary is known when the request is resolved.
    check_sampling(request, INT32_MAX + 1, _NUMBERS)
    Range(1, limits.max_choices, is_integer=True).check("n", request.n)
    _check_prompts(request, limits)
    _check_scores(request, limits)
    at_most("bad_words", len(request.bad_words), MAX_BAD_WORDS, "strings")
    for i, word in enumerate(request.bad_words):
        at_most(f"bad_words[{i}]", utf8_len(word, f"bad_words[{i}]"), MAX_BAD_WORD_BYTES, "bytes")
        if not word.strip():
            raise invalid(f"bad_words[{i}]", "more than white space", word)
    at_most("stop", len(request.stop), limits.max_stop_strings, "strings")
    for i, text in enumerate(request.stop):
        at_most(f"stop[{i}]", utf8_len(text, f"stop[{i}]"), limits.max_stop_string_bytes, "bytes")
        if not text:
            raise invalid(f"stop[{i}]", "a non-empty string", text)
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo"):
        value = getattr(request, name)
        if type(value) is not bool:
            raise invalid(name, "a boolean", value)
    if type(request.prediction) is not str:
        raise invalid("prediction", "a text", request.prediction)
    for name in ("tenant", "session"):
        check_label(name, getattr(request, name), limits)
    PRIORITY.check("priority", request.priority)
    if request.deadline_s is not None:
        _check_deadline(request.deadline_s)


def check_label(field: str, value: str, limits: Limits = DEFAULT_LIMITS) -> None:
    """Check a client's name of a tenant or session; raises `InvalidRequest`."""
    at_most(field, utf8_len(value, field), limits.max_label_bytes, "bytes")


def resolve(
    request: GenerationRequest,
    defaults: GenerationDefaults,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    limits: Limits = DEFAULT_LIMITS,
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
    special_stop_ids: Iterable[int] = (),
) -> SamplingParams:
    """Check a request that has passed `check` against the model, and fill in defaults for missing values.

    If the client gives no seed, a random one is chosen. The answer reports it, so that the client can repeat the
    stream. It comes from the operating system's generator, so that a client cannot predict the seeds of others.

    Parameters
    ----------
    num_prompt_tokens
        Length of the prompt, including chat template and special tokens.
    max_model_len
        Maximum number of prompt and output tokens together.
    vocab_size
        Token ids are in [0, vocab_size).
    bad_word_ids
        `bad_words` as token sequences, from `Tokenizer.bad_word_ids`.
    special_stop_ids
        Ids of the special tokens among the stop strings.

    Raises
    ------
    InvalidRequest
        The prompt is not valid, or a token id is outside the vocabulary.
    ContextLengthExceeded
        The prompt leaves no room for one token, or for `max_tokens`.
    """
    check_prompt(request, limits)
    _check_prompt_len(num_prompt_tokens, max_model_len)
    if isinstance(request.prompt, tuple):
        check_ids("prompt", request.prompt, vocab_size)
    check_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    check_ids("logit_bias", [token_id for token_id, _ in request.logit_bias], vocab_size)
    check_ids("allowed_token_ids", request.allowed_token_ids, vocab_size)
    stop_ids = tuple(dict.fromkeys((*request.stop_token_ids, *special_stop_ids)))
    at_most(
        "stop_token_ids", len(stop_ids), MAX_STOP_TOKEN_IDS, "ids, special tokens in stop included"
    )
    max_tokens = _resolve_max_tokens(request, defaults, num_prompt_tokens, max_model_len)
    if request.max_tokens is None or request.fit_to_model:
        max_tokens = min(max_tokens, max(1, limits.max_scores // _scores_per_token(request)))
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens must be <= max_tokens, which is {max_tokens} for this request,"
            f" got {min_tokens}",
            field="min_tokens",
        )
    numbers = _resolve_numbers(request, defaults)
    numbers |= {"max_tokens": max_tokens, "min_tokens": min_tokens}
    return SamplingParams(
        **numbers,
        stop_token_ids=stop_ids,
        ignore_eos=request.ignore_eos,
        logit_bias=tuple((i, float(bias)) for i, bias in request.logit_bias),
        allowed_token_ids=tuple(sorted(set(request.allowed_token_ids))),
        bad_words=bad_word_ids,
        grammar=request.grammar,
    )


def _resolve_numbers(request: GenerationRequest, defaults: GenerationDefaults) -> dict[str, Any]:
    """Return the parameters that are numbers, by name: the client's, else the model's, else `SamplingParams`'."""
    given = {name: getattr(request, name) for name in CLIENT_RANGES}
    numbers: dict[str, Any] = {
        **defaults.numbers,
        **{name: value for name, value in given.items() if value is not None},
    }
    for name, value in numbers.items():
        numbers[name] = value if CLIENT_RANGES[name].is_integer else float(value)
    numbers["top_k"] = max(0, numbers.get("top_k", 0))
    if numbers.get("temperature", 1.0) < GREEDY_TEMPERATURE:
        numbers["temperature"] = 0.0
    seed = numbers.get("seed")
    numbers["seed"] = (secrets.randbits(63) if seed is None else seed) & UINT64_MAX
    return numbers


def with_grammar(request: GenerationRequest, grammar: Grammar | None) -> GenerationRequest:
    """Return a checked request with another grammar, which is checked too."""
    if grammar is request.grammar:
        return request
    request = dataclasses.replace(request, grammar=grammar)
    check_sampling(request, INT32_MAX + 1, {})
    return request


# ------------------------------------------------------------------------------------------------
# Fields
# ------------------------------------------------------------------------------------------------


def check_prompt(request: GenerationRequest, limits: Limits) -> None:
    """Check prompt or messages without a tokenizer; raises `InvalidRequest`."""
    prompt, messages = request.prompt, request.messages
    if request.prompts != () and prompt is None and messages is None:
        # `_check_prompts` checks the list.
        return
    if (prompt is None) == (messages is None) or request.prompts != ():
        raise InvalidRequest(
            f"exactly one of prompt and messages must be given, got"
            f" {'neither' if prompt is None else 'both'}",
            field="prompt",
        )
    if messages is not None:
        if not isinstance(messages, tuple) or not messages:
            raise invalid("messages", "a list of at least 1 message", messages)
        _check_messages(messages, limits)
        return
    if isinstance(prompt, str):
        utf8_len(prompt, "prompt")
    elif not isinstance(prompt, tuple):
        raise invalid("prompt", "a string or a list of token ids", prompt)
    else:
        at_most("prompt", len(prompt), limits.max_prompt_ids, "token ids")
    if prompt == ():
        raise invalid("prompt", "a text or at least 1 token", prompt)
    adds = request.add_special_tokens
    if prompt == "" and adds is False:
        raise InvalidRequest(
            "an empty prompt consists of special tokens only: prompt must have at least 1 character with "
            "add_special_tokens false, got 0",
            field="prompt",
        )


def _check_prompts(request: GenerationRequest, limits: Limits) -> None:
    """Check the list of prompts; each prompt is checked in its own request."""
    if not isinstance(request.prompts, tuple):
        raise invalid("prompts", "a list of prompts", request.prompts)
    num_choices = len(request.prompts) * request.n
    if num_choices > limits.max_prompt_choices:
        raise InvalidRequest(
            f"prompt must have at most {limits.max_prompt_choices // request.n} prompts with n {request.n}, got "
            f"{len(request.prompts)}",
            field="prompt",
        )
    if request.prompts and request.resume_from is not None:
        raise InvalidRequest(
            f"the stream of a list of prompts cannot be resumed: with {request.resume_from.field} prompt must be one, "
            f"got a list of {len(request.prompts)}",
            field=request.resume_from.field,
        )


def _check_max_tokens(request: GenerationRequest) -> None:
    max_tokens = request.max_tokens
    if max_tokens is None:
        return
    if max_tokens == 0 and type(max_tokens) is int:
        if request.echo is not True:
            raise InvalidRequest(
                "max_tokens must be an integer >= 1, or 0 together with echo, got 0",
                field="max_tokens",
            )
        return
    CLIENT_RANGES["max_tokens"].check("max_tokens", max_tokens)


def _check_scores(request: GenerationRequest, limits: Limits) -> None:
    max_tokens = request.max_tokens or 0
    number = max_tokens * _scores_per_token(request) * max(1, len(request.prompts))
    if number > limits.max_scores and request.logprobs is not None and not request.fit_to_model:
        raise InvalidRequest(
            "logprobs + 1, times max_tokens, times the number of choices of all prompts must be <= "
            f"{limits.max_scores}, got {number}",
            field="logprobs",
        )


def _scores_per_token(request: GenerationRequest) -> int:
    """Return how many log-probabilities all choices of one prompt have at a position; 1 without any."""
    return 1 if request.logprobs is None else request.n * (1 + request.logprobs)


def _check_template_fields(request: GenerationRequest) -> None:
    """Check the fields that control how messages become a prompt."""
    add_prompt, continues = request.add_generation_prompt, request.continue_final_message
    if type(continues) is not bool:
        raise invalid("continue_final_message", "a boolean", continues)
    for name in ("add_generation_prompt", "add_special_tokens"):
        value = getattr(request, name)
        if value is not None and type(value) is not bool:
            raise invalid(name, "a boolean", value)
    fields = {
        "chat_template_kwargs": request.chat_template_kwargs,
        "add_generation_prompt": add_prompt,
        "continue_final_message": continues or None,
    }
    for name, value in fields.items():
        if request.messages is None and value is not None:
            raise InvalidRequest(
                f"a prompt uses no chat template: {name} must only be given with messages, got {shown(value)}",
                field=name,
            )
    if add_prompt and continues:
        raise InvalidRequest(
            "a message can either be continued or answered: continue_final_message must not be true together with "
            "add_generation_prompt, got true for both",
            field="continue_final_message",
        )
    if request.chat_template_kwargs is not None:
        check_template_kwargs(request.chat_template_kwargs)


def _check_messages(messages: tuple[Any, ...], limits: Limits) -> None:
    """Check the number of messages and parts; the chat template checks their content."""
    at_most("messages", len(messages), limits.max_messages, "messages")
    lists = (
        m.get(key) for m in messages if isinstance(m, dict) for key in ("content", "tool_calls")
    )
    num_parts = sum(len(items) for items in lists if isinstance(items, (list, tuple)))
    at_most("messages", num_parts, limits.max_message_parts, "parts and calls in all")


def _check_prompt_len(num_prompt_tokens: int, max_model_len: int) -> None:
    if num_prompt_tokens < 1:
        raise InvalidRequest("prompt must have at least 1 token, got 0", field="prompt")
    check_prompt_len(num_prompt_tokens, max_model_len)


def _resolve_max_tokens(
    request: GenerationRequest,
    defaults: GenerationDefaults,
    num_prompt_tokens: int,
    max_model_len: int,
) -> int:
    room = max_model_len - num_prompt_tokens
    if request.max_tokens is None:
        return room if defaults.max_tokens is None else min(defaults.max_tokens, room)
    if request.max_tokens > room and not request.fit_to_model:
        raise ContextLengthExceeded(
            f"max_tokens must be <= {room}: the prompt has {num_prompt_tokens} of the model's"
            f" {max_model_len} tokens, got {request.max_tokens}",
            field="max_tokens",
        )
    return min(request.max_tokens, room)


def _check_deadline(deadline_s: Any) -> None:
    if type(deadline_s) not in (int, float) or math.isnan(deadline_s):
        raise invalid("deadline_s", "a number of seconds", deadline_s)
    if deadline_s <= 0:
        raise DeadlineExceeded(f"the deadline passed {abs(deadline_s):.3f} s ago", field="timeout")
