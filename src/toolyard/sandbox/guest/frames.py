"""The bytes exchanged by the host and a worker. Both sides import this file; nothing else defines them.

A worker reads only the fixed header: numbers. Everything a program can know (source, names, file contents, stdin) stays
opaque to it and is passed on, so that no byte of one run ends up in memory that the next child inherits.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

REQUEST = struct.Struct("<B7xddQIIQQQQQQQQQ")


class Request(NamedTuple):
    """The header of a request: the fields of `REQUEST`, and what follows from them.

    The body follows, in the order of its sizes.
    """

    operation: int
    wall_seconds: float
    cpu_seconds: float
    memory_bytes: int
    processes: int
    open_files: int
    file_bytes: int
    disk_bytes: int
    output_bytes: int
    """Bytes kept of each stream."""
    flood_bytes: int
    """Bytes of one stream; a program that writes more is stopped."""
    meta_size: int
    code_size: int
    files_size: int
    stdin_size: int
    fetch_size: int
    order_end: int
    """End, within the whole request, of what a program's process needs to start."""
    stdin_end: int
    end: int


def read_request(content: memoryview | bytearray) -> Request:
    numbers: tuple[Any, ...] = REQUEST.unpack_from(content)
    *_, meta, code, files, stdin, fetch = numbers
    order_end = REQUEST.size + meta + code + files
    return Request._make((*numbers, order_end, order_end + stdin, order_end + stdin + fetch))


RUN_PYTHON = 1
RUN_COMMAND = 2
OPEN_SESSION = 3
CELL = 4
WRITE_FILES = 5
READ_FILES = 6
CANCEL = 7
EACH_PYTHON = 8
EACH_COMMAND = 9
"""One program, many inputs: one response each, in order. A cancellation ends it with one more response, CANCELLED."""

# Precedes the inputs in the stdin part of an EACH request: how many there are, the CPU to run them on (negative: no
# preference) and whether responses may be batched, then the length of each.
CASES = struct.Struct("<Ii?")
CASE = struct.Struct("<Q")

# reason, flags, wait status, wall s, cpu s, starved s, peak bytes, then the lengths of stdout, stderr and extra.
RESPONSE = struct.Struct("<BBxxidddQQQQ")

ENDED = 0
"""The program ended by itself; see the wait status."""
TIMED_OUT = 1
CPU_EXCEEDED = 2
MEMORY_EXCEEDED = 3
OUTPUT_EXCEEDED = 4
DISK_EXCEEDED = 5
CANCELLED = 6
REFUSED = 7
"""It never started: `extra` says why (bad file name, no such command)."""
LOST = 8
"""There is no session to run a cell in, or no longer."""
STARVED = 9
"""It waited for a CPU longer than a time limit can be extended: it counts as not run."""

STDOUT_CUT = 1
STDERR_CUT = 2
RETIRING = 4
"""The worker exits now: it could not clean up, or its session ended. The result itself is valid."""
FILES_CUT = 8
"""More was requested than fits into one reply."""

# A returned file: length of name, length of content; then both.
FILE = struct.Struct("<II")
MAX_FETCH_BYTES = 64 << 20


def patience(seconds: float) -> float:
    """By how much a time limit of `seconds` may be extended for a program that had to wait for a CPU."""
    return max(5.0, seconds)


NO_CPU_LIMIT = 0.0
"""In the header's cpu field."""

# Why the zygote has no worker to offer, although nothing was refused: trying again may help.
LAUNCHER_DIED = "the launcher died"
LAUNCHER_LATE = "took too long to start"
