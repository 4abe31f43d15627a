"""Decodes a stream of token ids: emitted text never changes, and in total it equals decoding all ids at once.

A character may span several tokens. The way to find an incomplete character depends on the tokenizer:

- Byte-level BPE (GPT-2, Llama 3, Qwen): tokens are bytes, so an incremental UTF-8 decoder is exact and takes constant
  time for each token.
- SentencePiece with byte fallback (Llama 2, Mistral): a run of byte tokens is one unit. `tokenizers` decodes all of the
  run or replaces each of its bytes by U+FFFD, so one invalid byte changes the text before it. The run is held back
  until it ends.
- All others: `tokenizers.decoders.DecodeStream`.

`DecodeStream` is not used for the first two kinds. On random ids of a byte-fallback tokenizer it raises "Invalid
prefix" or differs from decoding all ids at once. Its time for n invalid bytes grows with n * n: for 4000 tokens it
takes 410 us a token, and the byte-level detokenizer 1 us.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# A run of this many byte tokens is emitted before it ends, if it is valid UTF-8. Otherwise a model that repeats a line
# break (a byte token in Llama 2) without end would give no text to clients and stop strings.
MAX_HELD_BYTE_TOKENS = 16
# A UTF-8 character has at most 4 bytes, and a token at least one.
_CONTEXT_TOKENS = 4
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Detokenizer(Protocol):
    """Decodes one output stream."""

    def feed(self, ids: Iterable[int]) -> str:
        """Add token ids and return the text that has become final. Ids without a token add nothing."""
        ...

    def flush(self) -> str:
        """Return the rest of the text after the last id. Incomplete characters become U+FFFD."""
        ...


class DetokenizerFactory:
    """Makes the detokenizers of one tokenizer, and holds the tables that they share.

    Parameters
    ----------
    tokenizer
        The tokenizer, which must not be changed afterwards.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        steps = _decoder_steps(tokenizer)
        self._is_byte_level = steps == ["ByteLevel"]
        self._byte_values: dict[int, int] = {}  # Token id -> byte.
        if "ByteFallback" in steps:
            for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
                if found := _BYTE_TOKEN.fullmatch(token):
                    self._byte_values[token_id] = int(found[1], 16)
        self._char_bytes = _byte_level_alphabet() if self._is_byte_level else {}
        self._pieces = _Pieces(tokenizer, self._char_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text. Special tokens count as their names, unknown ids as nothing."""
        if token_id in self._byte_values:
            return bytes([self._byte_values[token_id]])
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level and all(char in self._char_bytes for char in token):
            return bytes(self._char_bytes[char] for char in token)
        if token_id in self._added_ids or self._is_byte_level:
            return token.encode()
        # Decode the token after itself: a decoder may strip a space at the start of a text.
        once = self._tokenizer.decode([token_id], skip_special_tokens=False)
        twice = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :].encode()

    def new(
        self,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        kept_ids: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Make a detokenizer for one stream.

        Parameters
        ----------
        skip_special_tokens
            Leave the tokenizer's special tokens out of the text.
        prompt_ids
            Tokens before the stream, if its text continues their text. Then a first token "▁world" becomes " world"
            instead of "world". Only the last few tokens are read.
        kept_ids
            Special tokens that stay in the text.
        """
        skipped = self._special_ids - kept_ids if skip_special_tokens else frozenset()
        context = [i for i in prompt_ids[-2 * _CONTEXT_TOKENS :] if i not in skipped]
        context = context[-_CONTEXT_TOKENS:]
        if self._is_byte_level:
            return _ByteLevelDetokenizer(self._pieces, skipped, context)
        if self._byte_values:
            return _ByteFallbackDetokenizer(self._tokenizer, skipped, self._byte_values, context)
        return _StreamDetokenizer(self._tokenizer, skipped, context)


class _Pieces(dict[int, str | bytes]):
    """The text of each token that has been looked up: whole characters as `str`, all others as bytes.

    All streams share the table; it grows up to the size of the vocabulary. A look-up takes a tenth of the time of
    getting a token's name from the tokenizer, converting it to bytes and decoding them.
    """

    def __init__(self, tokenizer: Tokenizer, char_bytes: dict[str, int]):
        super().__init__()
        self._id_to_token = tokenizer.id_to_token
        self._char_bytes = char_bytes

    def __missing__(self, token_id: int) -> str | bytes:
        token = self._id_to_token(token_id)
        if token is None:  # A row of a padded embedding.
            return ""
        try:
            utf8 = bytes([self._char_bytes[char] for char in token])
        except KeyError:  # An added token, with its name as text.
            utf8 = token.encode()
        try:
            piece: str | bytes = utf8.decode()
        except UnicodeDecodeError:
            piece = utf8
        self[token_id] = piece
        return piece


class _ByteLevelDetokenizer:
    def __init__(self, pieces: _Pieces, skipped: frozenset[int], context: Sequence[int]):
        self._pieces = pieces
        self._skipped = skipped
        # The first bytes of an incomplete character.
        self._held = b""
        # Drop the text of the context, and keep an incomplete character at its end.
        self.feed(context)

    def feed(self, ids: Iterable[int]) -> str:
        text = ""
        for token_id in ids:
            if token_id not in self._skipped:
                piece = self._pieces[token_id]
                text += piece if type(piece) is str and not self._held else self._decode(piece)
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")

    def _decode(self, piece: str | bytes) -> str:
        """Return the text that is final with this piece; hold an incomplete character back."""
        utf8 = self._held + (piece.encode() if isinstance(piece, str) else piece)
        text, num_final = codecs.utf_8_decode(utf8, "replace", False)
        self._held = utf8[num_final:]
        return text


class _ByteFallbackDetokenizer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        skipped: frozenset[int],
        byte_values: dict[int, int],
        context: Sequence[int],
    ):
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._byte_values = byte_values
        # The decoder strips a space at the start of its text. A token before the new ones prevents that.
        self._anchor = [i for i in context if i not in byte_values][-1:]
        self._run: list[int] = []  # Byte tokens that are held back.

    def feed(self, ids: Iterable[int]) -> str:
        text: list[str] = []
        # Tokens to decode; byte runs among them are complete.
        ready: list[int] = []
        for token_id in ids:
            if token_id in self._skipped or self._tokenizer.id_to_token(token_id) is None:
                continue
            if token_id in self._byte_values:
                self._run.append(token_id)
                if self._anchor_of(ready) and self._is_long_and_valid():
                    text.append(self._decode(ready))
                    text.append(self._decode(self._run))
                    ready, self._run = [], []
            else:
                ready += self._run
                ready.append(token_id)
                self._run = []
        text.append(self._decode(ready))
        return "".join(text)

    def flush(self) -> str:
        run, self._run = self._run, []
        return self._decode(run)

    def _anchor_of(self, ready: list[int]) -> list[int]:
        return ready or self._anchor

    def _is_long_and_valid(self) -> bool:
        # A character has at most 4 bytes. So a run that has not become valid within 4 more bytes is invalid.
        if not 0 <= len(self._run) - MAX_HELD_BYTE_TOKENS < 4:
            return False
        try:
            bytes(self._byte_values[i] for i in self._run).decode()
        except UnicodeDecodeError:
            return False
        return True

    def _decode(self, ids: list[int]) -> str:
        """Return the text that `ids` add to the text so far. Byte runs in `ids` must be complete."""
        if not ids:
            return ""
        decode = self._tokenizer.decode
        before = decode(self._anchor, skip_special_tokens=False)
        text = decode(self._anchor + ids, skip_special_tokens=False)[len(before) :]
        self._anchor = [i for i in ids if i not in self._byte_values][-1:] or self._anchor
        return text


class _StreamDetokenizer:
    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], context: Sequence[int]):
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._stream = DecodeStream(list(context), skip_special_tokens=False)
        # Tokens since the last emitted text, which `flush` decodes.
        self._held: list[int] = list(context)
        self._before = tokenizer.decode(self._held, skip_special_tokens=False)

    def feed(self, ids: Iterable[int]) -> str:
        text: list[str] = []
        for token_id in ids:
            if token_id in self._skipped:
                continue
            self._held.append(token_id)
            piece = self._stream.step(self._tokenizer, token_id)
            if piece:
                text.append(piece)
                self._held = self._held[-1:]
                self._before = self._tokenizer.decode(self._held, skip_special_tokens=False)
        return "".join(text)

    def flush(self) -> str:
        text = self._tokenizer.decode(self._held, skip_special_tokens=False)[len(self._before) :]
        self._held, self._before = [], ""
        return text


def _decoder_steps(tokenizer: Tokenizer) -> list[str]:
    """Return the types of the tokenizer's decoders; sequences are flattened."""
    if tokenizer.decoder is None:
        return []

    def flatten(state: dict[str, Any]) -> list[str]:
        if state["type"] == "Sequence":
            return [name for inner in state["decoders"] for name in flatten(inner)]
        return [state["type"]]

    return flatten(json.loads(tokenizer.decoder.__getstate__()))


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's printable characters for bytes (`bytes_to_unicode`, openai/gpt-2, src/encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet |= {chr(256 + n): byte for n, byte in enumerate(others)}
    return alphabet
