"""``--scheduling-policy fair``: tenants share the engine's tokens in proportion to their weights.

Deficit round robin (Shreedhar and Varghese, "Efficient fair queuing using deficit round robin",
1996), in tokens. The tenants that wait stand in a ring. One whose turn comes is credited a quantum
for each unit of weight, and its requests are admitted, oldest first, while its balance is above 0.
What they cost is known only as they run: prompt tokens not found in the cache on admission, each
output token when it is known. So a balance may fall below 0 and is paid off in later rounds.

Nobody is charged for what was used while no other waited: when nothing waits all balances are
forgotten, and a tenant that begins to wait joins at the level of those who do. Within a tenant
requests keep their order. A preempted one goes before all others: it had its turn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from octavo.core.queue import OrderKey, Queue, WaitingQueue, fcfs_key, priority_key
from octavo.core.request import Request
from octavo.core.running import Running

QUANTUM = 512  # tokens


class _Tenant:
    """One that waits, or is in debt."""

    __slots__ = ("balance", "name", "queue", "weight")

    def __init__(self, name: bytes, weight: float, balance: float) -> None:
        self.name = name
        self.weight = weight
        self.balance = balance  # tokens
        self.queue = WaitingQueue()


class FairQueue:
    """See the module. An operation takes O(log n) of a tenant's n requests, and of the tenants
    those that are passed over; settling looks once at each running request."""

    def __init__(self, quantum: int = QUANTUM) -> None:
        self.key: OrderKey = fcfs_key
        self._quantum = quantum
        self._ring: deque[_Tenant] = deque()  # the first has its turn
        self._tenants: dict[bytes, _Tenant] = {}  # those of the ring, by name
        self._turn_has_begun = False  # the first has been credited
        self._preempted = WaitingQueue()
        self._num_waiting = 0
        self._running: Running | None = None

    def watch(self, running: Running) -> None:
        """Whose tokens are charged."""
        self._running = running

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted
        for tenant in list(self._ring):
            yield from tenant.queue

    # ---- in and out ----

    def push(self, request: Request) -> None:
        if request.num_preemptions:
            self._enter()
            self._preempted.push(request)
            return
        tenant = self._tenants.get(request.tenant)
        if tenant is None or not tenant.queue:
            self._settle()  # its level is that of the others as of now
        self._enter()
        self._tenant(request).queue.push(request)

    def remove(self, request: Request) -> None:
        if request.num_preemptions:
            self._preempted.remove(request)
        else:
            tenant = self._tenants.get(request.tenant)
            if tenant is None:
                raise ValueError(f"{request} does not wait")
            tenant.queue.remove(request)
        self._num_waiting -= 1
        if not self._num_waiting:
            self._ring.clear()
            self._tenants.clear()
            self._turn_has_begun = False

    def in_turn(self) -> Iterator[Request]:
        yield from self._preempted.in_turn()
        self._settle()
        passed: dict[bytes, int] = {}
        while (tenant := self._next(passed)) is not None:
            request = tenant.queue.at(passed.get(tenant.name, 0))
            count = self._num_waiting
            yield request
            if self._num_waiting == count:
                passed[tenant.name] = passed.get(tenant.name, 0) + 1

    def admitted(self, request: Request, num_tokens: int) -> None:
        request.num_charged = len(request.tokens)
        if not request.num_preemptions:
            self._charge(request, num_tokens)

    def left(self, request: Request) -> None:
        self._charge(request, len(request.tokens) - request.num_charged)

    def last_in_line(self, running: Running) -> int:
        """The youngest request of the tenant with the most of them for its weight. So the oldest of
        all is never preempted for another, and each comes to an end."""
        ranks: dict[bytes, int] = {}
        places: list[tuple[float, int, int]] = []
        for slot in running.order.tolist():
            request = running.at(slot)
            rank = ranks[request.tenant] = ranks.get(request.tenant, 0) + 1
            share = rank / request.weight if rank > 1 else 0.0
            places.append((share, request.sequence, slot))
        return max(places)[2]

    # ---- accounts ----

    def _enter(self) -> None:
        if not self._num_waiting:  # from now on it counts what is used
            for request, known in self._known():
                request.num_charged = known
        self._num_waiting += 1

    def _known(self) -> Iterator[tuple[Request, int]]:
        """Running requests, and how many tokens each of them has."""
        running = self._running
        if running is not None:
            counts = running.known[running.order].tolist()
            for slot, known in zip(running.order.tolist(), counts):
                yield running.at(slot), known

    def _settle(self) -> None:
        """Charges what has come out since the last time."""
        if not self._num_waiting:
            return
        for request, known in self._known():
            if known > request.num_charged:
                self._charge(request, known - request.num_charged)
                request.num_charged = known

    def _charge(self, request: Request, num_tokens: int) -> None:
        if self._num_waiting and num_tokens:
            self._tenant(request).balance -= num_tokens

    def _tenant(self, request: Request) -> _Tenant:
        """Its tenant, which joins the ring if it is not in it."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            levels = [t.balance / t.weight for t in self._ring if t.queue]
            balance = min(0.0, max(levels, default=0.0)) * request.weight
            tenant = _Tenant(request.tenant, request.weight, balance)
            self._tenants[tenant.name] = tenant
            self._ring.append(tenant)
        tenant.weight = request.weight  # the operator may have changed it
        return tenant

    def _drop(self, tenant: _Tenant) -> None:
        if tenant is self._ring[0]:
            self._turn_has_begun = False
        self._ring.remove(tenant)
        del self._tenants[tenant.name]

    # ---- turns ----

    def _next(self, passed: dict[bytes, int]) -> _Tenant | None:
        """Turns the ring to a tenant with credit and a request that was not passed over. None if
        there is no such request."""
        ring = self._ring
        while any(len(tenant.queue) > passed.get(tenant.name, 0) for tenant in ring):
            for _ in range(len(ring)):
                tenant = ring[0]
                self._begin_turn(tenant)
                if tenant.balance > 0 and len(tenant.queue) > passed.get(tenant.name, 0):
                    return tenant
                self._end_turn(tenant)
            self._pay_rounds(passed)
        return None

    def _begin_turn(self, tenant: _Tenant) -> None:
        if not self._turn_has_begun:
            self._turn_has_begun = True
            share = self._quantum * tenant.weight
            tenant.balance = min(tenant.balance + share, share)

    def _end_turn(self, tenant: _Tenant) -> None:
        """One that waits for nothing and owes nothing leaves the ring."""
        if not tenant.queue and tenant.balance >= 0:
            self._drop(tenant)
        else:
            self._ring.rotate(-1)
            self._turn_has_begun = False

    def _pay_rounds(self, passed: dict[bytes, int]) -> None:
        """Credits at once all the rounds in which no tenant could have been served."""
        rounds = min(
            math.floor(-tenant.balance / (self._quantum * tenant.weight))
            for tenant in self._ring
            if len(tenant.queue) > passed.get(tenant.name, 0)
        )
        if rounds > 0:
            for tenant in self._ring:
                share = self._quantum * tenant.weight
                tenant.balance = min(tenant.balance + rounds * share, share)


def waiting_queue(policy: str, ageing: float = 0.0) -> Queue:
    """The queue of ``--scheduling-policy``. ValueError for an unknown one (the parser knows
    them)."""
    if policy == "fair":
        return FairQueue()
    if policy == "priority":
        return WaitingQueue(priority_key(ageing))
    if policy != "fcfs":
        raise ValueError(policy)
    return WaitingQueue()
