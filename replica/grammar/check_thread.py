"""A thread that handles waiting grammars one at a time, with a checker of its own."""

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
    """Call `handle` for each waiting grammar.

    Parameters
    ----------
    checker
        Used by `handle` only. This object owns it and closes it.
    handle
        Called in the thread with a tenant and its grammar; must not raise.
    on_expired
        Called in the thread with each request that has reached its deadline, but not before a running `handle` returns.
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
        """Queue a grammar: see `GrammarQueue.push`."""
        with self._changed:
            if self._is_closed:
                return
            self._queue.push(tenant, key, waiters, is_bounded=is_bounded)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread and the checker's process. Waiting requests get no answer."""
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
