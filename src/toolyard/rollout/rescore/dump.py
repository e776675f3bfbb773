"""Where a dump that was scored again goes: the same files and lines in another folder, with their new scores."""

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
from toolyard.records.writer import FolderLock
from toolyard.rollout.blame import TASK
from toolyard.rollout.config import SETTINGS_BESIDE_DUMP
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.rescore.scoring import Change, Rescored, is_verls

_NOT_EXTRAS = frozenset({"input", "output", "gts", "score", "step", "request_id", "format_version"})
"""What a reward returns besides its score stands beside these in verl's lines, and must not replace them."""
_WHY = "reward_error"
"""In verl's lines, why there is no score."""


class RescoredDump:
    """The folder, its own while it is open:

        with RescoredDump("rescored", source="runs/a", files=run.files) as dump:
            dump.write(rescored)                      # in the order of the lines
            dump.finish({"final": "gsm8k:strict"})

    A file has its name only when it is whole. Of one that was begun and not ended, because the run was stopped, what
    there is lies beside it as `<name>.partial.jsonl`, which no reader of dumps takes for a step.
    """

    def __init__(self, folder: str | PathLike[str], *, source: str | PathLike[str], files: list[Path]) -> None:
        """
        Raises:
            ConfigError: the folder is the dump's own, or has files of these names.
            RecordError: it cannot be written to.
        """
        self.folder, self._source = Path(folder), Path(source)
        self.partial: Path | None = None
        own = self._source if self._source.is_dir() else self._source.parent
        if self.folder.exists() and self.folder.samefile(own):
            raise ConfigError(
                f"--out {self.folder}: that is the dump itself, which is never written over; name another"
            )
        taken = [target for file in files if (target := self.folder / file.name).exists()]
        if taken:
            raise ConfigError(f"--out {self.folder}: {taken[0].name} exists there already; name another folder")
        self._own = own
        self._lock = FolderLock(self.folder)
        self._file: BinaryIO | None = None
        self._name = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A file that is not whole by then is removed."""
        try:
            if self._file is not None:
                with contextlib.suppress(OSError):  # it writes what it still holds, where nothing can be written
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
        """All lines were written, or the run was stopped in the middle of the last file. `rewards`, the settings that
        made them, are put into those of the dump.

        Raises:
            RecordError: it cannot be written.
        """
        try:
            if stopped and self._file is not None:
                self.partial = self.folder / f"{Path(self._name).stem}.partial.jsonl"
            self._close(self.partial or self.folder / self._name)
            text = json.dumps({**self._settings(), "rewards": rewards}, indent=2, ensure_ascii=False)
            new = self.folder / f".{SETTINGS_BESIDE_DUMP}.new"
            new.write_text(text + "\n", encoding="utf-8")
            new.replace(self.folder / SETTINGS_BESIDE_DUMP)
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
    """The line with its new score, and everything else as it was; to the byte, if nothing changed.

    Raises:
        RecordError: what the reward returned cannot be written.
    """
    raw = rescored.raw if rescored.raw.endswith(b"\n") else rescored.raw + b"\n"
    if rescored.change is Change.LEFT:
        return raw
    before: JSON = decode(raw)
    after = _verls(before, rescored) if is_verls(rescored.trajectory) else _ours(before, rescored)
    return raw if after == before else encode(after) + b"\n"


def _verls(line: JSON, rescored: Rescored) -> JSON:
    extras = rescored.final.extras if rescored.final is not None else {_WHY: rescored.why}
    kept = {key: value for key, value in line.items() if key != _WHY}
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
    }
    if combined.failed:
        failure = {"whose": TASK, "stage": RolloutState.COMPLETED.value, "error": combined.why_missing}
        changed |= {"state": RolloutState.FAILED.value, "failure": failure}
        changed["finish_reason"] = FinishReason.REWARD_FAILURE.value
    elif trajectory.state == RolloutState.FAILED:
        # How it would have ended, had its reward not failed, was not kept.
        changed |= {"state": RolloutState.COMPLETED.value, "failure": None, "finish_reason": UNKNOWN}
    return line | changed
