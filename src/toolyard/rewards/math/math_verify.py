"""A process that compares answers with `math-verify`: the child's side of `process`, which documents the protocol.

It is killed at the deadline, so math-verify's own timeouts, which are signals and cannot stop C code, are off. Its
memory is limited and it cannot write files: an expression that explodes only fails its own check.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Callable
from io import BufferedRWPair
from typing import Any

LENGTH = struct.Struct("<I")
"""Precedes each message, which is ASCII JSON."""

_PR_SET_PDEATHSIG = 1
_WARM_UP = r"\frac{x^2 - 1}{x - 1} + \sqrt{2}", r"x + 1 + \sqrt{2}"
_PLACES = 6
"""Decimals are compared after rounding to this many places; if the ground truth is small, to as many digits of it."""
_SHOWN_CHARS = 1000


def serve(channel: int, parent: int, memory_bytes: int) -> None:
    """Answer requests from the socket `channel` until it closes. The kernel kills it when the process `parent` ends."""
    _die_with(parent)
    warnings.simplefilter("ignore")
    logging.disable()
    with socket.socket(fileno=channel) as connection, connection.makefile("rwb") as stream:
        try:
            check = _load()
        except BaseException:
            _send(stream, {"failed": traceback.format_exc()})
            sys.exit(1)
        _limit(memory_bytes)
        _send(stream, {"ready": True})
        while (request := _receive(stream)) is not None:
            verdict = check(request, lambda parsed: _send(stream, {"truth": parsed}))
            # After growing this large, it may lack memory for the next check, which would be unfair.
            _send(stream, {**verdict, "spent": _largest_size() > memory_bytes // 2})


def _largest_size() -> int:
    """Return the peak memory of this process. Not `ru_maxrss`, which starts at the parent's."""
    with open("/proc/self/status", "rb") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith(b"VmHWM:")), 0)


def _die_with(parent: int) -> None:
    """Let the kernel kill this process: immediately, even while C code holds the GIL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def _limit(memory_bytes: int) -> None:
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _send(stream: BufferedRWPair, message: dict[str, Any]) -> None:
    encoded = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(encoded)) + encoded)
    stream.flush()


def _receive(stream: BufferedRWPair) -> dict[str, Any] | None:
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    encoded = stream.read(LENGTH.unpack(header)[0])
    return json.loads(encoded)


# The check ------------------------------------------------------------------------------------------------------------


def _load() -> Callable[[dict[str, Any], Callable[[bool], None]], dict[str, Any]]:
    import math_verify  # pyright: ignore[reportMissingTypeStubs]

    package: Any = math_verify  # it is only partly typed
    targets = [package.LatexExtractionConfig(boxed_match_priority=0), package.ExprExtractionConfig()]

    def parse(text: str) -> list[Any]:
        return package.parse(text, targets, parsing_timeout=None)

    def compare(truth: list[Any], answer: list[Any]) -> bool:
        return package.verify(truth, answer, float_rounding=_places(truth[0]), timeout_seconds=None)

    def check(request: dict[str, Any], tell_truth: Callable[[bool], None]) -> dict[str, Any]:
        truth = parse(_boxed(request["truth"]))
        is_expression = bool(truth) and not isinstance(truth[0], str)
        tell_truth(is_expression)
        right, answer = False, list[Any]()
        if is_expression:
            # math-verify itself catches most errors and returns false.
            with contextlib.suppress(MemoryError, RecursionError):
                answer = parse(_boxed(request["answer"]) if request["boxed"] else request["answer"])
                right = bool(answer) and compare(truth, answer)
        # Never format an expression: that may take forever.
        found = next((piece[:_SHOWN_CHARS] for piece in answer if isinstance(piece, str)), None)
        return {"right": right, "extracted": found}

    # Warm up, so that lazy loading does not count against the first check's deadline.
    compare(parse(_boxed(_WARM_UP[0])), parse(_boxed(_WARM_UP[1])))
    return check


def _boxed(expression: str) -> str:
    return f"\\boxed{{{expression}}}"


def _places(truth: Any) -> int:
    """More places for a small number, of which six would leave nothing: 0 is not 0.0000012."""
    places = _PLACES
    if getattr(truth, "is_Rational", False) or getattr(truth, "is_Float", False):
        size = abs(truth)
        while 0 < size < 1 and places < 100:
            size *= 10
            places += 1
    return places
