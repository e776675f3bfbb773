"""The child between the fork and the program's first line, and after its last.

A Python program runs in the forked interpreter itself; any other command is executed. Both see what they would see if
started by hand in an empty directory: their own standard streams, exit codes, signals, `atexit`, joined threads, files
flushed at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import marshal
import os
import resource
import select
import signal
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from itertools import islice
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NoReturn, cast

from . import frames, kernel
from .frames import Request

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_INERT = frozenset({
    dict, list, tuple, set, frozenset, FunctionType, CellType, ModuleType, deque, defaultdict, OrderedDict,
})  # fmt: skip
"""Types whose objects can be dropped unnoticed. So can objects that the collector does not track: numbers, strings."""
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Non-blocking: a live session may have put a pipe there that no one reads."""
COMMAND, STATUS = 3, 4
"""The child's descriptors besides the standard three: for orders, and for reporting why it could not start."""
BLOCKED = (int(signal.SIGINT), int(signal.SIGXCPU), int(signal.SIGCHLD))
_UNBLOCK = int(signal.SIG_UNBLOCK)
_signal_mask: Any = sys.modules["_signal"].pthread_sigmask
"""Without the enums that `signal` wraps around it, for which every child would copy pages."""
# Used at the end of every program, under local names: a module attribute would cost three more copied pages.
_run_exit_functions: Any = cast("Any", atexit)._run_exitfuncs
_modules, _collect, _get_objects, _exit, _exec = sys.modules, gc.collect, gc.get_objects, os._exit, exec

Meta = tuple[tuple[str, ...], dict[str, str], tuple[tuple[str, int, int], ...]]
"""Arguments, environment, and the files as (name, size, mode); marshaled, since that needs no imports."""
Order = tuple[Request, Meta, bytes, memoryview]
"""The request's header, its `Meta`, the code, and the concatenated contents of the files."""


_orders = select.poll()
_orders.register(COMMAND, select.POLLIN)
_NOTHING = marshal.dumps(((), {}, ()))
_NO_OUTPUT = b"print('', end='')\n"


class RefusedError(Exception):
    """The request cannot be carried out; the message is sent to the caller."""


class Interpreter:
    """Everything a Python program needs that does not depend on the program: built once, in the worker.

    Children only read it, so its pages are never copied.
    """

    def __init__(
        self, work: str, environment: dict[str, str], *, data_factor: float, sessions: Any, scope: int, others: int
    ) -> None:
        self.work = work
        self.scope = scope
        """Landlock ruleset that blocks a program's signals to its worker; -1 if it is PID 1, which ignores them."""
        self.others = others
        """Processes of the same user that are not the program's but count toward its limit."""
        self.data_factor = data_factor
        """The memory limit times this applies to each process if no cgroup limits them all; 0: not needed."""
        self.sessions = sessions
        """Turns this process into a session's interpreter; None if the zygote was not set up for sessions."""
        self.path = work + "/main.py"
        self.environment = environment
        sys.stdin = _stream(0, "<stdin>", "surrogateescape")
        sys.stdout = _stream(1, "<stdout>", "surrogateescape")
        sys.stderr = _stream(2, "<stderr>", "backslashreplace", line_buffering=True)
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
        sys.argv = ["main.py"]
        sys.orig_argv = [sys.executable, "main.py"]
        os.environ.clear()
        os.environ.update(environment)
        self.globals: dict[str, Any] = {
            "__builtins__": sys.modules["builtins"],
            "__file__": self.path,
            "__loader__": SourceFileLoader("__main__", self.path),
            "__cached__": None,
            "__annotations__": {},
        }
        # The zygote's own modules stay reachable from here, but nowhere a program would look.
        for name in [name for name in sys.modules if name == "guest" or name.startswith("guest.")]:
            del sys.modules[name]
        sys.path[:] = [work, *(entry for entry in sys.path if entry and entry != os.path.dirname(__file__))]
        self.module_count = len(sys.modules)
        for _ in range(3):  # make the compiler's first allocations here instead of in every child
            exec(compile("x = 1\ndef f(a):\n    return a + 1\nf(2)\n", "warm", "exec"), {})  # noqa: S102

    def make_main(self) -> ModuleType:
        """Created after the fork, or the garbage collector would not examine it when the program ends."""
        main = ModuleType("__main__")
        main.__dict__.update(self.globals)
        sys.modules["__main__"] = main
        return main


def _stream(handle: int, name: str, errors: str, *, line_buffering: bool = False) -> io.TextIOWrapper:
    """A standard stream as `python` creates it for a pipe.

    There must be a pipe now: a stream checks only once whether it can seek, and /dev/null can.
    """
    mode = "w" if handle else "r"
    before, pipe = os.dup(handle), os.pipe()
    os.dup2(pipe[1 if handle else 0], handle, False)
    raw = io.FileIO(handle, mode, closefd=False)
    raw.name = name
    binary = io.BufferedWriter(raw) if handle else io.BufferedReader(raw)
    stream = io.TextIOWrapper(binary, "utf-8", errors, newline="\n", line_buffering=line_buffering)
    stream.mode = mode  # type: ignore[misc]
    os.dup2(before, handle, False)
    for spare in (before, *pipe):
        os.close(spare)
    return stream


def prepare(scope: int) -> None:
    """Become a program's process, as far as possible without knowing the program. Runs ahead of any request.

    Every line here costs copied pages, so the worker has done what it could: the streams are in place as descriptors 0
    to 4, and the signal handlers are installed, but blocked.
    """
    if scope >= 0:
        kernel.restrict_self(scope)
    os.closerange(STATUS + 1, 1 << 20)
    os.setsid()
    kernel.make_dumpable()
    unblock_signals()
    reseed()


def unblock_signals() -> None:
    _signal_mask(_UNBLOCK, BLOCKED)


def reseed() -> None:
    generator = sys.modules.get("numpy.random")
    if generator is not None:  # `random` reseeds itself after a fork; numpy's global generator does not
        generator.seed(int.from_bytes(os.urandom(4), "little"))


def install_handlers() -> None:
    """Runs in the worker. Blocked there, since a handler would make PID 1 react to signals from inside its jail."""
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGXCPU, _stop_at_limit)


def _stop_at_limit(signum: int, frame: FrameType | None) -> None:
    """A limit was reached: flush Python's buffers. A program that does not exit is killed a moment later."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)


def rehearse(interpreter: Interpreter) -> None:
    """Do what the start and end of every program do, so that the pages they write to are copied now.

    A forked process copies a page when it first writes to it, and in Python even counting references is writing. Before
    an order arrives, this delays no one. Once there is one, the rest is left to the program itself.
    """
    if _orders.poll(0):
        return
    marshal.loads(_NOTHING)
    resource.getrlimit(resource.RLIMIT_NPROC)
    write_main(os.devnull, b"")
    if _orders.poll(0):
        return
    exec(compile(_NO_OUTPUT, interpreter.path, "exec", dont_inherit=True), interpreter.make_main().__dict__)  # noqa: S102
    _flush("stdout")
    _flush("stderr")
    if not _orders.poll(0):
        _drop_objects(interpreter)


def run(interpreter: Interpreter) -> NoReturn:
    """Wait for an order and carry it out."""
    prepare(interpreter.scope)
    gc.freeze()  # what the fork left
    rehearse(interpreter)
    try:
        args, code = _receive_order(interpreter)
    except BaseException as error:
        _refuse(error)
    os.close(COMMAND)
    os.close(STATUS)
    sys.argv[1:] = args
    interpreter.make_main()
    finish(interpreter, execute(interpreter, code))


def read_order() -> Order:
    data = bytearray(os.read(COMMAND, 65536))
    if len(data) < frames.REQUEST.size:
        os._exit(0)  # the worker is gone
    header = frames.read_request(data)
    while len(data) < header.order_end:
        chunk = os.read(COMMAND, min(header.order_end - len(data), 1 << 20))
        if not chunk:
            os._exit(0)
        data += chunk
    code = frames.REQUEST.size + header.meta_size
    meta: Meta = marshal.loads(data[frames.REQUEST.size : code])
    files = code + header.code_size
    return header, meta, bytes(data[code:files]), memoryview(data)[files:]


def _receive_order(interpreter: Interpreter) -> tuple[tuple[str, ...], bytes]:
    """Read the order and set everything up for it. Commands and sessions do not return from here."""
    header, (args, environment, files), code, content = read_order()
    operation = header.operation
    write_files(interpreter.work, files, content)
    apply_limits(header, interpreter)
    limit_files(header)
    if environment:
        os.environ.update(environment)
    if operation == frames.RUN_COMMAND:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, which would be inherited
        os.execve(args[0], args, {**interpreter.environment, **environment})
    if operation == frames.OPEN_SESSION:
        if interpreter.sessions is None:
            raise RefusedError("this zygote has no sessions")
        interpreter.sessions.serve(interpreter)
    write_main(interpreter.path, code)
    return args, code


def _refuse(error: BaseException) -> NoReturn:
    """Report why on the status pipe, which closes before the first line of untrusted code runs: it cannot be forged."""
    os.write(STATUS, why_refused(error))
    os._exit(125)


def why_refused(error: BaseException) -> bytes:
    text = str(error) if isinstance(error, (RefusedError, OSError)) else f"{type(error).__name__}: {error}"
    return text.encode("utf-8", "backslashreplace")[:4000]


def apply_limits(header: Request, interpreter: Interpreter, ours: int = 2) -> None:
    """Apply all limits except those on files. `ours`: processes of the same user that are not the program's."""
    processes = header.processes
    if header.cpu_seconds != frames.NO_CPU_LIMIT:
        # Per process; the worker sums up the tree. One second extra, so that SIGXCPU comes before SIGKILL.
        seconds = int(header.cpu_seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if interpreter.data_factor:
        size = int(header.memory_bytes * interpreter.data_factor)
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    if interpreter.others:  # other workers' programs count too: leave room for them
        processes = interpreter.others + 4 * processes
    resource.setrlimit(resource.RLIMIT_NPROC, (processes + ours, processes + ours))


def limit_files(header: Request) -> None:
    """Call it after the given files are written: the limits apply to what the program writes itself."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (header.open_files, header.open_files))
    resource.setrlimit(resource.RLIMIT_FSIZE, (header.file_bytes, header.file_bytes))


def target_of(work: str, name: str) -> str:
    """The path of a file of that name. Lexical only: the jail provides the safety, this gives clear errors."""
    if not name or "\0" in name or name.endswith("/"):
        raise RefusedError(f"file name {name!r} is not a valid file name")
    parts = name.split("/")
    if ".." in parts:
        raise RefusedError(f"file name {name!r} leaves the working directory: '..' is not allowed")
    return name if name.startswith("/") else f"{work}/{name}"


def write_files(work: str, files: tuple[tuple[str, int, int], ...], content: memoryview) -> None:
    at = 0
    for name, size, mode in files:
        target = target_of(work, name)
        try:
            if "/" in name:
                os.makedirs(os.path.dirname(target), exist_ok=True)
            handle = os.open(target, _WRITE, mode)
            try:
                _write_all(handle, content[at : at + size])
            finally:
                os.close(handle)
        except OSError as error:
            raise RefusedError(f"cannot write file {name!r}: {error.strerror}") from None
        at += size


def _write_all(handle: int, content: memoryview | bytes) -> None:
    while content:
        content = content[os.write(handle, content) :]


def write_main(path: str, code: bytes | memoryview) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    _write_all(handle, code)
    os.close(handle)


def execute(
    interpreter: Interpreter,
    code: bytes | CodeType,
    begin: Callable[[Any], object] | None = None,
    argument: Any = None,
) -> int:
    """Run the program, compiled or not, as `python main.py` would; returns its exit code. Its module must exist.

    `begin` returns in a fork, which starts here: with everything at hand, it copies the fewest pages.
    """
    run, space, text = _exec, _modules["__main__"].__dict__, None if isinstance(code, CodeType) else code
    try:
        if begin is not None:
            begin(argument)
        if text is not None:
            code = compile(text, interpreter.path, "exec", dont_inherit=True)
        run(code, space)
    except SystemExit as error:
        return exit_status(error)
    except BaseException as error:
        return report(error)
    return 0


def exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 255 if error.code.bit_length() < 64 else 255
    print(error.code, file=sys.stderr)
    return 1


def report(error: BaseException) -> int:
    trace = error.__traceback__
    trace = trace.tb_next if trace is not None else None  # skip our own frame
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException:
        return 1
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def finish(interpreter: Interpreter, status: int) -> NoReturn:
    """Do what the interpreter does at exit, in its order: threads, atexit, streams, objects (files flush)."""
    try:
        if "threading" in _modules:
            _modules["threading"]._shutdown()
        _run_exit_functions()
    except BaseException as error:
        report(error)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # one is closed, missing or broken
        if not (_flush("stdout") & _flush("stderr")):
            status = 120
    # Check whether dropping any object the program created could have an effect. Most create only lists and functions.
    item: object = None
    kind = noticed = None
    for item in _get_objects():
        kind = type(item)
        # Nearly as common, but written in Python: someone may have given it a destructor.
        if kind not in _INERT and (kind is not Counter or "__del__" in Counter.__dict__):
            noticed = kind
            break
    if noticed is not None:
        item = kind = noticed = None  # so that it can be dropped
        _drop_objects(interpreter)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    _exit(status)


def _flush(name: str) -> bool:
    stream: Any = getattr(sys, name, None)
    try:
        if stream is not None:
            stream.flush()
    except BaseException as error:
        if getattr(stream, "closed", False):
            return True
        with contextlib.suppress(BaseException):
            print(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}", file=sys.stderr)
        return False
    return True


def _drop_objects(interpreter: Interpreter) -> None:
    """Drop the program's objects, so that files left open are flushed and destructors run with their globals."""
    # Twice, as the interpreter does: after the first pass, surviving objects are ordered by their references, so that
    # in the second a file's buffer is dropped before its descriptor.
    _collect()
    # New modules are at the end of the table. Looking at the others would copy their pages.
    count = len(_modules) - interpreter.module_count
    for name in ("__main__", *islice(reversed(_modules), count)) if count > 0 else ("__main__",):
        _modules.pop(name, None)
    _collect()
    # Objects still held by the zygote's modules, such as hooks or handlers, are not destroyed, but their data is
    # flushed. Destructors may also have printed, and not to the streams that the program had set.
    held = [item for item in _get_objects() if issubclass(type(item), _WRITERS)]
    for stream in (*held, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()  # type: ignore[union-attr]
        except BaseException:  # noqa: S112
            continue
