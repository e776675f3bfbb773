"""What the rollouts of a process report, until somebody wants to know."""

from __future__ import annotations

from toolyard.records.trajectory import Trajectory

from .metrics import Measure
from .observer import TrainObserver
from .trl import StepObserver, StepReport


class Reports(StepObserver):
    """Measures them, and passes on what is of interest while they run."""

    def __init__(self, observer: TrainObserver) -> None:
        self._observer = observer
        self._measure = Measure()

    def begins(self, step: int, requests: int, evaluation: bool) -> None:
        self._observer.playing(step, requests, evaluation)

    def ended(self, trajectory: Trajectory) -> None:
        self._observer.ended(trajectory)

    def stepped(self, report: StepReport) -> None:
        self._measure = self._measure + Measure.of(report)
        self._observer.played()

    def taken(self) -> Measure:
        """Of all reports since the last time."""
        measure, self._measure = self._measure, Measure()
        return measure
