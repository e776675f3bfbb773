"""Kills a process tree without a pid namespace around it.

Killing one by one loses against a program that forks faster. Stopping does not: a stopped process cannot fork but still
counts toward the process limit, so the rest soon cannot fork anymore.

A process may end, and its pid be reused on the host, between finding it and signaling it. So each is held by a pidfd,
and only those seen below us again afterwards are signaled: if the pid was reused in between, the pidfd's process is
dead, and the signal goes nowhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Container

_MOST_AT_ONCE = 256
"""Processes held at once: each takes a descriptor."""
_THREADS = 15
"""Position of the thread count in /proc/PID/stat, counted from after the parent pid."""


def below(root: int, spared: Container[int] = ()) -> list[int]:
    """All live processes that descend from `root`, as far as /proc shows them, except `spared` and their descendants.

    A process whose first thread has ended looks dead but is alive, with its children, while it has another thread.
    """
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                    state, parent, *more = file.read(512).rpartition(b")")[2].split()
            except OSError:
                continue
            children.setdefault(int(parent), []).append(int(name))
            if state in (b"Z", b"X") and int(more[_THREADS]) < 2:
                dead.add(int(name))
    found: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children.get(parent, ()) if child not in spared]
        found += [pid for pid in level if pid not in dead]
    return found


def end_all(root: int, spared: Container[int] = ()) -> None:
    """Stop everything below `root` until nothing new appears, then kill it. `root` itself continues, and reaps."""
    while _end_some(root, spared) == _MOST_AT_ONCE:
        pass


def _end_some(root: int, spared: Container[int]) -> int:
    """Return how many were killed."""
    held: dict[int, int] = {}
    try:
        while new := [pid for pid in below(root, spared) if pid not in held][: _MOST_AT_ONCE - len(held)]:
            opened: dict[int, int] = {}
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    opened[pid] = held[pid] = os.pidfd_open(pid)
            ours = set(below(root, spared))
            for pid, handle in opened.items():
                if pid in ours:
                    _send(handle, signal.SIGSTOP)
                else:
                    os.close(held.pop(pid))
        for handle in held.values():
            _send(handle, signal.SIGKILL)
        return len(held)
    finally:
        for handle in held.values():
            os.close(handle)


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)
