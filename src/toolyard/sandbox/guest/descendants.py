"""Ending a process tree without a pid namespace around it.

Killing one by one loses against a program that forks faster. Stopping does not: what is stopped cannot fork, keeps its
place in the process limit, and so the rest soon has no room left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Container


def below(root: int, spared: Container[int] = ()) -> list[int]:
    """All processes that descend from `root`, as far as /proc shows them, without `spared` and those below them."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                    parent = int(file.read(512).rpartition(b")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children.get(parent, ()) if child not in spared]
        found += level
    return found


def end_all(root: int, spared: Container[int] = ()) -> None:
    """Stop everything below `root` until nothing new appears, then kill it. `root` itself goes on, and reaps."""
    stopped: set[int] = set()
    while new := [pid for pid in below(root, spared) if pid not in stopped]:
        for pid in new:
            _send(pid, signal.SIGSTOP)
        stopped.update(new)
    for pid in stopped:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
