"""Where cases come from: a process that holds a program, compiled, and is forked once for each input.

It runs no line of the program, and learns nothing of a case, not even how it ends: the cases are the worker's children
(see `clone`). So no case finds traces of another in the memory it is forked with. The cases have the same user id as
this process. What keeps them from it is that it is not dumpable, so that nobody opens its memory or its descriptors,
and the system-call filter. They can signal it: then it is gone or silent, and the worker goes on without it.

A fork copies a page when it is first written to, and in Python even looking at an object is writing. That is what a
case costs. So what can be done once is done once, by the worker or here, and the rest with as few objects as will do.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import warnings
from functools import partial
from types import CodeType
from typing import Any, NoReturn

from . import clone, large_pages, nursery, program, steps, warmth
from .program import execute, finish
from .steps import Call

CONTROL = program.COMMAND
"""The socket to the worker. A case closes it before its first line."""
READY, CASE = b"r", b"c"
"""Told to the worker when the order is understood; told by the worker for each case, whose standard streams come along.
A case that cannot be set up tells why."""
REFUSED = 125
"""And ends with this."""
ORIGIN = program.STATUS
"""The socket between the worker and the process that parents are forked from."""
_OURS = 3
"""Processes that are not the program's: the worker, this one, and one to spare, as in an ordinary run."""
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


class Setup:
    """What all parents of a worker have in common, made in the worker."""

    def __init__(self, interpreter: program.Interpreter, processors: set[int]) -> None:
        self.interpreter = interpreter
        self.fork = clone.siblings(CONTROL, processors, program.BLOCKED, close=True)
        with nursery.within():
            self.execute, self.finish = nursery.copy_of(execute), nursery.copy_of(finish)
        self.fork_with_control = clone.siblings(CONTROL, processors, program.BLOCKED, close=False)
        self.listening = clone.listening()
        """Modules of the standard library, which are all that a parent adds, need not be asked."""
        self.inherit = None if self.listening or not steps.possible() else clone.heirs(ORIGIN, CONTROL, processors)
        """What makes a process the origin of parents; None where they are forked by the worker."""
        self.recall = warmth.Recall()
        warmth.rehearse(partial(_compile, path=interpreter.path))


def serve(setup: Setup, inherit: Call | None = None) -> NoReturn:
    """In a fork of the worker, which has put the control socket in place. Leaves when that is closed.

    `inherit`: makes this process the origin of parents, with the other socket. It stays in that call; they go on.
    """
    if inherit is not None:
        os.closerange(ORIGIN + 1, 1 << 20)
        large_pages.collapse()
        fork, those = inherit
        fork(those)
    try:
        interpreter = setup.interpreter
        order, code = _prepare(interpreter, _OURS if inherit is None else _OURS + 1)  # and its origin
        plain = order is None and not setup.listening and "random" not in sys.modules
        begin, argument = setup.fork if plain else (partial(_begin, setup), order)
        setup.recall()
        warmth.sort_gaps()
        gc.freeze()
        nursery.open_up()
        interpreter.make_main()  # not frozen: the collector of each case is to look at it
        os.write(CONTROL, READY)
    except BaseException:
        os._exit(1)
    setup.finish(interpreter, setup.execute(interpreter, code, begin, argument))


def _begin(setup: Setup, order: program.Order | None) -> None:
    """Fork, and do what only some cases have to."""
    fork, argument = setup.fork_with_control
    if setup.listening:
        clone.tell_before()
    fork(argument)
    try:
        if setup.listening:
            clone.tell_child()
        else:
            clone.reseed()
        program.reseed()
        if order is not None:
            _write(setup.interpreter, order)
        os.close(CONTROL)
    except BaseException:
        os._exit(1)


def _prepare(interpreter: program.Interpreter, ours: int) -> tuple[program.Order | None, bytes | CodeType]:
    """Everything that all cases have in common. Returns what each still has to write to its files, and the program.

    `ours`: processes that are not the program's.
    """
    os.closerange(CONTROL + 1, 1 << 20)
    order = program.read_order()
    header, (args, environment, files), code, _ = order
    program.apply_limits(header, interpreter, ours)
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
