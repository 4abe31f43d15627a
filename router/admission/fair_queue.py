"""Who goes next of the requests that wait at a router: deficit round robin over tenants, the urgent and the short
first within one.

Deficit round robin (Shreedhar and Varghese 1995) with what a request costs charged as it is spent, since nobody
knows beforehand how much it will generate. Waiting tenants take turns; a turn adds `quantum_tokens` to the
tenant's balance, and the tenant goes while its balance is above zero. Each token computed for it is taken off: one
for a prefilled token, two for a generated one, which is about what they cost a device (Sheng et al. 2024,
*Fairness in Serving Large Language Models*). So a balance may fall far below zero, and then the tenant lets the
others go until its turns have paid for that.

    credit   a tenant that waits for nothing saves no balance: it cannot come back and take everything
    debt     stays while others wait, and is paid by the rounds that pass, in the queue or not
    idle     as soon as nobody waits all debts are forgiven: what was free has cost nobody anything

Within a tenant smaller priorities go first, then earlier deadlines, then those with the smaller

    arrival + AGEING x seconds of their own prefill

as at the replicas (`quire/replica/scheduler/order.py`): shortest first, with an age that bounds what it costs the long
ones. A request is passed by those that come within `AGEING` times the seconds by which its prefill takes longer than
theirs.

Of two tenants that wait all the time neither gets more than three quanta and two charges beyond the other, over
any stretch of time; and a tenant's wait is bounded by what the others can be served until its turn comes. Pure: no
clock, no asyncio.
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
    """One request that waits.

    Attributes
    ----------
    tokens
        Of its prompt.
    prefill_s
        What they take to prefill on the replica that suits it best.
    priority
        Smaller is sooner, within the tenant.
    arrived_s, deadline_s
        On the caller's clock; no deadline: it has all the time in the world.
    """

    tenant: str
    tokens: int
    prefill_s: float
    priority: int = 0
    deadline_s: float | None = None
    arrived_s: float = 0.0
    number: int = 0  # in order of arrival; set by the queue

    def urgency(self) -> Urgency:
        """Sorts who goes first before the others of the tenant."""
        deadline_s = math.inf if self.deadline_s is None else self.deadline_s
        return self.priority, deadline_s, self.arrived_s + AGEING * self.prefill_s, self.number


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant that waits, or that owes."""

    name: str
    balance: float = 0.0  # tokens
    left_at: float = 0.0  # rounds that had passed when it last waited
    num_taken: int = 0
    waiting: dict[Ticket, Urgency] = field(default_factory=dict)  # oldest first
    urgent: list[tuple[Urgency, Ticket]] = field(default_factory=list)  # a heap
    tokens: int = 0  # of those that wait
    prefill_s: float = 0.0

    def next(self) -> Ticket:
        """The most urgent that waits; now and then the oldest."""
        if self.num_taken % OLDEST_EVERY == OLDEST_EVERY - 1:
            return next(iter(self.waiting))
        while self.urgent[0][1] not in self.waiting:
            heapq.heappop(self.urgent)
        return self.urgent[0][1]


class FairQueue:
    """The requests that wait, and the balances of their tenants.

    Parameters
    ----------
    quantum_tokens
        What a turn adds to a balance. Smaller is fairer over short times, larger is cheaper.
    """

    def __init__(self, quantum_tokens: int = 1024):
        self._tenants: dict[str, _Tenant] = {}
        self._turns: deque[_Tenant] = deque()  # those that wait; the first has its turn
        self._rounds = 0.0
        self._deadlines: list[tuple[float, int, Ticket]] = []  # a heap
        self._numbers = itertools.count()
        self._num_tickets = 0
        self._tokens = 0
        self.set_quantum(quantum_tokens)

    def set_quantum(self, quantum_tokens: int) -> None:
        """Go on with another quantum; no tenant keeps more than one of it, debts stay what they are.

        Raises
        ------
        ValueError
            It is below 1.
        """
        if quantum_tokens < 1:
            raise ValueError(f"quantum_tokens must be at least 1, got {quantum_tokens}")
        self._quantum = quantum_tokens
        for tenant in self._turns:
            tenant.balance = min(tenant.balance, float(quantum_tokens))

    def __len__(self) -> int:
        """Requests that wait."""
        return self._num_tickets

    def __contains__(self, ticket: Ticket) -> bool:
        tenant = self._tenants.get(ticket.tenant)
        return tenant is not None and ticket in tenant.waiting

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for tenant in self._turns for ticket in tenant.waiting)

    @property
    def tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._tokens

    @property
    def prefill_s(self) -> float:
        """Seconds of prefill that wait."""
        return sum(tenant.prefill_s for tenant in self._turns)

    def of_tenant(self, name: str) -> tuple[int, int]:
        """Requests and prompt tokens of one tenant that wait."""
        tenant = self._tenants.get(name)
        return (len(tenant.waiting), tenant.tokens) if tenant is not None else (0, 0)

    def prefill_s_ahead(self, new: Ticket) -> float:
        """Seconds of prefill that go before a new request; not those of shorter ones that will yet come.

        Of the tenant's own those that are at least as urgent, and of each other tenant as much as the rounds give
        it in the same time: no more than this tenant gets, and no more than it has waiting.
        """
        tenant = self._tenants.get(new.tenant)
        own_s = sum(ticket.prefill_s for ticket in _before(tenant, new))
        share_s = own_s + new.prefill_s
        others_s = sum(min(t.prefill_s, share_s) for t in self._turns if t is not tenant)
        return own_s + others_s

    def num_ahead(self, new: Ticket) -> int:
        """Requests that go before a new one, as `prefill_s_ahead` counts seconds. Rounds share out tokens, so of
        tenants whose requests differ much in size it is an estimate."""
        tenant = self._tenants.get(new.tenant)
        own = sum(1 for _ in _before(tenant, new))
        return own + sum(min(len(t.waiting), own + 1) for t in self._turns if t is not tenant)

    def push(self, ticket: Ticket) -> None:
        """Queue a request at the end of its priority."""
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
        """Who goes next, None when nobody waits. The same again until it is removed or somebody is charged."""
        while self._turns:
            tenant = self._turns[0]
            if tenant.balance > 0:
                return tenant.next()
            self._begin_turn()
        return None

    def take(self, ticket: Ticket) -> None:
        """It goes: remove it and count it as one of its tenant's turns."""
        tenant = self._tenants[ticket.tenant]
        tenant.num_taken += 1
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        """It does not wait any more; KeyError if it did not."""
        tenant = self._tenants[ticket.tenant]
        del tenant.waiting[ticket]
        tenant.tokens -= ticket.tokens
        tenant.prefill_s = tenant.prefill_s - ticket.prefill_s if tenant.waiting else 0.0
        self._num_tickets -= 1
        self._tokens -= ticket.tokens
        if len(tenant.urgent) > 2 * len(tenant.waiting) + 16:  # removed ones stay in heaps
            tenant.urgent = [entry for entry in tenant.urgent if entry[1] in tenant.waiting]
            heapq.heapify(tenant.urgent)
        if len(self._deadlines) > 2 * self._num_tickets + 16:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self]
            heapq.heapify(self._deadlines)
        if not tenant.waiting:
            self._leave(tenant)

    def expire(self, now_s: float) -> list[Ticket]:
        """Remove the requests whose deadline has passed, and return them."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            ticket = heapq.heappop(self._deadlines)[2]
            if ticket in self:
                self.remove(ticket)
                expired.append(ticket)
        return expired

    def charge(self, name: str, tokens: float) -> None:
        """So much was spent for a tenant, or given back; of no account while nobody waits."""
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
        """The balance of a tenant that waits again."""
        paid = (self._rounds - tenant.left_at) * self._quantum
        return min(0.0, tenant.balance + paid)

    def _leave(self, tenant: _Tenant) -> None:
        """Nothing of it waits any more."""
        if self._turns[0] is tenant:
            self._turns.popleft()
            self._turns.rotate(
                1
            )  # the turn goes on to the next from the last, as if it had ended there
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
        """To the next tenant; and first through the rounds in which nobody could go."""
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
    """The tenant's requests that are at least as urgent as one that comes last."""
    last = (*new.urgency()[:-1], math.inf)
    waiting = {} if tenant is None else tenant.waiting
    return (ticket for ticket, urgency in waiting.items() if urgency < last)
