"""Bounds of sampling parameters, the same for routers and replicas.

The router checks a client's request (`router/request/params.py`); the replica checks the resolved `SamplingParams`
again (`replica/core/sampling_checks.py`), because an engine also runs without a router. Both call `check_sampling`.
Bounds of numbers are declared with the fields of `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from quire.protos.column_schema import annotated
from quire.protos.errors import InvalidRequest
from quire.protos.field_checks import Range, at_most, check_ids, invalid, utf8_len
from quire.protos.wire import (
    GRAMMAR_KINDS,
    MAX_GRAMMAR_BYTES,
    MAX_TOOL_GRAMMAR_BYTES,
    TOOLS_FIELD,
    Grammar,
    SamplingParams,
)

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
