"""A thread that takes grammars from a queue and checks them one at a time, in a checking process of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from quire.replica.grammar.check_queue import GrammarQueue, WaitingGrammar
from quire.replica.grammar.grammar_check import GrammarChecker

_JOIN_S = 10.0
W = TypeVar("W")


class GrammarCheckThread(Generic[W]):
    """Call `handle` in a thread for each queued grammar. The first `push` starts the thread.

    Parameters
    ----------
    checker
        The checker that `handle` uses. This object owns and closes it.
    handle
        Called as `handle(this, tenant, grammar)` in the thread; must not raise.
    on_expired
        Called in the thread for each request with a deadline that has passed; must not raise. While `handle` runs,
        expired requests wait for it to return.
    """

    def __init__(
        self,
        name: str,
        checker: GrammarChecker,
        handle: Callable[[GrammarCheckThread[W], str, WaitingGrammar[W]], None],
        on_expired: Callable[[W], None],
    ):
        self.checker = checker
        self._name = name
        self._handle = handle
        self._on_expired = on_expired
        self._changed = threading.Condition()
        self._queue: GrammarQueue[W] = GrammarQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def push(
        self, tenant: str, key: bytes, waiters: list[tuple[float, W]], *, is_bounded: bool = True
    ) -> None:
        """Queue a grammar. Ignored after `close`.

        Parameters
        ----------
        key
            Identifies the grammar; requests of a tenant with the same key share one check.
        waiters
            (deadline, request) of each request that needs the grammar.
        is_bounded
            Whether a full queue raises `Overloaded`.
        """
        with self._changed:
            if self._is_closed:
                return
            self._queue.push(tenant, key, waiters, is_bounded=is_bounded)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the checking process, and wait up to 10 s for the thread to end. Waiting requests get no answer."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify()
        self.checker.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                expired = self._queue.expire(time.monotonic())
                turn = self._queue.pop()
                if turn is None and not expired:
                    self._changed.wait()
                    continue
            for waiter in expired:
                self._on_expired(waiter)
            if turn is not None:
                self._handle(self, *turn)
