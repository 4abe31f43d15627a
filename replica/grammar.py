"""Grammars: which tokens may come next so that the output stays in a language.

```
 submit ──▶ compiler thread: grammar text → matcher, replay of emitted tokens ──▶ scheduler
 each step: mask (before sampling, the forward may still run) ──▶ sample ──▶ advance with the token
```

A matcher lives as long as its request and has taken in exactly the request's output tokens, so a soft reset changes
nothing; a request that comes from another replica replays what was emitted there. llguidance does the parsing.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from quire.protos.errors import InvalidRequest, Overloaded, QuireError, UnsupportedField
from quire.protos.wire import Grammar
from quire.replica.compute_timer import ComputeTimer

try:
    import llguidance.numpy
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
except (
    ModuleNotFoundError
):  # an environment that only measures: requests with a grammar are refused
    llguidance = None

MAX_COMPILE_S = 2.0  # of the compiler's own time
MAX_PENDING = 64  # grammars that wait for the compiler or are in it
_MAX_MESSAGE = 300


class GrammarState:
    """Where one request's output is in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int):
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)

    def mask(self) -> np.ndarray:
        """[ceil(vocab / 32)] int32, bit i of word w set: id 32 * w + i may come next.

        All zero when the matcher has failed, which it does when a step exceeds its limits: better no token
        than a wrong one.
        """
        packed = np.zeros((1, self._num_words), np.int32)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, packed, 0)
        if self._matcher.is_error():
            packed[:] = 0
        return packed[0]

    def advance(self, token_id: int) -> bool:
        """Take in a sampled token; returns whether the output is complete: nothing can follow it."""
        self._matcher.consume_token(token_id)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """Why the matcher has failed; empty when it has not."""
        return self._matcher.get_error()[:_MAX_MESSAGE]


class GrammarCompiler:
    """Makes the matchers of one checkpoint, in a thread of its own.

    Parameters
    ----------
    tokenizer_path
        The checkpoint's tokenizer.json; read when the first grammar comes.
    vocab_size
        Columns of the logits.
    eos_token_ids
        May come where the output is complete.
    """

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos_token_ids: Sequence[int]):
        self._path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None  # of the compiler's thread
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")
        self._pending = threading.Semaphore(MAX_PENDING)

    def compile(self, grammar: Grammar, emitted_ids: Sequence[int]) -> GrammarState:
        """The state after `emitted_ids`.

        Raises
        ------
        InvalidRequest
            The grammar is not valid or too complex, or the tokens are not in its language.
        UnsupportedField
            The checkpoint has no tokenizer that grammars can use, or llguidance is not installed.
        """
        if llguidance is None:
            raise UnsupportedField(
                f"{grammar.field}: llguidance is not installed here", field=grammar.field
            )
        # An error message quotes neither the parser's state nor the whole grammar.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._load(grammar), _source(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequest(
                f"{grammar.field}: {matcher.get_error()[:_MAX_MESSAGE]}", field=grammar.field
            )
        if not matcher.consume_tokens(list(emitted_ids)):
            raise InvalidRequest(
                f"{grammar.field}: the {len(emitted_ids)} tokens already generated do not match it",
                field=grammar.field,
            )
        return GrammarState(matcher, self._vocab_size)

    def submit(
        self,
        grammar: Grammar,
        emitted_ids: Sequence[int],
        on_done: Callable[[GrammarState | QuireError], None],
    ) -> None:
        """Compile in the compiler's thread; `on_done` is called once, in some thread.

        After `MAX_COMPILE_S` of that thread's time it gets an error, though the thread goes on until its own limits end
        it. Waiting for others and reading the tokenizer count for nothing. A request that comes from another replica
        has no such bound: its grammar was compiled there, and its answer has begun.

        Raises
        ------
        Overloaded
            `MAX_PENDING` grammars are waiting.
        """
        if not self._pending.acquire(blocking=False):
            raise Overloaded(
                f"{MAX_PENDING} grammars are waiting to be compiled, which is the bound",
                retry_after_s=1.0,
            )
        once = threading.Lock()

        def tell(outcome: GrammarState | QuireError) -> None:
            if once.acquire(blocking=False):
                on_done(outcome)

        late = InvalidRequest(
            f"{grammar.field}: took longer than {MAX_COMPILE_S:g} s to compile",
            field=grammar.field,
        )
        limit_s = MAX_COMPILE_S if not len(emitted_ids) else math.inf
        self._pool.submit(
            self._compile_within, limit_s, lambda: tell(late), grammar, emitted_ids
        ).add_done_callback(lambda future: self._on_compiled(future, tell))

    def close(self) -> None:
        """Stop the thread after what it is at."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile_within(
        self,
        limit_s: float,
        on_late: Callable[[], None],
        grammar: Grammar,
        emitted_ids: Sequence[int],
    ) -> GrammarState:
        self._load(grammar)
        if limit_s == math.inf:
            return self.compile(grammar, emitted_ids)
        timer = ComputeTimer(limit_s, on_late)
        timer.begin()
        try:
            return self.compile(grammar, emitted_ids)
        finally:
            timer.end()

    def _on_compiled(
        self, future: Future[GrammarState], tell: Callable[[GrammarState | QuireError], None]
    ) -> None:
        self._pending.release()
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            tell(future.result())
        else:
            tell(error if isinstance(error, QuireError) else QuireError(f"grammar: {error}"))

    def _load(self, grammar: Grammar) -> LLTokenizer:
        if self._tokenizer is None:
            if not self._path.is_file():
                raise UnsupportedField(
                    f"{grammar.field}: the checkpoint has no tokenizer.json", field=grammar.field
                )
            try:
                self._tokenizer = LLTokenizer(
                    str(self._path), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                )
            except Exception as error:  # of the library: any kind of tokenizer it does not take
                raise UnsupportedField(
                    f"{grammar.field}: this checkpoint's tokenizer cannot be used: {error}"[
                        :_MAX_MESSAGE
                    ],
                    field=grammar.field,
                ) from error
        return self._tokenizer


def _source(grammar: Grammar) -> str:
    """llguidance's own form."""
    if grammar.kind == "json_schema":
        try:
            return LLMatcher.grammar_from_json_schema(grammar.text)
        except ValueError as error:
            raise InvalidRequest(
                f"{grammar.field}: {str(error)[:_MAX_MESSAGE]}", field=grammar.field
            ) from error
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        alternatives = " | ".join(
            json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text)
        )
        return LLMatcher.grammar_from_lark(f"start: {alternatives}")
    return LLMatcher.grammar_from_lark(grammar.text)
