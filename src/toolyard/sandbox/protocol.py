"""The sandbox's types: `Program` and `Limits` in, `Execution` with a `Verdict` out, and the `Sandbox` protocol.

What the program did is a value. What we failed to do is an exception (see `toolyard.errors`).
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
    """How a program ended. Each of these was caused by the program, never by us."""

    OK = "ok"
    """Exit code 0."""
    FAILED = "failed"
    """Exited by itself with a non-zero exit code (1 for an uncaught Python exception)."""
    SIGNALED = "signaled"
    """Killed by a signal that we did not send: SIGSEGV, SIGABRT, or one it sent to itself."""
    TIMED_OUT = "timed_out"
    """Stopped after `Limits.run_seconds` (or `compile_seconds`) of real time."""
    CPU_EXCEEDED = "cpu_exceeded"
    """Stopped after `Limits.cpu_seconds` of CPU time, summed over all its processes."""
    MEMORY_EXCEEDED = "memory_exceeded"
    """Killed for using more than `Limits.memory_bytes`, counting all its processes and its files in memory."""
    OUTPUT_EXCEEDED = "output_exceeded"
    """Stopped for writing more than `Limits.flood_bytes` to stdout or stderr."""
    DISK_EXCEEDED = "disk_exceeded"
    """Stopped for storing more than `Limits.disk_bytes` in its writable directories."""
    COMPILE_FAILED = "compile_failed"
    """The compiler rejected the program or hit a limit itself; `Execution.compile` says which."""


class Limits(BaseModel):
    """What one program may use. Exceeding a limit is a verdict; the output up to that point is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_seconds: Seconds = 10.0
    """Real time of the run stage. CPU time alone would let `sleep` hold a worker forever."""
    compile_seconds: Seconds = 10.0
    """Real time of the compile stage, for languages that have one."""
    cpu_seconds: Seconds | None = None
    """CPU time of all processes together. None: only real time is limited."""
    memory_bytes: Bytes = 1024 * MIB
    """Resident memory of the whole process tree, including files in its private directories."""
    processes: Count = 128
    """Processes and threads alive at once. Beyond it, fork and thread creation fail inside the program (EAGAIN)."""
    open_files: Count = 512
    """Open file descriptors per process. Beyond it, open() fails inside the program (EMFILE)."""
    file_bytes: Bytes = 128 * MIB
    """Size of any single file. Beyond it, write() fails inside the program (EFBIG)."""
    disk_bytes: Bytes = 256 * MIB
    """All files together. The program gets "no space left" or is stopped with DISK_EXCEEDED."""
    output_bytes: Annotated[int, Field(gt=0, le=256 * MIB)] = 1 * MIB
    """How much of stdout and of stderr is kept, each. The rest is dropped and the result is marked as truncated."""
    flood_bytes: Bytes = 64 * MIB
    """A program that writes more than this to one stream is stopped with OUTPUT_EXCEEDED."""


class Program(BaseModel):
    """A program to run: its source and its inputs.

    `files` are written before it starts, and `fetch_files` are read after it ends. Both are relative to its working
    directory; absolute names refer to its private root. Names that would escape it are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    language: str = "python"
    stdin: str | bytes | None = None
    """None and empty both mean immediate end of file."""
    files: Mapping[str, bytes] = {}
    fetch_files: Sequence[str] = ()
    """Read back after any outcome. Names that are missing or not regular files are left out of `Execution.files`."""
    args: Sequence[str] = ()
    """Arguments after the program name in `sys.argv` / `argv`."""
    env: Mapping[str, str] = {}
    """Variables added to the small fixed environment. The host's environment is never passed on."""

    def __init__(self, code: str, language: str = "python", **data: Any) -> None:
        # Positional, because people write `Program("print(1)")`.
        super().__init__(code=code, language=language, **data)


@dataclass(frozen=True, slots=True)
class StageResult:
    """The result of one stage: the compiler's run or the program's run."""

    verdict: Verdict
    exit_code: int | None
    """Negative: killed by that signal. None: we stopped it at a limit."""
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    max_memory_bytes: int = 0
    """Peak resident size of the largest process; 0 if the sandbox cannot tell."""
    starved_seconds: float = 0.0
    """How long it waited for a CPU, if that delayed it: its time limit was extended by the same amount."""

    @property
    def stdout(self) -> str:
        """As text. Bytes that are not UTF-8 appear as `\\xNN`; `stdout_bytes` has the raw bytes."""
        return self.stdout_bytes.decode("utf-8", "backslashreplace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Execution:
    """The result of a program. Bad programs are data: only our own failures are exceptions."""

    verdict: Verdict
    run: StageResult | None
    """None if the program did not run because its compile stage failed."""
    compile: StageResult | None = None
    """None for interpreted languages."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    isolation: str = "unknown"
    """The level it ran at: `full`, `namespaces`, `confined`, `none`; `unknown` for a third-party service."""
    queue_seconds: float = 0.0
    """How long it waited for a free worker. Does not count toward any limit."""
    compile_cached: bool = False

    @property
    def ok(self) -> bool:
        return self.verdict is Verdict.OK

    @property
    def stdout(self) -> str:
        return self.run.stdout if self.run else ""

    @property
    def stderr(self) -> str:
        """The program's stderr, or the compiler's if the program did not run."""
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
    """The exception that ended a cell, with Jupyter's field names."""

    ename: str
    evalue: str
    traceback: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of one session cell. `error` is set if it raised; the session stays open."""

    verdict: Verdict
    stdout: str
    stderr: str
    display: tuple[Mapping[str, str], ...] = ()
    """MIME bundles in order: the value of the last expression, figures, and arguments of `display()`."""
    error: CellError | None = None
    truncated: bool = False
    wall_seconds: float = 0.0
    session_lost: bool = False
    """The interpreter had to be killed: its variables are gone, and further cells raise `SessionLostError`."""

    @property
    def ok(self) -> bool:
        return self.verdict is Verdict.OK


@runtime_checkable
class Session(Protocol):
    """A Python interpreter that keeps its variables, imports and files between cells."""

    async def run(self, code: str, *, seconds: float | None = None) -> CellResult:
        """Run one cell. An exception or a timeout is a result; after a timeout the session stays open if possible.

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
    """Runs programs. Implemented by `LocalSandbox` and `RemoteSandbox`; `toolyard.testing` has tests for any other."""

    async def run(self, program: Program, limits: Limits | None = None) -> Execution:
        """Run `program` to completion. Crashes, endless loops and exceeded limits are verdicts, not errors.

        When it returns, every process of the program is dead and everything it wrote is gone.
        Cancelling the call stops the program.

        Raises:
            ProgramError: the request itself is wrong (unknown language, bad file name).
            SandboxError: the program could not be run at all; `retryable` says whether to try again.
        """
        ...

    def session(self, limits: Limits | None = None) -> AbstractAsyncContextManager[Session]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
