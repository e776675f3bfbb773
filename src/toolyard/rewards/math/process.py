"""The parent's side of a process that checks answers, one at a time. The child's side is `math_verify`.

They talk over a socket pair, in messages of a length and JSON:

    child:   {"ready": true} or {"failed": traceback}                                       once
    parent:  {"truth": "1/2", "answer": "0.5", "boxed": true}
    child:   {"truth": true}                  as soon as the ground truth is parsed
             {"right": true, "extracted": "0.5", "spent": false}            spent: replace this child

No `multiprocessing`: its children import the main module, which is not ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolyard.errors import OURS, RewardError
from toolyard.rewards.math import math_verify
from toolyard.rewards.math.math_verify import LENGTH

_START_SECONDS = 120.0
"""For importing sympy on a busy machine."""
_SEND_SECONDS = 10.0
"""An idle child only waits for a request."""
_POLL_SECONDS = 3600.0
"""A socket's timeout cannot be infinite."""
_SHARE = 0.5
"""Minimum share of a CPU. A check that got less by its deadline lacked time, which is not the answer's fault."""
_PATIENCE = 4
"""By how much the deadline may then be extended."""
_STOPPED = 0.01
"""A share below which waiting is pointless."""
_CPU_CLOCK = 2
_CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What to compare: LaTeX expressions, or, if not `boxed`, an answer that contains them."""

    truth: str
    answer: str
    boxed: bool


@dataclass(frozen=True, slots=True)
class CheckReply:
    """How a check ended."""

    right: bool = False
    extracted: str | None = None
    """What was taken as the answer in a text."""
    timed_out: bool = False
    spent: bool = False
    truth_problem: str = ""
    """What is wrong with the ground truth. If set, nothing is known about the answer."""


class LostError(Exception):
    """The child failed, not the check: it may succeed in another one."""

    def __init__(self, message: str, *, crashed: bool = False) -> None:
        super().__init__(message)
        self.crashed = crashed
        """It died by itself, possibly because of the check."""


class Child:
    """A process that checks one answer at a time. Started and used by one thread: it ends when that thread does."""

    def __init__(self, memory_bytes: int) -> None:
        self.checks = 0
        with contextlib.ExitStack() as undo:
            try:
                self._channel, theirs = socket.socketpair()
                undo.callback(self._channel.close)
                with theirs:
                    self._process = _start(theirs.fileno(), memory_bytes)
            except OSError as error:
                raise RewardError(f"the process that checks answers cannot be started: {error}", whose=OURS) from error
            undo.pop_all()
        self.pid = self._process.pid

    def begin(self) -> None:
        """Wait until it is ready."""
        until = time.monotonic() + _START_SECONDS
        hello = self._receive(lambda: until - time.monotonic())
        if hello is None:
            raise RewardError(f"the process that checks answers was not ready within {_START_SECONDS:g} s", whose=OURS)
        if "failed" in hello:
            raise RewardError(f"math-verify cannot be used here: {hello['failed']}", whose=OURS)

    def check(self, request: CheckRequest, seconds: float) -> CheckReply:
        """Compare. Do not use it after a reply with `timed_out`: it is still busy.

        Raises:
            LostError: it died, or got too little CPU time.
        """
        self.checks += 1
        deadline = _Deadline(seconds, self._processor_seconds)
        self._send({"truth": request.truth, "answer": request.answer, "boxed": request.boxed})
        truth = self._receive(deadline.left)
        if truth is None:
            return CheckReply(timed_out=True, truth_problem=f"could not be parsed within {seconds:g} s")
        verdict = self._receive(deadline.left)
        if verdict is None:
            return CheckReply(timed_out=True)
        return CheckReply(truth_problem="" if truth["truth"] else "cannot be parsed as an expression", **verdict)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """From any thread. Whatever its owner is waiting for fails immediately."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def end(self) -> None:
        self.kill()
        self._process.wait()
        self._channel.close()

    def disown(self) -> None:
        """In a fork: leave it to the parent, and do not keep its socket open."""
        self._channel.close()
        self._process.returncode = 0  # otherwise the destructor would wait for the parent's child

    def _processor_seconds(self) -> float:
        try:
            return time.clock_gettime((~self.pid << 3) | _CPU_CLOCK)  # like clock_getcpuclockid(3)
        except OSError:
            if not self.alive:
                raise self._lost() from None
            return time.monotonic()  # unknown: assume that it ran all the time

    def _send(self, message: dict[str, Any]) -> None:
        encoded = json.dumps(message).encode()
        self._channel.settimeout(_SEND_SECONDS)
        try:
            self._channel.sendall(LENGTH.pack(len(encoded)) + encoded)
        except OSError:
            raise self._lost() from None

    def _receive(self, left: Callable[[], float]) -> dict[str, Any] | None:
        """Return the next message. None if no time is `left`."""
        header = self._exactly(LENGTH.size, left)
        if header is None:
            return None
        (length,) = LENGTH.unpack(header)
        encoded = self._exactly(length, left)
        return None if encoded is None else json.loads(encoded)

    def _exactly(self, count: int, left: Callable[[], float]) -> bytes | None:
        received = b""
        while len(received) < count:
            seconds = left()
            if seconds <= 0:
                return None
            self._channel.settimeout(min(seconds, _POLL_SECONDS))
            try:
                more = self._channel.recv(count - len(received))
            except TimeoutError:
                continue
            except OSError:
                more = b""
            if not more:
                raise self._lost()
            received += more
        return received

    def _lost(self) -> LostError:
        self.kill()
        status = self._process.wait()
        ending = f"killed by {signal.strsignal(-status)}" if status < 0 else f"exit status {status}"
        return LostError(f"its process died: {ending}", crashed=status > 0 or -status in _CRASHES)


class _Deadline:
    """The deadline of a check that starts now. Extended if its process had to wait for a CPU."""

    def __init__(self, seconds: float, processor_seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._processor_seconds = processor_seconds
        self._begun = time.monotonic()
        self._until = self._begun + seconds
        self._used_before = processor_seconds()

    def left(self) -> float:
        """Return the seconds left; 0 if it has passed.

        Raises:
            LostError: it has passed, and the process got too little CPU time.
        """
        now = time.monotonic()
        if now < self._until:
            return self._until - now
        used = self._processor_seconds() - self._used_before
        missing = _SHARE * self._seconds - used
        if missing <= 0:
            return 0.0
        if used < _STOPPED * self._seconds or now > self._begun + _PATIENCE * self._seconds:
            raise LostError(f"its process got {used:.2f} s of CPU time within {now - self._begun:.2f} s")
        self._until = now + missing
        return missing


def _start(channel: int, memory_bytes: int) -> subprocess.Popen[bytes]:
    # It uses our module path. Its own session: Ctrl-C is the parent's concern.
    main = f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]}; from {math_verify.__name__} import serve; "
    main += f"serve({channel}, {os.getpid()}, {memory_bytes})"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", main],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[channel],
        start_new_session=True,
    )
