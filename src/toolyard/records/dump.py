"""Dumps: a folder with a file `<step>.jsonl` for each step, one trajectory per line.

Files only grow, and only by whole lines, so they can be read while they are being written. A line torn by a kill or a
full disk is removed when its file is next opened for writing; until then readers skip it.
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
from toolyard.records.writer import FolderLock, LineFile, Repair

_OPEN_FILES = 8
"""With asynchronous training a few steps may overlap."""
_NAME = re.compile(r"(0|[1-9][0-9]*)\.jsonl")


# Writing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The fields of a line that a resumed run needs."""

    request_id: str
    state: str
    finish_reason: str
    batch_data_id: str
    rollout_offset: int
    task_digest: str = ""
    """Digest of the task that was played; empty in dumps without digests."""
    session: str | None = None
    """The request whose branch it is, if an agent played it."""


class DumpWriter:
    """Appends trajectories to a folder, which is locked while it is open:

        async with DumpWriter(folder) as dump:
            await dump.write(trajectory)

    Lines are encoded and written in a thread, in the order of the calls. If the process is killed, at most the last
    line is torn.
    """

    def __init__(self, folder: str | PathLike[str], *, fsync: bool = False) -> None:
        """`fsync`: lines survive a crash of the machine, not only of the process; each write waits for the disk."""
        self.folder = Path(folder)
        self.repairs: list[Repair] = []
        """Repairs made to files of an earlier run when they were opened."""
        self._fsync = fsync
        self._lock: FolderLock | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._files: dict[int, LineFile] = {}
        self._unreported: BaseException | None = None
        self._expected: dict[int, int] = {}
        """The expected number of lines by step."""

    async def __aenter__(self) -> Self:
        """
        Raises:
            RecordError: another run is writing there, or the folder is not writable.
        """
        if self._lock is not None:
            raise RecordError(f"this writer of {self.folder} is already open")
        self._lock = FolderLock(self.folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="toolyard-dump")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def write(self, trajectory: Trajectory) -> None:
        """Append a trajectory to its step's file. Returns when it is written, so producers cannot outrun the disk. If
        cancelled, it is written anyway.

        Raises:
            RecordError: it could not be written; the file is unchanged, and later lines may still succeed.
        """
        # In one piece: a request whose own line is there is there with all its branches.
        lines = (*trajectory.branches, trajectory)
        await self._submitted(lambda: self._append(trajectory.step, b"".join(map(to_line, lines))))

    async def write_line(self, step: int, line: bytes) -> None:
        """Append a trajectory that is already encoded, with its newline. Like `write`."""
        await self._submitted(lambda: self._append(step, line))

    async def _submitted(self, append: Callable[[], None]) -> None:
        if self._thread is None:
            raise RecordError(f"the dump {self.folder} is not open")
        job = self._thread.submit(append)
        written = asyncio.wrap_future(job)
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            job.add_done_callback(self._keep_error)
            written.add_done_callback(lambda _: written.cancelled() or written.exception())  # or asyncio logs it
            raise

    async def close(self) -> None:
        """Wait for pending writes and unlock the folder. Closing twice is allowed.

        Raises:
            RecordError: a line could not be written after its `write` was cancelled.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        job = thread.submit(self._release)
        thread.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(job))
        if self._unreported is not None:
            unreported, self._unreported = self._unreported, None
            raise unreported

    def existing(self, step: int) -> dict[str, EndedRequest]:
        """The requests that have a line in the step's file, by id. If a request has several lines, the last one counts.

        Raises:
            RecordError: a line is damaged, so it is unknown whether its request was played.
        """
        path = self.folder / f"{step}.jsonl"
        if not path.exists():
            return {}
        self._file(step)  # detects a second writer now, not at its first line
        return {ended.request_id: ended for ended in _ended_in(path)}

    def count_lines(self, step: int) -> int:
        """The current number of lines in the step's file."""
        path = self.folder / f"{step}.jsonl"
        try:
            with path.open("rb") as file:
                return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
        except FileNotFoundError:
            return 0

    def expected_lines(self, step: int) -> int:
        """The expected number of lines in the step's file: those found plus those written."""
        return self._expected.get(step, self.count_lines(step))

    def forget(self, step: int, request_ids: Collection[str]) -> None:
        """Remove the lines of these requests, and of their branches, so that they can be played again. The file is
        replaced atomically. Call it before the first `write` to the step.

        Raises:
            RecordError: the file cannot be replaced.
        """
        forgotten = frozenset(request_ids)
        path, rewritten = self.folder / f"{step}.jsonl", self.folder / f".{step}.jsonl.new"
        file = self._files.pop(step, None)
        if file is not None:
            file.close()
            del self._expected[step]
        try:
            with rewritten.open("wb") as file:
                for _, line in lines_of(path):
                    if forgotten.isdisjoint(_names_in(decode(line))):
                        file.write(line if line.endswith(b"\n") else line + b"\n")
                file.flush()
                os.fsync(file.fileno())
            rewritten.replace(path)
        except OSError as error:
            rewritten.unlink(missing_ok=True)
            raise RecordError(f"cannot replace {path}: {error.strerror}") from None

    def _append(self, step: int, lines: bytes) -> None:
        self._file(step).append(lines)
        self._expected[step] += lines.count(b"\n")  # only after the write has succeeded

    def _file(self, step: int) -> LineFile:
        if step < 0:
            raise RecordError(f"step {step}: steps start at 0")
        file = self._files.pop(step, None)
        if file is None:
            if len(self._files) == _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            file = LineFile(self.folder / f"{step}.jsonl", fsync=self._fsync)
            if file.repair is not None:
                self.repairs.append(file.repair)
            self._expected.setdefault(step, self.count_lines(step) if file.is_regular else 0)
        self._files[step] = file  # the least recently used file is closed first
        return file

    def _release(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _keep_error(self, job: Future[None]) -> None:
        self._unreported = self._unreported or job.exception()


def _names_in(fields: JSON) -> set[Any]:
    """The ids that a line belongs to: its request's, and that of the session whose branch it is."""
    return {fields.get("request_id"), _session_of(fields)}


def _session_of(fields: JSON) -> str | None:
    metrics: JSON = fields.get("metrics") or {}
    branch: JSON = metrics.get("branch") or {}
    return branch.get("session")


def _ended_in(path: Path) -> Iterator[EndedRequest]:
    for number, line in lines_of(path):
        try:
            said: Any = decode(line)
            fields: JSON = cast("JSON", said) if isinstance(said, dict) else {}
            if isinstance(request_id := fields.get("request_id"), str):
                if isinstance(fields.get("format_version"), int):
                    _refuse_damaged(fields)
                metrics: JSON = fields.get("metrics") or {}
                yield EndedRequest(
                    request_id,
                    str(fields.get("state")),
                    str(fields.get("finish_reason")),
                    str(fields.get("batch_data_id")),
                    cast("int", fields.get("rollout_offset", 0)),
                    str(metrics.get("task_digest", "")),
                    _session_of(fields),
                )
        except RecordError as error:
            raise RecordError(
                f"{path}:{number}: this line is damaged ({error}); remove it to play its request again"
            ) from None


def _refuse_damaged(fields: JSON) -> None:
    """A cheap check of Toolyard's own lines; `toolyard audit` checks every token."""
    if fields.get("state") not in ("COMPLETED", "FAILED"):
        raise RecordError(f"state is {fields.get('state')!r}")
    for name, kind in (("tokens", dict), ("turns", list), ("messages", list), ("metrics", dict)):
        if not isinstance(fields.get(name), kind):
            raise RecordError(f"{name} is {str(fields.get(name))[:40]!r}")
    if not all(isinstance(fields["tokens"].get(name), list) for name in ("prompt_ids", "response_ids")):
        raise RecordError("tokens has no prompt_ids or no response_ids")


# Reading --------------------------------------------------------------------------------------------------------------

OnBadLine = Literal["raise", "skip"] | Callable[[RecordError], None]
"""What to do with a line that is not a trajectory. A function is called with the error; the line is skipped."""


class DumpLine(NamedTuple):
    path: Path
    number: int
    """Counted from 1."""
    trajectory: Trajectory


def read_dump(
    path: str | PathLike[str], *, steps: Collection[int] | None = None, on_bad_line: OnBadLine = "raise"
) -> Iterator[DumpLine]:
    """Read all trajectories of a folder, in the order of its steps, or of a single file with any name.

    A torn last line is skipped: it is still being written.

    Raises:
        RecordError: the dump does not exist, or a line is not a trajectory.
    """
    for file in dump_files(path, steps=steps):
        for number, line in lines_of(file):
            try:
                found = read_line(file, number, line)
            except RecordError as error:
                handle_bad_line(error, on_bad_line)
            else:
                yield found


def read_line(path: Path, number: int, line: bytes) -> DumpLine:
    """Parse one line from `lines_of`.

    Raises:
        RecordError: it is not a trajectory; the message says where and why.
    """
    try:
        return DumpLine(path, number, trajectory_of(line))
    except RecordError as error:
        raise RecordError(f"{path}:{number}: {error}") from None


def handle_bad_line(error: RecordError, on_bad_line: OnBadLine) -> None:
    """Handle a bad line as `on_bad_line` says."""
    if on_bad_line == "raise":
        raise error
    if on_bad_line != "skip":
        on_bad_line(error)


def dump_files(path: str | PathLike[str], *, steps: Collection[int] | None = None) -> list[Path]:
    """The files of a dump in the order of their steps, or `path` itself if it is a file.

    Raises:
        RecordError: `path` does not exist or cannot be read.
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


def not_a_dump(path: str | PathLike[str]) -> str:
    """The complaint about a folder without files of steps; it names the subfolder that has some."""
    inner = [entry for entry in sorted(Path(path).iterdir()) if entry.is_dir() and dump_files(entry)]
    hint = f"; did you mean {inner[0]}?" if inner else ""
    return f"{path} is not a dump: it has no <step>.jsonl{hint}"


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The non-blank lines of a file with their numbers, without a torn last line.

    Raises:
        RecordError: the file cannot be read.
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
    """Whether a line without a newline is incomplete."""
    try:
        return not isinstance(decode(line), dict)
    except RecordError:
        return True
