"""Ending a process tree by process ids, without hitting other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Container, Iterator

import pytest

from toolyard.sandbox.guest import descendants

FAMILY = """
import os, time
for _ in range(3): os.fork()
os.write(1, b".")
time.sleep(60)
"""


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_whole_family_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "_MOST_AT_ONCE", 3)  # fewer than there are
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE) as first:
        assert first.stdout
        assert first.stdout.read(8) == b"........"
        assert len(descendants.below(first.pid)) == 7
        before = len(os.listdir("/proc/self/fd"))
        descendants.end_all(first.pid)
        until = time.monotonic() + 10
        while descendants.below(first.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert descendants.below(first.pid) == []
        assert len(os.listdir("/proc/self/fd")) == before
        assert first.poll() is None, "but the root itself goes on"
        first.kill()


def test_a_number_that_has_become_a_strangers_is_not_signalled(
    stranger: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was seen below us, and when it is held it is not there any more."""
    looks = iter([[stranger.pid], [], []])

    def below(root: int, spared: Container[int] = ()) -> list[int]:
        return next(looks)

    monkeypatch.setattr(descendants, "below", below)
    descendants.end_all(os.getpid())
    time.sleep(0.1)
    assert stranger.poll() is None
    with open(f"/proc/{stranger.pid}/stat") as file:
        assert file.read().rpartition(")")[2].split()[0] == "S", "nor stopped"
