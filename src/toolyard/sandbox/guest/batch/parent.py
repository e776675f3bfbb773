"""The parent of cases: a process that holds a compiled program and is forked once for each input.

It runs no line of the program, and learns nothing about a case, not even how it ends: the cases are the worker's
children (see `fork_sibling` in guest.c). So no case finds traces of another in the memory it is forked with. The cases
have the same user id as this process. It is protected by not being dumpable, so that no one can open its memory or
descriptors, and by the system-call filter. Cases can signal it: then it is gone or stopped, and the worker continues
without it.

A fork copies a page when it first writes to it, and in Python even looking at an object is writing. That is the cost of
a case. So everything possible is done once, by the worker or here, and the rest with as few objects as possible.
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
"""READY is sent to the worker when the order is parsed; CASE is sent by the worker for each case, with its standard
streams. A case that cannot be set up sends the reason."""
REFUSED = 125
"""Exit code of a case that cannot be set up."""
_OURS = 3
"""Processes that are not the program's: the worker, this one, and a spare one, as in an ordinary run."""
_COMMON = frozenset({
    "array", "bisect", "calendar", "cmath", "copy", "dataclasses", "datetime", "decimal", "fractions", "hashlib",
    "heapq", "json", "numbers", "pprint", "queue", "random", "statistics", "string", "textwrap", "threading",
    "traceback",
})  # fmt: skip
"""Standard library modules that a case may find already imported: they only define things, and those that need to
handle forks do."""


_WITHOUT_FORK_HOOKS = sys.stdlib_module_names | {"__main__", "_distutils_hack", "_virtualenv"}
"""Modules that need not be notified of this kind of fork. Those of the standard library that handle forks do so for
other threads, of which there are none, except `random`, which each case seeds. The others come from `site`."""


def worker_writes_main(header: Request) -> bool:
    """Whether the worker writes a case's main.py: cheaper there, since it shares no pages with cases.

    Not if the program has files of its own, one of which may have that name, nor above the file size limit.
    """
    return header.files_size == 0 and header.code_size <= header.file_bytes


class Setup:
    """What all parents of a worker have in common, created in the worker."""

    def __init__(self, native: Native, interpreter: program.Interpreter, processors: set[int]) -> None:
        self.interpreter = interpreter
        mask = sum(1 << number for number in processors).to_bytes((max(processors) // 64 + 1) * 8, sys.byteorder)
        self._processors = ctypes.create_string_buffer(mask, len(mask))
        self.fork = native.fork_siblings, self._plan(closes_control=True)
        self.fork_with_control = native.fork_siblings, self._plan(closes_control=False)
        self.has_fork_hooks = any(name.partition(".")[0] not in _WITHOUT_FORK_HOOKS for name in sys.modules)
        """Whether a loaded module may have registered for forks and must be notified. Standard library modules, which
        are all that a parent adds, need not be."""
        self.warm_attributes = warmth.AttributeWarmer()
        warmth.rehearse(partial(_compile, path=interpreter.path))

    def _plan(self, *, closes_control: bool) -> Any:
        signals = sum(1 << (number - 1) for number in program.BLOCKED)
        processors = ctypes.cast(self._processors, ctypes.c_void_p)
        return ctypes.byref(Siblings(signals, len(self._processors), processors, CONTROL, closes_control))


def possible(native: Native | None) -> bool:
    """Whether cases can be forked here: the library is usable, and the interpreter is one it was written for."""
    one_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    return bool(native is not None and sys.implementation.name == "cpython" and one_lock and native.can_fork_siblings())


def serve(setup: Setup) -> NoReturn:
    """Runs in a fork of the worker, which has set up the control socket. Exits when that is closed."""
    try:
        interpreter = setup.interpreter
        order, code = _prepare(interpreter)
        plain = order is None and not setup.has_fork_hooks and "random" not in sys.modules
        begin, argument = setup.fork if plain else (partial(_begin, setup), order)
        setup.warm_attributes()
        warmth.sort_gaps()
        gc.freeze()
        interpreter.make_main()  # not frozen: each case's collector must examine it
        os.write(CONTROL, READY)
    except BaseException:
        os._exit(1)
    finish(interpreter, execute(interpreter, code, begin, argument))


def _begin(setup: Setup, order: program.Order | None) -> None:
    """Fork, and do what only some cases need."""
    fork, argument = setup.fork_with_control
    if setup.has_fork_hooks:
        ctypes.pythonapi.PyOS_BeforeFork()
    fork(argument)
    try:
        if setup.has_fork_hooks:
            ctypes.pythonapi.PyOS_AfterFork_Child()
        elif "random" in sys.modules:  # Python would notify it of the fork
            sys.modules["random"]._inst.seed()
        program.reseed()
        if order is not None:
            _write(setup.interpreter, order)
        os.close(CONTROL)
    except BaseException:
        os._exit(1)


def _prepare(interpreter: program.Interpreter) -> tuple[program.Order | None, bytes | CodeType]:
    """Do what all cases have in common. Returns the order, if each case must write files itself, and the program."""
    os.closerange(CONTROL + 1, 1 << 20)
    order = program.read_order()
    header, (args, environment, files), code, _ = order
    program.apply_limits(header, interpreter, _OURS)
    if environment:
        os.environ.update(environment)
    sys.argv[1:] = args
    compiled = _compile(code, interpreter.path)
    if isinstance(compiled, CodeType) and not files:  # a file could shadow a module
        names = _COMMON.intersection(compiled.co_names)
        if names:
            _import(names, interpreter)
    if files or not worker_writes_main(header):
        return order, compiled
    program.limit_files(header)
    return None, compiled


def _compile(code: bytes, path: str) -> bytes | CodeType:
    """Code that would cause an error or a warning is left for each case to compile itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return compile(code, path, "exec", dont_inherit=True)
    except BaseException:
        return code


def _import(names: frozenset[str], interpreter: program.Interpreter) -> None:
    """Import what the program is going to import. A name that it does not import only costs a moment."""
    sys.path.remove(interpreter.work)  # or its finder would cache that the directory is empty
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
