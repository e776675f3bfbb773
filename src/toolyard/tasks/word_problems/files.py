"""Write generated problems to files: tasks, and a teacher's answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from toolyard.errors import ConfigError
from toolyard.messages import JSON
from toolyard.tasks.prepare import write_lines, write_whole
from toolyard.tasks.word_problems.generator import rows, teacher_turns


def write_problems(
    destination: str | Path,
    count: int,
    *,
    seed: int = 0,
    split: str = "train",
    script: str | Path | None = None,
    force: bool = False,
) -> None:
    """Write `count` rows of `generator` to a `.jsonl` file.

    Write a teacher's answers to `script`, by task id, for `engine: {kind: scripted, script: …}`. Each file is written
    completely or not at all, and replaces an existing one only with `force`.

    Raises:
        ConfigError: a file already exists, cannot be written, or has an unknown type; or there are fewer distinct
            problems than `count`.
    """
    if count < 1:
        raise ConfigError(f"count {count}: expected at least 1")
    if Path(destination).suffix != ".jsonl":
        raise ConfigError(f"{destination}: its name must end in .jsonl")
    for file in (destination, script):
        if file is not None and Path(file).exists() and not force:
            raise ConfigError(f"{file}: already exists; --force replaces it")
    made = list(rows(count, seed=seed, split=split))
    write_whole(Path(destination).resolve(), write_lines, made)
    if script is not None:
        write_whole(Path(script).resolve(), _write_script, made)


def _write_script(path: Path, made: Iterable[JSON]) -> None:
    turns = {row["id"]: teacher_turns(row) for row in made}
    path.write_text(json.dumps(turns, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
