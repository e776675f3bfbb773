"""The observer and the result of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from toolyard.messages import JSON
from toolyard.records.trajectory import Trajectory


class TrainObserver:
    """Subclass it and override what you need. With several processes, only the main one calls it. Methods are called in
    the trainer's thread, except `ended` and `stopping`."""

    def note(self, text: str) -> None:
        """A message for the user: what starts now, what was found."""

    def began(self, done: int, steps: int) -> None:
        """Training has started: `done` of `steps` steps were done by earlier runs."""

    def playing(self, step: int, requests: int, evaluation: bool) -> None:
        """The rollouts of a step start: `requests` in this process."""

    def ended(self, trajectory: Trajectory) -> None:
        """A request has ended. Called in the rollouts' thread."""

    def played(self) -> None:
        """All rollouts of the step have ended; the update follows."""

    def stepped(self, line: JSON) -> None:
        """A step is done; `line` is its line of metrics."""

    def evaluated(self, line: JSON) -> None:
        """An evaluation is done; `line` is its line of metrics."""

    def saved(self, checkpoint: Path) -> None:
        """A checkpoint has been saved."""

    def stopping(self) -> None:
        """A signal asked to stop; training ends after this step. Called in a signal handler."""


@dataclass(slots=True)
class TrainResult:
    folder: Path
    steps: int = 0
    """Steps done, including those of earlier runs."""
    steps_before: int = 0
    lines: list[JSON] = field(default_factory=list[JSON])
    """The lines of metrics of all steps."""
    evaluations: list[JSON] = field(default_factory=list[JSON])
    model: Path | None = None
    """The trained model, if all steps are done."""
    checkpoint: Path | None = None
    """The last one."""
    plot: Path | None = None
    interrupted_by: int | None = None
    """The signal that stopped it early, if any."""

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
