"""Who watches a training run, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from toolyard.messages import JSON
from toolyard.records.trajectory import Trajectory


class TrainObserver:
    """Inherit, and override what is of interest. Of several processes, only the main one tells it anything. All of it
    is called in the trainer's thread, except `ended`."""

    def note(self, text: str) -> None:
        """Something that is worth a line: what begins now, what was found."""

    def began(self, done: int, steps: int) -> None:
        """Of so many steps, these were done before."""

    def playing(self, step: int, requests: int, evaluation: bool) -> None:
        """Rollouts begin; `requests` of this process."""

    def ended(self, trajectory: Trajectory) -> None:
        """One of them has ended. Called in the thread of the rollouts."""

    def played(self) -> None:
        """All have: what follows is the update."""

    def stepped(self, line: JSON) -> None:
        """One more step is done, and is in the metrics by this line."""

    def evaluated(self, line: JSON) -> None:
        """So is an evaluation."""

    def saved(self, checkpoint: Path) -> None:
        """A checkpoint is there."""

    def stopping(self) -> None:
        """Somebody asked for an end: it comes after this step. Called in a signal handler."""


@dataclass(slots=True)
class TrainResult:
    folder: Path
    steps: int = 0
    """That are done, also by those before us."""
    steps_before: int = 0
    lines: list[JSON] = field(default_factory=list[JSON])
    """Of all steps, as in the metrics."""
    evaluations: list[JSON] = field(default_factory=list[JSON])
    model: Path | None = None
    """What was trained, if all steps are done."""
    checkpoint: Path | None = None
    """The last one."""
    plot: Path | None = None
    interrupted_by: int | None = None
    """The signal that ended it before its time."""

    def as_json(self) -> JSON:
        def text(path: Path | None) -> str | None:
            return None if path is None else str(path)

        return {
            "output_dir": str(self.folder),
            "steps": self.steps,
            "steps_before": self.steps_before,
            "interrupted": self.interrupted_by is not None,
            "model": text(self.model),
            "checkpoint": text(self.checkpoint),
            "plot": text(self.plot),
            "first": self.lines[0] if self.lines else None,
            "last": self.lines[-1] if self.lines else None,
            "evaluations": self.evaluations,
        }
