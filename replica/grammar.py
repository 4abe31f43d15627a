"""Grammars: which tokens may come next so that the output stays in a language.

```
 submit ──▶ known text? ──yes──────────────────────────────────────┐
               │ no                                                ▼
               ├──▶ quick lane: judge within 0.25 s ──good──▶ compile here, remember ──▶ copy, replay ──▶ scheduler
               │         │ not done                               ▲
               │         ▼                                        │
               └     slow lane: judge within 2 s ─────good────────┘      otherwise: refused by name, remembered

 each step: mask (before sampling, the forward may still run) ──▶ sample ──▶ advance with the token
```

A matcher lives as long as its request and has taken in exactly the request's output tokens, so a soft reset changes
nothing; a request that comes from another replica replays what was emitted there. llguidance does the parsing.

Two lanes, because a compiler cannot be interrupted and shared: a grammar that takes seconds waits for others of its
kind, not in front of those that take milliseconds.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.protos.errors import InvalidRequest, Overloaded, QuireError, UnsupportedField
from quire.protos.wire import Grammar
from quire.replica import grammar_source
from quire.replica.grammar_judge import Budget, GrammarJudge, Outcome, Verdict
from quire.replica.grammar_lane import GrammarLane
from quire.replica.grammar_queue import WaitingGrammar

try:
    import llguidance.numpy
    from llguidance import LLMatcher, LLTokenizer
except ModuleNotFoundError:  # an environment that only measures: grammars are refused
    llguidance = None

# Of a judgement. Grammars in use need 0.02 to 0.15 s, most of it for masks of a large vocabulary.
QUICK = Budget(cpu_s=0.25, wall_s=1.5, nice=0)
SLOW = Budget(cpu_s=2.0, wall_s=8.0, nice=10)
MAX_WAIT_S = 10.0
# A request that comes from another replica has begun its answer, and many may come at once.
MAX_MOVED_WAIT_S = 60.0
# Compiled grammars that are kept for the next request with the same text.
MAX_KNOWN_BYTES = 32 << 20
_GOOD_BYTES = 64 << 10  # least cost of one
_REFUSED_BYTES = 4 << 10
_MAX_INLINE_REPLAY = 256  # tokens; takes less than a millisecond

OnDone = Callable[["GrammarState | QuireError"], None]


class GrammarState:
    """Where one request's output is in its grammar.

    Parameters
    ----------
    start
        The grammar's matcher before any token; shared, never changed.
    vocab_size
        Columns of the logits.
    emitted_ids
        Output so far.

    Raises
    ------
    ValueError
        The output is not in the grammar.
    """

    def __init__(self, start: LLMatcher, vocab_size: int, emitted_ids: Sequence[int]):
        self._start = start
        self._num_words = -(-vocab_size // 32)
        self._taken_ids = list(emitted_ids)
        self._matcher = self._replayed()
        if self._matcher.is_error():
            raise ValueError(f"the {len(emitted_ids)} tokens already generated do not match it")

    def mask(self) -> np.ndarray:
        """[ceil(vocab / 32)] int32, bit i of word w set: id 32 * w + i may come next.

        All zero when the matcher has failed, which it does when a step exceeds its limits: better no token
        than a wrong one.
        """
        had_failed = self._matcher.is_error()
        packed = self._fill()
        if self._matcher.is_error() and not had_failed:
            # Lexer states add up over a long output. A new matcher has only those of the tokens themselves.
            self._matcher = self._replayed()
            packed = self._fill()
        if self._matcher.is_error():
            packed[:] = 0
        return packed[0]

    def advance(self, token_id: int) -> bool:
        """Take in a sampled token; returns whether the output is complete: nothing can follow it."""
        self._taken_ids.append(token_id)
        self._matcher.consume_token(token_id)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """Why the matcher has failed; empty when it has not."""
        return grammar_source.message_of(self._matcher.get_error())

    def _replayed(self) -> LLMatcher:
        matcher = self._start.deep_copy()
        matcher.consume_tokens(self._taken_ids)
        return matcher

    def _fill(self) -> np.ndarray:
        packed = np.zeros((1, self._num_words), np.int32)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, packed, 0)
        return packed


@dataclass(frozen=True, slots=True)
class _Waiter:
    grammar: Grammar
    emitted_ids: Sequence[int]
    on_done: OnDone

    @property
    def is_moved(self) -> bool:
        """Whether the request comes from another replica."""
        return len(self.emitted_ids) > 0

    @property
    def max_wait_s(self) -> float:
        return MAX_MOVED_WAIT_S if self.is_moved else MAX_WAIT_S


@dataclass(frozen=True, slots=True)
class _Known:
    """What became of a grammar's text: a matcher before any token, or why there is none."""

    start: LLMatcher | None
    refusal: str
    num_bytes: int


class GrammarCompiler:
    """Makes the matchers of one checkpoint.

    Owns two lanes, each with a thread and a judging process of its own, and the compiled grammars. Threads and
    processes start with the first grammar that needs them.

    Parameters
    ----------
    tokenizer_path
        The checkpoint's tokenizer.json; read when the first grammar comes.
    vocab_size
        Columns of the logits.
    eos_token_ids
        May come where the output is complete.
    json_white_space
        One of `config.JSON_WHITE_SPACE`.
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
        self._known: OrderedDict[bytes, _Known] = OrderedDict()  # the last one used is the last
        self._known_lock = threading.Lock()
        self._quick = self._lane("quire-grammar-quick", QUICK)
        self._slow = self._lane("quire-grammar-slow", SLOW)
        # A thread that the interpreter's end stops inside the library would end the process with SIGABRT.
        self._at_exit = weakref.finalize(self, _close_all, (self._quick, self._slow))

    def submit(
        self,
        grammar: Grammar,
        emitted_ids: Sequence[int],
        on_done: OnDone,
        tenant: str = "",
    ) -> None:
        """Judge, compile, and replay `emitted_ids`; `on_done` is called once, in this thread or another.

        It gets an error when the grammar is refused, or waits longer than `MAX_WAIT_S`.

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
        known = self._look_up(key)
        if known is not None and len(emitted_ids) <= _MAX_INLINE_REPLAY:
            on_done(self._outcome(known, waiter))
            return
        until_s = time.monotonic() + waiter.max_wait_s
        self._quick.push(tenant, key, [(until_s, waiter)], is_bounded=not waiter.is_moved)

    def close(self) -> None:
        """End threads and processes; requests that wait hear nothing."""
        self._at_exit()

    def _lane(self, name: str, budget: Budget) -> GrammarLane[_Waiter]:
        judge = GrammarJudge(
            self._path, self._vocab_size, self._eos_token_ids, self._json_white_space, budget
        )
        return GrammarLane(name, judge, self._on_turn, _expire)

    def _on_turn(
        self, lane: GrammarLane[_Waiter], tenant: str, waiting: WaitingGrammar[_Waiter]
    ) -> None:
        """Answer all who wait for a grammar, or pass them on to the slow lane."""
        waiters = [waiter for _, waiter in waiting.waiters]
        try:
            known = self._look_up(waiting.key)
            if known is None:
                known = self._settle(lane, waiting.key, waiters[0].grammar)
            if known is None:
                is_bounded = not any(waiter.is_moved for waiter in waiters)
                self._slow.push(tenant, waiting.key, waiting.waiters, is_bounded=is_bounded)
                return
        except Exception as error:  # a lost answer would be a request that hangs
            if not isinstance(error, QuireError):
                error = QuireError(f"the grammar could not be judged: {error}")
            for waiter in waiters:
                waiter.on_done(error)
            return
        for waiter in waiters:
            waiter.on_done(self._outcome(known, waiter))

    def _settle(self, lane: GrammarLane[_Waiter], key: bytes, grammar: Grammar) -> _Known | None:
        """Judge a grammar, compile it if that is safe, and remember; None: it needs more than the quick lane gives.

        Raises
        ------
        QuireError
            It cannot be said: nothing to remember.
        """
        tokenizer = self._load(grammar)
        verdict = lane.judge.judge(grammar.kind, grammar.text)
        if verdict.outcome in (Outcome.SLOW, Outcome.LATE) and lane is self._quick:
            return None
        if verdict.outcome == Outcome.LATE:
            raise Overloaded(
                "the machine is too busy to judge the grammar; "
                f"{grammar.field}: at most {SLOW.wall_s:g} s, got more",
                field=grammar.field,
                retry_after_s=SLOW.wall_s,
            )
        if verdict.outcome == Outcome.UNUSABLE:
            raise _unsupported(grammar, f"the tokenizer cannot be used: {verdict.message}")
        if verdict.outcome == Outcome.GOOD:
            known = self._compile(tokenizer, grammar, verdict)
        else:
            known = _Known(None, _refusal(verdict), _REFUSED_BYTES)
        self._remember(key, known)
        return known

    def _compile(self, tokenizer: LLTokenizer, grammar: Grammar, verdict: Verdict) -> _Known:
        source = grammar_source.to_source(grammar.kind, grammar.text, self._json_white_space)
        start = LLMatcher(tokenizer, source, log_level=0, limits=grammar_source.limits())
        if start.is_error():
            return _Known(None, grammar_source.message_of(start.get_error()), _REFUSED_BYTES)
        return _Known(start, "", max(_GOOD_BYTES, verdict.num_bytes))

    def _outcome(self, known: _Known, waiter: _Waiter) -> GrammarState | QuireError:
        field = waiter.grammar.field
        if known.start is None:
            return InvalidRequest(
                f"the grammar is not valid or too complex; {field}: {known.refusal}", field=field
            )
        try:
            return GrammarState(known.start, self._vocab_size, waiter.emitted_ids)
        except ValueError as error:
            return InvalidRequest(
                f"the request cannot continue in its grammar; {field}: {error}", field=field
            )

    def _look_up(self, key: bytes) -> _Known | None:
        with self._known_lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
            return known

    def _remember(self, key: bytes, known: _Known) -> None:
        with self._known_lock:
            self._known[key] = known
            num_bytes = sum(one.num_bytes for one in self._known.values())
            while num_bytes > MAX_KNOWN_BYTES:
                _, oldest = self._known.popitem(last=False)
                num_bytes -= oldest.num_bytes

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
            except Exception as error:  # of the library: any kind of tokenizer it does not take
                message = f"this checkpoint's tokenizer cannot be used: {error}"
                raise _unsupported(grammar, grammar_source.message_of(message)) from error
            return self._tokenizer


def _key(grammar: Grammar) -> bytes:
    text = f"{grammar.kind}\0{grammar.text}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


def _refusal(verdict: Verdict) -> str:
    match verdict.outcome:
        case Outcome.SLOW:
            return f"at most {SLOW.cpu_s:g} s of processor time to compile, got more"
        case Outcome.LARGE:
            return f"at most {grammar_source.MAX_MEMORY_MIB} MiB of memory to compile, got more"
        case Outcome.CRASH:
            return f"the compiler crashes with it ({verdict.message})"
        case _:
            return verdict.message


def _unsupported(grammar: Grammar, message: str) -> UnsupportedField:
    return UnsupportedField(
        f"grammars are not served; {grammar.field}: {message}", field=grammar.field
    )


def _expire(waiter: _Waiter) -> None:
    waiter.on_done(
        Overloaded(
            f"the grammar waited too long to be compiled; {waiter.grammar.field}: at most "
            f"{waiter.max_wait_s:g} s, got more",
            field=waiter.grammar.field,
            retry_after_s=1.0,
        )
    )


def _close_all(lanes: Sequence[GrammarLane]) -> None:
    for lane in lanes:
        lane.close()
