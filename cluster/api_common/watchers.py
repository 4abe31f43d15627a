"""Limits the open streams that only watch (`WatchCache`, `Watch`, the live page), in total and for each client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from quire.protos.errors import Overloaded

FORWARDED_FOR = "x-forwarded-for"
RETRY_S = 1.0


class Watchers:
    """Counts the streams that only watch and refuses streams above the limits.

    Parameters
    ----------
    most
        Most streams of all clients together.
    most_of_client
        Most streams of one client.
    """

    def __init__(self, most: int, most_of_client: int):
        self.most = most
        self.most_of_client = most_of_client
        self._open: Counter[str] = Counter()

    @contextmanager
    def watching(self, client: str) -> Iterator[None]:
        """Count one stream of `client` while the context is open.

        Raises
        ------
        Overloaded
            The stream would exceed a limit.
        """
        for name, num_open, most in (
            ("router.max_watchers_per_client", self._open[client], self.most_of_client),
            ("router.max_watchers", self.num_open, self.most),
        ):
            if num_open >= most:
                self._forget(client)
                raise Overloaded(
                    f"this router has {num_open} streams of WatchCache, Watch and /ui open, "
                    f"and {name} is {most}",
                    retry_after_s=RETRY_S,
                )
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            self._forget(client)

    def _forget(self, client: str) -> None:
        if not self._open[client]:
            del self._open[client]

    @property
    def num_open(self) -> int:
        """Open streams of all clients."""
        return self._open.total()


def client_of(peer: str, forwarded_for: list[str]) -> str:
    """The address of a call's client.

    Parameters
    ----------
    peer
        The connection's peer in grpc's notation: ``ipv4:127.0.0.1:4242``.
    forwarded_for
        Values of the header `FORWARDED_FOR`. The proxy appends the address that it sees; earlier addresses come from
        the client and are ignored.
    """
    if forwarded_for:
        return forwarded_for[-1].rpartition(",")[2].strip()
    return peer.rpartition(":")[0] or peer
