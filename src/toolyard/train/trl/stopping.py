"""Ctrl-C and SIGTERM during training: the first stops it after the current step, the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Handles the signals within its block. Does nothing outside the main thread, where handlers cannot be set.

    Launchers of several processes forward a terminal's Ctrl-C as SIGTERM, so one of each counts as one request; only
    the second of the same kind ends training at once.
    """

    def __init__(self, on_stop: Callable[[], None]) -> None:
        """`on_stop` is called in the signal handler for the first signal."""
        self.signal: int | None = None
        """The first signal received."""
        self.can_finish = False
        """Whether there is a step to finish. If not, the first signal ends training at once."""
        self._on_stop = on_stop
        self._ended_by: int | None = None
        self._seen: set[int] = set()
        self._before: dict[int, Any] = {}

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    def check(self) -> None:
        """End training if a signal should have: where Python calls no code of ours, as in a destructor, it is lost.

        Raises:
            KeyboardInterrupt: with the signal's number.
        """
        if self._ended_by is not None:
            raise KeyboardInterrupt(self._ended_by)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        first = not self.wanted
        again = number in self._seen
        self._seen.add(number)
        self.signal = self.signal or number
        if again or not self.can_finish:
            self._ended_by = number
            self.check()
        if first:
            self._on_stop()
