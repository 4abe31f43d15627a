"""Token ids of what was tokenised before, by the pieces of a text that begin at special tokens or at words.

A tokenizer cuts a text at its special tokens first and looks at each part by itself. So

    ids("<s>system ...<s>user ...<s>assistant")  =  ids("<s>system ...") + ids("<s>user ...") + ids("<s>assistant")

and a chat's next turn has all pieces of the last one, followed by two or three new ones. Each piece keeps its special
token, so that what follows stands behind one, as in the whole text (some tokenizers treat the beginning of a text in a
way of their own). The ids are equal to those of the whole text, not nearly so: where a tokenizer's special tokens
reach beyond themselves (they swallow spaces, or count as whole words only) nothing is cut.

Then a byte-level tokenizer cuts at words, by one of a few well-known patterns, in all of which a space between two
letters begins a word with the letters behind it, whatever stands before and after. There long pieces are cut again,
every `WORD_PIECE_CHARS` from their beginning: of two prompts with the same document and another question only the
question is tokenised, and what is in the 256 characters before it.

A piece is found by its text and its tenant: how long a prompt took must not tell one tenant what another asked.
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

MAX_PIECES = 4096  # of a text; with more it is taken as a whole
# A piece at words has at least so many characters: what is tokenised again because its piece changed is then short
# enough to do at once, and one look-up is saved for 60 tokens.
WORD_PIECE_CHARS = 256
_BETWEEN_WORDS = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")
# The patterns of Llama 3 and of Qwen 2 and 3. GPT-2's is part of `ByteLevel`.
_WORD_PATTERNS = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
_ENTRY_BYTES = 200  # of Python objects, beside text and ids


def piece_pattern(backend: Tokenizer) -> re.Pattern[str] | None:
    """Finds the special tokens in a text as the tokenizer does; None where cutting there would not be exact.

    The tokenizer takes the leftmost, then the longest of the added tokens that are matched in the raw text, special
    or not. All are in the pattern, so that one inside another is not mistaken for itself.
    """
    added = [token for token in backend.get_added_tokens_decoder().values() if token.content]
    raw = [token for token in added if not token.normalized]
    reaching = any(token.lstrip or token.rstrip or token.single_word for token in raw)
    if not raw or reaching or backend.encode_special_tokens:
        return None
    if getattr(backend.model, "dropout", None):
        return None  # another tokenisation each time
    words = sorted({token.content for token in raw}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)))


def cuts_at_words(backend: Tokenizer) -> bool:
    """Whether a text may be cut between any two words: see above. False for all tokenizers that are not known."""
    if (_state(backend.normalizer) or {"type": "NFC"}) != {"type": "NFC"}:
        return False
    for token in backend.get_added_tokens_decoder().values():
        if " " in token.content or token.lstrip or token.rstrip or token.single_word:
            return False  # it may reach over the cut
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
    """What tokenizer.json says of a part of a tokenizer."""
    return None if part is None else json.loads(part.__getstate__())


class TokenCache:
    """Pieces and their ids, the least recently used go first. Of one thread.

    Parameters
    ----------
    max_bytes
        Of text, ids and Python's own.
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
        """The ids of each piece, None for those that are not here."""
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
        """Keep a piece's ids, [tokens] int32; nobody may change them."""
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
    return 4 * (len(tenant) + len(piece)) + ids.nbytes + _ENTRY_BYTES  # at most 4 bytes a character


def split(pattern: re.Pattern[str], text: str, at_words: bool = False) -> list[str]:
    """The pieces of a text: cut before each special token, and `at_words` every `WORD_PIECE_CHARS` from there;
    `[text]` where there are none, or too many."""
    starts = [0]
    longest = max(map(len, pattern.pattern.split("|")))  # escapes make it longer, never shorter
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
    """Where the piece from `start` to `end` is cut: each place depends on nothing behind its word's first letter, so
    that texts that begin alike are cut alike."""
    while match := search(_BETWEEN_WORDS, text, start + WORD_PIECE_CHARS, end, longest=3):
        start = match.start()
        yield start
