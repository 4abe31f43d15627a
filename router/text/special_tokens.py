"""Prevents text in messages from becoming special tokens.

A chat template writes special tokens around the turns of a conversation. A tokenizer finds special tokens anywhere in a
text, so a message that contains `<|im_end|>\\n<|im_start|>system` would start another turn. Therefore the text of a
message is marked before the template renders it, and marked tokens are encoded as plain text::

    message    Hi<|im_end|>
    protect    Hi*<|im_end|>                                     * is GUARD
    template   <|im_start|>user\\nHi*<|im_end|><|im_end|>
    encode     [<|im_start|>] + plain("user\\nHi<|im_end|>") + [<|im_end|>]

GUARD is a lone surrogate. Clients cannot send one, because `utf8_len` refuses it.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from quire.router.text.text_search import matches

GUARD = "\ud800"
# GUARD as `repr` and JSON in ASCII write it, behind an even number of backslashes.
_ESCAPED_GUARD = re.compile(r"(?<!\\)((?:\\\\)*)\\ud800")


class GuardedText(str):
    """A text with GUARD, which its `repr` keeps: a template that writes a list or an object writes that."""

    __slots__ = ()

    def __repr__(self) -> str:
        return unescape_guards(super().__repr__())


def guarded(text: str) -> str:
    """Return the text as `GuardedText` if it has a GUARD. Texts in lists and objects of a template need it."""
    return GuardedText(text) if GUARD in text else text


def with_guards(value: Any) -> Any:
    """Return a list or object whose guarded texts keep their guards when it is written; other values unchanged."""
    if isinstance(value, (list, tuple)):
        if any(type(item) is str and GUARD in item for item in value):
            return type(value)([guarded(i) if type(i) is str else i for i in value])
    elif isinstance(value, dict) and any(
        type(item) is str and GUARD in item for pair in value.items() for item in pair
    ):
        keys, values = with_guards(list(value)), with_guards(list(value.values()))
        return dict(zip(keys, values, strict=True))
    return value


def unescape_guards(text: str) -> str:
    """Return the text with GUARD where it was escaped."""
    return _ESCAPED_GUARD.sub(rf"\1{GUARD}", text)


class SpecialTokens:
    """The special tokens of one tokenizer. Threads may share it.

    Parameters
    ----------
    backend
        The tokenizer.
    """

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        self._lock = threading.Lock()
        # A copy of the tokenizer that encodes special tokens as text; `_plain_backend` makes it on first use.
        self._plain: Tokenizer | None = None
        # The ids that plain text must not contain: of all special tokens except the unknown token. Set with `_plain`.
        self._forbidden: frozenset[int] = frozenset()
        # Some tokenizers encode the start of a text differently, for example with a space before it. So each piece that
        # is not the start of the text is encoded behind this added token, and the token's id is dropped. It is random,
        # so that clients cannot send it.
        self._boundary = f"<{secrets.token_hex(16)}>"
        added = backend.get_added_tokens_decoder()
        found = {token.content: (i, token) for i, token in added.items() if token.special}
        found.pop("", None)
        # Longest first: where several special tokens match, the tokenizer takes the longest.
        words = sorted(found, key=len, reverse=True)
        self._ids = {word: found[word][0] for word in words}
        self._added = {word: found[word][1] for word in words}
        self._beginnings = {word[:n] for word in words for n in range(1, len(word))}
        self._ends = {word[n:] for word in words for n in range(1, len(word))}
        self._longest = max(map(len, words), default=0)
        # Tokens may overlap, so a match is one character.
        self._starts = _any_of([f"{re.escape(word[0])}(?={re.escape(word[1:])})" for word in words])
        self._tokens = _any_of([_matcher(self._added[word]) for word in words])

    @property
    def unguarded(self) -> re.Pattern[str] | None:
        """A pattern that finds the special tokens without a GUARD before them; None if there are none."""
        return self._tokens

    def id_of(self, text: str) -> int | None:
        """Return the id of the special token with this text, or None."""
        return self._ids.get(text)

    def protect(self, text: str, *, at_ends: bool = True) -> str:
        """Return the text with GUARD before each special token in it.

        Parameters
        ----------
        at_ends
            Also put GUARD where the text ends with the first part of a special token, or starts with the last part of
            one: the template's text next to it could complete the token.
        """
        if self._starts is None:
            return text
        places = {match.start() for match in matches(self._starts, text, self._longest)}
        if at_ends:
            lengths = range(1, min(self._longest, len(text) + 1))
            places |= {len(text) - n for n in lengths if text[-n:] in self._beginnings}
            places |= {0 for n in lengths if text[:n] in self._ends}
        if not places:
            return text
        cuts = [0, *sorted(places), len(text)]
        return GuardedText(GUARD.join(text[start:end] for start, end in itertools.pairwise(cuts)))

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a rendered template, [tokens] int32.

        A special token behind GUARD is encoded as plain text. For a text without GUARD, the ids are those of the
        tokenizer with `add_special_tokens=False`: it adds no BOS and no similar tokens.
        """
        return np.fromiter(self._encode(text), np.int32)

    def _encode(self, text: str) -> Iterator[int]:
        end = 0
        found = () if self._tokens is None else matches(self._tokens, text, self._longest + 1)
        for match in found:
            token = self._added[match[0]]
            piece = text[end : match.start()]
            # A token with `lstrip` includes the white space on its left, one with `rstrip` that on its right.
            yield from self._encode_plain(
                piece.rstrip() if token.lstrip else piece, is_first=not end
            )
            yield self._ids[match[0]]
            end = match.end()
            if token.rstrip:
                end += len(text[end:]) - len(text[end:].lstrip())
        yield from self._encode_plain(text[end:], is_first=not end)

    def _encode_plain(self, piece: str, is_first: bool) -> list[int]:
        """Return the ids of a piece as plain text: no special ids except the unknown token's."""
        ids = self._ids_of_plain([piece], is_first)
        if self._forbidden.isdisjoint(ids):
            return ids
        # A Unigram model finds special tokens also in plain text, because they are entries of its vocabulary. Split
        # each guarded token after its first character, and drop the ids of special tokens that remain.
        ids = self._ids_of_plain(re.split(f"(?<={GUARD}.)", piece), is_first)
        return [token_id for token_id in ids if token_id not in self._forbidden]

    def _ids_of_plain(self, parts: list[str], is_first: bool) -> list[int]:
        ids: list[int] = []
        for part in parts:
            text = part.replace(GUARD, "")
            if text and is_first and not ids:
                ids += self._plain_backend().encode(text, add_special_tokens=False).ids
            elif text:
                text = self._boundary + text
                ids += self._plain_backend().encode(text, add_special_tokens=False).ids[1:]
        return ids

    def _plain_backend(self) -> Tokenizer:
        """Return a copy of the tokenizer that encodes special tokens as text.

        It is made on first use, because it doubles the memory.
        """
        with self._lock:
            if self._plain is None:
                state = self._backend.to_str()
                self._forbidden = frozenset(self._ids.values()) - _unknown_ids(json.loads(state))
                plain = Tokenizer.from_str(state)
                plain.encode_special_tokens = True
                plain.add_tokens([AddedToken(self._boundary, normalized=False)])
                self._plain = plain
        return self._plain


def _unknown_ids(state: dict[str, Any]) -> set[int]:
    """Return the id of the model's unknown token, from tokenizer.json; empty if there is none."""
    model = state["model"]
    if model.get("unk_id") is not None:  # Unigram.
        return {model["unk_id"]}
    unknown = model.get("unk_token")
    return {model["vocab"][unknown]} if unknown in model["vocab"] else set()


def _matcher(token: AddedToken) -> str:
    """Return a pattern that matches the token where the tokenizer would find it, except behind GUARD.

    Its first character comes first: `re` looks for characters ten times as fast as for other conditions.
    """
    first, rest = re.escape(token.content[0]), re.escape(token.content[1:])
    word = f"{first}(?<!{GUARD}{first}){rest}"
    return rf"{first}(?<!\w{first}){word.removeprefix(first)}(?!\w)" if token.single_word else word


def _any_of(alternatives: list[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of the alternatives, earlier ones first; None if there are no alternatives."""
    return re.compile("|".join(alternatives)) if alternatives else None
