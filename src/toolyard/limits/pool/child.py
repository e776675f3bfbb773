"""The child's side of `process`, which explains the protocol: runs functions until the parent is gone.

Imports little, because importing is the cost of starting a worker process.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from toolyard.errors import LimiterError

REQUEST = struct.Struct("<Q")
REPLY = struct.Struct("<BQ")
HERE = b"!"
RETURNED, RAISED, LOST = range(3)
_ORPHAN_CHECK = 1.0
"""Seconds."""


def serve(channel: int, lifeline: int, parent: int) -> None:
    """Run requests until the parent closes the channel."""
    os.set_inheritable(channel, False)
    os.set_inheritable(lifeline, False)
    _die_with(lifeline, parent)
    with socket.socket(fileno=channel) as connection, connection.makefile("rwb") as stream:
        stream.write(HERE)
        stream.flush()
        while _serve_one(stream):
            pass


def _die_with(lifeline: int, parent: int) -> None:
    """Nothing is ever written to the lifeline: if it becomes readable, the parent is gone."""
    # By the kernel: immediately, even while a function holds the GIL.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)

    # By a thread: if the parent had died already, or a fork of it, such as a data loader, still holds the lifeline.
    def watch() -> None:
        while os.getppid() == parent and not select.select([lifeline], [], [], _ORPHAN_CHECK)[0]:
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="toolyard-lifeline", daemon=True).start()


def _serve_one(stream: io.BufferedRWPair) -> bool:
    header = stream.read(REQUEST.size)
    if len(header) < REQUEST.size:
        return False
    (length,) = REQUEST.unpack(header)
    request = stream.read(length)
    if len(request) < length:
        return False
    stream.write(HERE)
    stream.flush()
    kind, payload = _perform(request)
    for printed in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a function may have closed them
            printed.flush()
    stream.write(REPLY.pack(kind, len(payload)))
    stream.write(payload)
    stream.flush()
    return True


def _perform(request: bytes) -> tuple[int, bytes]:
    try:
        fn, args, kwargs = pickle.loads(request)  # noqa: S301  # from our own parent
        value = fn(*args, **kwargs)
    except BaseException as error:
        return RAISED, _describe(error)
    try:
        return RETURNED, dumps(value)
    except BaseException as error:
        return LOST, pickle.dumps((_name(value), _text(error), b""))


def _describe(error: BaseException) -> bytes:
    try:
        pickled = dumps(error)
    except BaseException:
        pickled = b""
    return pickle.dumps((_name(error), _text(error), pickled))


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _text(error: BaseException) -> str:
    trace = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, trace and trace.tb_next))


# Pickling -------------------------------------------------------------------------------------------------------------


class _ActorElsewhere:
    """Replaces a Ray actor in a process not connected to Ray, so that a tool that holds its pool can be pickled."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise LimiterError("a worker process is not connected to Ray and cannot use an actor handle")


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__module__ == "ray.actor" and type(obj).__name__ == "ActorHandle":
            return _ActorElsewhere, ()
        return super().reducer_override(obj)  # pyright: ignore


def dumps(value: object) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)  # pyright: ignore
        return file.getvalue()
