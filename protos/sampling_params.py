"""The sampling parameters: the schema from which bounds, wire format and columns of the request table are derived.

```
 temperature: Annotated[float, Range(0, 100), Column(np.float32, on_device=True)] = 1.0
                               bounds         array on the host, and on the device
```

The router checks a client's request (`router/request/params.py`); the replica checks the resolved `SamplingParams`
again (`replica/core/sampling_checks.py`), because an engine also runs without a router. Both call `check_sampling`.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from quire.protos.errors import InvalidRequest
from quire.protos.field_checks import (
    INT32_MAX,
    UINT64_MAX,
    Range,
    at_most,
    check_ids,
    invalid,
    utf8_len,
)
from quire.protos.wire_codec import Codec, Record, named_tuple, optional

_T = TypeVar("_T")
MAX_LOGPROBS = 20
# Below this temperature the most likely token is taken: for logits that differ by more than float32 rounding, the
# distribution is a single token.
GREEDY_TEMPERATURE = 1e-5
MAX_GRAMMAR_BYTES = 64 * 1024
# Bound on a grammar that a router makes from tools; all that are served fit. A replica compiles 0.5 MB in 0.5 s and in
# less than 64 MiB.
MAX_TOOL_GRAMMAR_BYTES = 1024 * 1024
# `Grammar.field` of such a grammar.
TOOLS_FIELD = "tools"
GRAMMAR_KINDS = ("json_schema", "regex", "choice", "lark")
# How an embedding follows from the hidden states of a prompt's tokens: that of the last token, or the mean of all.
POOLINGS = ("last", "mean")


class Column(NamedTuple):
    """A column with one entry per request that has a row."""

    dtype: Any
    # Returns the entry. Argument: the value of the field; for a field of the table itself, the request. None: the
    # field's value; for a field of the table, the table's code writes it.
    source: Callable[[Any], Any] | None = None
    # The device has a copy. Such a column has entries of 4 bytes.
    on_device: bool = False
    # A checkpoint's `generation_config.json` may have the default.
    in_checkpoint: bool = False
    # Gathered once for the decoding rows, because each step reads it (`request_table/decode_rows.py`).
    in_decodes: bool = False


def annotated(kind: type, annotation: type[_T]) -> dict[str, _T]:
    """Map names of fields of `kind` to their annotations of this type, in the order of declaration."""
    # With the module's names as globals, functions inside the annotations see them.
    hints = typing.get_type_hints(kind, vars(sys.modules[kind.__module__]), include_extras=True)
    found = {
        name: [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, annotation)]
        for name, hint in hints.items()
    }
    return {name: items[0] for name, items in found.items() if items}


class Grammar(NamedTuple):
    """A formal language, such as a JSON schema, that the output must follow."""

    kind: str  # one of GRAMMAR_KINDS
    text: str  # a JSON schema, a regular expression, a JSON list of strings, or a Lark grammar
    field: str  # name of the client's field, for errors


_Ids = Annotated[tuple[int, ...], Codec(None, tuple)]
_TUPLES = Codec(None, lambda items: tuple(map(tuple, items)))


_Count = Annotated[int, Range(0, INT32_MAX, is_integer=True)]
_NumTop = Annotated[int | None, Range(0, MAX_LOGPROBS, is_integer=True)]


@dataclass(frozen=True, slots=True)
class SamplingParams(Record):
    """Parameters of sampling and of the end of the output, with every default resolved.

    The next token is a pure function of (prompt ids, these parameters, seed, choice, absolute position), so any
    replica can continue a stream. This is the only declaration of a parameter behind the router: its default, its
    bounds, its place on the wire, and its column in the request table of a replica.
    """

    # Maximum number of tokens to generate.
    max_tokens: Annotated[int, Range(1, None, is_integer=True)] = 16
    # EOS and stop ids are masked before this many tokens.
    min_tokens: Annotated[int, Range(0, None, is_integer=True)] = 0
    # 0 = greedy.
    temperature: Annotated[
        float,
        Range(0, 100),
        Column(np.float32, lambda x: x if x >= GREEDY_TEMPERATURE else 0.0, True, True),
    ] = 1.0
    # 0 = off.
    top_k: Annotated[_Count, Column(np.int32, on_device=True, in_checkpoint=True)] = 0
    # 1 = off.
    top_p: Annotated[
        float,
        Range(0, 1, excludes_low=True),
        Column(np.float32, lambda x: max(x, float(np.finfo(np.float32).tiny)), True, True),
    ] = 1.0
    # The router chooses one if the client gave none.
    seed: Annotated[int, Range(0, UINT64_MAX, is_integer=True), Column(np.uint64)] = 0
    # Index of this sample among the n of one request; part of the noise key.
    choice: Annotated[_Count, Column(np.int32)] = 0
    # Ids that end the request as EOS does.
    stop_token_ids: _Ids = ()
    ignore_eos: bool = False
    # Excludes tokens less likely than min_p times the most likely one.
    min_p: Annotated[float, Range(0, 1), Column(np.float32, on_device=True, in_checkpoint=True)] = (
        0.0
    )
    # For tokens in the prompt or the output: positive logits are divided by it, others multiplied. 1 = off.
    repetition_penalty: Annotated[
        float, Range(0, 100, excludes_low=True), Column(np.float32, in_checkpoint=True)
    ] = 1.0
    # Subtracted from the logits of tokens in the output.
    presence_penalty: Annotated[float, Range(-2, 2), Column(np.float32)] = 0.0
    # The same, multiplied by the token's number of occurrences.
    frequency_penalty: Annotated[float, Range(-2, 2), Column(np.float32)] = 0.0
    # Pairs of a token id and the value to add to its logit.
    logit_bias: Annotated[tuple[tuple[int, float], ...], _TUPLES] = ()
    # The only ids to choose from; empty = all.
    allowed_token_ids: _Ids = ()
    # Token sequences that the output never contains.
    bad_words: Annotated[tuple[tuple[int, ...], ...], _TUPLES] = ()
    # Return log-probabilities of the unmodified distribution: of each output token and of this many most likely
    # ones. None = no log-probabilities; the column then has -1.
    logprobs: Annotated[_NumTop, Column(np.int32, lambda x: -1 if x is None else x)] = None
    grammar: Annotated[Grammar | None, optional(named_tuple(Grammar))] = None
    # Return the same for the tokens of the prompt, except the first, which has no distribution.
    prompt_logprobs: _NumTop = None
    # Position of the first prompt token for which they are returned. The tokens before it may come from the cache.
    prompt_logprobs_start: Annotated[int, Range(1, INT32_MAX, is_integer=True)] = 1
    # One of POOLINGS: the request generates nothing and ends with the embedding of its prompt. Empty: it generates.
    pooling: str = ""


# Fields of `SamplingParams` that only the router sets.
_ROUTER_FIELDS = ("choice", "prompt_logprobs_start")
# Bounds of the parameters that are numbers, by name.
RANGES: Mapping[str, Range] = annotated(SamplingParams, Range)
# Clients may also write top_k -1 for "off" and a signed seed, and do not give the fields of a single choice.
CLIENT_RANGES: Mapping[str, Range] = {
    **{name: bounds for name, bounds in RANGES.items() if name not in _ROUTER_FIELDS},
    "top_k": RANGES["top_k"]._replace(low=-1),
    "seed": RANGES["seed"]._replace(low=-(1 << 63)),
}
PRIORITY = Range(-1000, 1000, is_integer=True)
LOGIT_BIAS = Range(-100, 100)
MAX_LOGIT_BIAS_ENTRIES = 1024  # as in vLLM
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_STOP_TOKEN_IDS = 128  # as in vLLM
MAX_BAD_WORDS = 128  # as in vLLM
MAX_BAD_WORD_BYTES = 64
# A word has up to two token sequences, without and with a space before it (`TextTokenizer.bad_word_ids`).
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_WORD_TOKENS = 64


class SamplingFields(Protocol):
    """The fields of `GenerationRequest` and `SamplingParams` that have the same bounds."""

    @property
    def logit_bias(self) -> Sequence[tuple[int, float]]: ...
    @property
    def allowed_token_ids(self) -> Sequence[int]: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...
    @property
    def grammar(self) -> Grammar | None: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def min_tokens(self) -> int | None: ...


def check_sampling(
    fields: SamplingFields, vocab_size: int, ranges: Mapping[str, Range] = RANGES
) -> None:
    """Check each field against its bounds; None is valid for every field of `GenerationRequest`.

    Parameters
    ----------
    vocab_size
        Token ids must be below it.
    ranges
        Bounds of the fields with numbers, by field name.

    Raises
    ------
    InvalidRequest
        Names the field, its bounds and the value.
    """
    for name, bounds in ranges.items():
        if (value := getattr(fields, name)) is not None:
            bounds.check(name, value)
    bias = fields.logit_bias
    at_most("logit_bias", len(bias), MAX_LOGIT_BIAS_ENTRIES, "entries")
    check_ids("logit_bias", [token_id for token_id, _ in bias], vocab_size)
    for i, (_, value) in enumerate(bias):
        LOGIT_BIAS.check(f"logit_bias[{i}]", value)
    if len({token_id for token_id, _ in bias}) < len(bias):
        raise invalid("logit_bias", "entries of different token ids", [i for i, _ in bias])
    at_most("allowed_token_ids", len(fields.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS, "ids")
    check_ids("allowed_token_ids", fields.allowed_token_ids, vocab_size)
    at_most("stop_token_ids", len(fields.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    check_ids("stop_token_ids", fields.stop_token_ids, vocab_size)
    if fields.grammar is not None:
        _check_grammar(fields, fields.grammar)


def _check_grammar(fields: SamplingFields, grammar: Grammar) -> None:
    kind, text, field = grammar
    if kind not in GRAMMAR_KINDS:
        raise invalid(field, f"one of {', '.join(GRAMMAR_KINDS)}", kind)
    bound = MAX_TOOL_GRAMMAR_BYTES if field == TOOLS_FIELD else MAX_GRAMMAR_BYTES
    at_most(field, utf8_len(text, field), bound, "bytes of a grammar")
    # Only EOS may follow text that completes the grammar. With ignore_eos the output would never end; with min_tokens
    # there might be no token to sample.
    for name in ("ignore_eos", "min_tokens"):
        if getattr(fields, name):
            raise InvalidRequest(
                f"a grammar determines the end of the answer: {name} must not be given together with {field}, got "
                f"{getattr(fields, name)!r}",
                field=name,
            )
