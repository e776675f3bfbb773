"""Where cases come from: a process that holds a program, compiled, and is forked once for each input.

It runs no line of the program, and learns nothing of a case, not even how it ends: the cases are the worker's children
(see `fork_sibling` in guest.c). So no case finds traces of another in the memory it is forked with. The cases have the
same user id as this process. What keeps them from it is that it is not dumpable, so that nobody opens its memory or its
descriptors, and the system-call filter. They can signal it: then it is gone or silent, and the worker goes on without.

A fork copies a page when it is first written to, and in Python even looking at an object is writing. That is what a
case costs. So what can be done once is done once, by the worker or here, and the rest with as few objects as will do.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
import warnings
from functools import partial
from types import CodeType
from typing import Any, NoReturn

from .. import program, warmth
from ..frames import Request
from ..native import Native, Siblings
from ..program import execute, finish

CONTROL = program.COMMAND
"""The socket to the worker. A case closes it before its first line."""
READY, CASE = b"r", b"c"
"""Told to the worker when the order is understood; told by the worker for each case, whose standard streams come along.
A case that cannot be set up tells why."""
REFUSED = 125
"""And ends with this."""
_OURS = 3
"""Processes that are not the program's: the worker, this one, and one to spare, as in an ordinary run."""
_COMMON = frozenset({
    "array", "bisect", "calendar", "cmath", "copy", "dataclasses", "datetime", "decimal", "fractions", "hashlib",
    "heapq", "json", "numbers", "pprint", "queue", "random", "statistics", "string", "textwrap", "threading",
    "traceback",
})  # fmt: skip
"""Modules of the standard library that a case may find imported: they do nothing but define things, and those of them
that must know of a fork do."""


_DEAF = sys.stdlib_module_names | {"__main__", "_distutils_hack", "_virtualenv"}
"""Modules that need not hear of this kind of fork. Those of the standard library that want to hear of forks do so for
the sake of other threads, of which there are none; but for `random`, which each case seeds. Others come from `site`."""


def main_is_for_the_worker(header: Request) -> bool:
    """Whether the worker writes a case's main.py: it is cheaper there, where no page is shared with anybody.

    Not if the program has files of its own, one of which may have that name, nor past the limit for any file.
    """
    return header.files_size == 0 and header.code_size <= header.file_bytes


class Setup:
    """What all parents of a worker have in common, made in the worker."""

    def __init__(self, native: Native, interpreter: program.Interpreter, processors: set[int]) -> None:
        self.interpreter = interpreter
        mask = sum(1 << number for number in processors).to_bytes((max(processors) // 64 + 1) * 8, sys.byteorder)
        self._processors = ctypes.create_string_buffer(mask, len(mask))
        self.fork = native.fork_siblings, self._plan(closes_control=True)
        self.fork_with_control = native.fork_siblings, self._plan(closes_control=False)
        self.listening = any(name.partition(".")[0] not in _DEAF for name in sys.modules)
        """Whether a module that is loaded may have asked to hear of forks, and must. Modules of the standard library,
        which are all that a parent adds, need not be asked."""
        self.recall = warmth.Recall()
        warmth.rehearse(partial(_compile, path=interpreter.path))

    def _plan(self, *, closes_control: bool) -> Any:
        signals = sum(1 << (number - 1) for number in program.BLOCKED)
        processors = ctypes.cast(self._processors, ctypes.c_void_p)
        return ctypes.byref(Siblings(signals, len(self._processors), processors, CONTROL, closes_control))


def possible(native: Native | None) -> bool:
    """Whether cases can be forked here: by the library, from an interpreter that this was written for."""
    one_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    return bool(native is not None and sys.implementation.name == "cpython" and one_lock and native.can_fork_siblings())


def serve(setup: Setup) -> NoReturn:
    """In a fork of the worker, which has put the control socket in place. Leaves when that is closed."""
    try:
        interpreter = setup.interpreter
        order, code = _prepare(interpreter)
        plain = order is None and not setup.listening and "random" not in sys.modules
        begin, argument = setup.fork if plain else (partial(_begin, setup), order)
        setup.recall()
        warmth.sort_gaps()
        gc.freeze()
        interpreter.make_main()  # not frozen: the collector of each case is to look at it
        os.write(CONTROL, READY)
    except BaseException:
        os._exit(1)
    finish(interpreter, execute(interpreter, code, begin, argument))


def _begin(setup: Setup, order: program.Order | None) -> None:
    """Fork, and do what only some cases have to."""
    fork, argument = setup.fork_with_control
    if setup.listening:
        ctypes.pythonapi.PyOS_BeforeFork()
    fork(argument)
    try:
        if setup.listening:
            ctypes.pythonapi.PyOS_AfterFork_Child()
        elif "random" in sys.modules:  # which Python would tell of the fork
            sys.modules["random"]._inst.seed()
        program.reseed()
        if order is not None:
            _write(setup.interpreter, order)
        os.close(CONTROL)
    except BaseException:
        os._exit(1)


def _prepare(interpreter: program.Interpreter) -> tuple[program.Order | None, bytes | CodeType]:
    """Everything that all cases have in common. Returns what each still has to write to its files, and the program."""
    os.closerange(CONTROL + 1, 1 << 20)
    order = program.read_order()
    header, (args, environment, files), code, _ = order
    program.apply_limits(header, interpreter, _OURS)
    if environment:
        os.environ.update(environment)
    sys.argv[1:] = args
    compiled = _compile(code, interpreter.path)
    if isinstance(compiled, CodeType) and not files:  # one of which may be what a name means
        names = _COMMON.intersection(compiled.co_names)
        if names:
            _import(names, interpreter)
    if files or not main_is_for_the_worker(header):
        return order, compiled
    program.limit_files(header)
    return None, compiled


def _compile(code: bytes, path: str) -> bytes | CodeType:
    """What would say anything, an error or a warning, is left for each case to say itself."""
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
        os.write(CONTROL, program.why_refused(error))
        os._exit(REFUSED)
