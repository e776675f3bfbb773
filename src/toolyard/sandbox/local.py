"""`LocalSandbox`: the embedded sandbox. Programs run on this machine, in jails forked from warm interpreters.

Covered: see docs/threat-model.md, and `tests/isolation`, which attacks every claim of it.
Not covered: bugs of the kernel itself. For programs written by hostile humans put a virtual machine around it.
"""

from __future__ import annotations

import logging
import marshal
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from toolyard.errors import ProgramError, SandboxBusyError, SandboxClosedError, SandboxError

from . import languages
from .builds import Build, Builds, build_key, made_of
from .compilers import Compilers
from .guest import frames
from .isolation import Level, choose_level, probe
from .jail import zygote_config
from .pool import Pool, Slots
from .protocol import MIB, Execution, Limits, Program, Verdict
from .requests import as_bytes, header_of, stage_result, unpack_files
from .routing import LIGHT, choose_profile
from .session import LocalSession
from .toolchains import Toolchain
from .zygote import Reply, Worker, Zygote

_log = logging.getLogger(__name__)
_DEFAULT_LIMITS = Limits()
MAX_PROGRAM_BYTES = 256 * MIB
SESSION = "session"
"""The profile of sessions: its zygote also has what a notebook cell needs."""


class SandboxConfig(BaseModel):
    """How the embedded sandbox is set up. Every field is also a keyword argument of `LocalSandbox`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: PositiveInt | None = None
    """Programs that run at the same time. None: one for each processor this process may use, since programs that share
    one take longer and run into time limits they would have met alone. More pays for programs that mostly wait."""
    isolation: Literal["best", "required", "confined", "none"] = "best"
    """`best`: the highest level the machine grants, and an error if that is none. `required`: full or an error.
    `confined`: without namespaces even where they work. `none`: unprotected; only for programs you wrote yourself."""
    python: str | None = None
    """Interpreter of Python programs, with its site-packages. None: the one Toolyard runs in."""
    profiles: Mapping[str, Sequence[str]] = {
        "numpy": ("numpy",),
        "sympy": ("sympy",),
        "science": ("numpy", "scipy", "pandas", "sympy", "matplotlib"),
    }
    """Packages to keep imported, by profile. A program is forked from the smallest profile that has what it imports;
    packages that are not installed are passed over."""
    session_modules: Sequence[str] = ("numpy",)
    """Packages to keep imported for sessions."""
    read_only_paths: Sequence[str] = ()
    """More host paths that programs may read, at the same place."""
    disk_bytes: PositiveInt = 256 * MIB
    """Size of the writable directories of one worker, in memory. `Limits.disk_bytes` can only be smaller."""
    max_runs_per_worker: PositiveInt = 2000
    """After this many programs a worker is replaced: forks of one parent share their memory layout."""
    max_sessions: PositiveInt = 64
    session_idle_seconds: PositiveFloat = 600.0
    """A session without a cell for this long is closed."""
    compile_cache_bytes: int = 256 * MIB


@dataclass(frozen=True, slots=True)
class Statistics:
    """A moment of the sandbox's life."""

    workers: int
    busy: int
    waiting: int
    sessions: int
    isolation: str
    memory_limit: str
    """Who enforces it: `cgroup v1`, `cgroup v2`, `sampling`, `per process`."""
    executions: dict[str, int]
    """Finished programs by verdict; `error` counts our own failures."""
    zygotes: dict[str, int]
    """Workers alive by profile."""


class LocalSandbox:
    """The embedded sandbox, used as `async with LocalSandbox() as sandbox`.

    Raises on entry:
        IsolationError: the machine grants less than was asked for.
    """

    def __init__(self, config: SandboxConfig | None = None, **options: Any) -> None:
        self.config = config or SandboxConfig(**options)
        self._workers = self.config.workers or len(os.sched_getaffinity(0))
        self._executions: Counter[str] = Counter()
        self._sessions: set[LocalSession] = set()
        self._opened = False

    # --------------------------------------------------------------------------------------------- life cycle
    async def __aenter__(self) -> Self:
        self.grants = await probe(self.config.python)
        self.level = choose_level(self.grants, self.config.isolation)
        if self.level is not Level.FULL:
            _log.warning("programs run at isolation level %r, not 'full'; see `toolyard doctor`", self.level.value)
        self._host_directory = None
        if self.level in (Level.CONFINED, Level.NONE):
            self._host_directory = tempfile.mkdtemp(prefix="toolyard-")
            os.chmod(self._host_directory, 0o711)
        self._profiles = {name: frozenset(modules) for name, modules in self.config.profiles.items()}
        self._compilers = Compilers()
        self._slots = Slots(self._workers)
        self._builds = Builds(self.config.compile_cache_bytes)
        self._pool = Pool(self._make_zygote, idle=self._workers, max_runs=self.config.max_runs_per_worker)
        self._opened = True
        self._compilers.start()
        try:
            await self._pool.warm_up(min(self._workers, len(os.sched_getaffinity(0))))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop everything. Programs still running end with `SandboxClosedError`; nothing is left behind."""
        if not self._opened:
            return
        self._opened = False
        self._slots.close()
        for session in list(self._sessions):
            await session.close()
        await self._compilers.stop()
        await self._pool.close()
        if self._host_directory:
            shutil.rmtree(self._host_directory, ignore_errors=True)

    def _make_zygote(self, profile: str) -> Zygote:
        modules = self.config.session_modules if profile == SESSION else sorted(self._profiles.get(profile, ()))
        config = zygote_config(
            self.grants,
            self.level,
            modules=modules,
            sessions=profile == SESSION,
            read_only={*self.config.read_only_paths, *self._compilers.read_only},
            binds=self._compilers.binds,
            disk_bytes=self.config.disk_bytes,
            host_directory=self._host_directory,
        )
        return Zygote(profile, self.grants.python.executable, config)

    # ----------------------------------------------------------------------------------------------- programs
    async def run(
        self, program: Program, limits: Limits | None = None, *, start_within: float | None = None
    ) -> Execution:
        """Run `program` to completion; see `Sandbox.run`.

        `start_within` bounds the wait for a free worker, in seconds; None waits as long as it takes.

        Raises:
            SandboxBusyError: no worker came free in that time; the program did not start.
        """
        if not self._opened:
            raise SandboxClosedError("the sandbox is not open: use `async with LocalSandbox() as sandbox`")
        limits = limits or _DEFAULT_LIMITS
        _refuse_oversize(program)
        language = languages.find_language(program.language)
        try:
            if language.name == "python":
                execution = await self._run_python(program, limits, start_within)
            else:
                jailed = self.level in (Level.FULL, Level.NAMESPACES)
                toolchain = self._compilers.toolchain(language, program, limits, shelves=jailed)
                execution = await self._run_with(toolchain, program, limits, start_within)
        except SandboxError as error:
            self._executions["error"] += 1
            if not self._opened:
                raise SandboxClosedError("the sandbox was closed while the program ran") from error
            raise
        self._executions[execution.verdict.value] += 1
        return execution

    async def _run_python(self, program: Program, limits: Limits, start_within: float | None) -> Execution:
        queued = await self._slots.take(start_within)
        try:
            profile = self._profile(program.code)
            async with self._pool.worker(profile) as worker:
                meta = (tuple(program.args), dict(program.env), _manifest(program.files, 0o644))
                reply = await self._request(
                    worker, frames.RUN_PYTHON, meta, program, limits, limits.run_seconds, program.code, program.files
                )
        finally:
            self._slots.give()
        return self._execution(reply, queued)

    def _profile(self, code: str) -> str:
        profile = choose_profile(code, self._profiles)
        if profile == LIGHT or self._pool.ready(profile):
            return profile
        return LIGHT

    async def _run_with(
        self, toolchain: Toolchain, program: Program, limits: Limits, start_within: float | None
    ) -> Execution:
        files = {toolchain.source_name: as_bytes(program.code), **program.files}
        build, cached, queued = None, False, 0.0
        if toolchain.compile_argv:
            build, cached, queued = await self._build(toolchain, program, files, limits, start_within)
            if build.stage.verdict is not Verdict.OK:
                return Execution(
                    Verdict.COMPILE_FAILED, None, build.stage, isolation=self.level, queue_seconds=queued,
                    compile_cached=cached,
                )  # fmt: skip
        waited = await self._slots.take(start_within)
        try:
            argv = (*toolchain.run_argv, *program.args)
            artifacts: Mapping[str, bytes] = build.artifacts if build else {}
            given = {name: content for name, content in files.items() if name not in artifacts}
            manifest = (*_manifest(given, 0o644), *_manifest(artifacts, 0o755))
            meta = (argv, {**toolchain.env, **program.env}, manifest)
            async with self._pool.worker(LIGHT) as worker:
                reply = await self._request(
                    worker, frames.RUN_COMMAND, meta, program, limits, limits.run_seconds, "", {**given, **artifacts}
                )
        finally:
            self._slots.give()
        return self._execution(reply, queued + waited, build, cached)

    async def _build(
        self, toolchain: Toolchain, program: Program, files: Mapping[str, bytes], limits: Limits, within: float | None
    ) -> tuple[Build, bool, float]:
        queued = 0.0

        async def compile_it() -> tuple[Build, bool]:
            nonlocal queued
            queued = await self._slots.take(within)
            try:
                assert toolchain.compile_argv
                roomy = limits.model_copy(update={"memory_bytes": max(limits.memory_bytes, 1024 * MIB)})
                meta = (toolchain.compile_argv, {**toolchain.env, **program.env}, _manifest(files, 0o644))
                fetch = [name for artifact in toolchain.artifacts for name in (artifact, artifact + "/")]
                task = Program(program.code, program.language, fetch_files=fetch)
                async with self._pool.worker(LIGHT) as worker:
                    reply = await self._request(
                        worker, frames.RUN_COMMAND, meta, task, roomy, limits.compile_seconds, "", files
                    )
            finally:
                self._slots.give()
            stage = stage_result(reply)
            # A compiler that ran into the clock may be quicker next time; anything else it says again.
            keep = stage.verdict in (Verdict.OK, Verdict.FAILED)
            return made_of(toolchain, stage, unpack_files(reply.extra)), keep

        build, cached = await self._builds.get(build_key(toolchain, program), compile_it)
        return build, cached, queued

    async def _request(
        self,
        worker: Worker,
        operation: int,
        meta: tuple[Any, ...],
        program: Program,
        limits: Limits,
        seconds: float,
        code: str,
        files: Mapping[str, bytes],
    ) -> Reply:
        stdin = program.stdin or b""
        parts = [
            marshal.dumps(meta, 4),
            as_bytes(code),
            b"".join(files.values()),
            as_bytes(stdin) if isinstance(stdin, str) else stdin,
            marshal.dumps(list(program.fetch_files), 4) if program.fetch_files else b"",
        ]
        reply = await worker.request(header_of(operation, limits, seconds, parts), parts, seconds)
        if reply.reason == frames.REFUSED:
            raise ProgramError(reply.extra.decode("utf-8", "replace"))
        if reply.reason == frames.CANCELLED:
            raise SandboxError("the program was cancelled")
        return reply

    def _execution(self, reply: Reply, queued: float, build: Build | None = None, cached: bool = False) -> Execution:
        stage = stage_result(reply)
        return Execution(
            stage.verdict,
            stage,
            build.stage if build else None,
            files=unpack_files(reply.extra),
            isolation=self.level,
            queue_seconds=queued,
            compile_cached=cached,
        )

    # ----------------------------------------------------------------------------------------------- sessions
    @asynccontextmanager
    async def session(self, limits: Limits | None = None) -> AsyncGenerator[LocalSession]:
        """A Python interpreter that keeps its state between cells, closed when the block is left."""
        session = await self.open_session(limits)
        try:
            yield session
        finally:
            await session.close()

    async def open_session(self, limits: Limits | None = None) -> LocalSession:
        """For callers whose session outlives a block; they must `close()` it.

        Raises:
            SandboxBusyError: too many sessions are open.
        """
        if not self._opened:
            raise SandboxClosedError("the sandbox is not open: use `async with LocalSandbox() as sandbox`")
        if len(self._sessions) >= self.config.max_sessions:
            raise SandboxBusyError(f"{len(self._sessions)} sessions are open, which is the limit (max_sessions)")
        session = LocalSession(
            self._slots, limits or Limits(), self.config.session_idle_seconds, on_close=self._sessions.discard
        )
        self._sessions.add(session)
        try:
            worker = await self._pool.spawn(SESSION)
            await session.open(worker, lambda: self._pool.discard(SESSION, worker))
        except BaseException:
            await session.close()
            raise
        return session

    # --------------------------------------------------------------------------------------------- statistics
    def statistics(self) -> Statistics:
        return Statistics(
            workers=self._workers,
            busy=self._workers - self._slots.free,
            waiting=self._slots.waiting,
            sessions=len(self._sessions),
            isolation=self.level,
            memory_limit=self.grants.memory_limit,
            executions=dict(self._executions),
            zygotes={name: count for name, count in self._pool.live.items() if count},
        )

    @property
    def process_ids(self) -> Mapping[str, int]:
        """Zygotes' pids by profile, for those who watch or test them."""
        return {name: zygote.pid for name, zygote in self._pool.zygotes.items()}


def _refuse_oversize(program: Program) -> None:
    size = len(program.code) + len(program.stdin or "") + sum(map(len, program.files.values()))
    if size > MAX_PROGRAM_BYTES:
        raise ProgramError(f"code, stdin and files are {size} bytes together; at most {MAX_PROGRAM_BYTES} can be sent")


def _manifest(files: Mapping[str, bytes], mode: int) -> tuple[tuple[str, int, int], ...]:
    return tuple((name, len(content), mode) for name, content in files.items())
