"""The parent of cases: a process that holds a program, compiled, and forks it once for each input.

It runs no line of the program and learns nothing of a case but its process number and how it ended, so that no case
finds traces of another in the memory it is forked with. The cases have the same user id: what keeps them from it is
that it is not dumpable (nobody opens its memory or its descriptors) and the system-call filter. They can signal it. The
worker, which no signal reaches, then sees it gone or silent, ends everything and goes on without it.

A fork copies a page when either side first writes to it, and in Python even looking at an object is writing. That is
what a case costs, so whatever can be done once is done here, and a case does the rest with as few objects as it can.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import struct
import sys
from types import CodeType
from typing import Any, NoReturn

from . import kernel, program

CONTROL = program.COMMAND
"""The socket to the worker. A case closes it before its first line."""
READY, REFUSED, ENDED = b"rxe"
"""The first byte of a message to the worker. REFUSED goes before the ENDED of the same case, and tells why."""
REPORT = struct.Struct("<BxxxiddQ")
"""ENDED, wait status, processor seconds of the user and of the system, largest resident size."""
CASE = b"c"
"""The one message from the worker after the order; the case's standard streams come along."""
_OURS = 3
"""Processes that are not the program's: the worker, this one, and one to spare, as in an ordinary run."""
_SPACE = socket.CMSG_SPACE(3 * 4)
_COMMON = frozenset({
    "array", "bisect", "calendar", "cmath", "copy", "dataclasses", "datetime", "decimal", "fractions", "hashlib",
    "heapq", "json", "numbers", "pprint", "queue", "random", "statistics", "string", "textwrap", "threading",
    "traceback",
})  # fmt: skip
"""Modules of the standard library that a case may find imported: they do nothing but define things, and those of them
that must know of a fork do."""


def main_is_for_the_worker(header: tuple[Any, ...]) -> bool:
    """Whether the worker writes a case's main.py: it is cheaper there, where no page is shared with anybody.

    Not if the program has files of its own, one of which may have that name, nor past the limit for any file.
    """
    return header[12] == 0 and header[11] <= header[6]


def serve(interpreter: program.Interpreter, processors: set[int]) -> NoReturn:
    """In a fork of the worker, which has put the control socket in place. Leaves when that is closed."""
    try:
        order, code = _prepare(interpreter)
        steps = kernel.steps_of_a_case(processors, CONTROL)
        control = socket.socket(fileno=CONTROL)
        reseeds = "numpy.random" in sys.modules
        gc.collect()
        gc.freeze()
        interpreter.make_main()  # not frozen: the collector of each case is to look at it
        os.write(CONTROL, bytes((READY,)))
        while control.recvmsg(1, _SPACE)[0]:
            pid = os.fork()
            if pid == 0:
                break
            os.closerange(0, CONTROL)
            _, status, usage = os.wait4(pid, 0)
            os.write(CONTROL, REPORT.pack(ENDED, status, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024))
        else:
            os._exit(0)
        if order is not None:
            _write(interpreter, order)
        if reseeds:
            program.reseed()
        for step, arguments in steps:
            step(*arguments)
    except BaseException:
        os._exit(1)
    program.run_main(interpreter, code)


def _prepare(interpreter: program.Interpreter) -> tuple[program.Order | None, bytes | CodeType]:
    """Everything that all cases have in common. Returns what each still has to write to its files, and the program."""
    os.closerange(CONTROL + 1, 1 << 20)
    os.closerange(0, CONTROL)  # so that descriptors which come with a case take these numbers
    order = program.read_order()
    header, (args, environment, files), code, _ = order
    program.apply_limits(header, interpreter, _OURS)
    program.unblock_signals()
    if environment:
        os.environ.update(environment)
    sys.argv[1:] = args
    compiled = _compile(code, interpreter.path)
    if isinstance(compiled, CodeType) and not files:  # one of which may be what a name means
        _import(_COMMON.intersection(compiled.co_names), interpreter)
    if files or not main_is_for_the_worker(header):
        return order, compiled
    program.limit_files(header)
    return None, compiled


def _compile(code: bytes, path: str) -> bytes | CodeType:
    """What would say anything, an error or a warning, is left for each case to say itself."""
    warnings = sys.modules["warnings"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return compile(code, path, "exec", dont_inherit=True)
    except BaseException:
        return code


def _import(names: frozenset[str], interpreter: program.Interpreter) -> None:
    """What the program is going to import. A name that is none of its imports costs a moment, no more."""
    sys.path.remove(interpreter.work)  # or its finder would remember that the directory was empty
    for name in names:
        importlib.import_module(name)
    sys.path.insert(0, interpreter.work)
    interpreter.module_count = len(sys.modules)


def _write(interpreter: program.Interpreter, order: program.Order) -> None:
    header, (_, _, files), code, content = order
    try:
        program.write_files(interpreter.work, files, content)
        program.limit_files(header)
        program.write_main(interpreter.path, code)
    except BaseException as error:
        os.write(CONTROL, bytes((REFUSED,)) + program.why_refused(error))
        os._exit(125)
