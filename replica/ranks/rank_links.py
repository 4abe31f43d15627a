"""Connections between the leader and the other ranks: sockets in a folder that only this user can open.

```
 leader   listens ◀─ connect ─ rank 1, rank 2, ...
          options ──▶ sizes ◀── sizes agreed, pool ──▶ ready ◀── step ──▶ step ──▶ step ──▶ ...
```

After `ready` a rank sends how many of its copies between device and host memory have ended (`rank_copies.py`), and the
reason of its failure. A connection that ends is the end of the replica, on both sides.
"""

from __future__ import annotations

import select
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from quire.protos.errors import EngineError
from quire.replica.ranks.rank_copies import CopiesOfRanks

# A rank imports torch and transformers before it connects.
_CONNECT_TIMEOUT_S = 300.0
_SOCKET = "leader"
# The end of a connection is noticed at once; a limit for a busy machine.
_NOTICE_S = 5.0


class RankEnd(NamedTuple):
    """The end of a rank."""

    rank: int
    # Why it has failed; None: its process has ended without a word, as a process that is killed.
    error: str | None

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of the replica has failed: {self.error or 'its process has ended'}"
        )


class RankLinks:
    """The leader's connections.

    Attributes
    ----------
    folder
        A new folder, in which the ranks meet.
    copies
        What the other ranks have told of their copies.
    """

    def __init__(self, num_ranks: int):
        self.folder = Path(tempfile.mkdtemp(prefix="quire-ranks-"))
        self._num_others = num_ranks - 1
        self.copies = CopiesOfRanks(self._num_others, self.check)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.folder / _SOCKET))
        self._listener.listen(self._num_others)
        self._links: list[Connection] = []
        self._closing = False
        self._end: RankEnd | None = None
        self._ended = threading.Event()
        self._on_end: Callable[[RankEnd], None] | None = None
        self._abort: Callable[[], None] = lambda: None

    def accept(self) -> None:
        """Wait until all ranks are connected.

        Raises
        ------
        EngineError
            They do not connect in time.
        """
        found: dict[int, Connection] = {}
        self._listener.settimeout(_CONNECT_TIMEOUT_S)
        while len(found) < self._num_others:
            try:
                connected, _ = self._listener.accept()
            except TimeoutError:
                raise EngineError(
                    f"{self._num_others - len(found)} of {self._num_others} ranks have not started within "
                    f"{_CONNECT_TIMEOUT_S:.0f} s"
                ) from None
            connected.setblocking(True)
            link = Connection(connected.detach())
            found[int(msgpack.unpackb(link.recv_bytes()))] = link
        self._links = [found[rank] for rank in sorted(found)]

    def send(self, message: bytes) -> None:
        """Send a message to all ranks.

        Raises
        ------
        EngineError
            A rank has ended.
        """
        self.send_each([message] * self._num_others)

    def send_each(self, messages: Sequence[bytes]) -> None:
        """Send each rank a message of its own.

        Raises
        ------
        EngineError
            A rank has ended.
        """
        self.check()
        try:
            for link, message in zip(self._links, messages, strict=True):
                link.send_bytes(message)
        except OSError as error:
            raise EngineError(f"a rank has ended: {error}") from error

    def send_file(self, fd: int) -> None:
        """Send an open file to all ranks: each gets the same opening, with its locks."""
        try:
            for link in self._links:
                reduction.send_handle(link, fd, None)
        except OSError as error:
            raise EngineError(f"a rank has ended: {error}") from error

    def receive(self) -> list[Any]:
        """Return one message of each rank.

        Raises
        ------
        EngineError
            A rank reports an error or has ended.
        """
        messages = []
        for rank, link in enumerate(self._links, 1):
            try:
                message = msgpack.unpackb(link.recv_bytes())
            except (EOFError, OSError):
                raise EngineError(f"rank {rank} has ended while the replica started") from None
            if error := message.get("error"):
                raise EngineError(f"rank {rank}: {error}")
            messages.append(message)
        return messages

    def forget_folder(self) -> None:
        """Remove the folder: all ranks have met. A process that is killed would leave it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def watch(self, abort: Callable[[], None]) -> None:
        """Start a thread that reads what ranks send. It calls `abort` when one has ended, so that no step waits for
        it."""
        self._abort = abort
        threading.Thread(target=self._watch, name="quire-ranks", daemon=True).start()

    def on_end(self, call: Callable[[RankEnd], None]) -> None:
        """Call `call` when a rank has ended, from the thread of `watch`."""
        self._on_end = call
        if self._end is not None:
            call(self._end)

    def check(self) -> None:
        """Raise `EngineError` if a rank has ended."""
        if self._end is not None:
            raise EngineError(str(self._end))

    def fail(self, error: str) -> None:
        """Note that a step of the leader has failed, unless `watch` finds that another rank has ended."""
        if not self._ended.wait(_NOTICE_S):
            self._note(RankEnd(0, error))

    def close(self) -> None:
        """End the connections, and so the other ranks."""
        self._closing = True
        self._listener.close()
        for link in self._links:
            # The thread that watches still waits for it: wake it.
            with socket.socket(fileno=link.fileno()) as own:
                own.shutdown(socket.SHUT_RDWR)
                own.detach()
        self.forget_folder()

    def _watch(self) -> None:
        while True:
            ready = wait(self._links)
            if self._closing:
                return
            rank, link = next((r, link) for r, link in enumerate(self._links, 1) if link in ready)
            try:
                message = msgpack.unpackb(link.recv_bytes())
            except (EOFError, OSError):
                message = {"error": None}
            if "error" in message:
                self._note(RankEnd(rank, message["error"]))
                self._abort()
                return
            self.copies.note(rank - 1, message["copies"])

    def _note(self, end: RankEnd) -> None:
        self._end = end
        self._ended.set()
        self.copies.wake()
        if self._on_end is not None:
            self._on_end(end)


class LeaderLink:
    """The connection of another rank to the leader."""

    def __init__(self, folder: Path, rank: int):
        own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        own.connect(str(folder / _SOCKET))
        self._link = Connection(own.detach())
        self._link.send_bytes(msgpack.packb(rank))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the leader."""
        self._link.send_bytes(msgpack.packb(message))

    def receive_file(self) -> int:
        """Return the leader's open file.

        Raises
        ------
        OSError, EOFError
            The leader has ended.
        """
        return reduction.recv_handle(self._link)

    def watch(self, on_end: Callable[[], None]) -> None:
        """Start a thread that calls `on_end` when the leader has ended, even if its messages are not read."""

        def wait_for_end() -> None:
            ends = select.poll()
            ends.register(self._link.fileno(), select.POLLRDHUP)
            ends.poll()
            on_end()

        threading.Thread(target=wait_for_end, name="quire-leader", daemon=True).start()

    def has_message(self, timeout_s: float) -> bool:
        """Wait for the leader's next message, or for its end; False: neither has come in time."""
        return self._link.poll(timeout_s)

    def receive(self) -> bytes | None:
        """Wait for the leader's next message; None: it has ended."""
        try:
            return self._link.recv_bytes()
        except (EOFError, OSError):
            return None
