"""What a run tells whoever watches it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from toolyard.records.trajectory import Trajectory
from toolyard.rollout.finish import RolloutState
from toolyard.rollout.run_many import Stuck
from toolyard.rollout.status import Status
from toolyard.rollout.summary import Summary
from toolyard.supervision import Stall


class Running(Protocol):
    """A run in progress: a `RolloutRun`, or a `ClusterRun`."""

    @property
    def states(self) -> Counter[RolloutState]:
        """Number of running requests by state. Can be read from any thread."""
        ...

    @property
    def live(self) -> tuple[int, int, int]:
        """Turns, sampled tokens and tool calls of the running requests. Can be read from any thread."""
        ...

    @property
    def statuses(self) -> Mapping[str, Status]:
        """Each worker of a cluster, as it last reported, by name; otherwise only this process, without a name. Can be
        read from any thread."""
        ...

    @property
    def limiters(self) -> Sequence[object]:
        """The limiters of its tools and rewards, once they are in use."""
        ...

    @property
    def ledger(self) -> Mapping[str, int]:
        """Figures of a cluster's ledger (see `Ledger.figures`); otherwise empty."""
        ...

    @property
    def is_blocked(self) -> bool:
        """Whether the event loop is blocked. Can be read from any thread."""
        ...

    def stop(self) -> None:
        """Start no more requests and abort the running ones; the run ends soon."""
        ...


class Observer:
    """Watches a run. Subclass it and override what you need. Methods are called in the run's event loop, except
    `stalled`; `stage` and `note` may be called in other threads."""

    def stage(self, text: str) -> None:
        """What the run does from now on, before its first request: reading the tasks, importing torch."""

    def note(self, text: str) -> None:
        """A message for the user: rows were skipped, a worker has died."""

    def opened(self, total: int, done: int) -> None:
        """The run is about to start: `total` requests, `done` of which were found in the dump."""

    def grouped(self, total: int, done: int) -> None:
        """A group is all samples of a task: of `total` groups, `done` are in the dump. At first after `opened`, then
        whenever one is complete."""

    def began(self, run: Running) -> None:
        """The run has started. It can now be inspected and stopped."""

    def told(self, kind: str, text: str) -> None:
        """A worker of a cluster reports that a request is stuck, or that its event loop is blocked."""

    def ended(self, trajectory: Trajectory, summary: Summary) -> None:
        """A request has ended."""

    def stuck(self, stuck: Stuck) -> None:
        """A request has been in one stage for too long."""

    def stalled(self, stall: Stall) -> None:
        """The event loop is blocked. Called in another thread, because the loop cannot call anything."""


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._all = observers

    def stage(self, text: str) -> None:
        for one in self._all:
            one.stage(text)

    def note(self, text: str) -> None:
        for one in self._all:
            one.note(text)

    def opened(self, total: int, done: int) -> None:
        for one in self._all:
            one.opened(total, done)

    def grouped(self, total: int, done: int) -> None:
        for one in self._all:
            one.grouped(total, done)

    def began(self, run: Running) -> None:
        for one in self._all:
            one.began(run)

    def told(self, kind: str, text: str) -> None:
        for one in self._all:
            one.told(kind, text)

    def ended(self, trajectory: Trajectory, summary: Summary) -> None:
        for one in self._all:
            one.ended(trajectory, summary)

    def stuck(self, stuck: Stuck) -> None:
        for one in self._all:
            one.stuck(stuck)

    def stalled(self, stall: Stall) -> None:
        for one in self._all:
            one.stalled(stall)
