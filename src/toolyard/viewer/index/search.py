"""Full-text search: a file with all readable text of a dump, case-folded, which is scanned for a needle.

The text of a line is a record: MARK, the line's number, then its parts, each after a GAP. Neither byte occurs in UTF-8,
so no text can contain them, and no match spans two parts. The file only grows. It is read in blocks, not mapped into
memory: other threads can run between two blocks, and a truncated file is an error instead of a crash (SIGBUS).
"""

from __future__ import annotations

import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from toolyard.errors import RecordError

MARK, GAP = b"\xfe", b"\xff"
BLOCK = 1 << 22
_NEEDLES = 16
"""Number of needles whose matches are cached."""


def folded(*parts: str) -> bytes:
    """The text in the form in which it is compared: case-folded. Lone surrogates are kept."""
    return GAP.join(part.casefold().encode("utf-8", "surrogatepass") for part in parts)


def record(number: int, text: bytes) -> bytes:
    """The record of a line; `text` is the result of `folded`."""
    return MARK + str(number).encode() + GAP + text


class TextFile:
    """The records of an index. One thread of one process appends; readers see only what it has committed."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: it cannot be opened.
        """
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, tuple[int, array[int]]] = OrderedDict()
        """By needle: how far the file was searched, and the numbers of the matching lines in file order."""

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def write(self, at: int, text: bytes) -> None:
        """Write and sync, so that a later commit can rely on it even after a power failure.

        Raises:
            RecordError: it cannot be written; the disk may be full.
        """
        rest = memoryview(text)
        try:
            while rest:
                written = os.pwrite(self._fd, rest, at)
                rest, at = rest[written:], at + written
            os.fdatasync(self._fd)
        except OSError as error:
            raise RecordError(f"cannot write the index {self.path}: {error.strerror}") from None

    def contains(self, start: int, end: int, needle: str) -> bool:
        """Whether the record at `start` contains `needle`."""
        wanted = folded(needle)
        return bool(wanted) and wanted in self._read(start, end - start).partition(GAP)[2]

    def lines_with(self, needle: str, end: int) -> array[int]:
        """The numbers of the matching lines in the file's first `end` bytes; some may be gone from the index."""
        wanted = folded(needle)
        if not wanted:
            return array("q")
        with self._lock:
            upto, known = self._found.get(wanted, (0, array("q")))
        if upto < end:
            known = known + self._search(wanted, upto, end)
            with self._lock:
                self._found[wanted] = end, known
                self._found.move_to_end(wanted)
                if len(self._found) > _NEEDLES:
                    self._found.popitem(last=False)
        # Another thread may have searched further meanwhile, or `end` may be older: extra numbers do no harm.
        return known

    def _search(self, wanted: bytes, start: int, end: int) -> array[int]:
        found: array[int] = array("q")
        size = BLOCK
        while start < end:
            block = self._read(start, min(size, end - start))
            whole = len(block) if start + len(block) == end else block.rfind(MARK)
            if whole <= 0:
                size *= 2  # a record longer than a block
                continue
            found.extend(_numbers(block, whole, wanted))
            start, size = start + whole, BLOCK
        return found

    def _read(self, start: int, size: int) -> bytes:
        try:
            read = os.pread(self._fd, size, start)
            while read and len(read) < size and (more := os.pread(self._fd, size - len(read), start + len(read))):
                read += more
        except OSError as error:
            raise RecordError(f"cannot read the index {self.path}: {error.strerror}") from None
        if len(read) < size:
            raise RecordError(f"{self.path} was truncated; delete its folder, and the index is built again")
        return read


def _numbers(block: bytes, end: int, wanted: bytes) -> Iterator[int]:
    """The numbers of the matching lines in the complete records up to `end`."""
    at = block.find(wanted, 0, end)
    while at >= 0:
        mark = block.rfind(MARK, 0, at)
        gap = block.index(GAP, mark)
        if at < gap:
            at = block.find(wanted, gap, end)  # the needle matched the line's number
            continue
        yield int(block[mark + 1 : gap])
        following = block.find(MARK, at, end)  # one match per line is enough
        at = block.find(wanted, following, end) if following >= 0 else -1
