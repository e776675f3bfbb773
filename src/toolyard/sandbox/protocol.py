"""The sandbox's nouns: `Program` and `Limits` in, `Execution` with a `Verdict` out, and what a `Sandbox` must do.

What the guest program did is a value. What we failed to do is an exception (see `toolyard.errors`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Annotated, Any, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

MIB = 1024 * 1024
GIB = 1024 * MIB
Bytes = Annotated[int, Field(gt=0, lt=1 << 62)]
Seconds = Annotated[float, Field(gt=0, lt=1e9)]
Count = Annotated[int, Field(gt=0, lt=1 << 31)]


class Verdict(StrEnum):
    """How a program ended. Every one of these is the program's doing."""

    OK = "ok"
    """Exit code 0."""
    FAILED = "failed"
    """Ended by itself with a non-zero exit code (an uncaught Python exception is exit code 1)."""
    SIGNALED = "signaled"
    """Died of a signal that we did not send: SIGSEGV, SIGABRT, or one it sent to itself."""
    TIMED_OUT = "timed_out"
    """Stopped at `Limits.run_seconds` (or `compile_seconds`) of real time."""
    CPU_EXCEEDED = "cpu_exceeded"
    """Stopped at `Limits.cpu_seconds` of processor time, over all its processes."""
    MEMORY_EXCEEDED = "memory_exceeded"
    """Killed for using more than `Limits.memory_bytes`, over all its processes and its files in memory."""
    OUTPUT_EXCEEDED = "output_exceeded"
    """Stopped for writing more than `Limits.flood_bytes` to stdout or stderr."""
    DISK_EXCEEDED = "disk_exceeded"
    """Stopped for holding more than `Limits.disk_bytes` in its writable directories."""
    COMPILE_FAILED = "compile_failed"
    """The compiler rejected it, or itself ran into a limit; `Execution.compile` says which."""


class Limits(BaseModel):
    """What one program may use. Over-limit is a verdict that keeps the output produced until then."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_seconds: Seconds = 10.0
    """Real time of the run stage, from its start. CPU time alone would let `sleep` hold a worker for ever."""
    compile_seconds: Seconds = 10.0
    """Real time of the compile stage, where the language has one."""
    cpu_seconds: Seconds | None = None
    """Processor time of all processes together. None: only real time counts."""
    memory_bytes: Bytes = 1024 * MIB
    """Resident memory of the whole process tree, files in its private directories included."""
    processes: Count = 128
    """Processes and threads alive at once. Past it, fork and thread creation fail inside the program (EAGAIN)."""
    open_files: Count = 512
    """Open file descriptors of each process. Past it, open() fails inside the program (EMFILE)."""
    file_bytes: Bytes = 128 * MIB
    """Size of any single file. Past it, write() fails inside the program (EFBIG)."""
    disk_bytes: Bytes = 256 * MIB
    """All files together. The program sees "no space left" or is stopped with DISK_EXCEEDED."""
    output_bytes: Annotated[int, Field(gt=0, le=256 * MIB)] = 1 * MIB
    """How much of stdout and of stderr is kept, each. The rest is read and dropped, and the result says so."""
    flood_bytes: Bytes = 64 * MIB
    """Where dropping ends: a program that writes more than this to one stream is stopped with OUTPUT_EXCEEDED."""


class Program(BaseModel):
    """A program to run: its source and everything it is given.

    `files` are written before it starts, `fetch_files` are read after it ended, both relative to its working directory
    (absolute names mean its own private root). Names that would leave it are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    language: str = "python"
    stdin: str | bytes | None = None
    """None and empty both mean: end of file at once."""
    files: Mapping[str, bytes] = {}
    fetch_files: Sequence[str] = ()
    """Read back after any outcome. A name that is missing, or no regular file, is left out of `Execution.files`."""
    args: Sequence[str] = ()
    """Arguments after the program's own name in `sys.argv` / `argv`."""
    env: Mapping[str, str] = {}
    """Variables added to the small fixed environment. Nothing of the host's environment is ever passed on."""

    def __init__(self, code: str, language: str = "python", **data: Any) -> None:
        # Positional, because `Program("print(1)")` is how people write it.
        super().__init__(code=code, language=language, **data)


@dataclass(frozen=True, slots=True)
class StageResult:
    """One stage: the compiler's run, or the program's."""

    verdict: Verdict
    exit_code: int | None
    """Negative: died of that signal. None: we stopped it at a limit."""
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    max_memory_bytes: int = 0
    """Largest resident size seen of one process; 0 where the sandbox cannot tell."""
    starved_seconds: float = 0.0
    """How long it waited for a processor, if that made it late: its time limit was extended by as much."""

    @property
    def stdout(self) -> str:
        """Text. Bytes that are not UTF-8 appear as `\\xNN`; `stdout_bytes` has them as they were."""
        return self.stdout_bytes.decode("utf-8", "backslashreplace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Execution:
    """What became of a program. Bad programs are data: only our own failures are exceptions."""

    verdict: Verdict
    run: StageResult | None
    """None when it did not come to a run: the compile stage failed."""
    compile: StageResult | None = None
    """None for interpreted languages."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    isolation: str = "unknown"
    """The level in force while it ran: `full`, `namespaces`, `confined`, `none`; `unknown` for a foreign service."""
    queue_seconds: float = 0.0
    """How long it waited for a free worker. Not part of any limit."""
    compile_cached: bool = False

    @property
    def ok(self) -> bool:
        return self.verdict is Verdict.OK

    @property
    def stdout(self) -> str:
        return self.run.stdout if self.run else ""

    @property
    def stderr(self) -> str:
        """Of the run; of the compiler where it did not come to a run."""
        stage = self.run or self.compile
        return stage.stderr if stage else ""

    @property
    def exit_code(self) -> int | None:
        return self.run.exit_code if self.run else None

    @property
    def truncated(self) -> bool:
        return bool(self.run and (self.run.stdout_truncated or self.run.stderr_truncated))

    @property
    def wall_seconds(self) -> float:
        return sum(stage.wall_seconds for stage in (self.compile, self.run) if stage)


@dataclass(frozen=True, slots=True)
class CellError:
    """An exception a cell ended with, in a notebook's terms."""

    ename: str
    evalue: str
    traceback: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CellResult:
    """What one cell of a session did. `error` is set when it raised; the session lives on."""

    verdict: Verdict
    stdout: str
    stderr: str
    display: tuple[Mapping[str, str], ...] = ()
    """MIME bundles in order: the value of the last expression, figures, and what `display()` was given."""
    error: CellError | None = None
    truncated: bool = False
    wall_seconds: float = 0.0
    session_lost: bool = False
    """The interpreter had to be killed: variables are gone, and further cells raise `SessionLostError`."""

    @property
    def ok(self) -> bool:
        return self.verdict is Verdict.OK


@runtime_checkable
class Session(Protocol):
    """A Python interpreter that keeps its variables, imports and files between cells."""

    async def run(self, code: str, *, seconds: float | None = None) -> CellResult:
        """Run one cell. An exception or a time-out is a result; after a time-out the session lives on if it can.

        Raises:
            SessionLostError: the interpreter is gone.
            SandboxError: it could not be run at all.
        """
        ...

    async def write_files(self, files: Mapping[str, bytes]) -> None: ...

    async def read_files(self, names: Sequence[str]) -> dict[str, bytes]: ...

    async def close(self) -> None: ...


@runtime_checkable
class Sandbox(Protocol):
    """Runs programs. `LocalSandbox` and `RemoteSandbox` are this; `toolyard.testing` holds any other to it."""

    async def run(self, program: Program, limits: Limits | None = None) -> Execution:
        """Run `program` to completion. Crashes, endless loops and hunger are verdicts, not errors.

        When it returns, every process the program started is dead and everything it wrote is gone.
        Cancelling it stops the program.

        Raises:
            ProgramError: the request itself is wrong (unknown language, bad file name).
            SandboxError: it could not be run at all; `retryable` says whether to try again.
        """
        ...

    def session(self, limits: Limits | None = None) -> AbstractAsyncContextManager[Session]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
