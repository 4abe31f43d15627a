"""A compiled grammar, and the position of one request's output in it.

Requests of one tenant with the same grammar text share a compiled grammar. Each request has a matcher (its position in
the grammar), and the matchers share a lexer. The lexer adds states while masks are computed, and never frees them:

```
 CompiledGrammar ── lexer 1: states ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ full ──▶ lexer 2: states ▒▒▒
     │  │  └─ request c                                   (compiled again; each request replays its tokens)
     │  └──── request b
     └─────── request a
```

So the lexer's limit bounds the memory of each grammar text, for any output length and any number of requests.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.replica.grammar.grammar_source import message_of

try:
    import llguidance.numpy
    from llguidance import LLMatcher
except ModuleNotFoundError:
    # A machine that only runs GPU measurements; grammars are refused there.
    pass

# If a lexer is full after fewer masks, a new one would be full again soon: the grammar exceeds the limits.
MIN_MASKS_OF_A_LEXER = 16
# A grammar that takes longer to compile is not compiled again, because the step waits for the compilation.
MAX_RENEWAL_S = 0.1


class CompiledGrammar:
    """A matcher at the start of the output, which requests copy, and the lexer that the copies share.

    Parameters
    ----------
    build
        Compiles the grammar; `is_error` of the matcher is true if the compilation failed.
    """

    def __init__(self, build: Callable[[], LLMatcher]):
        self._build = build
        self._lock = threading.Lock()
        began = time.thread_time()
        # Requests copy this matcher; it never consumes a token.
        self._start = build()
        self._build_s = time.thread_time() - began
        self._lexer_number = 0
        # Number of masks that the current lexer has computed.
        self._num_masks = 0

    @property
    def error(self) -> str:
        """The reason why the grammar could not be compiled; empty if it could."""
        return message_of(self._start.get_error())

    def matcher(self) -> tuple[LLMatcher, int]:
        """A new matcher at the start of the output, and the number of its lexer."""
        with self._lock:
            return self._start.deep_copy(), self._lexer_number

    def count_mask(self) -> None:
        """Count a mask of the current lexer."""
        self._num_masks += 1

    def renew(self, lexer_number: int) -> bool:
        """Replace the lexer with this number, unless it was already replaced. Returns whether a newer lexer exists.

        The lexer is not replaced if it has computed few masks or if the grammar takes long to compile.
        """
        with self._lock:
            if lexer_number != self._lexer_number:
                return True
            if self._num_masks < MIN_MASKS_OF_A_LEXER or self._build_s > MAX_RENEWAL_S:
                return False
            self._start = self._build()
            self._lexer_number += 1
            self._num_masks = 0
            return True


class GrammarState:
    """The position of one request's output in its grammar.

    Parameters
    ----------
    vocab_size
        Number of columns of the logits.
    emitted_ids
        Token ids of the output so far.

    Raises
    ------
    ValueError
        The grammar does not allow the output so far.
    """

    def __init__(self, grammar: CompiledGrammar, vocab_size: int, emitted_ids: Sequence[int]):
        self._grammar = grammar
        self._num_words = -(-vocab_size // 32)
        self._taken_ids = list(emitted_ids)
        self._replay()
        if self._matcher.is_error():
            self._recover()
        if self._matcher.is_error():
            raise ValueError(f"the {len(emitted_ids)} tokens already generated do not match it")

    def mask(self) -> np.ndarray:
        """[ceil(vocab / 32)] int32; if bit i of word w is set, id 32 * w + i may come next.

        All zero if the matcher has failed because it exceeded its limits. Then the request gets an error instead of a
        wrong token.
        """
        self._grammar.count_mask()
        packed = self._fill()
        if self._matcher.is_error() and self._recover():
            packed = self._fill()
        if self._matcher.is_error():
            packed[:] = 0
        row: np.ndarray = packed[0]
        return row

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Number of leading tokens that may come next, without those that complete the output."""
        ahead = self._copy()
        allowed = ahead._matcher.validate_tokens(list(token_ids))
        for i, token_id in enumerate(token_ids[:allowed]):
            if ahead.advance(token_id):
                return i
        return allowed

    def ahead(self, token_ids: Sequence[int]) -> GrammarAhead:
        """The position after further tokens."""
        return GrammarAhead(self, token_ids)

    def mask_after(self, token_ids: Sequence[int]) -> np.ndarray:
        """The mask after further tokens. All set if `num_allowed` excludes them, so that the mask is never needed."""
        ahead = self._copy()
        if ahead._matcher.validate_tokens(list(token_ids)) == len(token_ids) and not any(
            ahead.advance(token_id) for token_id in token_ids
        ):
            return ahead.mask()
        return np.full(self._num_words, -1, np.int32)

    def _copy(self) -> GrammarState:
        """The same position, to look ahead."""
        ahead = copy.copy(self)
        ahead._taken_ids = [*self._taken_ids]
        ahead._matcher = self._matcher.deep_copy()
        return ahead

    def advance(self, token_id: int) -> bool:
        """Consume a sampled token. Returns whether the output is complete, so that no token can follow."""
        self._taken_ids.append(token_id)
        self._matcher.consume_token(token_id)
        if self._matcher.is_error():
            self._recover()
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """The reason why the matcher has failed; empty if it has not."""
        return message_of(self._matcher.get_error())

    def _recover(self) -> bool:
        """Continue with a new lexer, in case this one is full. Returns whether a new lexer exists."""
        if not self._grammar.renew(self._lexer_number):
            return False
        self._replay()
        return True

    def _replay(self) -> None:
        self._matcher, self._lexer_number = self._grammar.matcher()
        self._matcher.consume_tokens(self._taken_ids)

    def _fill(self) -> np.ndarray:
        packed = np.zeros((1, self._num_words), np.int32)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, packed, 0)
        return packed


class GrammarAhead:
    """The position of a request's output in its grammar once drafted tokens follow it.

    Parameters
    ----------
    state
        The present position, which stays as it is.
    token_ids
        The drafted tokens.
    """

    def __init__(self, state: GrammarState, token_ids: Sequence[int]):
        self._state = state
        self._token_ids = token_ids

    def mask(self) -> np.ndarray:
        """See `GrammarState.mask_after`."""
        return self._state.mask_after(self._token_ids)
