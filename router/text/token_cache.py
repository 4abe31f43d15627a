"""A cache of token ids for pieces of text that begin at special tokens or at words.

A tokenizer first cuts a text at its special tokens and then encodes each part independently:

    ids("<s>system ...<s>user ...<s>assistant")  =  ids("<s>system ...") + ids("<s>user ...") + ids("<s>assistant")

So the next turn of a chat has all pieces of the last turn, followed by two or three new ones. Each piece starts with
its special token, so the text after it has the same left neighbour as in the whole text (some tokenizers encode the
start of a text differently). The ids equal those of the whole text exactly. Therefore texts are not cut if a tokenizer
has special tokens that affect the text around them (they absorb spaces, or match whole words only).

A byte-level tokenizer then cuts the text at words, by one of a few known patterns. With each of these patterns, a space
between two letters starts a word in any context. Therefore long pieces are cut again, about every `WORD_PIECE_CHARS`.
For a second question about the same document, only the question and up to 256 characters before it are tokenised.

The key is the text and the tenant. If tenants shared entries, a tenant could learn another one's prompts from the time
of its own requests.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from quire.router.text.text_search import matches, search

# A text with more pieces is encoded as a whole.
MAX_PIECES = 4096
# Least characters of a piece that is cut at words. A changed piece is then short enough to encode on the event loop,
# and a look-up saves about 60 tokens.
WORD_PIECE_CHARS = 256
_BETWEEN_WORDS = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")
# The patterns of Llama 3 and of Qwen 2 and 3. GPT-2's is part of `ByteLevel`.
_WORD_PATTERNS = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
# Bytes of an entry's Python objects, without its text and ids.
_ENTRY_BYTES = 200


def piece_pattern(backend: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern that finds special tokens as the tokenizer does; None if cutting there would not be exact.

    The tokenizer takes the leftmost, then the longest added token that it matches in the raw text, special or not. The
    pattern has all of these tokens, so a token inside a longer one does not match.
    """
    added = [token for token in backend.get_added_tokens_decoder().values() if token.content]
    raw = [token for token in added if not token.normalized]
    reaching = any(token.lstrip or token.rstrip or token.single_word for token in raw)
    if not raw or reaching or backend.encode_special_tokens:
        return None
    if getattr(backend.model, "dropout", None):
        # With dropout the tokenisation is random.
        return None
    words = sorted({token.content for token in raw}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)))


def cuts_at_words(backend: Tokenizer) -> bool:
    """Return whether a text may be cut before a space between two letters; False for unknown kinds of tokenizers."""
    if (_state(backend.normalizer) or {"type": "NFC"}) != {"type": "NFC"}:
        return False
    for token in backend.get_added_tokens_decoder().values():
        if " " in token.content or token.lstrip or token.rstrip or token.single_word:
            return False  # It may span the cut.
    match _state(backend.pre_tokenizer):
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        }:
            return pattern in _WORD_PATTERNS
    return False


def _state(part: Any) -> dict[str, Any] | None:
    """Return a part of a tokenizer as it is written in tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


class TokenCache:
    """Maps pieces of text to their token ids; the least recently used are evicted first. Not thread-safe.

    Parameters
    ----------
    max_bytes
        Bound on the memory of texts, ids and Python objects.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pieces: OrderedDict[tuple[str, str], np.ndarray] = OrderedDict()
        self.num_hits = 0
        self.num_misses = 0

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def find(self, tenant: str, pieces: Sequence[str]) -> list[np.ndarray | None]:
        """Return the ids of each piece; None for pieces that are not in the cache."""
        found = []
        for piece in pieces:
            ids = self._pieces.get((tenant, piece))
            if ids is None:
                self.num_misses += 1
            else:
                self.num_hits += 1
                self._pieces.move_to_end((tenant, piece))
            found.append(ids)
        return found

    def put(self, tenant: str, piece: str, ids: np.ndarray) -> None:
        """Add a piece's ids, [tokens] int32. The array must not change afterwards."""
        key = (tenant, piece)
        size = _size(key, ids)
        if size > self._max_bytes or key in self._pieces:
            return
        self._pieces[key] = ids
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            old_key, old_ids = self._pieces.popitem(last=False)
            self._num_bytes -= _size(old_key, old_ids)


def _size(key: tuple[str, str], ids: np.ndarray) -> int:
    tenant, piece = key
    return (
        4 * (len(tenant) + len(piece)) + ids.nbytes + _ENTRY_BYTES
    )  # At most 4 bytes a character.


def split(pattern: re.Pattern[str], text: str, at_words: bool = False) -> list[str]:
    """Cut a text before each special token and, with `at_words`, every `WORD_PIECE_CHARS` from there.

    Return `[text]` if there are more than `MAX_PIECES` pieces.
    """
    starts = [0]
    longest = max(map(len, pattern.pattern.split("|")))  # Escapes make it longer, never shorter.
    for match in matches(pattern, text, longest):
        if match.start():
            starts.append(match.start())
        if len(starts) > MAX_PIECES:
            return [text]
    if at_words:
        cuts = [
            cut
            for start, end in itertools.pairwise([*starts, len(text)])
            for cut in (start, *_word_cuts(text, start, end))
        ]
        starts = cuts if len(cuts) <= MAX_PIECES else starts
    ends = [*starts[1:], len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def _word_cuts(text: str, start: int, end: int) -> Iterator[int]:
    """Yield the places at which the piece from `start` to `end` is cut.

    A place depends only on the text up to the first letter of its word, so texts with the same beginning are cut at the
    same places.
    """
    while match := search(_BETWEEN_WORDS, text, start + WORD_PIECE_CHARS, end, longest=3):
        start = match.start()
        yield start
