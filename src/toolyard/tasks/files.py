"""Read tasks from files: JSON lines, one JSON array, or parquet.

JSON lines are read one by one, so a file may be larger than memory; only the ids of previous rows are kept. An array
(`.json`) is read at once, parquet in batches.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal

from toolyard.errors import ConfigError, TaskError
from toolyard.tasks import bundled
from toolyard.tasks.protocol import Task
from toolyard.tasks.rows import Shape, Wording, ids_of, shape_of, task_of_row

OnBadRow = Literal["raise", "skip"]

MAX_LINE_BYTES = 64 * 1024 * 1024
"""A longer line is a bad row: most likely the file has no line ends."""
_CHUNK_BYTES = 1024 * 1024
_HEAD_BYTES = 4096
"""An array must start within this many bytes."""
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_SUFFIXES = (*_JSON_SUFFIXES, *(f"{suffix}.gz" for suffix in _JSON_SUFFIXES), ".parquet")
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is not a valid task."""

    file: str
    unit: str
    """line or row."""
    number: int
    """Counted from 1."""
    problem: str
    """The field, the value and how to fix it."""

    def __str__(self) -> str:
        return f"{self.file}: {self.unit} {self.number}: {self.problem}"


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as it is in the file, or why it cannot be read."""

    unit: str
    number: int
    value: Any = None
    problem: str | None = None


class TaskReader(Iterator[Task]):
    """Iterates over the tasks of one file, in order, and counts what was read. Created by `read_tasks`."""

    def __init__(
        self,
        path: Path,
        stem: str,
        wording: Wording,
        on_bad_row: OnBadRow,
        limit: int | None,
        report: Callable[[BadRow], object] | None,
    ) -> None:
        self.path = path
        self.stem = stem
        self.tasks = 0
        self.bad = 0
        """Number of skipped rows."""
        self.ended = False
        """Whether every row of the file has been read."""
        self.shapes: Counter[Shape] = Counter()
        self._wording = wording
        self._on_bad_row: OnBadRow = on_bad_row
        self._limit = limit
        self._report = report
        self._ids: set[str] = set()
        self._rows = raw_rows(path)

    def __next__(self) -> Task:
        """Return the next task.

        Raises:
            TaskError: a row is bad and bad rows are not skipped; the file cannot be read further; or it has no tasks.
        """
        if self.tasks == self._limit:
            self._rows.close()
            raise StopIteration
        for raw in self._rows:
            try:
                task, shape = self._task(raw)
            except TaskError as error:
                self._skip(BadRow(str(self.path), raw.unit, raw.number, str(error)))
                continue
            self._ids.add(task.id)
            self.tasks += 1
            self.shapes[shape] += 1
            return task
        self.ended = True
        if not self.tasks:
            raise TaskError(f"{self.path}: {f'all {self.bad} rows are bad' if self.bad else 'it has no rows'}")
        raise StopIteration

    def _task(self, raw: RawRow) -> tuple[Task, Shape]:
        if raw.problem is not None:
            raise TaskError(raw.problem)
        shape = shape_of(raw.value)
        return task_of_row(raw.value, self._id(raw), self._wording), shape

    def _id(self, raw: RawRow) -> str:
        """Return the row's own id, or one from its index or its position: always the same for the same file."""
        own, of_index = ids_of(raw.value, self.stem)
        if own is not None and own in self._ids:
            raise TaskError(f"id: {own!r} is also the id of an earlier row; ids must be unique or omitted")
        place = f"{self.stem}-{raw.number:06d}"
        # Merged datasets restart counting at 0.
        candidates = [own] if own is not None else [name for name in (of_index, place) if name is not None]
        for candidate in candidates:
            if candidate not in self._ids:
                return candidate
        raise TaskError(f"id: missing, and its position in the file, {place!r}, is the id of an earlier row")

    def _skip(self, bad: BadRow) -> None:
        if self._on_bad_row == "raise":
            raise TaskError(str(bad))
        self.bad += 1
        if self._report is not None:
            self._report(bad)


def open_tasks(
    name_or_path: str | Path,
    *,
    on_bad_row: OnBadRow = "raise",
    limit: int | None = None,
    report: Callable[[BadRow], object] | None = None,
    system: str | None = None,
    instruction: str | None = None,
    data_source: str | None = None,
) -> TaskReader:
    """Like `read_tasks`, but also accepts the name of a bundled set, which takes precedence: a file with the same name
    is `./word-problems`."""
    found = bundled.find(name_or_path)
    return read_tasks(
        name_or_path if found is None else found.path,
        on_bad_row=on_bad_row,
        limit=limit,
        report=report,
        system=system,
        instruction=instruction,
        data_source=data_source or (None if found is None else found.data_source),
    )


def read_tasks(
    path: str | Path,
    *,
    on_bad_row: OnBadRow = "raise",
    limit: int | None = None,
    report: Callable[[BadRow], object] | None = None,
    system: str | None = None,
    instruction: str | None = None,
    data_source: str | None = None,
) -> TaskReader:
    """Read the tasks of a file: `.jsonl`, `.ndjson`, `.json` (each also with `.gz`) or `.parquet`.

    Bad rows raise, or with `on_bad_row="skip"` are passed to `report`, counted and skipped. Problems with the file as a
    whole always raise. `limit` counts tasks, not rows. The other arguments change rows: see `Wording`.

    Raises:
        TaskError: the file is missing, has an unknown type or, while iterating, is bad.
        ConfigError: `limit` or `on_bad_row` is invalid.
        MissingDependencyError: it is parquet, and pyarrow is not installed.
    """
    if on_bad_row not in ("raise", "skip"):
        raise ConfigError(f"on_bad_row {on_bad_row!r}: expected 'raise' or 'skip'")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit {limit}: expected at least 1, or None for all tasks")
    found = Path(path)
    wording = Wording(system, instruction, data_source)
    return TaskReader(found, stem_of(found), wording, on_bad_row, limit, report)


def stem_of(path: Path) -> str:
    """Return the name without its suffix."""
    suffix = _suffix_of(path)
    return path.name.removesuffix(path.name[len(path.name) - len(suffix or "") :]) or path.name


def _suffix_of(path: Path) -> str | None:
    name = path.name.lower()
    return next((suffix for suffix in sorted(_SUFFIXES, key=len, reverse=True) if name.endswith(suffix)), None)


# Rows -----------------------------------------------------------------------------------------------------------------


def raw_rows(path: Path) -> Generator[RawRow]:
    """Yield the rows of a file unchanged. Errors that show without reading the file are raised immediately.

    Raises:
        TaskError, MissingDependencyError: as in `read_tasks`.
    """
    suffix = _suffix_of(path)
    if os.path.isdir(path):
        files = sorted(child.name for child in path.iterdir() if _suffix_of(child))
        inside = ", ".join(files[:_SHOWN_NAMES]) + (", …" if len(files) > _SHOWN_NAMES else "")
        raise TaskError(f"{path}: is a folder; name a file in it: {inside or 'it has no task files'}")
    if not os.path.exists(path):  # pathlib's version raises if the name is too long
        names = ", ".join(bundled.NAMES)
        raise TaskError(f"{path}: no such file; names of bundled sets: {names}")
    if suffix is None:
        raise TaskError(f"{path}: unknown file type; its name must end in one of {', '.join(_SUFFIXES)}")
    if suffix == ".parquet":
        from toolyard.tasks.parquet_pyarrow import read_parquet

        return _numbered(read_parquet(path))
    return _json_rows(
        path, packed=suffix.endswith(".gz"), may_be_array=suffix.startswith(".json") and not suffix.startswith(".jsonl")
    )


def _json_rows(path: Path, *, packed: bool, may_be_array: bool) -> Generator[RawRow]:
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            if may_be_array:
                head = file.read(_HEAD_BYTES).removeprefix(_BOM)
                file.seek(0)
                if head.lstrip().startswith(b"["):
                    yield from _numbered(_array(path, file.read()))
                    return
            yield from _lines(file)
    except (OSError, EOFError, zlib.error) as error:  # a damaged archive, or a disk error
        raise TaskError(f"{path}: cannot be read: {error}") from None


def _numbered(rows: Iterable[Any]) -> Generator[RawRow]:
    for number, row in enumerate(rows, 1):
        bad = isinstance(row, TaskError)
        yield RawRow("row", number, None if bad else row, str(row) if bad else None)


def _array(path: Path, content: bytes) -> list[Any]:
    try:
        return _decoded(content.removeprefix(_BOM))
    except ValueError as error:
        raise TaskError(f"{path}: {error}") from None


def _lines(file: BufferedIOBase) -> Generator[RawRow]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            yield RawRow("line", number, problem=f"has more than {MAX_LINE_BYTES:,} bytes; does it have line ends?")
            while line and not line.endswith(b"\n"):
                line = file.readline(_CHUNK_BYTES)
            continue
        content = (line.removeprefix(_BOM) if number == 1 else line).strip()
        if not content:
            continue
        try:
            yield RawRow("line", number, _decoded(content))
        except ValueError as error:
            yield RawRow("line", number, problem=str(error))


def _decoded(content: bytes) -> Any:
    """Decode a row.

    Raises:
        ValueError: it is not JSON, or cannot be given to a model.
    """
    try:
        found: Any = json.loads(content.decode(), parse_constant=_no_constant)
        if _SURROGATE.search(content):
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {content[error.start]:#04x} at byte {error.start + 1}") from None
    except UnicodeEncodeError:
        raise ValueError("a lone \\ud… escape is half a character, which no tokenizer can read") from None
    except json.JSONDecodeError as error:
        near = error.doc[max(0, error.pos - 20) : error.pos + 20]
        raise ValueError(f"not valid JSON: {error.msg} (character {error.pos + 1}, near {near!r})") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    return found


def _no_constant(word: str) -> float:
    raise ValueError(f"not valid JSON: {word} is not a JSON number")
