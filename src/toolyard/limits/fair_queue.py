"""Who is next: first come, first served within a tenant, weighted fair between tenants. Pure: no clock, no locks.

Each tenant has a line and a tag. The line with the lowest tag is served, and its tag then moves on by 1 / weight; who
comes back from having nothing to wait for starts at the tag being served, neither punished nor paid for the past.

How far can a waiter be overtaken? With k waiters of its own tenant (weight w) before it, a tenant of weight u is served
at most floor((k + 1) · u / w) + 1 times before it, whatever else comes and goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_SPARE = 64
"""Lines of tenants with nobody waiting that are kept before they are looked through."""


class _Line(Generic[T]):
    __slots__ = ("tag", "tenant", "ticketed", "waiters", "weight")

    def __init__(self, tenant: str, tag: float) -> None:
        self.tenant = tenant
        self.weight = 1.0
        self.tag = tag
        self.waiters: dict[T, None] = {}
        self.ticketed = False
        """Whether the heap knows of this line, rightly or not."""


class FairQueue(Generic[T]):
    """Items wait here, each at most once."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._heap: list[tuple[float, int, _Line[T]]] = []
        self._tag = 0.0
        self._serial = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, item: T, tenant: str, weight: float = 1.0) -> None:
        """To the end of its tenant's line. The weight given last is the tenant's."""
        line = self._lines.get(tenant)
        if line is None:
            self._forget_the_idle()
            line = self._lines[tenant] = _Line(tenant, self._tag)
        line.weight = weight
        line.waiters[item] = None
        self._length += 1
        if not line.ticketed:
            line.tag = max(line.tag, self._tag)
            self._ticket(line)

    def pop(self) -> T:
        """Whoever is next.

        Raises:
            IndexError: nobody waits.
        """
        while True:
            tag, _, line = heapq.heappop(self._heap)
            line.ticketed = False
            if line.waiters:  # not if all of them have left meanwhile
                break
        self._tag = tag
        item = next(iter(line.waiters))
        del line.waiters[item]
        self._length -= 1
        line.tag = tag + 1.0 / line.weight
        if line.waiters:
            self._ticket(line)
        elif not self._length:
            self._reset()
        return item

    def remove(self, item: T, tenant: str) -> bool:
        """Whether it was still waiting."""
        line = self._lines.get(tenant)
        if line is None or item not in line.waiters:
            return False
        del line.waiters[item]
        self._length -= 1
        if not self._length:
            self._reset()
        return True

    def reweigh(self, tenant: str, weight: float) -> None:
        line = self._lines.get(tenant)
        if line is not None:
            line.weight = weight

    def waiting(self) -> Iterator[tuple[str, float, int]]:
        """Tenant, weight and how many, of those who have someone waiting."""
        for line in self._lines.values():
            if line.waiters:
                yield line.tenant, line.weight, len(line.waiters)

    def drain(self) -> list[T]:
        items = [item for line in self._lines.values() for item in line.waiters]
        self._length = 0
        self._reset()
        return items

    def _ticket(self, line: _Line[T]) -> None:
        self._serial += 1
        line.ticketed = True
        heapq.heappush(self._heap, (line.tag, self._serial, line))

    def _reset(self) -> None:
        self._lines.clear()
        self._heap.clear()
        self._tag = 0.0

    def _forget_the_idle(self) -> None:
        """A tenant can be as short-lived as a trajectory. What an idle one's tag still says is nothing after a turn."""
        if len(self._lines) > 2 * len(self._heap) + _SPARE:
            self._lines = {
                tenant: line for tenant, line in self._lines.items() if line.ticketed or line.tag > self._tag
            }
