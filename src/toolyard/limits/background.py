"""A daemon thread with an event loop, for work that is not part of any call: timers, heartbeats, sockets.

It runs beside the caller's own loop, so that a caller's loop blocked for seconds delays nothing here.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_current: Background | None = None


class Background:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="toolyard-limits", daemon=True)
        self._thread.start()

    def soon(self, call: Callable[..., object], *args: object) -> None:
        self.loop.call_soon_threadsafe(call, *args)

    def at(self, when: float, call: Callable[[], object]) -> None:
        """Call at a time of `time.monotonic()`, which this loop uses."""
        self.loop.call_soon_threadsafe(self.loop.call_at, when, call)

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)


def background() -> Background:
    """This process's background thread. A fork starts without one, since threads do not survive it."""
    global _current
    with _lock:
        if _current is None:
            _current = Background()
        return _current


def _forget() -> None:
    global _lock, _current
    _lock, _current = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
