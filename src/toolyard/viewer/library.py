"""The library: all trajectories in a folder, found through an index.

    with Library.open(folder, progress=…) as library:
        for row in library.rows(parse_query("score<0.5 sort:-time"), limit=50):
            trajectory = library.trajectory(row.number)

The index next to the dump is built once and grows with it; `refresh` indexes what was added. Several threads may use a
library at once, and several viewers may have the same folder open.
"""

# ruff: noqa: S608 - only constants are put together here; every value is a parameter
from __future__ import annotations

import os
import threading
import time
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from toolyard.errors import RecordError
from toolyard.records.trajectory import Trajectory
from toolyard.viewer.calls import Call, report_of
from toolyard.viewer.groups import Sample, changes_between, groups_of
from toolyard.viewer.index.build import Builder, Progress
from toolyard.viewer.index.files import MAX_LINE, DumpFile, Source
from toolyard.viewer.index.place import IndexFolder, find_index_folder
from toolyard.viewer.index.rows import label, trajectory_in
from toolyard.viewer.index.sql import (
    ATTEMPT,
    CALL,
    LOOKED_UP,
    NATURAL,
    NOT_A_BRANCH,
    REWARD_BY_NAME,
    ROW,
    SAMPLE,
    TABLES,
    order_by,
    step_summaries,
    values_of,
    where,
    where_calls,
)
from toolyard.viewer.index.store import State, Store, bytes_done
from toolyard.viewer.protocol import Attempt, CallReport, Group, Row, StepSummary, TaskChange
from toolyard.viewer.query import Query

MEASURES = ("score", "turns", "tools", "response_tokens", "seconds")
"""The numbers of a row whose distribution is shown."""
RAW_CHARS = 1_000_000
_POLL_SECONDS = 0.05
_AT_ONCE = 500
"""Rows fetched by one statement."""
_ANSWERS = 12
"""Maximum cached results; each takes eight bytes per row."""
_MOST_OPEN = 64
"""Files open at once while lines are read."""
_EVERYTHING = Query()

T = TypeVar("T")


class RelatedRows(NamedTuple):
    group: list[Row]
    """The other samples of the same task (or prompt, if lines name no task), in the same step and run."""
    elsewhere: list[Row]
    """The same request in other lines, usually of other runs."""


class _Place(NamedTuple):
    """Where a line is."""

    file: str
    start: int
    size: int
    crc: int


_PLACE = "files.name, rows.start, rows.size, rows.crc"


class _OpenFiles:
    """Reads lines, and keeps the files open between them: checking and opening one takes longer than reading a line."""

    def __init__(self, source: Source, file_of: Callable[[str], DumpFile | None]) -> None:
        self._source = source
        self._file_of = file_of
        self._opened = ExitStack()
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._descriptors.clear()
        self._opened.close()

    def read(self, place: _Place, most: int, *, cut: bool = False) -> bytes | None:
        """The line; None if it is gone. If it is longer than `most` bytes: the first ones if it may be `cut`, else
        None."""
        if place.size > most and not cut:
            return None
        try:
            fd = self._descriptor(place.file)
            line = None if fd is None else os.pread(fd, min(place.size, most), place.start)
        except OSError:
            return None
        if line is None or len(line) < place.size:
            return line if cut else None
        # The file may have been replaced after it was indexed: return no line rather than another one.
        return line if zlib.crc32(line) == place.crc else None

    def _descriptor(self, name: str) -> int | None:
        if name not in self._descriptors:
            file = self._file_of(name)
            if file is None:
                return None
            if len(self._descriptors) >= _MOST_OPEN:
                self.__exit__()
            self._descriptors[name] = self._opened.enter_context(self._source.opened(file))
        return self._descriptors[name]


class _Index(NamedTuple):
    place: IndexFolder
    store: Store

    def close(self) -> None:
        self.store.close()
        self.place.close()

    def is_there(self) -> bool:
        return self.place.is_there() and self.store.is_there()


class Library:
    """All trajectories in a folder; see `open`. Any method may raise RecordError if the index or the folder is gone or
    unreadable."""

    folder: Path
    """File names are relative to it."""

    def __init__(self, path: Path, index_dir: Path | None, progress: Progress | None) -> None:
        self._source = Source(path)
        self.folder = path.parent if self._source.is_file else path
        self._index_dir = index_dir
        self._refreshing = threading.Lock()
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._files: dict[str, DumpFile] = {}
        self._retired: list[_Index] = []
        self._closed = False
        self._index = self._opened(progress)
        self._seen = self._index.store.state().changes

    @classmethod
    def open(
        cls, folder: str | PathLike[str], *, progress: Progress | None = None, index_dir: Path | None = None
    ) -> Library:
        """Build the index, or bring it up to date. If another process is doing that, wait for it.

        `folder`: a dump, a folder of dumps, or one file. `progress` is called with the bytes done and the total bytes;
        an exception from it ends the opening, and the index built so far is kept. `index_dir`: folder for the index;
        by default `.toolyard-index` in the dump or, if that cannot be written, the cache.

        Raises:
            RecordError: there is no such folder, or no writable place for the index.
        """
        return cls(Path(folder), index_dir, progress)

    def close(self) -> None:
        """Close the library. Closing twice is allowed; all other methods fail afterwards."""
        with self._refreshing:
            self._closed = True
            for index in (*self._retired, self._index):
                index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Following --------------------------------------------------------------------------------------------------------

    def refresh(self) -> int:
        """Index what was added. Returns the number of rows added or removed since the last call, by any process."""
        with self._refreshing:
            index = self._index
            if self._closed:
                raise RecordError(f"the library of {self.folder} is closed")
            if index.is_there():
                with index.place.writing() as granted:
                    if granted:  # otherwise another process is updating it
                        Builder(index.store, self._source).run()
                changes = index.store.state().changes
                came, self._seen = changes - self._seen, changes
                return came
            # The index was deleted, usually with the dump, which is being rewritten. Readers may still use the old one.
            self._source.files()  # raises if the folder is still gone
            self._index = self._opened(None)
            self._retired.append(index)
            gone, self._seen = self._seen, self._index.store.state().changes
            return gone + self._seen

    @property
    def generation(self) -> int:
        """Grows when rows disappear or get new numbers, because a file was replaced or deleted."""
        return self._index.store.state().generation

    def _opened(self, progress: Progress | None) -> _Index:
        place = find_index_folder(self._source, self._index_dir)
        try:
            while True:
                with place.writing() as granted:
                    if granted:
                        store = Store(place)
                        try:
                            Builder(store, self._source, progress).run()
                        except BaseException:
                            store.close()
                            raise
                        return _Index(place, store)
                if progress is not None:
                    total = sum(file.signature.size for file in self._source.files())
                    progress(min(bytes_done(place), total), total)
                time.sleep(_POLL_SECONDS)
        except BaseException:
            place.close()
            raise

    # Rows -------------------------------------------------------------------------------------------------------------

    def count(self, query: Query | None = None) -> int:
        return len(self._order(query))

    @property
    def torn(self) -> int:
        """How many files have an incomplete last line, which has no row: it is still being written, or was cut off."""
        with self._index.store.reading() as connection:
            (count,) = connection.execute(
                "SELECT count(*) FROM files WHERE done >= 0 AND done < size AND name LIKE '%.jsonl'"
            ).fetchone()
        return count

    def rows(self, query: Query | None = None, *, offset: int = 0, limit: int = 100) -> list[Row]:
        """The rows that match, in the query's order."""
        start = max(0, offset)
        return self.fetch(self._order(query)[start : start + max(0, limit)])

    def fetch(self, numbers: Sequence[int]) -> list[Row]:
        """The rows that exist, in the order of the numbers."""
        found: dict[int, Row] = {}
        for start in range(0, len(numbers), _AT_ONCE):
            some = numbers[start : start + _AT_ONCE]
            rows = self._looked_up(f"rows.number IN ({', '.join('?' * len(some))})", *some, order="1")
            found |= {row.number: row for row in rows}
        return [found[number] for number in numbers if number in found]

    def row(self, number: int) -> Row | None:
        return next(iter(self.fetch([_bound(number)])), None)

    def at(self, file: str, line: int) -> Row | None:
        """The row at a line of a file, named relative to the folder."""
        named = file.encode("utf-8", "replace").decode(), _bound(line)
        return next(iter(self._looked_up("files.name = ? AND rows.line = ?", *named, tables=TABLES)), None)

    def position(self, number: int, query: Query | None = None) -> int | None:
        """Its position in the query's order, from 0; None if it does not match."""
        try:
            return self._order(query).index(number)
        except ValueError:
            return None

    def find(self, request_id: str) -> list[Row]:
        """The lines of a request in all runs. A prefix of the id is enough if it is unique."""
        wanted = label(request_id)
        if not wanted:
            return []
        exact = self._looked_up("rows.request_id = ?", wanted)
        if exact:
            return exact
        between = "rows.request_id >= ? AND rows.request_id < ?"
        ends = wanted, f"{wanted}\U0010ffff"
        with self._index.store.reading() as connection:
            ids = connection.execute(f"SELECT DISTINCT request_id FROM rows WHERE {between} LIMIT 2", ends).fetchall()
        return self._looked_up(between, *ends) if len(ids) == 1 else []

    def related(self, number: int) -> RelatedRows:
        """The rows to compare with. Empty for a line that is damaged or gone."""
        with self._index.store.reading() as connection:
            found = connection.execute(
                f"SELECT rows.group_id, rows.task, rows.step, files.run, rows.request_id FROM {LOOKED_UP} "
                "WHERE rows.number = ? AND rows.damaged = ''",
                (_bound(number),),
            ).fetchone()
        if found is None:
            return RelatedRows([], [])
        *same, request_id = found
        group = self._looked_up(
            "rows.group_id = ? AND rows.task = ? AND rows.step = ? AND files.run = ? AND rows.damaged = ''",
            *same,
            order=f"rows.sample, {NATURAL}",
        )
        elsewhere = self._looked_up("rows.request_id = ?", request_id) if request_id else []
        return RelatedRows(*([row for row in rows if row.number != number] for rows in (group, elsewhere)))

    def steps(self, query: Query | None = None) -> list[StepSummary]:
        """Summaries of the matching rows, by step."""

        def summed_up(store: Store, state: State) -> list[StepSummary]:
            condition, values = _where(wanted, store, state)
            with store.reading() as connection:
                return step_summaries(connection, condition, values)

        wanted = query or _EVERYTHING
        return list(self._remembered("steps", wanted, summed_up))

    def scores(self, query: Query | None = None) -> list[tuple[int, float | None]]:
        """The step and the score of every matching row that is not damaged."""

        def found(store: Store, state: State) -> list[tuple[int, float | None]]:
            condition, values = _where(wanted, store, state)
            with store.reading() as connection:
                return connection.execute(
                    f"SELECT rows.step, rows.score FROM {LOOKED_UP} WHERE {condition} AND rows.damaged = ''", values
                ).fetchall()

        wanted = query or _EVERYTHING
        return list(self._remembered("scores", wanted, found))

    def measures(self, query: Query | None = None) -> list[tuple[float | None, ...]]:
        """The `MEASURES` of every matching row that is not damaged."""
        store = self._index.store
        condition, values = _where(query or _EVERYTHING, store, store.state())
        columns = ", ".join(f"rows.{name}" for name in MEASURES)
        with store.reading() as connection:
            return connection.execute(
                f"SELECT {columns} FROM {LOOKED_UP} WHERE ({condition}) AND rows.damaged = ''", values
            ).fetchall()

    def groups(self, query: Query | None = None) -> list[Group]:
        """The matching rows that are not damaged, by step, run and task, in the order of their first lines."""

        def found(store: Store, state: State) -> list[Group]:
            grouped = groups_of(self._samples(wanted, store, state))
            return sorted(grouped, key=lambda group: (group.step, min(group.numbers)))

        wanted = query or _EVERYTHING
        return self._remembered("groups", wanted, found)

    def changes(self, before: Query, after: Query) -> list[TaskChange]:
        """What became of each task between two selections, such as two steps or two runs."""
        store = self._index.store
        state = store.state()
        return changes_between(self._samples(before, store, state), self._samples(after, store, state))

    def attempts(self, query: Query | None = None, *, reward: str | None = None) -> list[Attempt]:
        """The matching rows that are not damaged, in the order of their lines, with the score, or with the part of the
        reward that is named. A session counts once, not each of its branches."""
        store = self._index.store
        condition, values = _where(query or _EVERYTHING, store, store.state())
        score, named = ("rows.score", ()) if reward is None else (REWARD_BY_NAME, (reward,))
        with store.reading() as connection:
            found = connection.execute(
                f"SELECT {ATTEMPT}, {score} FROM {TABLES} WHERE ({condition}) AND rows.damaged = '' AND {NOT_A_BRANCH} "
                f"ORDER BY {NATURAL}",
                (*named, *values),
            )
            return list(map(Attempt._make, found))

    def calls(self, query: Query | None = None) -> CallReport:
        """The tool calls of the matching rows. Conditions on calls, such as `tool:search`, also choose among these."""

        def found(store: Store, state: State) -> CallReport:
            condition, values = _where(wanted, store, state)
            calls, more = where_calls(wanted)
            with store.reading() as connection:
                rows = connection.execute(
                    f"SELECT {CALL} FROM {LOOKED_UP} CROSS JOIN calls ON calls.number = rows.number "
                    f"WHERE ({condition}) AND ({calls})",
                    (*values, *more),
                )
                return report_of(map(Call._make, rows))

        wanted = query or _EVERYTHING
        return self._remembered("calls", wanted, found)

    def calls_of(self, numbers: Sequence[int]) -> list[Call]:
        """The tool calls of these rows, row by row in their order."""
        found: list[Call] = []
        with self._index.store.reading() as connection:
            for start in range(0, len(numbers), _AT_ONCE):
                some = numbers[start : start + _AT_ONCE]
                found += map(
                    Call._make,
                    connection.execute(
                        f"SELECT {CALL} FROM calls WHERE number IN ({', '.join('?' * len(some))}) ORDER BY number, at",
                        some,
                    ),
                )
        return found

    def runs(self) -> list[str]:
        """The folders with files, relative to this one; an empty name is this one itself."""
        with self._index.store.reading() as connection:
            found = connection.execute("SELECT run FROM files GROUP BY run ORDER BY min(place)")
            return [run for (run,) in found]

    def values(self, field: str, prefix: str = "") -> list[tuple[str, int]]:
        """The 20 most frequent values of a text field that contain `prefix`, those that begin with it first, and how
        many rows or calls have them."""
        with self._index.store.reading() as connection:
            return values_of(connection, field, prefix)

    def reward_names(self) -> list[str]:
        with self._index.store.reading() as connection:
            return [name for (name,) in connection.execute("SELECT DISTINCT name FROM rewards ORDER BY 1 LIMIT 100")]

    def _samples(self, query: Query, store: Store, state: State) -> list[Sample]:
        condition, values = _where(query, store, state)
        with store.reading() as connection:
            found = connection.execute(
                f"SELECT {SAMPLE} FROM {LOOKED_UP} WHERE ({condition}) AND rows.damaged = '' AND {NOT_A_BRANCH} "
                "ORDER BY rows.step, files.run, rows.group_id, rows.task, rows.sample, rows.number",
                values,
            )
            return list(map(Sample._make, found))

    # Lines ------------------------------------------------------------------------------------------------------------

    def trajectory(self, number: int) -> Trajectory | None:
        """None if the line is damaged or gone."""
        line = self._line(number, MAX_LINE)
        try:
            return None if line is None else trajectory_in(line)
        except RecordError:
            return None

    def raw(self, number: int, max_chars: int = RAW_CHARS) -> str:
        """The raw line, or its first `max_chars`; invalid UTF-8 is replaced. Empty if the line is gone."""
        line = self._line(number, max(0, max_chars) * 4 + 1, cut=True)
        return "" if line is None else line.decode("utf-8", "replace").rstrip("\n")[:max_chars]

    def lines(self, query: Query | None = None, *, limit: int | None = None) -> Iterator[bytes | None]:
        """The matching lines in the query's order, as they are in their files. None for a line that is damaged, or was
        changed after it was indexed."""
        return self.read(self._order(query)[:limit])

    def read(self, numbers: Sequence[int]) -> Iterator[bytes | None]:
        """The lines of these rows, in their order. None as in `lines`, and for a number that no row has."""
        with _OpenFiles(self._source, self._file) as files:
            for start in range(0, len(numbers), _AT_ONCE):
                some = numbers[start : start + _AT_ONCE]
                with self._index.store.reading() as connection:
                    found = connection.execute(
                        f"SELECT rows.number, rows.damaged, {_PLACE} FROM {LOOKED_UP} "
                        f"WHERE rows.number IN ({', '.join('?' * len(some))})",
                        some,
                    )
                    places = {number: None if damaged else _Place(*place) for number, damaged, *place in found}
                for number in some:
                    place = places.get(number)
                    yield None if place is None else files.read(place, MAX_LINE)

    def has_file(self, path: Path) -> bool:
        """Whether the file at `path` is one of the library's."""
        real = path.resolve()
        return any(file.path == real for file in self._source.files())

    def contains(self, number: int, needle: str) -> bool:
        """Whether any text of the trajectory contains `needle`, ignoring case."""
        store = self._index.store
        with store.reading() as connection:
            places = connection.execute("SELECT text_start, text_end FROM rows WHERE number = ?", (_bound(number),))
            found = places.fetchone()
        if found is None:
            return False
        start, end = found
        return store.text.contains(start, end, needle)

    def next_match(
        self, needle: str, number: int | None, query: Query | None = None, *, backwards: bool = False
    ) -> Row | None:
        """The next row after `number` that contains `needle`, in the query's order. Wraps around, and ends with the row
        itself. Starts at the first row if `number` is None or does not match the query."""
        store = self._index.store
        found = set(store.text.lines_with(needle, store.state().text_end))
        order = self._order(query)
        try:
            here = order.index(number) if number is not None else None
        except ValueError:
            here = None
        if backwards:
            before = len(order) if here is None else here
            around = (*order[:before][::-1], *order[before:][::-1])
        else:
            after = 0 if here is None else here + 1
            around = (*order[after:], *order[:after])
        match = next((candidate for candidate in around if candidate in found), None)
        return None if match is None else self.row(match)

    # ------------------------------------------------------------------------------------------------------------------

    def _order(self, query: Query | None) -> array[int]:
        """The numbers of all matching rows."""

        def in_order(store: Store, state: State) -> array[int]:
            condition, values = _where(wanted, store, state)
            with store.reading() as connection:
                found = connection.execute(
                    f"SELECT rows.number FROM {TABLES} WHERE {condition} ORDER BY {order_by(wanted)}", values
                )
                return array("q", (number for (number,) in found))

        wanted = query or _EVERYTHING
        return self._remembered("order", wanted, in_order)

    def _remembered(self, what: str, query: Query, answer: Callable[[Store, State], T]) -> T:
        """A cached result, valid as long as no row was added or removed."""
        store = self._index.store
        state = store.state()
        key = (what, query, state.generation, state.changes)
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
        found = answer(store, state)
        with self._lock:
            self._answers[key] = found
            if len(self._answers) > _ANSWERS:
                self._answers.popitem(last=False)
        return found

    def _looked_up(self, condition: str, *values: Any, order: str = NATURAL, tables: str = LOOKED_UP) -> list[Row]:
        with self._index.store.reading() as connection:
            found = connection.execute(f"SELECT {ROW} FROM {tables} WHERE {condition} ORDER BY {order}", values)
            return [Row(*columns) for columns in found]

    def _line(self, number: int, most: int, *, cut: bool = False) -> bytes | None:
        """The line; if it is longer than `most` bytes, the first ones if it may be `cut`, otherwise None."""
        with self._index.store.reading() as connection:
            found = connection.execute(
                f"SELECT {_PLACE} FROM {LOOKED_UP} WHERE rows.number = ?", (_bound(number),)
            ).fetchone()
        with _OpenFiles(self._source, self._file) as files:
            return None if found is None else files.read(_Place(*found), most, cut=cut)

    def _file(self, name: str) -> DumpFile | None:
        with self._lock:
            if name not in self._files:
                self._files = {file.name: file for file in self._source.files()}
            return self._files.get(name)


def _bound(number: int) -> int:
    """A number in SQLite's range. A link may contain any number; no row has a negative one."""
    return number if 0 <= number < 1 << 63 else -1


def _where(query: Query, store: Store, state: State) -> tuple[str, list[Any]]:
    """The query as SQL, without rows committed after `state`: their text is not searched."""
    condition, values = where(query, lambda needle: store.text.lines_with(needle, state.text_end))
    return f"({condition}) AND rows.number <= {state.last_number}", values
