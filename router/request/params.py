"""Every bound on a request, once for HTTP and gRPC: the client's values to the engine's
`SamplingParams`.

`check` is all that can be said before the prompt is tokenised, `resolve` the rest. An error names
the field, its bound and the value.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.protos.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, shown
from quire.protos.wire import (
    GRAMMAR_KINDS,
    GREEDY_TEMPERATURE,
    MAX_GRAMMAR_BYTES,
    MAX_LOGPROBS,
    SamplingParams,
)
from quire.router.text.template_kwargs import check_template_kwargs
from quire.router.text.tokenizer import check_prompt_len, read_json_object, utf8_len
from quire.router.types import GenerationRequest

_INT32_MAX = (1 << 31) - 1
_INT64_MIN = -(1 << 63)
_UINT64_MAX = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that are a choice of the server, not of the model."""

    max_temperature: float = 100.0
    max_stop_strings: int = 16
    max_stop_string_bytes: int = 256
    max_stop_token_ids: int = 64
    max_label_bytes: int = 256  # tenant, session
    max_penalty: float = 2.0  # of presence and frequency, and the negative of it
    max_repetition_penalty: float = 100.0
    max_logit_bias: float = 100.0  # and the negative of it
    max_logit_bias_entries: int = 1024
    max_allowed_token_ids: int = 4096
    max_bad_words: int = 64
    max_bad_word_bytes: int = 64
    max_choices: int = 32  # n
    max_prompt_choices: int = 256  # prompts of one request times n
    max_priority: int = 1000  # and the negative of it
    max_messages: int = 4096
    max_message_parts: int = 4096  # of all messages together
    max_prompt_ids: int = 512 * 1024


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What holds when the client gives no value."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None  # None: up to the model's length

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, DEFAULT_LIMITS.max_temperature)
        _top_p("top_p", self.top_p)
        _integer("top_k", self.top_k, -1, _INT32_MAX)
        _number("min_p", self.min_p, 0.0, 1.0)
        _repetition(self.repetition_penalty, DEFAULT_LIMITS.max_repetition_penalty)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)

    @classmethod
    def load(cls, folder: str | Path) -> GenerationDefaults:
        """Those of a checkpoint's `generation_config.json`; values that it lacks keep theirs.

        Raises
        ------
        ValueError
            The file is not a JSON object or a value is out of its bounds.
        """
        path = Path(folder) / "generation_config.json"
        config = read_json_object(path)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: config[name] for name in names if config.get(name) is not None}
        try:
            return cls(**values)
        except InvalidRequest as error:
            raise ValueError(f"{path}: {error}") from error


def check(request: GenerationRequest, limits: Limits = DEFAULT_LIMITS) -> None:
    """Refuse what is wrong whatever the model is.

    Raises
    ------
    InvalidRequest
        A value of a wrong type or out of its bounds.
    DeadlineExceeded
        No time is left.
    """
    _check_prompt(request, limits)
    _check_template_fields(request)
    if request.max_tokens != 0 or request.echo is not True or type(request.max_tokens) is not int:
        _check_max_tokens(request.max_tokens)
    if request.min_tokens is not None:
        _integer("min_tokens", request.min_tokens, 0, None)
    if request.temperature is not None:
        _number("temperature", request.temperature, 0, limits.max_temperature)
    if request.top_p is not None:
        _top_p("top_p", request.top_p)
    if request.top_k is not None:
        _integer("top_k", request.top_k, -1, _INT32_MAX)
    if request.seed is not None:
        _integer("seed", request.seed, _INT64_MIN, _UINT64_MAX)
    _integer("n", request.n, 1, limits.max_choices)
    _check_prompts(request, limits)
    _check_distribution(request, limits)
    if request.grammar is not None:
        _check_grammar(request)
    _check_stop(request.stop, limits)
    _sequence("stop_token_ids", request.stop_token_ids, limits.max_stop_token_ids, "ids")
    for i, token_id in enumerate(request.stop_token_ids):
        _integer(f"stop_token_ids[{i}]", token_id, 0, _INT32_MAX)
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo"):
        value = getattr(request, name)
        if type(value) is not bool:
            raise _invalid(name, "a boolean", value)
    for name in ("tenant", "session"):
        _string(name, getattr(request, name), limits.max_label_bytes)
    _integer("priority", request.priority, -limits.max_priority, limits.max_priority)
    if request.deadline_s is not None:
        _check_deadline(request.deadline_s)


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
    """Check a request against the model and fill in what the client left open.

    A seed is drawn where the client gives none. Report it back: with it the client gets the same stream again. It comes
    from the system's generator, so that one client's seeds do not tell another's.

    Parameters
    ----------
    num_prompt_tokens
        Length of the prompt with chat template and special tokens.
    max_model_len
        Prompt and output tokens together.
    vocab_size
        Token ids are in [0, vocab_size).
    bad_word_ids
        `bad_words` as token sequences: see `tokenizer.bad_word_ids`.
    special_stop_ids
        Ids of the special tokens among the stop strings.

    Raises
    ------
    InvalidRequest, DeadlineExceeded
        As `check`; and token ids that the model does not have.
    ContextLengthExceeded
        The prompt leaves no room for a token, or for `max_tokens`.
    """
    check(request, limits)
    _check_prompt_len(num_prompt_tokens, max_model_len)
    if isinstance(request.prompt, tuple):
        check_prompt_ids(request.prompt, vocab_size)
    for i, token_id in enumerate(request.stop_token_ids):
        _integer(f"stop_token_ids[{i}]", token_id, 0, vocab_size - 1)
    for name in ("logit_bias", "allowed_token_ids"):
        for i, item in enumerate(getattr(request, name)):
            token_id = item[0] if name == "logit_bias" else item
            _integer(f"{name}[{i}]", token_id, 0, vocab_size - 1)
    max_tokens = _resolve_max_tokens(request, defaults, num_prompt_tokens, max_model_len)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens must be <= max_tokens, which is {max_tokens} for this request,"
            f" got {min_tokens}",
            field="min_tokens",
        )
    temperature = _first(request.temperature, defaults.temperature)
    seed = secrets.randbits(63) if request.seed is None else request.seed
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=0.0 if temperature < GREEDY_TEMPERATURE else float(temperature),
        top_k=max(0, _first(request.top_k, defaults.top_k)),
        top_p=float(_first(request.top_p, defaults.top_p)),
        seed=seed & _UINT64_MAX,
        stop_token_ids=tuple(dict.fromkeys((*request.stop_token_ids, *special_stop_ids))),
        ignore_eos=request.ignore_eos,
        min_p=float(_first(request.min_p, defaults.min_p)),
        repetition_penalty=float(_first(request.repetition_penalty, defaults.repetition_penalty)),
        presence_penalty=float(request.presence_penalty or 0.0),
        frequency_penalty=float(request.frequency_penalty or 0.0),
        logit_bias=tuple((i, float(bias)) for i, bias in request.logit_bias),
        allowed_token_ids=tuple(sorted(set(request.allowed_token_ids))),
        bad_words=bad_word_ids,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        grammar=request.grammar,
    )


# ------------------------------------------------------------------------------------------------
# Fields
# ------------------------------------------------------------------------------------------------


def _check_prompt(request: GenerationRequest, limits: Limits) -> None:
    prompt, messages = request.prompt, request.messages
    if request.prompts != () and prompt is None and messages is None:
        return  # see `_check_prompts`
    if (prompt is None) == (messages is None) or request.prompts != ():
        raise InvalidRequest(
            f"exactly one of prompt and messages must be given, got"
            f" {'neither' if prompt is None else 'both'}",
            field="prompt",
        )
    if messages is not None:
        if not isinstance(messages, tuple) or not messages:
            raise _invalid("messages", "a list of at least 1 message", messages)
        _check_messages(messages, limits)
        return
    if isinstance(prompt, str):
        utf8_len(prompt, "prompt")
    elif not isinstance(prompt, tuple):
        raise _invalid("prompt", "a string or a list of token ids", prompt)
    else:
        at_most("prompt", len(prompt), limits.max_prompt_ids, "token ids")
    if prompt == ():
        raise _invalid("prompt", "a text or at least 1 token", prompt)
    adds = request.add_special_tokens
    if prompt == "" and adds is False:
        raise InvalidRequest(
            "an empty prompt is its special tokens alone: prompt must have at least 1 character with "
            "add_special_tokens false, got 0",
            field="prompt",
        )


def _check_prompts(request: GenerationRequest, limits: Limits) -> None:
    """A list of prompts; what each of them is, its own request says."""
    if not isinstance(request.prompts, tuple):
        raise _invalid("prompts", "a list of prompts", request.prompts)
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


def _check_max_tokens(max_tokens: Any) -> None:
    if max_tokens == 0 and type(max_tokens) is int:
        raise InvalidRequest(
            "max_tokens must be an integer >= 1, or 0 together with echo, got 0", field="max_tokens"
        )
    if max_tokens is not None:
        _integer("max_tokens", max_tokens, 1, None)


def _check_template_fields(request: GenerationRequest) -> None:
    """What says how messages become a prompt."""
    add_prompt, continues = request.add_generation_prompt, request.continue_final_message
    if type(continues) is not bool:
        raise _invalid("continue_final_message", "a boolean", continues)
    for name in ("add_generation_prompt", "add_special_tokens"):
        value = getattr(request, name)
        if value is not None and type(value) is not bool:
            raise _invalid(name, "a boolean", value)
    fields = {
        "chat_template_kwargs": request.chat_template_kwargs,
        "add_generation_prompt": add_prompt,
        "continue_final_message": continues or None,
    }
    for name, value in fields.items():
        if request.messages is None and value is not None:
            raise InvalidRequest(
                f"a prompt passes no chat template: {name} must only be given with messages, got {shown(value)}",
                field=name,
            )
    if add_prompt and continues:
        raise InvalidRequest(
            "the last message is either continued or answered: continue_final_message must not be true together with "
            "add_generation_prompt, got true for both",
            field="continue_final_message",
        )
    if request.chat_template_kwargs is not None:
        check_template_kwargs(request.chat_template_kwargs)


def _check_messages(messages: tuple[Any, ...], limits: Limits) -> None:
    """Their number. What is in them is for the chat template."""
    at_most("messages", len(messages), limits.max_messages, "messages")
    contents = (m.get("content") for m in messages if isinstance(m, dict))
    num_parts = sum(len(content) for content in contents if isinstance(content, (list, tuple)))
    at_most("messages", num_parts, limits.max_message_parts, "parts in all")


def _check_prompt_len(num_prompt_tokens: int, max_model_len: int) -> None:
    if num_prompt_tokens < 1:
        raise InvalidRequest("prompt must have at least 1 token, got 0", field="prompt")
    check_prompt_len(num_prompt_tokens, max_model_len)


def check_prompt_ids(ids: Sequence[Any], vocab_size: int) -> None:
    # These calls take a fifth of the loop's time, which is 25 ms for the longest prompt.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for i, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise _invalid(f"prompt[{i}]", f"a token id in [0, {vocab_size})", token_id)


def _resolve_max_tokens(
    request: GenerationRequest,
    defaults: GenerationDefaults,
    num_prompt_tokens: int,
    max_model_len: int,
) -> int:
    room = max_model_len - num_prompt_tokens
    if request.max_tokens is None:
        return room if defaults.max_tokens is None else min(defaults.max_tokens, room)
    if request.max_tokens > room:
        raise ContextLengthExceeded(
            f"max_tokens must be <= {room}: the prompt has {num_prompt_tokens} of the model's"
            f" {max_model_len} tokens, got {request.max_tokens}",
            field="max_tokens",
        )
    return request.max_tokens


def _check_distribution(request: GenerationRequest, limits: Limits) -> None:
    if request.min_p is not None:
        _number("min_p", request.min_p, 0.0, 1.0)
    if request.repetition_penalty is not None:
        _repetition(request.repetition_penalty, limits.max_repetition_penalty)
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(request, name)
        if value is not None:
            _number(name, value, -limits.max_penalty, limits.max_penalty)
    bias = request.logit_bias
    _sequence("logit_bias", bias, limits.max_logit_bias_entries, "entries")
    for i, (token_id, value) in enumerate(bias):
        _integer(f"logit_bias[{i}]", token_id, 0, _INT32_MAX)
        _number(f"logit_bias[{i}]", value, -limits.max_logit_bias, limits.max_logit_bias)
    if len({token_id for token_id, _ in bias}) < len(bias):
        raise _invalid("logit_bias", "entries of different token ids", [i for i, _ in bias])
    allowed = request.allowed_token_ids
    _sequence("allowed_token_ids", allowed, limits.max_allowed_token_ids, "ids")
    for i, token_id in enumerate(allowed):
        _integer(f"allowed_token_ids[{i}]", token_id, 0, _INT32_MAX)
    if request.logprobs is not None:
        _integer("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    if request.prompt_logprobs is not None:
        _integer("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
    _sequence("bad_words", request.bad_words, limits.max_bad_words, "strings")
    for i, word in enumerate(request.bad_words):
        _string(f"bad_words[{i}]", word, limits.max_bad_word_bytes)
        if not word.strip():
            raise _invalid(f"bad_words[{i}]", "more than white space", word)


def _check_grammar(request: GenerationRequest) -> None:
    grammar = request.grammar
    if grammar.kind not in GRAMMAR_KINDS:
        raise _invalid("grammar", f"one of {', '.join(GRAMMAR_KINDS)}", grammar.kind)
    _string(grammar.field, grammar.text, MAX_GRAMMAR_BYTES)
    for name in ("ignore_eos", "min_tokens"):
        if getattr(request, name):
            raise InvalidRequest(
                f"a grammar says when the answer ends: {name} must not be given together with {grammar.field}, got "
                f"{getattr(request, name)!r}",
                field=name,
            )


def _check_stop(stop: Any, limits: Limits) -> None:
    _sequence("stop", stop, limits.max_stop_strings, "strings")
    for i, value in enumerate(stop):
        _string(f"stop[{i}]", value, limits.max_stop_string_bytes)
        if not value:
            raise _invalid(f"stop[{i}]", "a non-empty string", value)


def _check_deadline(deadline_s: Any) -> None:
    if not _is_number(deadline_s) or math.isnan(deadline_s):
        raise _invalid("deadline_s", "a number of seconds", deadline_s)
    if deadline_s <= 0:
        raise DeadlineExceeded(f"the deadline passed {abs(deadline_s):.3f} s ago", field="timeout")


# ------------------------------------------------------------------------------------------------
# Types and bounds
# ------------------------------------------------------------------------------------------------


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    """An int, and not a bool: JSON's true is no number."""
    if type(value) is not int or value < low or (high is not None and value > high):
        bound = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
        raise _invalid(name, bound, value)


def _top_p(name: str, value: Any) -> None:
    if not _is_number(value) or not 0 < value <= 1:
        raise _invalid(name, "a number in (0, 1]", value)


def _number(name: str, value: Any, low: float, high: float) -> None:
    if not _is_number(value) or not low <= value <= high:  # false for NaN, too
        raise _invalid(name, f"a number in [{low:g}, {high:g}]", value)


def _repetition(value: Any, high: float) -> None:
    if not _is_number(value) or not 0 < value <= high:
        raise _invalid("repetition_penalty", f"a number in (0, {high:g}]", value)


def _string(name: str, value: Any, max_bytes: int) -> None:
    if not isinstance(value, str):
        raise _invalid(name, "a string", value)
    num_bytes = utf8_len(value, name)
    if num_bytes > max_bytes:
        raise InvalidRequest(
            f"{name} must have at most {max_bytes} bytes, got {num_bytes}", field=name
        )


def _sequence(name: str, value: Any, max_len: int, noun: str) -> None:
    if not isinstance(value, tuple):
        raise _invalid(name, f"a list of {noun}", value)
    at_most(name, len(value), max_len, noun)


def at_most(name: str, number: int, bound: int, noun: str) -> None:
    """Refuse more than `bound` of something.

    Raises
    ------
    InvalidRequest
        With the name of the field, its bound and the number.
    """
    if number > bound:
        raise InvalidRequest(f"{name} must have at most {bound} {noun}, got {number}", field=name)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _invalid(name: str, bound: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {bound}, got {shown(value)}", field=name)
