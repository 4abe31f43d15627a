"""Encodes text with the checkpoint's tokenizer; long texts are encoded in threads.

It reads the checkpoint's `tokenizer.json` with the `tokenizers` library. It does not use transformers, because its
AutoTokenizer imports torch, which a router does not need.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Encoding, Tokenizer

from quire.protos.errors import ContextLengthExceeded, Overloaded, UnsupportedField
from quire.protos.field_checks import utf8_len
from quire.protos.unique_keys import parse_json
from quire.router.text.detokenizer import Detokenizer, DetokenizerFactory
from quire.router.text.special_tokens import GUARD, SpecialTokens
from quire.router.text.token_cache import TokenCache, cuts_at_words, piece_pattern, split

# Texts up to this length are encoded on the event loop. Measured with byte-level BPE on one busy CPU core: 0.17 us
# a character, so 90 us for 512 characters; a thread adds 50 to 80 us.
INLINE_CHARS = 512
# Texts up to this length are searched for special tokens on the event loop; it takes 1 ns a character.
INLINE_SPLIT_CHARS = 128 * 1024
# A text with more bytes is refused before it is encoded. Prose has 3 to 5 bytes a token, the densest code about 8.
MAX_BYTES_PER_TOKEN = 16

_T = TypeVar("_T")
# Files of tokenizers that `tokenizers` does not read: SentencePiece, tiktoken, WordPiece, BPE.
_SLOW_FILES = ("*.model", "*.tiktoken", "vocab.*", "merges.txt", "tekken.json", "tokenization_*.py")
_NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TextTokenizer:
    """A checkpoint's tokenizer. Immutable after `load`, so threads may share it.

    Attributes
    ----------
    backend
        The `tokenizers.Tokenizer`.
    vocab_size
        Largest token id + 1, added tokens included; the model's embedding may have more rows.
    special_ids
        Ids that `decode` leaves out when special tokens are skipped.
    special_tokens
        Named special tokens of the checkpoint, `bos_token` and so on, as chat templates use them.
    piece_pattern
        Finds the places where a text may be cut (`token_cache.py`); None: nowhere.
    cuts_at_words
        Whether a text may also be cut between words.
    special
        The special tokens; it encodes texts in which some special tokens must be plain text.
    """

    def __init__(self, backend: Tokenizer, special_tokens: dict[str, str]):
        self.backend = backend
        self.special_tokens = special_tokens
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._detokenizers = DetokenizerFactory(backend)
        self.piece_pattern = piece_pattern(backend)
        self.cuts_at_words = cuts_at_words(backend)
        self.special = SpecialTokens(backend)
        self._around = _added_around(backend)
        self._before = () if self._around is None else tuple(self._around[0].tolist())

    @classmethod
    def load(cls, folder: str | Path) -> TextTokenizer:
        """Load `tokenizer.json`, and `tokenizer_config.json` and `special_tokens_map.json` if they exist.

        Raises
        ------
        FileNotFoundError
            The folder has no `tokenizer.json`. The message names files of tokenizers in other formats.
        ValueError
            A file has a wrong format.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(_without_fast_version(path))
        try:
            backend = Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises bare Exception.
            raise ValueError(f"{path}: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        special_tokens = load_special_tokens(folder)
        _add_missing_tokens(backend, special_tokens)
        return cls(backend, special_tokens)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        max_model_len: int | None = None,
        num_output: int = 1,
    ) -> np.ndarray:
        """Return the token ids of a text.

        Parameters
        ----------
        add_special_tokens
            Add BOS and similar tokens by the post-processor in `tokenizer.json`. `add_bos_token` in
            `tokenizer_config.json` has no effect then, as in transformers 5. False for the output of a chat template,
            which contains these tokens.
        max_model_len
            Refuse a text with more tokens before each token becomes a Python object.
        num_output
            Number of these tokens that the text must leave for the output.

        Returns
        -------
        [tokens] int32

        Raises
        ------
        InvalidRequest
            The text has a lone surrogate, so it is not valid Unicode.
        ContextLengthExceeded
            The text has more tokens than `max_model_len` - `num_output`.
        """
        utf8_len(text, "prompt")
        # `encode` would hold the GIL (2 s for 2 MB); the batch call releases it.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        _check_lens([encoding], max_model_len, num_output)
        return np.array(encoding.ids, dtype=np.int32)

    @property
    def knows_special_tokens(self) -> bool:
        """Whether `add_special_tokens` adds the same tokens to every text."""
        return self.cuts_at_words and self._around is not None

    def join(self, pieces: Sequence[np.ndarray], add_special_tokens: bool) -> np.ndarray:
        """Join the token ids of a text's pieces, [tokens] int32."""
        if add_special_tokens:
            if self._around is None:
                raise UnsupportedField(
                    "this tokenizer adds special tokens in a way that depends on the text: add_special_tokens must be "
                    "false for these messages, got true",
                    field="add_special_tokens",
                )
            before, after = self._around
            pieces = (before, *pieces, after)
        return np.concatenate(pieces)

    def without_second_start(self, ids: np.ndarray) -> np.ndarray:
        """Remove a second BOS from the ids of a text that was encoded with `add_special_tokens`.

        It is second if the text itself starts with a written BOS.
        """
        num = len(self._before)
        if not num or tuple(ids[num : 2 * num].tolist()) != self._before:
            return ids
        return ids[num:] if tuple(ids[:num].tolist()) == self._before else ids

    def start_id(self) -> int | None:
        """Return the token for an empty text: the checkpoint's BOS, else its EOS; None if it has neither."""
        for name in ("bos_token", "eos_token"):
            token_id = self.backend.token_to_id(self.special_tokens.get(name, ""))
            if token_id is not None:
                return token_id
        return None

    def encode_pieces(
        self, pieces: Sequence[str], max_model_len: int | None = None, num_output: int = 1
    ) -> list[np.ndarray]:
        """Return the ids of each piece of a text, [tokens] int32 each, without BOS and similar tokens."""
        encodings = self.backend.encode_batch_fast(list(pieces), add_special_tokens=False)
        _check_lens(encodings, max_model_len, num_output)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_guarded_pieces(
        self, pieces: Sequence[str], max_model_len: int | None = None, num_output: int = 1
    ) -> list[np.ndarray]:
        """Encode as `encode_pieces`, but tokens that `SpecialTokens.protect` has marked as plain text."""
        usual = [piece for piece in pieces if GUARD not in piece]
        encoded = self.encode_pieces(usual, max_model_len, num_output)
        found = dict(zip(usual, encoded, strict=True))
        return [found[p] if p in found else self.special.encode(p) for p in pieces]

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences to forbid, so that the output does not contain `words` (vLLM's rule).

        A word has one tokenisation at the start of a text and another after a space. The first is forbidden, and the
        second if it has the same length and another first token. Other tokenisations of the characters are allowed.
        """
        sequences: dict[tuple[int, ...], None] = {}  # An ordered set.
        for word in words:
            bare = tuple(self.encode(word.lstrip(), add_special_tokens=False).tolist())
            spaced = tuple(self.encode(f" {word.lstrip()}", add_special_tokens=False).tolist())
            if bare:
                sequences[bare] = None
            if spaced and len(spaced) == len(bare) and spaced[0] != bare[0]:
                sequences[spaced] = None
        return tuple(sequences)

    def detokenizer(
        self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> Detokenizer:
        """Make a detokenizer for one stream (`DetokenizerFactory.new`)."""
        return self._detokenizers.new(skip_special_tokens, prompt_ids)

    def decode(self, ids: list[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids beyond the vocabulary add nothing."""
        ids = ids.tolist() if isinstance(ids, np.ndarray) else ids
        # `decode` would hold the GIL (0.27 s for 512 Ki ids); the batch call releases it.
        (text,) = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it; an id without a token is empty."""
        return [self.backend.id_to_token(i) or "" for i in ids]


class AsyncTokenizer:
    """Encodes in a bounded thread pool, so that a long prompt does not delay the streams of other requests.

    A cache (`token_cache.py`) holds encoded pieces of texts. For the next turn of a chat, or another question about the
    same document, only the new pieces are encoded.

    Parameters
    ----------
    num_threads
        Number of threads of the pool.
    max_pending
        Most texts that wait for a thread or are being encoded; further ones are refused.
    cache_bytes
        Bound on the cache's memory; 0: no cache.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        num_threads: int = 2,
        max_pending: int = 256,
        cache_bytes: int = 64 * 1024**2,
    ):
        self.tokenizer = tokenizer
        self.cache = TokenCache(cache_bytes)
        self._pattern = tokenizer.piece_pattern if cache_bytes else None
        self._max_pending = max_pending
        self._num_pending = 0
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    async def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        max_model_len: int,
        field: str = "prompt",
        tenant: str = "",
        is_guarded: bool = False,
        num_output: int = 1,
    ) -> np.ndarray:
        """Encode as `TextTokenizer.encode` does; a text that begins with BOS does not get a second one.

        Parameters
        ----------
        max_model_len
            A text of more than `MAX_BYTES_PER_TOKEN` bytes for each of these tokens is refused before it is encoded.
        field
            Name of the request's field, for errors.
        tenant
            Tenant of the request; the cache returns only pieces of this tenant.
        is_guarded
            The text comes from messages that `SpecialTokens.protect` has marked: marked tokens are plain text.
        num_output
            Number of tokens that the text must leave for the output.

        Raises
        ------
        ContextLengthExceeded
            The text is too long for the model with any tokenisation.
        InvalidRequest
            The text is not valid Unicode.
        Overloaded
            `max_pending` texts are waiting.
        """
        num_bytes = utf8_len(text.replace(GUARD, "") if is_guarded else text, field)
        max_bytes = MAX_BYTES_PER_TOKEN * max_model_len
        if num_bytes > max_bytes:
            raise ContextLengthExceeded(
                f"{field} has {num_bytes} bytes; at most {max_bytes} can be served"
                f" ({MAX_BYTES_PER_TOKEN} for each of the model's {max_model_len} tokens)",
                field=field,
            )
        bounds = max_model_len, num_output
        ids = await self._encode(text, add_special_tokens, tenant, is_guarded, bounds)
        return self.tokenizer.without_second_start(ids) if add_special_tokens else ids

    async def _encode(
        self,
        text: str,
        add_special_tokens: bool,
        tenant: str,
        is_guarded: bool,
        bounds: tuple[int, int],
    ) -> np.ndarray:
        """`bounds` are `max_model_len` and `num_output`."""
        has_guards = is_guarded and GUARD in text
        if len(text) <= INLINE_CHARS and not has_guards:
            return self.tokenizer.encode(text, add_special_tokens)
        pattern = self._pattern
        if has_guards and pattern is not None:
            pattern = self.tokenizer.special.unguarded
        if pattern is not None and (self.tokenizer.knows_special_tokens or not add_special_tokens):
            pieces = await self._encode_pieces(pattern, text, tenant, bounds, has_guards)
            return self.tokenizer.join(pieces, add_special_tokens)
        if has_guards:
            ids = await self.in_thread(self.tokenizer.special.encode, text)
            return self.tokenizer.join([ids], add_special_tokens)
        return await self.in_thread(self.tokenizer.encode, text, add_special_tokens, *bounds)

    async def _encode_pieces(
        self,
        pattern: re.Pattern[str],
        text: str,
        tenant: str,
        bounds: tuple[int, int],
        has_guards: bool,
    ) -> list[np.ndarray]:
        """Return the ids of each piece, [tokens] int32; encode only those that are not in the cache."""
        at_words = self.tokenizer.cuts_at_words
        if len(text) <= INLINE_SPLIT_CHARS:
            pieces = split(pattern, text, at_words)
        else:
            pieces = await self.in_thread(split, pattern, text, at_words)
        found = self.cache.find(tenant, pieces)
        missing = dict.fromkeys(
            piece for piece, ids in zip(pieces, found, strict=True) if ids is None
        )
        encoded: list[np.ndarray] = []
        if missing:
            if has_guards and any(GUARD in piece for piece in missing):
                encode = self.tokenizer.encode_guarded_pieces
                encoded = await self.in_thread(encode, tuple(missing), *bounds)
            elif sum(map(len, missing)) <= INLINE_CHARS:
                encoded = self.tokenizer.encode_pieces(tuple(missing))
            else:
                encoded = await self.in_thread(
                    self.tokenizer.encode_pieces, tuple(missing), *bounds
                )
        new = dict(zip(missing, encoded, strict=True))
        for piece, ids in new.items():
            self.cache.put(tenant, piece, ids)
        return [
            new[piece] if ids is None else ids for piece, ids in zip(pieces, found, strict=True)
        ]

    async def in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call a slow function in the thread pool.

        Raises
        ------
        Overloaded
            `max_pending` calls are waiting.
        """
        if self._num_pending >= self._max_pending:
            raise Overloaded(
                f"{self._num_pending} prompts are waiting to be tokenised, the limit is"
                f" {self._max_pending}",
                retry_after_s=1.0,
                reason="tokenizer",
            )
        self._num_pending += 1
        future = self._pool.submit(function, *args)
        loop = asyncio.get_running_loop()
        # Count until the thread has finished, because the text of a cancelled request still occupies a thread.
        future.add_done_callback(lambda _: _call_soon(loop, self._release))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Stop the threads after their present texts; drop the waiting ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _release(self) -> None:
        self._num_pending -= 1


def _without_fast_version(path: Path) -> str:
    """Return why a folder without `tokenizer.json` is refused, and what its user can do."""
    others = (name for pattern in _SLOW_FILES for name in sorted(path.parent.glob(pattern)))
    found = ", ".join(dict.fromkeys(file.name for file in others))
    has = f"; the checkpoint has only {found}, a tokenizer without a fast version" if found else ""
    return (
        f"{path} not found: the checkpoint needs a tokenizer in the `tokenizers` format{has}. Where transformers can "
        f"convert it, AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes the file"
    )


def _added_around(backend: Tokenizer) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the tokens that the post-processor adds before and after any text, [tokens] int32 each.

    None if they depend on the text.
    """
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    num_added = len(whole) - len(bare)
    if not bare or num_added != backend.num_special_tokens_to_add(False):
        return None
    for i in range(num_added + 1):
        if whole[i : i + len(bare)] == bare:
            return np.array(whole[:i], np.int32), np.array(whole[i + len(bare) :], np.int32)
    return None


def _check_lens(encodings: Sequence[Encoding], max_model_len: int | None, num_output: int) -> None:
    if max_model_len is not None:
        check_prompt_len(sum(map(len, encodings)), max_model_len, num_output)


def check_prompt_len(num_tokens: int, max_model_len: int, num_output: int = 1) -> None:
    """Check that a prompt leaves room for its output: one token or none.

    Raises
    ------
    ContextLengthExceeded
        The prompt has more than `max_model_len` - `num_output` tokens.
    """
    if num_tokens <= max_model_len - num_output:
        return
    if not num_output:
        raise ContextLengthExceeded(
            f"prompt: {num_tokens} tokens; the model takes at most {max_model_len}",
            field="prompt",
        )
    raise ContextLengthExceeded(
        f"prompt has {num_tokens} tokens; at most {max_model_len - 1} leave room for an"
        f" output token in the model's {max_model_len}",
        field="prompt",
    )


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)


def load_special_tokens(folder: str | Path) -> dict[str, str]:
    """Load the named special tokens of a checkpoint. `tokenizer_config.json` overrides the older map file."""
    merged = {
        **read_json_object(Path(folder) / "special_tokens_map.json"),
        **read_json_object(Path(folder) / "tokenizer_config.json"),
    }
    tokens = {}
    for name in _NAMED_SPECIAL_TOKENS:
        value = merged.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; return an empty one if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected an object, got {type(value).__name__}")
    return value


def _add_missing_tokens(backend: Tokenizer, special_tokens: dict[str, str]) -> None:
    """Add named special tokens that tokenizer.json does not list as added tokens."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([t for t in special_tokens.values() if t not in added])
