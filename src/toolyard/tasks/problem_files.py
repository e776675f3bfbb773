"""Made problems in files: tasks, and what a teacher says to them."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from toolyard.errors import ConfigError

from .problems import rows, teacher_turns


def write_problems(
    destination: str | Path,
    count: int,
    *,
    seed: int = 0,
    split: str = "train",
    script: str | Path | None = None,
    force: bool = False,
) -> None:
    """Write `count` rows of `toolyard.tasks.problems` to a `.jsonl` file, and to `script` what a teacher says to them,
    by task id: what `engine: {kind: scripted, script: …}` plays.

    Each file appears whole or not at all, and takes the place of another only with `force`.

    Raises:
        ConfigError: a file is there already, or cannot be written, or is of no such kind; or there are not so many
            different problems.
    """
    if count < 1:
        raise ConfigError(f"count {count}: expected at least 1")
    if Path(destination).suffix != ".jsonl":
        raise ConfigError(f"{destination}: its name should end in .jsonl")
    for file in (destination, script):
        if file is not None and Path(file).exists() and not force:
            raise ConfigError(f"{file}: is there already; --force replaces it")
    made = list(rows(count, seed=seed, split=split))
    _write(Path(destination), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made))
    if script is not None:
        turns = {row["id"]: teacher_turns(row) for row in made}
        _write(Path(script), json.dumps(turns, indent=1, ensure_ascii=False) + "\n")


def _write(target: Path, text: str) -> None:
    target = Path(os.path.realpath(target))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8", newline="\n")
        os.replace(partial, target)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):  # there is none, or not even its folder
            partial.unlink()
