"""Writes a rescored dump: the same files and lines in another folder, with new scores."""

from __future__ import annotations

import contextlib
import json
import os
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from toolyard.errors import ConfigError, RecordError
from toolyard.messages import JSON
from toolyard.records.jsonl import decode, encode, finite
from toolyard.records.lines import UNKNOWN
from toolyard.records.writer import FolderLock, write_json
from toolyard.rewards.explanation import FIELDS
from toolyard.rollout.blame import TASK
from toolyard.rollout.config import SETTINGS_BESIDE_DUMP
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.rescore.scoring import Change, Rescored, is_verl_line

_NOT_EXTRAS = frozenset({"input", "output", "gts", "score", "step", "request_id", "format_version"})
"""In verl's lines a reward's extra values stand beside these fields and must not replace them."""
_WHY = "reward_error"
"""The field of verl's lines that says why there is no score."""


class RescoredDump:
    """The output folder, locked while it is open:

        with RescoredDump("rescored", source="runs/a", files=run.files) as dump:
            dump.write(rescored)                      # in the order of the lines
            dump.finish({"final": "gsm8k:strict"})

    A file gets its name only when it is complete. If the run is stopped, the lines of the unfinished file are kept as
    `<name>.partial.jsonl`, which readers of dumps ignore.
    """

    def __init__(self, folder: str | PathLike[str], *, source: str | PathLike[str], files: list[Path]) -> None:
        """
        Raises:
            ConfigError: the folder is the dump's own, or already has files with these names.
            RecordError: the folder is not writable.
        """
        self.folder, self._source = Path(folder), Path(source)
        self.partial: Path | None = None
        own = self._source if self._source.is_dir() else self._source.parent
        if self.folder.exists() and self.folder.samefile(own):
            raise ConfigError(
                f"--out {self.folder}: that is the dump itself, which is never overwritten; name another folder"
            )
        taken = [target for file in files if (target := self.folder / file.name).exists()]
        if taken:
            raise ConfigError(f"--out {self.folder}: {taken[0].name} already exists there; name another folder")
        self._own = own
        self._lock = FolderLock(self.folder)
        self._file: BinaryIO | None = None
        self._name = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove a file that is not complete."""
        try:
            if self._file is not None:
                with contextlib.suppress(OSError):  # closing flushes the buffer, which may fail
                    self._file.close()
                self._new.unlink(missing_ok=True)
        finally:
            self._lock.close()

    def write(self, rescored: Rescored) -> None:
        """
        Raises:
            RecordError: it cannot be written.
        """
        line = rescored_line(rescored)
        try:
            if self._name != rescored.path.name:
                self._close(self.folder / self._name)
                self._name = rescored.path.name
                self._file = self._new.open("wb")
            assert self._file is not None
            self._file.write(line)
        except OSError as error:
            raise RecordError(f"cannot write to {self._new}: {error.strerror}") from None

    def finish(self, rewards: JSON, *, stopped: bool = False) -> None:
        """Call it after the last line, or with `stopped` if the run was stopped in the middle of the last file.
        `rewards`, the settings that were used, replace those in the dump's settings.

        Raises:
            RecordError: a file cannot be written.
        """
        try:
            if stopped and self._file is not None:
                self.partial = self.folder / f"{Path(self._name).stem}.partial.jsonl"
            self._close(self.partial or self.folder / self._name)
            write_json(self.folder / SETTINGS_BESIDE_DUMP, {**self._settings(), "rewards": rewards})
        except OSError as error:
            raise RecordError(f"cannot write to {self.folder}: {error.strerror}") from None

    @property
    def _new(self) -> Path:
        return self.folder / f".{self._name}.new"

    def _close(self, target: Path) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._new.replace(target)

    def _settings(self) -> JSON:
        try:
            found: Any = json.loads((self._own / SETTINGS_BESIDE_DUMP).read_bytes())
        except (OSError, ValueError):
            return {}
        return cast("JSON", found) if isinstance(found, dict) else {}


def rescored_line(rescored: Rescored) -> bytes:
    """The line with its new score and everything else unchanged; identical to the byte if nothing changed.

    Raises:
        RecordError: the reward's result cannot be written as JSON.
    """
    raw = rescored.raw if rescored.raw.endswith(b"\n") else rescored.raw + b"\n"
    if rescored.change is Change.LEFT:
        return raw
    before: JSON = decode(raw)
    after = _verls(before, rescored) if is_verl_line(rescored.trajectory) else _ours(before, rescored)
    return raw if after == before else encode(after) + b"\n"


def _verls(line: JSON, rescored: Rescored) -> JSON:
    final = rescored.final
    extras = {_WHY: rescored.why} if final is None else dict(final.extras)
    if final is not None and final.explanation is not None:
        extras |= final.explanation.as_json()
    kept = {key: value for key, value in line.items() if key not in (_WHY, *FIELDS)}
    return kept | {"score": rescored.score} | {key: value for key, value in extras.items() if key not in _NOT_EXTRAS}


def _ours(line: JSON, rescored: Rescored) -> JSON:
    combined, trajectory = rescored.combined, rescored.trajectory
    assert combined is not None
    rewards = {**trajectory.rewards, **{name: finite(value) for name, value in combined.parts.items()}}
    metrics = {key: value for key, value in trajectory.metrics.items() if key != "reward"}
    if rescored.final is not None and rescored.final.extras:
        metrics["reward"] = dict(sorted(rescored.final.extras.items()))
    changed: JSON = {
        "score": rescored.score,
        "rewards": dict(sorted(rewards.items())),
        "metrics": dict(sorted(metrics.items())),
        "reward_details": {name: dict(sorted(said.items())) for name, said in sorted(rescored.details.items())},
    }
    if combined.failed:
        failure = {"whose": TASK, "stage": RolloutState.COMPLETED.value, "error": combined.why_missing}
        changed |= {"state": RolloutState.FAILED.value, "failure": failure}
        changed["finish_reason"] = FinishReason.REWARD_FAILURE.value
    elif trajectory.state == RolloutState.FAILED:
        # The finish reason it would have had without the reward's failure was not kept.
        changed |= {"state": RolloutState.COMPLETED.value, "failure": None, "finish_reason": UNKNOWN}
    return line | changed
