"""An invariant checker outside the limiter: every execution holds a connection to it for as long as it runs.

When a process is killed, the kernel closes its connections before anyone learns of its death, so what the referee
counts is what really runs, through any crash.
"""

from __future__ import annotations

import os
import selectors
import socket
import tempfile
import threading
import time
from typing import Self


class Referee:
    def __init__(self) -> None:
        self.path = os.path.join(tempfile.mkdtemp(prefix="ty-"), "referee")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(4096)
        self._selector = selectors.DefaultSelector()
        self._running: set[socket.socket] = set()
        self.most = 0
        self.started = 0
        self.starts: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="referee")
        self._thread.start()

    def reset(self) -> None:
        self.most, self.started, self.starts = len(self._running), 0, []

    @property
    def running(self) -> int:
        return len(self._running)

    def longest_gap(self) -> float:
        """Between two starts."""
        return max((later - earlier for earlier, later in zip(self.starts, self.starts[1:], strict=False)), default=0.0)

    def wait_for_most(self, count: int, within: float) -> float:
        """Seconds until `count` ran at once, counted from now."""
        begin = time.monotonic()
        self.most = 0
        while self.most < count:
            assert time.monotonic() - begin < within, f"only {self.most} of {count} at once within {within} s"
            time.sleep(0.005)
        return time.monotonic() - begin

    def _watch(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._stop.is_set():
            ready = [key.fileobj for key, _ in self._selector.select(0.05)]
            for connection in ready:
                if connection is not self._listener:
                    self._end(connection)
            if self._listener in ready:
                self._admit()

    def _admit(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            # Ends that came before this start count before it.
            for key, _ in self._selector.select(0):
                if key.fileobj is not self._listener:
                    self._end(key.fileobj)
            self._running.add(connection)
            self._selector.register(connection, selectors.EVENT_READ)
            self.started += 1
            self.starts.append(time.monotonic())
            self.most = max(self.most, len(self._running))

    def _end(self, connection) -> None:
        self._selector.unregister(connection)
        self._running.discard(connection)
        connection.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for connection in list(self._running):
            self._end(connection)
        self._selector.close()
        self._listener.close()
        os.unlink(self.path)
        os.rmdir(os.path.dirname(self.path))


class Running:
    """One execution, in whatever process it runs."""

    def __init__(self, path: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._connection.close()
