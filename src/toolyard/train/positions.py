"""Where a stream of tasks was after each step, so that a resumed run continues there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from toolyard.messages import JSON
from toolyard.train.metrics import read_metrics
from toolyard.train.pacing import Position

POSITIONS = "positions.jsonl"
"""One line per update, written before its checkpoint."""


def position_line(step: int, positions: Sequence[Position | None]) -> JSON:
    """The positions of all processes after `step` updates."""
    return {"step": step, "processes": [_as_json(position or Position()) for position in positions]}


def read_position(path: Path, step: int, process: int, processes: int) -> Position | None:
    """The position of a process after `step` updates; None if there is none, or if the number of processes has changed.

    Raises:
        RecordError: the file is damaged.
    """
    if not path.exists():
        return None
    found = next((line for line in read_metrics(path) if line["step"] == step), None)
    if found is None or len(found["processes"]) != processes:
        return None
    mine: JSON = found["processes"][process]
    return Position(int(mine["next"]), tuple(mine["waiting"]))


def _as_json(position: Position) -> JSON:
    return {"next": position.next, "waiting": list(position.waiting)}
