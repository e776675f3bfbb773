"""What an execution pool could leave behind: processes, threads, file descriptors."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolyard.limits.background import background


def alive(pid: int) -> bool:
    """A zombie is not: that its new parent does not ask for it is not ours to change."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children() -> list[int]:
    """Children of this process, including zombies."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(entry.parent.name))
    return sorted(found)


@pytest.fixture
def nothing_is_left_behind() -> Iterator[None]:
    background()  # the limiters' own thread, which stays
    before = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert [thread for thread in threading.enumerate() if thread.name.startswith(("toolyard-pool", "toolyard-w"))] == []
    assert (children(), len(os.listdir("/proc/self/fd"))) == before
