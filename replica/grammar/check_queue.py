"""The order in which grammars are checked: tenants take turns, queues are bounded, waiting requests have deadlines.

This module uses neither a clock nor threads; the caller passes the time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from quire.protos.errors import Overloaded

# Largest numbers of grammars that may wait.
MAX_WAITING = 64
MAX_WAITING_PER_TENANT = 16
_RETRY_AFTER_S = 1.0
W = TypeVar("W")


@dataclass(slots=True)
class WaitingGrammar(Generic[W]):
    """A grammar that waits, and the requests of one tenant that need it.

    Parameters
    ----------
    key
        Identifies the grammar.
    waiters
        (deadline, request) of each request; deadlines in seconds of the monotonic clock.
    """

    key: bytes
    waiters: list[tuple[float, W]] = field(default_factory=list)


class GrammarQueue(Generic[W]):
    """The grammars that wait for one checker, in the order in which they are checked.

    The queue does not look into the request objects; their type is the caller's choice.
    """

    def __init__(self) -> None:
        # Tenants in the order of their turns, each with its grammars in the order of arrival.
        self._tenants: OrderedDict[str, OrderedDict[bytes, WaitingGrammar[W]]] = OrderedDict()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(
        self,
        tenant: str,
        key: bytes,
        waiters: list[tuple[float, W]],
        *,
        is_bounded: bool = True,
    ) -> None:
        """Add requests that wait for a grammar. Requests of one tenant for the same grammar share its check.

        Raises
        ------
        Overloaded
            Too many grammars of all tenants or of this tenant are waiting. Not raised if `is_bounded` is false.
        """
        own = self._tenants.get(tenant, OrderedDict())
        if key not in own:
            if is_bounded:
                self._check_room(len(own))
            own = self._tenants.setdefault(tenant, OrderedDict())
            own[key] = WaitingGrammar(key)
            self._num_waiting += 1
        own[key].waiters.extend(waiters)

    def pop(self) -> tuple[str, WaitingGrammar[W]] | None:
        """Take the oldest grammar of the next tenant, and move this tenant to the end of the turns."""
        if not self._tenants:
            return None
        tenant, own = self._tenants.popitem(last=False)
        _, waiting = own.popitem(last=False)
        self._num_waiting -= 1
        if own:
            self._tenants[tenant] = own
        return tenant, waiting

    def expire(self, now_s: float) -> list[W]:
        """Remove and return the requests that have reached their deadline."""
        expired: list[W] = []
        for tenant, own in list(self._tenants.items()):
            for key, waiting in list(own.items()):
                expired += [waiter for until_s, waiter in waiting.waiters if until_s <= now_s]
                waiting.waiters = [pair for pair in waiting.waiters if pair[0] > now_s]
                if not waiting.waiters:
                    del own[key]
                    self._num_waiting -= 1
            if not own:
                del self._tenants[tenant]
        return expired

    def clear(self) -> None:
        """Remove all requests."""
        self._tenants.clear()
        self._num_waiting = 0

    def _check_room(self, num_own: int) -> None:
        for num, bound, whose in (
            (self._num_waiting, MAX_WAITING, "all tenants"),
            (num_own, MAX_WAITING_PER_TENANT, "this tenant"),
        ):
            if num >= bound:
                raise Overloaded(
                    f"too many grammars wait to be compiled: at most {bound} of {whose}, got {num + 1}",
                    retry_after_s=_RETRY_AFTER_S,
                )
