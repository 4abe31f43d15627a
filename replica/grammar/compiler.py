"""Compilation of grammars, which restrict a request's output to a formal language (a regex, a JSON schema).

```
 submit ──▶ known text? ──yes────────────────────────────────────┐
               │ no                                              ▼
               └──▶ quick thread: check in 0.2 s ───good───▶ compile here ──▶ copy, replay ──▶ scheduler
                         │ not done                              ▲
                         ▼                                       │
                    slow thread: check in 2 s ───────good────────┘      otherwise: refused with the reason, remembered

 each step: mask (before sampling, the forward may still run) ──▶ sample ──▶ advance with the token
```

For a request that migrates from another replica, the tokens that were emitted there are replayed. The library
llguidance compiles the grammars and computes the masks.

A check cannot be interrupted, so there are two threads: a grammar that takes seconds must not delay grammars that take
milliseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.protos.errors import (
    InvalidRequest,
    Overloaded,
    QuireError,
    Unavailable,
    UnsupportedField,
)
from quire.protos.sampling_params import Grammar
from quire.replica.grammar import grammar_source
from quire.replica.grammar.check_queue import WaitingGrammar
from quire.replica.grammar.check_thread import GrammarCheckThread
from quire.replica.grammar.grammar_check import Budget, CheckResult, GrammarChecker, Outcome
from quire.replica.grammar.state import CompiledGrammar, GrammarState

try:
    from llguidance import LLMatcher, LLTokenizer
except ModuleNotFoundError:
    # A machine that only runs GPU measurements; grammars are refused there.
    pass

# Budgets of one check. Grammars in use need 0.02 to 0.15 s, most of it for masks of a large vocabulary.
QUICK = Budget(cpu_s=0.2, wall_s=0.8, nice=0)
SLOW = Budget(cpu_s=2.0, wall_s=8.0, nice=5)
MAX_WAIT_S = 10.0
# Limit for migrated requests. It is longer, because their clients have already received output, and many may arrive
# at once.
MAX_MIGRATED_WAIT_S = 60.0
# Number of grammar texts with a remembered result.
MAX_REFUSALS = 4096
# Compiled grammars that are kept while no request uses them. `grammar_source.MAX_LEXER_STATES` limits each to 20 MB.
MAX_RECENT = 4
# At most this many tokens are replayed in the caller's thread; this takes less than a millisecond.
_MAX_INLINE_REPLAY = 256

OnDone = Callable[[GrammarState | QuireError], None]


@dataclass(frozen=True, slots=True)
class _Waiter:
    grammar: Grammar
    emitted_ids: Sequence[int]
    on_done: OnDone

    @property
    def is_migrated(self) -> bool:
        """Whether the request has begun on another replica."""
        return len(self.emitted_ids) > 0

    @property
    def max_wait_s(self) -> float:
        """Maximum seconds for which the request waits for its grammar."""
        return MAX_MIGRATED_WAIT_S if self.is_migrated else MAX_WAIT_S

    def answer(self, outcome: GrammarState | QuireError) -> None:
        """Call `on_done`. Ignore the error of an engine that is closed, which would end the checking thread."""
        with contextlib.suppress(Unavailable):
            self.on_done(outcome)


class GrammarCompiler:
    """Compile grammars for one checkpoint.

    It owns two threads, each with a checking process. It also owns the compiled grammars and the reasons why grammars
    were refused. Threads and processes start with the first grammar that needs them.

    Parameters
    ----------
    tokenizer_path
        The checkpoint's tokenizer.json; read for the first grammar.
    vocab_size
        Number of columns of the logits.
    eos_token_ids
        Token ids that the mask allows where the output is complete.
    json_white_space
        White space allowed in JSON: `one_space`, `none` or `any` (`grammar_source.py`).
    """

    def __init__(
        self,
        tokenizer_path: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        json_white_space: str = "one_space",
    ):
        self._path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._json_white_space = json_white_space
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()
        # Key of a grammar's text to the reason why it was refused; empty if it passed. The newest is the last.
        self._refusals: OrderedDict[bytes, str] = OrderedDict()
        # (tenant, key of the text) to compiled grammar. `_compiled` has those in use; `_recent` keeps the newest ones
        # alive for later requests.
        self._compiled: weakref.WeakValueDictionary[tuple[str, bytes], CompiledGrammar] = (
            weakref.WeakValueDictionary()
        )
        self._recent: OrderedDict[tuple[str, bytes], CompiledGrammar] = OrderedDict()
        self._quick = self._check_thread("quire-grammar-quick", QUICK)
        self._slow = self._check_thread("quire-grammar-slow", SLOW)
        # Close the threads at exit: if the interpreter exits while one runs llguidance, the process ends with SIGABRT.
        self._at_exit = weakref.finalize(self, _close_all, (self._quick, self._slow))

    def submit(
        self,
        grammar: Grammar,
        emitted_ids: Sequence[int],
        on_done: OnDone,
        tenant: str = "",
    ) -> None:
        """Check and compile a grammar, and replay `emitted_ids`.

        `on_done` is called at most once, in this thread or in another one: with the state, or with an error if the
        grammar is refused or has waited too long. After `close` it may never be called.

        Raises
        ------
        Overloaded
            Too many grammars are waiting.
        UnsupportedField
            llguidance is not installed.
        """
        if not grammar_source.is_installed():
            raise _unsupported(grammar, "llguidance is not installed here")
        waiter = _Waiter(grammar, emitted_ids, on_done)
        key = _key(grammar)
        compiled = self._look_up(tenant, key)
        with self._lock:
            refusal = self._refusals.get(key, "")
        if refusal or (compiled is not None and len(emitted_ids) <= _MAX_INLINE_REPLAY):
            on_done(self._outcome(compiled, refusal, waiter))
            return
        until_s = time.monotonic() + waiter.max_wait_s
        self._quick.push(tenant, key, [(until_s, waiter)], is_bounded=not waiter.is_migrated)

    def close(self) -> None:
        """End the threads and processes. Waiting requests get no answer."""
        self._at_exit()

    def _check_thread(self, name: str, budget: Budget) -> GrammarCheckThread[_Waiter]:
        checker = GrammarChecker(
            self._path, self._vocab_size, self._eos_token_ids, self._json_white_space, budget
        )
        return GrammarCheckThread(name, checker, self._on_turn, _expire)

    def _on_turn(
        self, thread: GrammarCheckThread[_Waiter], tenant: str, waiting: WaitingGrammar[_Waiter]
    ) -> None:
        """Answer all requests that wait for a grammar, or hand them to the slow thread."""
        waiters = [waiter for _, waiter in waiting.waiters]
        try:
            refusal = self._refusal(thread, waiting.key, waiters[0].grammar)
            if refusal is None:
                is_bounded = not any(waiter.is_migrated for waiter in waiters)
                self._slow.push(tenant, waiting.key, waiting.waiters, is_bounded=is_bounded)
                return
            compiled = None if refusal else self._compile(tenant, waiting.key, waiters[0].grammar)
            outcomes = [self._outcome(compiled, refusal, waiter) for waiter in waiters]
        except Exception as error:
            # Without an answer the requests would hang.
            if not isinstance(error, QuireError):
                error = QuireError(f"the grammar could not be checked: {error}")
            outcomes = [error] * len(waiters)
        for waiter, outcome in zip(waiters, outcomes, strict=True):
            waiter.answer(outcome)

    def _refusal(
        self, thread: GrammarCheckThread[_Waiter], key: bytes, grammar: Grammar
    ) -> str | None:
        """The reason why a grammar is refused; empty if it passes. None: the check exceeds the quick thread's budget.

        Raises
        ------
        QuireError
            The grammar cannot be checked now. The error is not remembered.
        """
        self._load(grammar)
        with self._lock:
            if key in self._refusals:
                return self._refusals[key]
        result = thread.checker.check(grammar.kind, grammar.text)
        match result.outcome:
            case Outcome.SLOW | Outcome.LATE if thread is self._quick:
                return None
            case Outcome.LATE:
                raise Overloaded(
                    "the machine is too busy to check the grammar; "
                    f"{grammar.field}: at most {SLOW.wall_s:g} s, got more",
                    field=grammar.field,
                    retry_after_s=SLOW.wall_s,
                )
            case Outcome.UNUSABLE:
                raise _unsupported(grammar, f"the tokenizer cannot be used: {result.message}")
        self._remember_refusal(key, _refusal_of(result))
        return _refusal_of(result)

    def _compile(self, tenant: str, key: bytes, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar that has passed its check. Concurrent requests of one tenant share the result."""
        compiled = self._look_up(tenant, key)
        if compiled is None:
            tokenizer = self._load(grammar)
            source = grammar_source.to_source(grammar.kind, grammar.text, self._json_white_space)
            limits = grammar_source.limits()
            compiled = CompiledGrammar(
                lambda: LLMatcher(tokenizer, source, log_level=0, limits=limits)
            )
            with self._lock:
                self._compiled[tenant, key] = compiled
                self._recent[tenant, key] = compiled
                while len(self._recent) > MAX_RECENT:
                    self._recent.popitem(last=False)
        return compiled

    def _outcome(
        self, compiled: CompiledGrammar | None, refusal: str, waiter: _Waiter
    ) -> GrammarState | QuireError:
        field = waiter.grammar.field
        if compiled is not None:
            refusal = refusal or compiled.error
        if refusal or compiled is None:
            return InvalidRequest(
                f"the grammar is not valid or too complex; {field}: {refusal}", field=field
            )
        try:
            return GrammarState(compiled, self._vocab_size, waiter.emitted_ids)
        except ValueError as error:
            return InvalidRequest(
                f"the request cannot continue in its grammar; {field}: {error}", field=field
            )

    def _look_up(self, tenant: str, key: bytes) -> CompiledGrammar | None:
        with self._lock:
            compiled = self._compiled.get((tenant, key))
            if (tenant, key) in self._recent:
                self._recent.move_to_end((tenant, key))
            return compiled

    def _remember_refusal(self, key: bytes, refusal: str) -> None:
        with self._lock:
            self._refusals[key] = refusal
            while len(self._refusals) > MAX_REFUSALS:
                self._refusals.popitem(last=False)

    def _load(self, grammar: Grammar) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is not None:
                return self._tokenizer
            if not self._path.is_file():
                raise _unsupported(grammar, "the checkpoint has no tokenizer.json")
            try:
                self._tokenizer = LLTokenizer(
                    str(self._path), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                )
            except Exception as error:
                # The library raises errors of several types for tokenizers that it does not support.
                message = f"this checkpoint's tokenizer cannot be used: {error}"
                raise _unsupported(grammar, grammar_source.message_of(message)) from error
            return self._tokenizer


def _key(grammar: Grammar) -> bytes:
    text = f"{grammar.kind}\0{grammar.text}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


def _refusal_of(result: CheckResult) -> str:
    match result.outcome:
        case Outcome.GOOD:
            return ""
        case Outcome.SLOW:
            return f"at most {SLOW.cpu_s:g} s of processor time to compile, got more"
        case Outcome.LARGE:
            return f"at most {grammar_source.MAX_MEMORY_MIB} MiB of memory to compile, got more"
        case Outcome.CRASH:
            return f"the compiler crashes with it ({result.message})"
        case _:
            return result.message or "no reason is given"


def _unsupported(grammar: Grammar, message: str) -> UnsupportedField:
    return UnsupportedField(
        f"grammars are not served; {grammar.field}: {message}", field=grammar.field
    )


def _expire(waiter: _Waiter) -> None:
    waiter.answer(
        Overloaded(
            f"the grammar waited too long to be compiled; {waiter.grammar.field}: at most "
            f"{waiter.max_wait_s:g} s, got more",
            field=waiter.grammar.field,
            retry_after_s=1.0,
        )
    )


def _close_all(threads: Sequence[GrammarCheckThread[Any]]) -> None:
    for thread in threads:
        thread.close()
