"""A client's grammar as llguidance reads it, and the limits that llguidance works under.

Imported by the engine and by the process that judges grammars, so both compile exactly the same.
"""

from __future__ import annotations

import json
from typing import Any

try:
    from llguidance import LLMatcher, LLParserLimits
except ModuleNotFoundError:
    # A machine that only runs GPU measurements.
    _IS_INSTALLED = False
else:
    _IS_INSTALLED = True

# By `EngineArgs.json_white_space`. A regular expression for each separator.
_JSON_OPTIONS: dict[str, Any] = {
    "one_space": {
        "whitespace_flexible": False,
        "item_separator": ", ?",
        "key_separator": ": ?",
    },
    "none": {"whitespace_flexible": False},
    "any": {"whitespace_flexible": True},
}

# Lexer states take about 0.5 kB each: at most 20 MB a text. A string of 1,000 characters needs about 10,000 with a
# vocabulary of 128,000 tokens; `state.py` begins with an empty lexer when this one is full.
MAX_LEXER_STATES = 30_000
# Of one mask; 7 a microsecond. Grammars in use need less than 50,000.
STEP_LEXER_FUEL = 100_000
# That compiling a grammar and its first masks may take; grammars in use need less than 15.
MAX_MEMORY_MIB = 64
# The judge allows half of it: a grammar that passes has room for states that the judge did not see.
_CHECK_SHARE = 0.5
_MAX_MESSAGE = 300
_MARK = "<non-verbose/>"  # the library ends short messages with it


def is_installed() -> bool:
    """Whether grammars can be compiled at all."""
    return _IS_INSTALLED


def limits(*, for_check: bool = False) -> LLParserLimits:
    """Bounds of one matcher. Its messages quote neither the parser's state nor the whole grammar."""
    share = _CHECK_SHARE if for_check else 1.0
    return LLParserLimits(
        max_lexer_states=int(MAX_LEXER_STATES * share),
        step_lexer_fuel=int(STEP_LEXER_FUEL * share),
        verbose_errors=False,
    )


def to_source(kind: str, text: str, json_white_space: str) -> str:
    """llguidance's own form of a grammar of `protos.wire`.

    Raises
    ------
    ValueError
        A JSON schema that is not an object.
    """
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS[json_white_space])
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        alternatives = " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(text))
        return LLMatcher.grammar_from_lark(f"start: {alternatives}")
    return LLMatcher.grammar_from_lark(text)


def message_of(error: str) -> str:
    """The library's error text, as a client gets it."""
    return error.replace(_MARK, "").strip()[:_MAX_MESSAGE]
