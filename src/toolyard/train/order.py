"""The order in which tasks are played, and a place in it."""

from __future__ import annotations

import random
from dataclasses import dataclass


class TaskOrder:
    """Passes over `tasks` tasks, each in another random order, or in file order."""

    def __init__(self, tasks: int, *, seed: int, shuffle: bool) -> None:
        self._tasks, self._seed, self._shuffle = tasks, seed, shuffle
        self._passes: list[list[int]] = []

    def at(self, place: int) -> int:
        """The task at a place of the order, which starts with 0."""
        turn, index = divmod(place, self._tasks)
        while len(self._passes) <= turn:
            every = list(range(self._tasks))
            if self._shuffle:
                random.Random(f"{self._seed}/{len(self._passes)}").shuffle(every)  # noqa: S311  (must be reproducible)
            self._passes.append(every)
        return self._passes[turn][index]

    def first(self, wanted: int) -> list[int]:
        """The first `wanted` tasks. A longer list starts with the same ones."""
        return [self.at(place) for place in range(wanted)]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a stream is in the order of tasks."""

    next: int = 0
    """The first place that has not started."""
    waiting: tuple[int, ...] = ()
    """Places before it that have started and are neither trained nor put aside."""
