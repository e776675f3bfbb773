"""Read and write parquet files; read Arrow files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from toolyard.errors import MissingDependencyError, TaskError
from toolyard.messages import JSON

try:
    pyarrow: Any = import_module("pyarrow")  # it is barely annotated
    parquet: Any = import_module("pyarrow.parquet")
    ipc: Any = import_module("pyarrow.ipc")
except ImportError as error:
    raise MissingDependencyError("pyarrow", "parquet", "reading and writing parquet and Arrow files") from error

_ROWS_READ = 256
"""Maximum rows in memory: a row of an image dataset may have megabytes."""
_ROWS_WRITTEN = 4096
"""Rows per row group."""


def read_parquet(path: Path) -> Iterator[JSON | TaskError]:
    """Yield all rows in order; an error in place of one that cannot be decoded.

    Raises:
        TaskError: the file is not parquet, or is damaged.
    """
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_READ, use_threads=False):
                yield from _rows_of(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskError(f"{path}: cannot be read as parquet: {error}") from None


def read_arrow(path: Path) -> Iterator[JSON | TaskError]:
    """Like `read_parquet`, for Arrow's formats for streams, which `datasets` writes, and for files."""
    try:
        with pyarrow.memory_map(str(path)) as source:
            try:
                batches: Iterable[Any] = ipc.open_stream(source)
            except pyarrow.ArrowInvalid:
                file = ipc.open_file(source)
                batches = (file.get_batch(number) for number in range(file.num_record_batches))
            for batch in batches:
                for start in range(0, batch.num_rows, _ROWS_READ):
                    yield from _rows_of(batch.slice(start, _ROWS_READ))
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskError(f"{path}: cannot be read as Arrow: {error}") from None


def _rows_of(batch: Any) -> Iterable[JSON | TaskError]:
    try:
        return batch.to_pylist(maps_as_pydicts="strict")
    except (ValueError, KeyError, OverflowError) as error:
        if batch.num_rows == 1:
            return [TaskError(f"the row cannot be decoded: {error}")]
        # One bad row must not lose the others of its batch.
        return [row for index in range(batch.num_rows) for row in _rows_of(batch.slice(index, 1))]


def write_parquet(path: Path, rows: Iterable[JSON]) -> int:
    """Write `rows`, all with the same fields; return their number. Without rows, no file is written."""
    written, writer, batch = 0, None, list[JSON]()
    try:
        for row in rows:
            batch.append(row)
            written += 1
            if len(batch) == _ROWS_WRITTEN:
                writer, batch = _add(path, writer, batch), []
        if batch:
            writer = _add(path, writer, batch)
    finally:
        if writer is not None:
            writer.close()
    return written


def _add(path: Path, writer: Any, rows: Sequence[JSON]) -> Any:
    table = pyarrow.Table.from_pylist(list(rows), schema=None if writer is None else writer.schema)
    writer = writer or parquet.ParquetWriter(path, table.schema)
    writer.write_table(table)
    return writer
