"""Read tasks from files (JSON lines, one JSON array, parquet, Arrow), folders of them, or the Hugging Face hub.

JSON lines are read one by one, so a file may be larger than memory; only the ids of previous rows are kept. An array
(`.json`) is read at once, parquet and Arrow in batches, and a data set of the hub as it arrives.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal, cast

from toolyard.errors import ConfigError, TaskError
from toolyard.tasks import bundled, folders, hub_datasets
from toolyard.tasks.protocol import Task
from toolyard.tasks.rows import Shape, Wording, ids_of, shape_of, task_of_row

OnBadRow = Literal["raise", "skip"]

MAX_LINE_BYTES = 64 * 1024 * 1024
"""A longer line is a bad row: most likely the file has no line ends."""
_CHUNK_BYTES = 1024 * 1024
_HEAD_BYTES = 4096
"""An array must start within this many bytes."""
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_SUFFIXES = (*_JSON_SUFFIXES, *(f"{suffix}.gz" for suffix in _JSON_SUFFIXES), ".parquet", folders.ARROW)
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


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
    file: str = ""
    """The file of a folder."""
    place: int = 0
    """Among all rows of a folder, from 1; 0 for a single file, where `number` says it."""


class TaskReader(Iterator[Task]):
    """Iterates over the tasks of one source, in order, and counts what was read. Created by `read_tasks`."""

    def __init__(
        self,
        source: str | Path,
        stem: str,
        wording: Wording,
        on_bad_row: OnBadRow,
        limit: int | None,
        report: Callable[[BadRow], object] | None,
        fields: Mapping[str, str],
    ) -> None:
        self.source = str(source)
        self.stem = stem
        self.tasks = 0
        self.bad = 0
        """Number of skipped rows."""
        self.ended = False
        """Whether every row has been read."""
        self.shapes: Counter[Shape] = Counter()
        self._wording = wording
        self._on_bad_row: OnBadRow = on_bad_row
        self._limit = limit
        self._report = report
        self._ids: set[str] = set()
        self._fields = dict(fields)
        self._rows = raw_rows(source)

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
                self._skip(BadRow(raw.file or self.source, raw.unit, raw.number, str(error)))
                continue
            self._ids.add(task.id)
            self.tasks += 1
            self.shapes[shape] += 1
            return task
        self.ended = True
        if not self.tasks:
            raise TaskError(f"{self.source}: {f'all {self.bad} rows are bad' if self.bad else 'it has no rows'}")
        raise StopIteration

    def _task(self, raw: RawRow) -> tuple[Task, Shape]:
        if raw.problem is not None:
            raise TaskError(raw.problem)
        row = renamed(raw.value, self._fields)
        shape = shape_of(row)
        return task_of_row(row, self._id(raw, row), self._wording), shape

    def _id(self, raw: RawRow, row: Any) -> str:
        """Return the row's own id, or one from its index or its position: always the same for the same file."""
        own, of_index = ids_of(row, self.stem)
        if own is not None and own in self._ids:
            raise TaskError(f"id: {own!r} is also the id of an earlier row; ids must be unique or omitted")
        place = f"{self.stem}-{raw.place or raw.number:06d}"
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
    fields: Mapping[str, str] | None = None,
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
        fields=fields,
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
    fields: Mapping[str, str] | None = None,
) -> TaskReader:
    """Read the tasks of a file (`.jsonl`, `.ndjson`, `.json`, each also with `.gz`, `.parquet` or `.arrow`), of a
    folder of such files (`FOLDER` or `FOLDER:SPLIT`, see `folders`), or of the hub (`hf://…`, see `hub_datasets`).

    Tasks of the hub have its name for the data set as their data source, unless their rows name one.

    `fields` renames fields of rows: `{"prompt": "problem"}` takes `problem` as the prompt.

    Bad rows raise, or with `on_bad_row="skip"` are passed to `report`, counted and skipped. Problems with the file as a
    whole always raise. `limit` counts tasks, not rows. The other arguments change rows: see `Wording`.

    Raises:
        TaskError: the file is missing, has an unknown type or, while iterating, is bad.
        ConfigError: `limit` or `on_bad_row` is invalid.
        MissingDependencyError: it is parquet or Arrow without pyarrow, or on the hub without `datasets`.
    """
    if on_bad_row not in ("raise", "skip"):
        raise ConfigError(f"on_bad_row {on_bad_row!r}: expected 'raise' or 'skip'")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit {limit}: expected at least 1, or None for all tasks")
    if data_source is None and str(path).startswith(hub_datasets.SCHEME):
        data_source = hub_datasets.parse_name(str(path)).name
    wording = Wording(system, instruction, data_source)
    return TaskReader(path, stem_of(path), wording, on_bad_row, limit, report, fields or {})


def stem_of(source: str | Path) -> str:
    """Return the name without its suffix; of a folder and of the hub with the split."""
    if str(source).startswith(hub_datasets.SCHEME):
        asked = hub_datasets.parse_name(str(source))
        return "-".join(part for part in (asked.name.partition("/")[2], asked.config, asked.split) if part)
    path, split = _place_of(source)
    if os.path.isdir(path):
        return "-".join(part for part in (path.resolve().name, split) if part)
    suffix = _suffix_of(path)
    return path.name.removesuffix(path.name[len(path.name) - len(suffix or "") :]) or path.name


def _suffix_of(path: Path) -> str | None:
    name = path.name.lower()
    return next((suffix for suffix in sorted(_SUFFIXES, key=len, reverse=True) if name.endswith(suffix)), None)


# Rows -----------------------------------------------------------------------------------------------------------------


def renamed(row: Any, fields: Mapping[str, str]) -> Any:
    """
    Raises:
        TaskError: a field is missing.
    """
    if not fields or not isinstance(row, Mapping):
        return row
    given = cast("Mapping[str, Any]", row)
    if missing := [name for name in fields.values() if name not in given]:
        raise TaskError(f"it has no field {missing[0]!r} to rename; fields: {', '.join(map(str, given))}")
    kept = {name: value for name, value in given.items() if name not in fields.values()}
    return {**kept, **{name: given[old] for name, old in fields.items()}}


def raw_rows(source: str | Path) -> Generator[RawRow]:
    """Yield the rows of a file, a folder or the hub unchanged. Errors that show without reading rows are raised
    immediately.

    Raises:
        TaskError, MissingDependencyError: as in `read_tasks`.
    """
    if str(source).startswith(hub_datasets.SCHEME):
        return _numbered(hub_datasets.hub_rows(str(source)))
    path, split = _place_of(source)
    if os.path.isdir(path):
        return _folder_rows(folders.files_in(path, split).files)
    return _file_rows(path)


def _place_of(source: str | Path) -> tuple[Path, str | None]:
    """`FOLDER:SPLIT` as two, unless there is such a file."""
    text = str(source)
    folder, _, split = text.rpartition(":")
    if folder and split and not os.path.exists(text) and os.path.isdir(folder):
        return Path(folder), split
    return Path(source), None


def _folder_rows(files: Sequence[Path]) -> Generator[RawRow]:
    rows = ((file, raw) for file in files for raw in _file_rows(file))
    for place, (file, raw) in enumerate(rows, 1):
        yield replace(raw, file=str(file), place=place)


def _file_rows(path: Path) -> Generator[RawRow]:
    suffix = _suffix_of(path)
    if not os.path.exists(path):  # pathlib's version raises if the name is too long
        names = ", ".join(bundled.NAMES)
        raise TaskError(f"{path}: no such file; names of bundled sets: {names}")
    if suffix is None:
        raise TaskError(f"{path}: unknown file type; its name must end in one of {', '.join(_SUFFIXES)}")
    if suffix == ".parquet":
        from toolyard.tasks.parquet_pyarrow import read_parquet

        return _numbered(read_parquet(path))
    if suffix == folders.ARROW:
        from toolyard.tasks.parquet_pyarrow import read_arrow

        return _numbered(read_arrow(path))
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
