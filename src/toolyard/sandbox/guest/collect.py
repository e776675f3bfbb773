"""Moves files in and out of a finished run or a live session, in a short-lived child of the worker.

Reading follows no symbolic links and accepts regular files only, whatever the program left there: links, pipes, devices
and directories are skipped.
"""

from __future__ import annotations

import marshal
import os
import stat
from collections.abc import Callable, Iterator
from typing import NoReturn

from . import frames, kernel, program

Task = Callable[[str, bytes, bool], None]
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
_MAX_LISTED = 10_000
"""Entries visited below one name: an endless tree must not take endless time."""


def perform(task: Task, work: str, private_root: bool) -> NoReturn:
    """In the child: read the whole order, carry it out, exit."""
    order = bytearray()
    while chunk := os.read(program.COMMAND, 1 << 20):
        order += chunk
    try:
        task(work, bytes(order), private_root)
    except program.RefusedError as error:
        os.write(program.STATUS, str(error).encode("utf-8", "backslashreplace"))
        os._exit(1)
    except BaseException:
        os._exit(2)
    os._exit(0)


def read_files(work: str, order: bytes, private_root: bool) -> None:
    """Reply with each file that exists, as `frames.FILE` records. A name that ends in `/` means all files below it."""
    left = frames.MAX_FETCH_BYTES
    for name in marshal.loads(order):
        for found, handle in _open_all(work, name, private_root):
            size = os.fstat(handle).st_size
            encoded = os.fsencode(found)
            record = frames.FILE.size + len(encoded) + size
            if record <= left:
                left -= record
                _send(frames.FILE.pack(len(encoded), size) + encoded)
                _send_file(handle, size)
            os.close(handle)


def _open_all(work: str, name: str, private_root: bool) -> Iterator[tuple[str, int]]:
    if not name.endswith("/"):
        handle = _open(work, name, private_root)
        if handle is not None:
            yield name, handle
        return
    looked_at = 0
    folders = [name.strip("/")]
    while folders:
        folder = folders.pop()
        handle = _open(work, folder or ".", private_root, os.O_DIRECTORY)
        if handle is None:
            continue
        entries = sorted(os.listdir(handle))
        os.close(handle)
        for entry in entries[: _MAX_LISTED - looked_at]:
            looked_at += 1
            inside = f"{folder}/{entry}" if folder else entry
            handle = _open(work, inside, private_root)
            if handle is not None:
                yield inside, handle
            else:
                folders.append(inside)


def _open(work: str, name: str, private_root: bool, kind: int = 0) -> int | None:
    """Open a regular file of that name (or a directory, by `kind`). Returns None if there is none.

    Absolute names refer to the run's own root, if it has one.
    """
    absolute = name.startswith("/")
    if absolute and not private_root:
        if not name.startswith(work + "/"):
            return None
        absolute, name = False, name[len(work) + 1 :]
    try:
        directory = os.open("/" if absolute else work, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            handle = kernel.open_beneath(directory, name, _READ | kind, in_root=absolute)
        finally:
            os.close(directory)
    except (OSError, ValueError):
        return None
    if kind or stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    return None


def _send(content: bytes | memoryview) -> None:
    while content:
        content = content[os.write(program.STATUS, content) :]


def _send_file(handle: int, size: int) -> None:
    """Send exactly `size` bytes, as announced, even if a live session changes the file meanwhile."""
    while size:
        chunk = os.read(handle, min(size, 1 << 20))
        if not chunk:
            _send(bytes(size))
            return
        _send(chunk)
        size -= len(chunk)


def write_files(work: str, order: bytes, private_root: bool) -> None:
    """Write files into a live session. The order: length of the list of (name, size, mode), the list, the contents."""
    size = int.from_bytes(order[:8], "little")
    program.write_files(work, marshal.loads(order[8 : 8 + size]), memoryview(order)[8 + size :])
