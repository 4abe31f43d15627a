"""Conversion of a client's grammar to llguidance's form, and the limits for llguidance.

The engine and the process that checks grammars both use this module, so they compile exactly the same source.
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

# Value of `EngineArgs.json_white_space` to llguidance's options; separators are regular expressions.
_JSON_OPTIONS: dict[str, Any] = {
    "one_space": {
        "whitespace_flexible": False,
        "item_separator": ", ?",
        "key_separator": ": ?",
    },
    "none": {"whitespace_flexible": False},
    "any": {"whitespace_flexible": True},
}

# A lexer state takes about 0.5 kB, so a compiled grammar takes at most 20 MB. A string of 1,000 characters needs about
# 10,000 states with a vocabulary of 128,000 tokens. `state.py` starts an empty lexer when this many states are used.
MAX_LEXER_STATES = 30_000
# Work limit of llguidance for one mask; a microsecond uses 7 units. Grammars seen in practice need less than 50,000.
STEP_LEXER_FUEL = 100_000
# Memory for compiling a grammar and its first masks; grammars seen in practice need less than 15 MiB.
MAX_MEMORY_MIB = 64
# Share of the limits that a check may use. The rest is room for lexer states that the check did not reach.
_CHECK_SHARE = 0.5
_MAX_MESSAGE = 300
# The library ends short messages with this mark.
_MARK = "<non-verbose/>"


def is_installed() -> bool:
    """Whether llguidance is installed."""
    return _IS_INSTALLED


def limits(*, for_check: bool = False) -> LLParserLimits:
    """llguidance's limits for one matcher. Error messages are short: no parser state, and not the whole grammar."""
    share = _CHECK_SHARE if for_check else 1.0
    return LLParserLimits(
        max_lexer_states=int(MAX_LEXER_STATES * share),
        step_lexer_fuel=int(STEP_LEXER_FUEL * share),
        verbose_errors=False,
    )


def to_source(kind: str, text: str, json_white_space: str) -> str:
    """Convert a grammar of `protos.wire` to llguidance's form.

    Raises
    ------
    ValueError
        A JSON schema is not an object.
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
    """Shorten the library's error text for a client."""
    return error.replace(_MARK, "").strip()[:_MAX_MESSAGE]
