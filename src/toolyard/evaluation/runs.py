"""The runs to evaluate: the attempts in one dump, or in several that are pooled, such as the seeds of a run.

They are read through the viewer's index, so everything that the viewer opens can be evaluated: files, folders, folders
of runs, dumps of verl and TRL. A line without a reward stays one without a reward.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolyard.errors import ConfigError
from toolyard.rollout.fingerprint import saved_differences, saved_settings
from toolyard.viewer.library import Library
from toolyard.viewer.protocol import Attempt
from toolyard.viewer.query import DAMAGED, Query, parse_query

OpenLibrary = Callable[[Path], Library]
"""Opens a dump, with whatever progress the caller shows."""

_PATTERN = frozenset("*?[")
_SEED = "seed:"
"""The setting in which the runs that are pooled differ."""


@dataclass(slots=True)
class Run:
    """The attempts at tasks to evaluate together."""

    name: str
    paths: list[Path]
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    damaged: int = 0
    """Lines that cannot be read."""
    torn: int = 0
    """Files whose last line is incomplete."""
    repeated: int = 0
    """Lines left out, because a later line of the same file has the same request id."""
    notes: list[str] = field(default_factory=list[str])

    @property
    def steps(self) -> set[int]:
        return {attempt.step for attempt in self.attempts}


def read_run(
    dumps: str | Path | Sequence[str | Path],
    *,
    query: str | Query = "",
    reward: str | None = None,
    opened: OpenLibrary = Library.open,
) -> Run:
    """Read a dump, or several that are pooled: files, folders, or patterns such as `runs/seed-*`.

    Args:
        query: Use only the matching trajectories, in the viewer's language.
        reward: Use this part of the reward, such as `final`, in place of the score.

    Raises:
        ConfigError: a dump does not exist or is named twice, nothing matches, or no line has such a reward.
        RecordError: a dump cannot be read.
        QueryError: the query is invalid.
    """
    given = [str(one) for one in ([dumps] if isinstance(dumps, str | Path) else dumps)]
    paths = [path for one in given for path in _matching(one)]
    names: dict[Path, Path] = {}
    for path in paths:
        if (real := path.resolve()) in names:
            raise ConfigError(f"{path} is the same dump as {names[real]}: its samples would count twice")
        names[real] = path
    asked = parse_query(query) if isinstance(query, str) else query
    run = Run(", ".join(given), paths)
    reward_names: set[str] = set()
    for path in paths:
        with opened(path) as library:
            found = library.attempts(asked, reward=reward)
            last = {(one.file, one.request_id or number): one for number, one in enumerate(found)}
            run.repeated += len(found) - len(last)
            run.attempts += last.values()
            folders = sorted({one.run for one in last.values()})
            run.damaged += library.count(DAMAGED)
            run.torn += library.torn
            reward_names.update(library.reward_names())
            if len(folders) > 1:
                run.notes.append(pooled_runs(path, folders))
    if not run.attempts:
        raise ConfigError(
            f"{run.name}: {'no trajectory matches the query' if str(asked) else 'it has no trajectories'}"
        )
    if reward is not None and reward not in reward_names:
        known = f"available: {', '.join(sorted(reward_names))}" if reward_names else "its lines name no parts"
        raise ConfigError(f"{run.name}: no line has a reward {reward!r}; {known}")
    run.notes += _notes(run)
    return run


def pooled_runs(path: Path, names: Sequence[str]) -> str:
    """What to tell about a folder whose subfolders are used, too: `eval` of a training run has other tasks."""
    shown = ", ".join(name or "." for name in names)
    return f"{path}: the runs {shown} are taken together; run:NAME in the query selects one, -run:NAME leaves one out"


def _matching(path: str) -> list[Path]:
    if os.path.exists(path):
        return [Path(path)]
    if not _PATTERN.intersection(path):
        raise ConfigError(f"{path!r} does not exist; `toolyard rollout --out DIR` writes a dump")
    found = sorted(Path(one) for one in glob.glob(path))
    if not found:
        raise ConfigError(f"{path!r}: no file or folder matches this pattern")
    return found


def _notes(run: Run) -> list[str]:
    notes: list[str] = []
    if run.damaged:
        notes.append(f"{run.name}: {run.damaged} damaged {_lines(run.damaged)} left out")
    if run.torn:
        notes.append(f"{run.name}: {torn_lines(run.torn)} left out")
    if run.repeated:
        notes.append(
            f"{run.name}: {run.repeated} {_lines(run.repeated)} left out, whose request has a later line in its file"
        )
    if len(steps := run.steps) > 1:
        notes.append(
            f"{run.name}: {len(steps)} steps are pooled, {min(steps)} to {max(steps)}; --by step shows each, "
            "-q step:N selects one"
        )
    known = [(path, settings) for path in run.paths if (settings := saved_settings(path)) is not None]
    for path, settings in known[1:]:
        changed = [one for one in saved_differences(known[0][1], settings) if not one.startswith(_SEED)]
        if changed:
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            notes.append(
                f"{known[0][0]} and {path} are pooled, but were played with other settings: {changed[0]}{more}"
            )
    return notes


def torn_lines(count: int) -> str:
    """How to call the incomplete last lines of `count` files."""
    return f"{count} incomplete last {_lines(count)} (still being written, or cut off)"


def _lines(count: int) -> str:
    return "line" if count == 1 else "lines"


def reasons_without_reward(attempts: Sequence[Attempt]) -> Counter[str]:
    """Attempts without a reward, by finish reason."""
    return Counter(attempt.finish for attempt in attempts if attempt.score is None)
