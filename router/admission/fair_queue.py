"""The order of the requests that wait at a router: fair between tenants, urgent and short requests first within one.

Between tenants: deficit round robin (Shreedhar and Varghese 1995). The output length is not known in advance, so
tokens are charged when they are computed. Waiting tenants take turns. A turn adds `quantum_tokens` to the tenant's
balance, and the tenant may send while its balance is above zero. A prefilled token costs 1 and a generated token 2,
about their relative cost on a device (Sheng et al. 2024, *Fairness in Serving Large Language Models*). A balance can
fall far below zero, because a request's output is charged after the request was sent. Then the tenant sends nothing
until the quanta of its turns have paid the debt.

    credit   a tenant without waiting requests keeps no balance above zero, so it cannot save turns for a burst
    debt     stays while other tenants wait; each round pays a quantum of it, whether the tenant waits or not
    idle     when the queue becomes empty, all debts are cleared: no tenant waits for the devices any more

Within a tenant: smaller priorities first, then earlier deadlines, then the smaller

    arrival + AGEING x seconds of the request's own prefill

The replicas use the same order (`quire/replica/scheduler/order.py`): shortest first, with ageing that bounds the delay
of long requests. A later request overtakes an earlier one only if it arrives within `AGEING` times the difference of
their prefill seconds.

Bound on unfairness: over any period in which two tenants both have waiting requests, one gets at most three quanta and
two charges more than the other. So a tenant's wait is bounded by the service that the others can get before its turn.
This module is pure: it uses no clock and no asyncio.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.protos.fairness import AGEING, OLDEST_EVERY

TOKENS_PER_GENERATED = 2
MAX_DEBTORS = 65_536


Urgency = tuple[int, float, float, int]


@dataclass(slots=True, eq=False)
class Ticket:
    """One waiting request.

    Attributes
    ----------
    tokens
        Prompt tokens.
    prefill_s
        Seconds to prefill them on the best replica.
    priority
        The request with the smaller value goes first, among those of its tenant.
    arrived_s, deadline_s
        Times of the caller's clock; deadline None: the request may wait forever.
    number
        Position in the order of arrival; set by the queue.
    """

    tenant: str
    tokens: int
    prefill_s: float
    priority: int = 0
    deadline_s: float | None = None
    arrived_s: float = 0.0
    number: int = 0

    def urgency(self) -> Urgency:
        """Return the sort key among the tenant's requests; the smallest goes first."""
        deadline_s = math.inf if self.deadline_s is None else self.deadline_s
        return self.priority, deadline_s, self.arrived_s + AGEING * self.prefill_s, self.number


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant with waiting requests, or with a debt.

    Attributes
    ----------
    balance
        Tokens that the tenant may still send in this turn; negative: its debt.
    left_at
        The queue's count of rounds when the tenant's last waiting request left.
    num_taken
        Number of the tenant's requests that were sent.
    waiting
        Its waiting requests with their sort keys, oldest first.
    urgent
        The same as a heap by sort key; it may still contain requests that have left `waiting`.
    tokens, prefill_s
        Sums over `waiting`.
    """

    name: str
    balance: float = 0.0
    left_at: float = 0.0
    num_taken: int = 0
    waiting: dict[Ticket, Urgency] = field(default_factory=dict)
    urgent: list[tuple[Urgency, Ticket]] = field(default_factory=list)
    tokens: int = 0
    prefill_s: float = 0.0

    def next(self) -> Ticket:
        """Return the most urgent request, or the oldest one in every `OLDEST_EVERY`-th call."""
        if self.num_taken % OLDEST_EVERY == OLDEST_EVERY - 1:
            return next(iter(self.waiting))
        while self.urgent[0][1] not in self.waiting:
            heapq.heappop(self.urgent)
        return self.urgent[0][1]


class FairQueue:
    """The waiting requests, and the balances of their tenants.

    Parameters
    ----------
    quantum_tokens
        Tokens that a turn adds to a balance. Smaller is fairer over short times, larger is cheaper.
    """

    def __init__(self, quantum_tokens: int = 1024):
        self._tenants: dict[str, _Tenant] = {}
        # Tenants with waiting requests; the first one has the turn.
        self._turns: deque[_Tenant] = deque()
        self._rounds = 0.0
        # A heap of (deadline, number, request); it may still contain requests that have left the queue.
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._numbers = itertools.count()
        self._num_tickets = 0
        self._tokens = 0
        self.set_quantum(quantum_tokens)

    def set_quantum(self, quantum_tokens: int) -> None:
        """Change the quantum. Balances above one new quantum are reduced to it; debts stay.

        Raises
        ------
        ValueError
            `quantum_tokens` is below 1.
        """
        if quantum_tokens < 1:
            raise ValueError(f"quantum_tokens must be at least 1, got {quantum_tokens}")
        self._quantum = quantum_tokens
        for tenant in self._turns:
            tenant.balance = min(tenant.balance, float(quantum_tokens))

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return self._num_tickets

    def __contains__(self, ticket: Ticket) -> bool:
        tenant = self._tenants.get(ticket.tenant)
        return tenant is not None and ticket in tenant.waiting

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for tenant in self._turns for ticket in tenant.waiting)

    @property
    def tokens(self) -> int:
        """Prompt tokens of the waiting requests."""
        return self._tokens

    @property
    def prefill_s(self) -> float:
        """Sum of the prefill seconds of the waiting requests."""
        return sum(tenant.prefill_s for tenant in self._turns)

    def of_tenant(self, name: str) -> tuple[int, int]:
        """Return the number and the prompt tokens of one tenant's waiting requests."""
        tenant = self._tenants.get(name)
        return (len(tenant.waiting), tenant.tokens) if tenant is not None else (0, 0)

    def prefill_s_ahead(self, new: Ticket) -> float:
        """Return the seconds of prefill that are sent before a new request, if no further requests arrive.

        The tenant's own requests count if they are at least as urgent. Each other tenant counts with its share of the
        rounds until then: at most as much as this tenant sends, and at most what it has waiting.
        """
        tenant = self._tenants.get(new.tenant)
        own_s = sum(ticket.prefill_s for ticket in _before(tenant, new))
        share_s = own_s + new.prefill_s
        others_s = sum(min(t.prefill_s, share_s) for t in self._turns if t is not tenant)
        return own_s + others_s

    def num_ahead(self, new: Ticket) -> int:
        """Return the number of requests that are sent before a new one, by the rule of `prefill_s_ahead`.

        It is an estimate if tenants have requests of very different sizes, because rounds distribute tokens, not
        requests.
        """
        tenant = self._tenants.get(new.tenant)
        own = sum(1 for _ in _before(tenant, new))
        return own + sum(min(len(t.waiting), own + 1) for t in self._turns if t is not tenant)

    def push(self, ticket: Ticket) -> None:
        """Add a request."""
        ticket.number = next(self._numbers)
        tenant = self._tenant(ticket.tenant)
        if not tenant.waiting:
            tenant.balance = self._paid_off(tenant)
            self._turns.append(tenant)
        tenant.waiting[ticket] = urgency = ticket.urgency()
        heapq.heappush(tenant.urgent, (urgency, ticket))
        tenant.tokens += ticket.tokens
        tenant.prefill_s += ticket.prefill_s
        self._num_tickets += 1
        self._tokens += ticket.tokens
        if ticket.deadline_s is not None:
            heapq.heappush(self._deadlines, (ticket.deadline_s, ticket.number, ticket))

    def next(self) -> Ticket | None:
        """Return the request to send next, or None if the queue is empty.

        Further calls return the same request until it is removed or a tenant is charged.
        """
        while self._turns:
            tenant = self._turns[0]
            if tenant.balance > 0:
                return tenant.next()
            self._begin_turn()
        return None

    def take(self, ticket: Ticket) -> None:
        """Remove a request to send it. Every `OLDEST_EVERY`-th one of a tenant is its oldest, so count it."""
        tenant = self._tenants[ticket.tenant]
        tenant.num_taken += 1
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Remove a request; raise `KeyError` if it is not in the queue."""
        tenant = self._tenants[ticket.tenant]
        del tenant.waiting[ticket]
        tenant.tokens -= ticket.tokens
        tenant.prefill_s = tenant.prefill_s - ticket.prefill_s if tenant.waiting else 0.0
        self._num_tickets -= 1
        self._tokens -= ticket.tokens
        if len(tenant.urgent) > 2 * len(tenant.waiting) + 16:  # Heaps keep removed requests.
            tenant.urgent = [item for item in tenant.urgent if item[1] in tenant.waiting]
            heapq.heapify(tenant.urgent)
        if len(self._deadlines) > 2 * self._num_tickets + 16:
            self._deadlines = [item for item in self._deadlines if item[2] in self]
            heapq.heapify(self._deadlines)
        if not tenant.waiting:
            self._leave(tenant)

    def expire(self, now_s: float) -> list[Ticket]:
        """Remove and return the requests with a deadline up to `now_s`."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            ticket = heapq.heappop(self._deadlines)[2]
            if ticket in self:
                self.remove(ticket)
                expired.append(ticket)
        return expired

    def charge(self, name: str, tokens: float) -> None:
        """Subtract tokens from a tenant's balance; a negative number adds them. Do nothing while the queue is empty."""
        if self._turns:
            tenant = self._tenant(name)
            tenant.balance = min(tenant.balance - tokens, float(self._quantum))

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= MAX_DEBTORS + len(self._turns):
                oldest = next(t.name for t in self._tenants.values() if not t.waiting)
                del self._tenants[oldest]
            tenant = self._tenants[name] = _Tenant(name, left_at=self._rounds)
        return tenant

    def _paid_off(self, tenant: _Tenant) -> float:
        """Return the balance of a tenant that starts to wait: its debt, less a quantum for each round since it left."""
        paid = (self._rounds - tenant.left_at) * self._quantum
        return min(0.0, tenant.balance + paid)

    def _leave(self, tenant: _Tenant) -> None:
        """Take a tenant out of the turns after its last waiting request."""
        if self._turns[0] is tenant:
            self._turns.popleft()
            # Put the last tenant first, as if its turn had just ended: `_begin_turn` rotates to the next one.
            self._turns.rotate(1)
        else:
            self._turns.remove(tenant)
        tenant.urgent.clear()
        tenant.left_at = self._rounds
        if not self._turns:
            self._tenants.clear()
            self._deadlines.clear()
        elif tenant.balance >= 0:
            del self._tenants[tenant.name]

    def _begin_turn(self) -> None:
        """Give the turn to the next tenant. First skip all rounds in which every tenant would still be in debt."""
        quantum = self._quantum
        idle_rounds = min(math.floor(-tenant.balance / quantum) for tenant in self._turns)
        if idle_rounds > 0:
            for tenant in self._turns:
                tenant.balance += idle_rounds * quantum
            self._rounds += idle_rounds
        self._turns.rotate(-1)
        tenant = self._turns[0]
        tenant.balance = min(tenant.balance + quantum, float(quantum))
        self._rounds += 1 / len(self._turns)


def _before(tenant: _Tenant | None, new: Ticket) -> Iterator[Ticket]:
    """Return the tenant's waiting requests that are at least as urgent as a new one."""
    last = (*new.urgency()[:-1], math.inf)
    waiting = {} if tenant is None else tenant.waiting
    return (ticket for ticket, urgency in waiting.items() if urgency < last)
