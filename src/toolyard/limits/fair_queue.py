"""Decides who is next: first come, first served within a tenant, weighted fair between tenants. No clock, no locks.

Self-clocked fair queueing. Each waiting tenant has a line with a tag; the line with the lowest tag is served, and its
tag advances by 1 / weight. The clock is the tag served last; a tenant that had no waiters joins at 1 / weight after it,
neither punished nor rewarded for the past.

How far can a waiter be overtaken? With k waiters of its own tenant (weight w) ahead of it, a tenant of weight u is
served at most floor((k + 1) · u / w) + 1 times before it, whatever else comes and goes. If it is first in its line, no
number of tenants of the same weight that arrive later are served before it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class _Line(Generic[T]):
    __slots__ = ("tag", "tenant", "waiters", "weight")

    def __init__(self, tenant: str, weight: float, tag: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.tag = tag
        self.waiters: OrderedDict[T, None] = OrderedDict()


class FairQueue(Generic[T]):
    """A queue of items, each in it at most once."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        """Only tenants that have waiters."""
        self._heap: list[tuple[float, int, _Line[T]]] = []
        self._clock = 0.0
        self._serial = 0
        self._length = 0
        self.paces: Mapping[str, float] = {}
        """Used instead of a tenant's weight, if set by someone who sees more than this queue."""

    def __len__(self) -> int:
        return self._length

    def push(self, item: T, tenant: str, weight: float = 1.0) -> None:
        """Append to the tenant's line. The latest weight counts."""
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(tenant, weight, self._clock + 1.0 / self.paces.get(tenant, weight))
            self._ticket(line)
        line.weight = weight
        line.waiters[item] = None
        self._length += 1

    def pop(self) -> T:
        """Remove and return the next item.

        Raises:
            IndexError: the queue is empty.
        """
        while True:
            tag, _, line = heapq.heappop(self._heap)
            if line.waiters:  # empty if all of them gave up
                break
        self._clock = tag
        item, _ = line.waiters.popitem(last=False)
        self._length -= 1
        if line.waiters:
            line.tag = tag + 1.0 / self.paces.get(line.tenant, line.weight)
            self._ticket(line)
        else:
            self._leave(line)
        return item

    def remove(self, item: T, tenant: str) -> bool:
        """Return whether the item was still waiting."""
        line = self._lines.get(tenant)
        if line is None or item not in line.waiters:
            return False
        del line.waiters[item]
        self._length -= 1
        if not line.waiters:
            self._leave(line)
        return True

    def waiting(self) -> Iterator[tuple[str, float, int]]:
        """Tenant, weight and number of waiters, for tenants that have any."""
        for line in self._lines.values():
            yield line.tenant, line.weight, len(line.waiters)

    def drain(self) -> list[T]:
        items = [item for line in self._lines.values() for item in line.waiters]
        self._lines.clear()
        self._heap.clear()
        self._length = 0
        return items

    def _ticket(self, line: _Line[T]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (line.tag, self._serial, line))

    def _leave(self, line: _Line[T]) -> None:
        del self._lines[line.tenant]
        if not self._lines:
            self._heap.clear()
            self._clock = 0.0
        elif len(self._heap) > 2 * len(self._lines) + 64:  # tickets of lines whose waiters all gave up
            self._heap = [ticket for ticket in self._heap if ticket[2].waiters]
            heapq.heapify(self._heap)
