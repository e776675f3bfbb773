"""Convert published datasets to verl's format."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from toolyard.errors import ConfigError, TaskError
from toolyard.messages import JSON
from toolyard.tasks import bundled
from toolyard.tasks.files import BadRow, RawRow, raw_rows, stem_of
from toolyard.tasks.protocol import Task
from toolyard.tasks.rows import Shape, Wording, gsm8k_kwargs, shape_of, task_of_row
from toolyard.whole_file import replacing

GSM8K_SYSTEM = (
    "You solve math problems step by step. Use the tools that you are given to compute, and to check your answer "
    "before you give it. Put the final answer at the end, in the format `#### <answer>`."
)
_SUFFIXES = (".jsonl", ".parquet")


@dataclass(slots=True)
class Prepared:
    """The result of `prepare_gsm8k`."""

    read: int = 0
    written: int = 0
    skipped: list[BadRow] = field(default_factory=list[BadRow])


def prepare_gsm8k(
    source: str | Path,
    destination: str | Path,
    *,
    system: str = GSM8K_SYSTEM,
    split: str | None = None,
    limit: int | None = None,
    skip_bad_rows: bool = False,
    force: bool = False,
) -> Prepared:
    """Write rows in GSM8K's format as verl's, with the kwargs of `calc_gsm8k_reward` and `code_interpreter`.

    `source` is a file, or the name of a bundled set; `destination` ends in `.jsonl` or `.parquet`. It is written
    completely or not at all, and replaces an existing file only with `force`. `split` defaults to the source's name;
    `extra_info.index` counts the source's rows from 0, including bad ones. An empty `system` means no system message.
    `limit` counts written rows.

    Raises:
        TaskError: a row is bad and bad rows are not skipped, or none is left; the source cannot be read.
        ConfigError: the destination already exists, cannot be written, or has an unknown type.
        MissingDependencyError: parquet without pyarrow.
    """
    found = bundled.find(source)
    origin, target = (source if found is None else found.path), Path(os.path.realpath(destination))
    wording = Wording(system=system, data_source=None if found is None else found.data_source)
    write = _writer_for(target)
    if target.exists() and not force:
        raise ConfigError(f"{destination}: already exists; --force replaces it")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit {limit}: expected at least 1, or None for all rows")
    done = Prepared()
    tasks = _gsm8k_tasks(origin, raw_rows(origin), wording, skip_bad_rows, done)
    named = split or stem_of(origin)
    write_whole(target, write, (_verl_row(task, named, index) for index, task in islice(tasks, limit)))
    return done


def _gsm8k_tasks(
    origin: str | Path, rows: Iterator[RawRow], wording: Wording, skip: bool, done: Prepared
) -> Iterator[tuple[int, Task]]:
    """Yield each task with the number of its row."""
    for raw in rows:
        done.read += 1
        try:
            if raw.problem is not None:
                raise TaskError(raw.problem)
            if shape_of(raw.value) is not Shape.GSM8K:
                raise TaskError("expected GSM8K's own fields, question and answer")
            task = task_of_row(raw.value, "", wording)
        except TaskError as error:
            bad = BadRow(raw.file or str(origin), raw.unit, raw.number, str(error))
            if not skip:
                raise TaskError(str(bad)) from None
            done.skipped.append(bad)
            continue
        done.written += 1
        yield done.read - 1, task
    if not done.written:
        why = f"all {done.read} rows are bad" if done.read else "it has no rows"
        raise TaskError(f"{origin}: {why}")


def _verl_row(task: Task, split: str, index: int) -> JSON:
    return {
        "data_source": task.data_source,
        "prompt": [{"role": message.role, "content": message.content} for message in task.messages],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": task.ground_truth},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": str(task.extra_info["answer"]),
            "question": task.extra_info["question"],
            "need_tools_kwargs": True,
            "tools_kwargs": gsm8k_kwargs(task.ground_truth),
        },
    }


# Files ----------------------------------------------------------------------------------------------------------------

_Writer = Callable[[Path, Iterable[JSON]], object]


def _writer_for(target: Path) -> _Writer:
    if target.suffix == ".parquet":
        from toolyard.tasks.parquet_pyarrow import write_parquet

        return write_parquet
    if target.suffix != ".jsonl":
        raise ConfigError(f"{target}: its name must end in {' or '.join(_SUFFIXES)}, which determines the format")
    return write_lines


def write_lines(path: Path, rows: Iterable[JSON]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_whole(target: Path, write: _Writer, rows: Iterable[JSON]) -> None:
    """Write the file with `write`, completely or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as partial:
            write(partial, rows)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from None
