"""The folder of a training run: its lock, its settings, its checkpoints and where it was in the order of tasks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from toolyard.errors import ConfigError
from toolyard.messages import JSON
from toolyard.records.writer import FolderLock, write_json
from toolyard.train.config import TrainConfig
from toolyard.train.metrics import METRICS, read_metrics
from toolyard.train.order import Position

SETTINGS = "train.json"
MODEL = "model"
"""The result: a model, or an adapter in PEFT's format."""
NEW_MODEL, OLD_MODEL = f"{MODEL}.new", f"{MODEL}.old"
"""While one replaces the other."""
WARM_START = "warm_start"
"""The result of the supervised start, if there was one."""
PLOT = "metrics.png"
POSITIONS = "positions.jsonl"
"""One line per update, written before its checkpoint."""

STATE = "trainer_state.json"
"""Written last, so a checkpoint or a model without it is incomplete."""
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
_TAUGHT = ("warm_start", "lora", "precision", "seed", "rollout.engine.model", "rollout.chat", "rollout.tools")
"""Settings that determine the result of a supervised start."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int


class RunFolder:
    """Locked by one process from `__init__` to `close`, or until that process dies."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            RecordError: another run uses it, or it is not writable.
        """
        self.path = path
        self._lock = FolderLock(path)

    def begin(self, config: TrainConfig, *, resume: bool, note: Callable[[str], None]) -> Checkpoint | None:
        """Return the checkpoint to continue from; None: start from the beginning. Saves the settings in the folder, and
        removes incomplete checkpoints.

        Raises:
            ConfigError: the folder already has a run, and `resume` is false; or its supervised start, from which the
                run would begin, was made with other settings.
            RecordError: the settings cannot be written.
        """
        found = last_checkpoint(self.path)
        has_steps = (self.path / METRICS).exists() and bool(read_metrics(self.path / METRICS))
        if not resume and (found is not None or has_steps):
            state = "no checkpoint" if found is None else f"a checkpoint of step {found.step}"
            raise ConfigError(
                f"output_dir {str(self.path)!r} already has a run, with {state}: continue it with --resume, choose "
                "another folder, or remove this one"
            )
        changed = self._changes(config)
        taught = found is None and config.warm_start is not None and (self.path / WARM_START).exists()
        if taught and (other := [name for name in changed if name.startswith(_TAUGHT)]):
            raise ConfigError(
                f"{self.path / WARM_START} was trained with other settings for {', '.join(other)}: remove it to train "
                "it again, or choose another folder"
            )
        if resume and found is None:
            note(f"{self.path} has no checkpoint: starting from the beginning")
        for torn in _checkpoints(self.path):
            if found is None or torn.step > found.step:
                note(f"removing {torn.path}, which is incomplete")
                shutil.rmtree(torn.path, ignore_errors=True)
        for left in (NEW_MODEL, OLD_MODEL):  # by a kill
            shutil.rmtree(self.path / left, ignore_errors=True)
        if changed and (found is not None or has_steps or taught):
            note(f"{self.path} was started with other settings for {', '.join(changed)}: the new ones apply from here")
        write_json(self.path / SETTINGS, settings_of(config))
        return found

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _changes(self, config: TrainConfig) -> list[str]:
        """Settings that differ from those saved in the folder, if any."""
        try:
            before: JSON = json.loads((self.path / SETTINGS).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing or incomplete
            return []
        return sorted(_differences(before, settings_of(config)) - {"steps"})


def settings_of(config: TrainConfig) -> JSON:
    """The settings to save: without secrets, machine-specific paths, and how the run is watched."""
    kept = config.model_dump(mode="json", exclude={"output_dir"})
    for name in ("api_key", "urls"):
        del kept["rollout"]["engine"][name]
    for name in ("rollout_data_dir", "logs", "metrics"):
        del kept["rollout"][name]
    return kept


def last_checkpoint(folder: Path) -> Checkpoint | None:
    """The last complete checkpoint."""
    whole = [found for found in _checkpoints(folder) if steps_of(found.path) == found.step]
    return max(whole, key=lambda found: found.step, default=None)


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


def _checkpoints(folder: Path) -> list[Checkpoint]:
    if not folder.is_dir():
        return []
    names = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir()]
    return [Checkpoint(path, int(name[1])) for path, name in names if name]


def steps_of(path: Path) -> int | None:
    """The number of steps after which a checkpoint or a model was saved. None: it is missing or incomplete."""
    try:
        return json.loads((path / STATE).read_text(encoding="utf-8")).get("global_step")
    except (OSError, ValueError):
        return None


def _differences(one: Any, other: Any, place: str = "") -> set[str]:
    """Where two settings differ, as `a.b`."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return set() if one == other else {place}
    first, second = cast("JSON", one), cast("JSON", other)
    return {
        found
        for key in first.keys() | second.keys()
        for found in _differences(first.get(key), second.get(key), f"{place}.{key}" if place else key)
    }
