"""Which groups of a stream start, and which are trained in a step. Decisions only: nothing here runs or waits.

A *group* is all samples of one task. Steps are counted from 0, one for each time that groups are handed out.

* A group that starts with the weights of step `v` is *due* at step `v + max_staleness`: it must be trained by then.
* A group may start only if all groups that have started, and it, fit into the steps until then. So nothing ever
  becomes too old, and nothing is thrown away for its age.
* A step takes the oldest groups that have ended. It may overtake a slow group, but only as long as every group left
  behind can still be trained when it is due.
* A *flat* group, whose scores are all equal, is put aside, and another may start in its place, up to `spare` times per
  step. Further flat groups are trained like any other.

With `max_staleness` 0, groups start when their step begins, and the step takes all of them: synchronous training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from toolyard.train.order import Position


@dataclass(slots=True, eq=False)
class PacedGroup:
    place: int
    """In the order of tasks."""
    due: int
    """The last step that may train it."""
    ended: bool = False
    flat: bool = False


@dataclass(frozen=True, slots=True)
class HandOut:
    """The groups of one step, in the order in which they started."""

    trained: list[PacedGroup]
    aside: list[PacedGroup]
    """Flat groups that others have replaced."""


class Pacing:
    def __init__(
        self,
        per_step: int,
        *,
        max_staleness: int = 0,
        spare: int = 0,
        steps: int | None = None,
        start: Position | None = None,
    ) -> None:
        """
        Args:
            per_step: Groups trained in a step.
            spare: How many flat groups a step may put aside.
            steps: The number of steps; nothing is started for later ones. None: no end.
            start: Where to start. Places that were waiting start first.
        """
        start = start or Position()
        self._per_step, self._staleness, self._spare = per_step, max_staleness, spare
        self._last = None if steps is None else steps - 1
        self._again = list(start.waiting)
        self._next_place = start.next
        self._step = 0
        """The next to be handed out."""
        self._weights = -1
        """The step whose weights groups start with."""
        self._groups: list[PacedGroup] = []
        """Started and not handed out, in order; `due` never decreases."""

    @property
    def position(self) -> Position:
        waiting = (group.place for group in self._groups)
        return Position(self._next_place, (*waiting, *self._again))

    def begin_step(self) -> None:
        """From now on, groups start with the weights of the next step to be handed out."""
        self._weights = self._step

    def admit(self) -> list[PacedGroup]:
        """The groups to start now."""
        due = self._weights + self._staleness
        if self._last is not None:
            due = min(due, self._last)
        room = (due - self._step + 1) * self._per_step - (len(self._groups) - len(self._aside()))
        started = [PacedGroup(self._next(), due) for _ in range(room)]
        self._groups += started
        return started

    def end(self, group: PacedGroup, *, flat: bool) -> None:
        """All requests of the group have ended."""
        group.ended = True
        group.flat = flat

    def hand_out(self) -> HandOut | None:
        """The groups of the next step; None if it must wait for some that are running."""
        aside = self._aside()
        counted = [group for group in self._groups if group not in aside]
        trained = [group for group in counted if group.ended][: self._per_step]
        left = [group for group in counted if group not in trained]
        if len(trained) < self._per_step or not self._fits(left):
            return None
        self._groups = left
        self._step += 1
        return HandOut(trained, aside)

    def _next(self) -> int:
        if self._again:
            return self._again.pop(0)
        self._next_place += 1
        return self._next_place - 1

    def _aside(self) -> list[PacedGroup]:
        return [group for group in self._groups if group.flat][: self._spare]

    def _fits(self, left: Collection[PacedGroup]) -> bool:
        """Whether the steps after this one can train all groups that are left, each when it is due."""
        return all(self._until(left, due) <= (due - self._step) * self._per_step for due in _dues(left))

    def _until(self, groups: Iterable[PacedGroup], due: int) -> int:
        return sum(group.due <= due for group in groups)


def _dues(groups: Iterable[PacedGroup]) -> set[int]:
    return {group.due for group in groups}
