"""Ctrl-C and SIGTERM while a trainer runs: the first asks for an end after the step, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Within the block, signals are answered. Outside of the main thread, where nobody can, they are left as they are.

    What launches several processes passes a terminal's Ctrl-C on as SIGTERM. So one of each is one wish; the second of
    a kind is impatience.
    """

    def __init__(self, told: Callable[[], None]) -> None:
        """`told`: the first has come, and is heeded. Called in the signal handler."""
        self.signal: int | None = None
        """The one that came."""
        self.can_finish = False
        """Whether there is a step that is worth finishing. Where not, the first one ends it at once."""
        self._told = told
        self._seen: set[int] = set()
        self._before: dict[int, Any] = {}

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._come)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def _come(self, number: int, _: FrameType | None) -> None:
        first = not self.wanted
        again = number in self._seen
        self._seen.add(number)
        self.signal = self.signal or number
        if again or not self.can_finish:
            raise KeyboardInterrupt(number)
        if first:
            self._told()
