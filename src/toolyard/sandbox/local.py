"""`LocalSandbox`: the embedded sandbox. Programs run on this machine, in jails forked from warm interpreters.

Covered: see docs/threat-model.md; `tests/isolation` attacks every claim in it.
Not covered: bugs in the kernel itself. For programs written by hostile humans, put a virtual machine around it.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from toolyard.errors import (
    ConfigError,
    IsolationError,
    ProgramError,
    SandboxBusyError,
    SandboxClosedError,
    SandboxError,
    ToolchainMissingError,
)
from toolyard.sandbox import languages
from toolyard.sandbox.host.cases import Processors, interleave, replies
from toolyard.sandbox.host.jail import gpu_devices, zygote_config
from toolyard.sandbox.host.plans import ExecutionPlan, compile_order, python_plan, run_order
from toolyard.sandbox.host.pool import Pool, Slots
from toolyard.sandbox.host.requests import Input, ask, input_bytes, refuse_oversize, stage_result, unpack_files
from toolyard.sandbox.host.routing import LIGHT, choose_profile
from toolyard.sandbox.host.session import LocalSession
from toolyard.sandbox.host.worker import WorkerReply
from toolyard.sandbox.host.zygote import Zygote
from toolyard.sandbox.isolation import Level, choose_level, probe
from toolyard.sandbox.languages.builds import Build, Builds, build_key, make_build
from toolyard.sandbox.languages.compilers import Compilers
from toolyard.sandbox.languages.toolchains import Language, Toolchain
from toolyard.sandbox.protocol import MIB, Execution, Limits, Program, Verdict

_log = logging.getLogger(__name__)
_DEFAULT_LIMITS = Limits()
SESSION = "session"
"""The profile for sessions: its zygote also has what notebook cells need."""
_TCP_RULES = 4
"""The Landlock version that can name a port."""
GPU = "gpu"
"""The profile for programs that can see the machine's GPUs."""


class SandboxConfig(BaseModel):
    """Settings of the embedded sandbox. Every field is also a keyword argument of `LocalSandbox`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: PositiveInt | None = None
    """Programs that run at the same time. None: one per CPU this process may use, since programs that share a CPU take
    longer and hit time limits they would otherwise meet. Raise it for programs that mostly wait."""
    isolation: Literal["best", "required", "confined", "none"] = "best"
    """`best`: the highest level the machine supports, or an error if there is none. `required`: full or an error.
    `confined`: no namespaces even if they work. `none`: unprotected; only for programs you wrote yourself."""
    python: str | None = None
    """Interpreter for Python programs, with its site-packages. None: the one Toolyard runs in."""
    profiles: Mapping[str, Sequence[str]] = {
        "numpy": ("numpy",),
        "sympy": ("sympy",),
        "science": ("numpy", "scipy", "pandas", "sympy", "matplotlib"),
        "pytest": ("pytest",),
    }
    """Packages to keep imported, by profile. A program is forked from the smallest profile that has what it imports;
    packages that are not installed are skipped."""
    session_modules: Sequence[str] = ("numpy",)
    """Packages to keep imported for sessions."""
    read_only_paths: Sequence[str] = ()
    """More host paths that programs may read, at the same location. At level `confined` as root, only files that every
    user can read."""
    gpu: bool = False
    """Let programs in cuda and python_gpu, and no others, use NVIDIA GPUs. Not at level `confined`.
    GPU memory and time are not limited, and the GPU driver adds a large kernel attack surface."""
    reachable: str | None = None
    """One TCP address, `host:port`, that programs reach as 127.0.0.1 with the same port, and nothing else of any
    network. Each program then has a new worker; the inputs of `run_each` share one. Needs level `full` and Landlock 4
    (Linux 6.7)."""
    disk_bytes: PositiveInt = 256 * MIB
    """Size of the writable directories of one worker, in memory. `Limits.disk_bytes` can only be smaller."""
    max_runs_per_worker: PositiveInt = 2000
    """Replace a worker after this many programs, regardless of how many inputs each was run on."""
    max_sessions: PositiveInt = 64
    session_idle_seconds: PositiveFloat = 600.0
    """Close a session after this long without a cell."""
    compile_cache_bytes: int = 256 * MIB


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of the sandbox."""

    workers: int
    busy: int
    waiting: int
    sessions: int
    isolation: str
    memory_limit: str
    """What enforces it: `cgroup v1`, `cgroup v2`, `sampling`, `per process`."""
    executions: dict[str, int]
    """Finished programs by verdict; `error` counts our own failures."""
    zygotes: dict[str, int]
    """Live workers by profile."""


class LocalSandbox:
    """The embedded sandbox, used as `async with LocalSandbox() as sandbox`.

    Raises on entry:
        IsolationError: the machine provides less isolation than requested.
    """

    def __init__(self, config: SandboxConfig | None = None, **options: Any) -> None:
        self.config = config or SandboxConfig(**options)
        self._workers = self.config.workers or len(os.sched_getaffinity(0))
        self._reachable = None if self.config.reachable is None else _address(self.config.reachable)
        self._executions: Counter[str] = Counter()
        self._sessions: set[LocalSession] = set()
        self._opened = False

    # --------------------------------------------------------------------------------------------- life cycle
    async def __aenter__(self) -> Self:
        self.grants = await probe(self.config.python)
        self.level = choose_level(self.grants, self.config.isolation)
        if self.level is not Level.FULL:
            _log.warning("programs run at isolation level %r, not 'full'; see `toolyard doctor`", self.level.value)
        if self._reachable is not None and (self.level is not Level.FULL or self.grants.landlock_abi < _TCP_RULES):
            raise IsolationError(
                f"reachable: blocking all other addresses needs level 'full' with Landlock {_TCP_RULES}; this machine "
                f"has {self.level.value!r} with Landlock {self.grants.landlock_abi}"
            )
        self._host_directory = None
        if self.level in (Level.CONFINED, Level.NONE):
            self._host_directory = tempfile.mkdtemp(prefix="toolyard-")
            os.chmod(self._host_directory, 0o711)
        self._profiles = {name: frozenset(modules) for name, modules in self.config.profiles.items()}
        self._compilers = Compilers(self.grants.python.modules)
        self._slots = Slots(self._workers)
        self._processors = Processors()
        self._builds = Builds(self.config.compile_cache_bytes)
        max_runs = self.config.max_runs_per_worker if self._reachable is None else 1
        self._pool = Pool(self._make_zygote, idle=self._workers, max_runs=max_runs)
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
            devices=gpu_devices() if profile == GPU else (),
            reachable_port=0 if self._reachable is None else self._reachable[1],
        )
        return Zygote(profile, self.grants.python.executable, config, self._reachable)

    # ----------------------------------------------------------------------------------------------- programs
    async def run(
        self, program: Program, limits: Limits | None = None, *, start_within: float | None = None
    ) -> Execution:
        """Run `program` to completion; see `Sandbox.run`.

        `start_within` limits the wait for a free worker, in seconds; None waits as long as it takes.

        Raises:
            SandboxBusyError: no worker became free in that time; the program did not start.
        """
        self._check_request(program, [program.stdin])
        limits = limits or _DEFAULT_LIMITS
        with self._counting_errors():
            plan = await self._plan(program, limits, start_within)
            if plan.compiles:
                waited = await self._slots.take(start_within)
                try:
                    async with self._pool.worker(self._profile(plan)) as worker:
                        reply = await ask(worker, plan.order, limits, limits.run_seconds, program.stdin)
                finally:
                    self._slots.give()
                execution = plan.execution(reply, self.level, waited)
            else:
                execution = plan.execution(None, self.level)
        self._executions[execution.verdict.value] += 1
        return execution

    async def run_each(
        self,
        program: Program,
        stdins: Sequence[Input],
        limits: Limits | None = None,
        *,
        start_within: float | None = None,
        batch_results: bool = False,
    ) -> AsyncGenerator[Execution]:
        """Run `program` once on each of `stdins` and yield what `run` would have returned, in the same order.

        Cheaper than calling `run`: the program is compiled once and waits for one worker, and a Python program is
        forked from one prepared process. Other languages also use idle workers. No run sees another. Each run has its
        own `limits`; `queue_seconds` is counted for the first only. Leaving early stops the current runs and skips the
        rest; call `aclose()` to wait for that. `batch_results`: results may arrive up to 50 ms late; cheaper if you
        need all of them.

        Raises:
            ProgramError: also if `program` has a stdin of its own.
            SandboxError: the next run failed on our side; earlier results are valid.
        """
        if program.stdin is not None:
            raise ProgramError("run_each: the program has a stdin of its own; pass it in stdins instead")
        self._check_request(program, stdins)
        with self._counting_errors():
            plan = await self._plan(program, limits or _DEFAULT_LIMITS, start_within)
            found = self._each(plan, stdins, limits or _DEFAULT_LIMITS, start_within, batch_results)
            async with aclosing(found) as executions:
                async for execution in executions:
                    self._executions[execution.verdict.value] += 1
                    yield execution

    async def _each(
        self,
        plan: ExecutionPlan,
        stdins: Sequence[Input],
        limits: Limits,
        start_within: float | None,
        batch_results: bool,
    ) -> AsyncGenerator[Execution]:
        if not plan.compiles:
            for _ in stdins:
                yield plan.execution(None, self.level)
                plan = plan.again()
            return
        waited = await self._slots.take(start_within)
        slots = 1
        try:
            # Python cases are forked from one process, which is cheaper than spreading them. Others use idle workers.
            while not plan.warm and slots < len(stdins) and self._slots.take_idle():
                slots += 1
            inputs = list(map(input_bytes, stdins))
            shares = [self._replies(plan, inputs[first::slots], limits, batch_results) for first in range(slots)]
            async with aclosing(interleave(shares)) as found:
                later = plan.again()
                async for reply in found:
                    yield plan.execution(reply, self.level, waited)
                    plan, waited = later, 0.0
        finally:
            for _ in range(slots):
                self._slots.give()

    async def _replies(
        self, plan: ExecutionPlan, inputs: Sequence[bytes], limits: Limits, batch_results: bool
    ) -> AsyncGenerator[WorkerReply]:
        """One worker's reply to each of `inputs`."""
        with self._processors.lend() as processor:
            profile = self._profile(plan)
            found = replies(self._pool, profile, plan.order, inputs, limits, processor, batch_results=batch_results)
            async with aclosing(found):
                async for reply in found:
                    yield reply

    def _check_request(self, program: Program, stdins: Sequence[Input]) -> None:
        if not self._opened:
            raise SandboxClosedError("the sandbox is not open: use `async with LocalSandbox() as sandbox`")
        refuse_oversize(program, stdins)

    @contextmanager
    def _counting_errors(self) -> Generator[None]:
        try:
            yield
        except SandboxError as error:
            self._executions["error"] += 1
            if not self._opened:
                raise SandboxClosedError("the sandbox was closed while the program ran") from error
            raise

    async def _plan(self, program: Program, limits: Limits, start_within: float | None) -> ExecutionPlan:
        """Compile the program if its language needs it."""
        language = languages.find_language(program.language)
        if language.in_python:
            if language.name != "python":
                self._require_toolchain(language)
            return replace(python_plan(language.in_python(program)), gpu=language.gpu, warm=language.name == "python")
        jailed = self.level in (Level.FULL, Level.NAMESPACES)
        toolchain = self._compilers.toolchain(language, program, limits, precompiled=jailed)
        gpu = language.gpu and self.config.gpu
        if gpu:
            self._require_proc(language)
        if not toolchain.compile_argv:
            return ExecutionPlan(run_order(toolchain, program, {}), gpu=gpu)
        build, cached, queued = await self._build(toolchain, program, limits, start_within)
        return ExecutionPlan(run_order(toolchain, program, build.artifacts), build, cached, queued, gpu)

    def _require_toolchain(self, language: Language) -> None:
        """
        Raises:
            ToolchainMissingError: something the language needs besides the interpreter is missing.
        """
        self._compilers.find(language)
        if language.gpu and not self.config.gpu:
            raise ToolchainMissingError(
                f"{language.title}: this sandbox does not give programs a GPU; open it with gpu=True, or run "
                "`toolyard sandbox serve --gpu`"
            )
        if language.gpu:
            self._require_proc(language)

    def _require_proc(self, language: Language) -> None:
        if self.level is Level.CONFINED:
            raise ToolchainMissingError(
                f"{language.title}: programs cannot use a GPU at isolation level 'confined': CUDA needs /proc"
            )

    def _profile(self, plan: ExecutionPlan) -> str:
        if plan.gpu:
            return GPU
        profile = choose_profile(plan.order.code, self._profiles)
        if profile == LIGHT or self._pool.ready(profile):
            return profile
        return LIGHT

    async def _build(
        self, toolchain: Toolchain, program: Program, limits: Limits, within: float | None
    ) -> tuple[Build, bool, float]:
        queued = 0.0

        async def compile_it() -> tuple[Build, bool]:
            nonlocal queued
            queued = await self._slots.take(within)
            try:
                order = compile_order(toolchain, program)
                roomy = limits.model_copy(update={"memory_bytes": max(limits.memory_bytes, 1024 * MIB)})
                async with self._pool.worker(LIGHT) as worker:
                    reply = await ask(worker, order, roomy, limits.compile_seconds, None)
            finally:
                self._slots.give()
            stage = stage_result(reply)
            # A compiler that timed out may be faster next time; any other result would be the same again.
            keep = stage.verdict in (Verdict.OK, Verdict.FAILED)
            return make_build(toolchain, stage, unpack_files(reply.extra)), keep

        build, cached = await self._builds.get(build_key(toolchain, program), compile_it)
        return build, cached, queued

    # ----------------------------------------------------------------------------------------------- sessions
    @asynccontextmanager
    async def session(self, limits: Limits | None = None) -> AsyncGenerator[LocalSession]:
        """Open a Python interpreter that keeps its state between cells. It is closed when the block is left."""
        session = await self.open_session(limits)
        try:
            yield session
        finally:
            await session.close()

    async def open_session(self, limits: Limits | None = None) -> LocalSession:
        """Like `session`, for sessions that outlive a block; you must `close()` it.

        Raises:
            SandboxBusyError: too many sessions are open.
        """
        if not self._opened:
            raise SandboxClosedError("the sandbox is not open: use `async with LocalSandbox() as sandbox`")
        if len(self._sessions) >= self.config.max_sessions:
            raise SandboxBusyError(f"{len(self._sessions)} sessions are open, which is the maximum (max_sessions)")
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
            zygotes={name: count for name, count in dict(self._pool.live).items() if count},
        )

    @property
    def process_ids(self) -> Mapping[str, int]:
        """Zygote pids by profile, for monitoring and tests."""
        return {name: zygote.pid for name, zygote in self._pool.zygotes.items()}


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"reachable: expected host:port, not {text!r}")
    return host.strip("[]"), int(port)
