"""A process that compares answers by `math-verify`: the child's side of `process`, which says how they speak.

It is killed when it takes too long, so math-verify's own time-outs, which are signals and stop no C code, are off. It
may not have more memory than it is allowed, nor write files: an expression that explodes is a failure of its own check.
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
"""Before each message, which is JSON in ASCII."""

_PR_SET_PDEATHSIG = 1
_WARM_UP = r"\frac{x^2 - 1}{x - 1} + \sqrt{2}", r"x + 1 + \sqrt{2}"
_PLACES = 6
"""Decimals are compared after rounding to that many; if the ground truth is small, to that many that count in it."""
_SHOWN_CHARS = 1000


def serve(channel: int, parent: int, memory_bytes: int) -> None:
    """Answer requests from the socket `channel` until it ends. To be killed when the process `parent` is gone."""
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
            # Having been that large, it may be short of memory for the next check, which would be unjust.
            _send(stream, {**verdict, "spent": _largest_size() > memory_bytes // 2})


def _largest_size() -> int:
    """Bytes that this process ever held. Not `ru_maxrss`, which begins with what its parent held."""
    with open("/proc/self/status", "rb") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith(b"VmHWM:")), 0)


def _die_with(parent: int) -> None:
    """By the kernel: at once, and also while C code holds the interpreter's lock."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
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

    package: Any = math_verify  # its types are half known
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
            # math-verify itself catches most, and calls them false.
            with contextlib.suppress(MemoryError, RecursionError):
                answer = parse(_boxed(request["answer"]) if request["boxed"] else request["answer"])
                right = bool(answer) and compare(truth, answer)
        # Never an expression as text: making it may take for ever.
        found = next((piece[:_SHOWN_CHARS] for piece in answer if isinstance(piece, str)), None)
        return {"right": right, "extracted": found}

    # What is loaded and compiled on first use is not to count against the first check's deadline.
    compare(parse(_boxed(_WARM_UP[0])), parse(_boxed(_WARM_UP[1])))
    return check


def _boxed(expression: str) -> str:
    return f"\\boxed{{{expression}}}"


def _places(truth: Any) -> int:
    """More for a small number, of which six would leave nothing: 0 is not the answer where 0.0000012 is."""
    places = _PLACES
    if getattr(truth, "is_Rational", False) or getattr(truth, "is_Float", False):
        size = abs(truth)
        while 0 < size < 1 and places < 100:
            size *= 10
            places += 1
    return places
