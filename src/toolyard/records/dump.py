"""The dump: a folder with a file `<step>.jsonl` for each step, one trajectory a line, written and read.

Files only grow, and only by whole lines, so that they can be read while they are written. A line that a kill or a full
disk tore is removed when its file is next opened for writing; until then readers pass over it.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast

from toolyard.errors import RecordError
from toolyard.messages import JSON
from toolyard.records.jsonl import decode
from toolyard.records.lines import to_line, trajectory_of
from toolyard.records.trajectory import Trajectory
from toolyard.records.writer import FolderLock, LineFile, Mended

_OPEN_FILES = 8
"""Steps may overlap where training is asynchronous, but not many of them."""
_NAME = re.compile(r"(0|[1-9][0-9]*)\.jsonl")


# Writing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ended:
    """What a line says about a request, as far as it matters to a run that is resumed."""

    request_id: str
    state: str
    finish_reason: str
    batch_data_id: str
    rollout_offset: int
    task_digest: str = ""
    """Of what was played; empty in dumps that have none."""


class DumpWriter:
    """Appends trajectories to a folder, which is its own while it is open:

        async with DumpWriter(folder) as dump:
            await dump.write(trajectory)

    Lines are made and written in a thread, in the order of the calls. Killed at any moment, the process leaves whole
    lines and at most one torn one, the last.
    """

    def __init__(self, folder: str | PathLike[str], *, fsync: bool = False) -> None:
        """`fsync`: lines survive the death of the machine as well, not only of the process; each waits for the disk."""
        self.folder = Path(folder)
        self.mended: list[Mended] = []
        """What had to be done to files of an earlier run, as they were opened."""
        self._fsync = fsync
        self._lock: FolderLock | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._files: dict[int, LineFile] = {}
        self._untold: BaseException | None = None
        self._expected: dict[int, int] = {}
        """How many lines the files of steps should have."""

    async def __aenter__(self) -> Self:
        """
        Raises:
            RecordError: another run is writing there, or nobody can.
        """
        if self._lock is not None:
            raise RecordError(f"this writer of {self.folder} is open already")
        self._lock = FolderLock(self.folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="toolyard-dump")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def write(self, trajectory: Trajectory) -> None:
        """Append it to its step's file; when this returns, it is there. Whoever writes waits, so that nobody produces
        faster than the disk takes. Cancelled, it is written nevertheless.

        Raises:
            RecordError: it could not be written, and the file is as before; later lines may still succeed.
        """
        if self._thread is None:
            raise RecordError(f"the dump {self.folder} is not open")
        job = self._thread.submit(self._append, trajectory)
        try:
            await asyncio.shield(asyncio.wrap_future(job))
        except asyncio.CancelledError:
            job.add_done_callback(self._keep_error)
            raise

    async def close(self) -> None:
        """Wait for what is being written, and give the folder free. Closing twice is allowed.

        Raises:
            RecordError: a line could not be written whose writer was cancelled, and so could not be told.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        job = thread.submit(self._release)
        thread.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(job))
        if self._untold is not None:
            untold, self._untold = self._untold, None
            raise untold

    def existing(self, step: int) -> dict[str, Ended]:
        """The requests that have a line in the step's file, by id. Of several lines of one request the last counts.

        Raises:
            RecordError: a line is damaged: nobody can tell whether its request was played.
        """
        path = self.folder / f"{step}.jsonl"
        if not path.exists():
            return {}
        self._file(step)  # so that a second writer is found out now, and not with its first line
        return {ended.request_id: ended for ended in _ended_in(path)}

    def count_lines(self, step: int) -> int:
        """How many lines the step's file has now."""
        path = self.folder / f"{step}.jsonl"
        try:
            with path.open("rb") as file:
                return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
        except FileNotFoundError:
            return 0

    def expected_lines(self, step: int) -> int:
        """How many it should have: those that were there, and those that were written."""
        return self._expected.get(step, self.count_lines(step))

    def forget(self, step: int, request_ids: Collection[str]) -> None:
        """Drop the lines of these requests, so that they can be played again. The file is replaced as a whole: killed
        at any moment, it has all lines or those that stay. Before the first `write` to the step.

        Raises:
            RecordError: it cannot be replaced.
        """
        path, mended = self.folder / f"{step}.jsonl", self.folder / f".{step}.jsonl.new"
        file = self._files.pop(step, None)
        if file is not None:
            file.close()
            del self._expected[step]
        try:
            with mended.open("wb") as file:
                for _, line in lines_of(path):
                    if decode(line).get("request_id") not in request_ids:
                        file.write(line if line.endswith(b"\n") else line + b"\n")
                file.flush()
                os.fsync(file.fileno())
            mended.replace(path)
        except OSError as error:
            mended.unlink(missing_ok=True)
            raise RecordError(f"cannot replace {path}: {error.strerror}") from None

    def _append(self, trajectory: Trajectory) -> None:
        self._file(trajectory.step).append(to_line(trajectory))
        self._expected[trajectory.step] += 1  # only now: it is there

    def _file(self, step: int) -> LineFile:
        if step < 0:
            raise RecordError(f"a dump has no file for step {step}: steps count from 0")
        file = self._files.pop(step, None)
        if file is None:
            if len(self._files) == _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            file = LineFile(self.folder / f"{step}.jsonl", fsync=self._fsync)
            if file.mended is not None:
                self.mended.append(file.mended)
            self._expected.setdefault(step, self.count_lines(step) if file.is_regular else 0)
        self._files[step] = file  # the last used is the last to be closed
        return file

    def _release(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _keep_error(self, job: Future[None]) -> None:
        self._untold = self._untold or job.exception()


def _ended_in(path: Path) -> Iterator[Ended]:
    for number, line in lines_of(path):
        try:
            said: Any = decode(line)
            fields: JSON = cast("JSON", said) if isinstance(said, dict) else {}
            if isinstance(request_id := fields.get("request_id"), str):
                if isinstance(fields.get("format_version"), int):
                    _refuse_damaged(fields)
                metrics: JSON = fields.get("metrics") or {}
                yield Ended(
                    request_id,
                    str(fields.get("state")),
                    str(fields.get("finish_reason")),
                    str(fields.get("batch_data_id")),
                    cast("int", fields.get("rollout_offset", 0)),
                    str(metrics.get("task_digest", "")),
                )
        except RecordError as error:
            raise RecordError(
                f"{path}:{number}: this line is damaged ({error}); remove it, and its request is played again"
            ) from None


def _refuse_damaged(fields: JSON) -> None:
    """Cheaply, of a line of ours: `toolyard audit` looks at every token."""
    if fields.get("state") not in ("COMPLETED", "FAILED"):
        raise RecordError(f"state is {fields.get('state')!r}")
    for name, kind in (("tokens", dict), ("turns", list), ("messages", list), ("metrics", dict)):
        if not isinstance(fields.get(name), kind):
            raise RecordError(f"{name} is {str(fields.get(name))[:40]!r}")
    if not all(isinstance(fields["tokens"].get(name), list) for name in ("prompt_ids", "response_ids")):
        raise RecordError("tokens has no prompt_ids or no response_ids")


# Reading --------------------------------------------------------------------------------------------------------------

OnBadLine = Literal["raise", "skip"] | Callable[[RecordError], None]
"""What to do about a line that is no trajectory. A function is told of it, with file and line number; it is skipped."""


class DumpLine(NamedTuple):
    path: Path
    number: int
    """Counted from 1."""
    trajectory: Trajectory


def read_dump(
    path: str | PathLike[str], *, steps: Collection[int] | None = None, on_bad_line: OnBadLine = "raise"
) -> Iterator[DumpLine]:
    """All trajectories of a folder, in the order of its steps, or of one file, whatever its name.

    The last line of a file may be torn: it is being written.

    Raises:
        RecordError: there is no such dump, or a line of it is no trajectory.
    """
    for file in dump_files(path, steps=steps):
        for number, line in lines_of(file):
            try:
                found = read_line(file, number, line)
            except RecordError as error:
                refuse(error, on_bad_line)
            else:
                yield found


def read_line(path: Path, number: int, line: bytes) -> DumpLine:
    """One line that `lines_of` gave.

    Raises:
        RecordError: it is no trajectory; the message says where and why.
    """
    try:
        return DumpLine(path, number, trajectory_of(line))
    except RecordError as error:
        raise RecordError(f"{path}:{number}: {error}") from None


def refuse(error: RecordError, on_bad_line: OnBadLine) -> None:
    """Do about a bad line what is wanted."""
    if on_bad_line == "raise":
        raise error
    if on_bad_line != "skip":
        on_bad_line(error)


def dump_files(path: str | PathLike[str], *, steps: Collection[int] | None = None) -> list[Path]:
    """The files of a dump in the order of their steps, or the one file that `path` is.

    Raises:
        RecordError: there is nothing.
    """
    path = Path(path)
    try:
        if not path.is_dir():
            path.stat()
            return [path]
        found = {int(name[1]): entry for entry in path.iterdir() if (name := _NAME.fullmatch(entry.name))}
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    return [found[step] for step in sorted(found) if steps is None or step in steps]


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that say something, with their numbers; without the last one if it is torn.

    Raises:
        RecordError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and is_torn(line):
                    return
                if not line.isspace():
                    yield number, line
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None


def is_torn(line: bytes) -> bool:
    """Of a line without its newline: whether more is missing than that."""
    try:
        return not isinstance(decode(line), dict)
    except RecordError:
        return True
