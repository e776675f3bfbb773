"""The checks of `toolyard doctor`: what works on this machine, found by trying it. Prints nothing.

Kernel features are tried one by one in separate processes, each language's self-test runs in a real sandbox, and
optional packages are imported in a fresh interpreter: what is reported as OK has just worked. If a Ray cluster is
running, it is asked for its limiters; none is started.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from toolyard import settings
from toolyard._version import __version__
from toolyard.cli.doctor.remedies import Host, kernel_remedy, toolchain_remedy
from toolyard.cli.outcomes import duration, ending, summary_line
from toolyard.errors import LimiterError, MissingDependencyError, SandboxError, ToolchainMissingError, ToolyardError
from toolyard.limits.cluster import survey as ray_survey
from toolyard.limits.cluster.survey import FoundLimiter, Survey
from toolyard.sandbox import languages
from toolyard.sandbox.guest import native
from toolyard.sandbox.isolation import Grants, Level, probe
from toolyard.sandbox.languages import Language, Toolchain
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Limits, Program

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "server": ("httptools", "prometheus_client", "starlette", "uvicorn", "uvloop"),
    "ray": ("ray",),
    "mcp": ("anyio", "mcp"),
    "chat": ("httpx", "jinja2", "renderers", "tokenizers", "transformers"),
    "hf": ("accelerate", "gguf", "safetensors", "torch"),
    "parquet": ("pyarrow",),
    "datasets": ("datasets",),
    "pictures": ("matplotlib",),
    "math": ("math_verify",),
    "viewer": ("textual",),
    "otel": ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "trl": ("matplotlib", "peft", "trl"),
    "verl": ("verl",),
}
"""The modules of each user-facing extra in pyproject.toml."""

_SELF_TEST_LIMITS = Limits(run_seconds=30, compile_seconds=60)
_IMPORT_SECONDS = 120.0
"""The first import of torch from a cold disk is slow."""
_SURVEY_SECONDS = 45.0
"""Joining a cluster takes one or two seconds; if its head has just died, Ray would retry for minutes."""

_TORCH = """
import torch
one = torch.ones(64, 64)
assert (one @ one).sum().item() == 64**3, "torch cannot multiply"
print(torch.__version__)
"""
_TORCH_GPU = """
import torch
assert torch.cuda.is_available(), f"torch {torch.__version__} sees no GPU"
for index in range(torch.cuda.device_count()):
    one = torch.ones(64, 64, device=f"cuda:{index}")
    assert (one @ one).sum().item() == 64**3, f"GPU {index} cannot multiply"
print(torch.cuda.device_count())
"""

ReportProgress = Callable[[str], None]


class Status(StrEnum):
    OK = "ok"
    """Tried, and it works."""
    MISSING = "missing"
    """Not installed, or not permitted."""
    BROKEN = "broken"
    """Present, but it failed when tried."""
    UNKNOWN = "unknown"
    """Of a pod: left to the node or the image."""


class Group(StrEnum):
    KERNEL = "kernel"
    SANDBOX = "sandbox"
    LANGUAGES = "languages"
    EXTRAS = "extras"
    HARDWARE = "hardware"
    CLUSTER = "cluster"


class Check(BaseModel):
    """One thing that was tried."""

    model_config = ConfigDict(frozen=True)

    group: Group
    name: str
    status: Status
    detail: str
    """A version, a time, or the reason it does not work."""
    remedy: str | None = None
    """What to do about it, if anything can be done."""


class DoctorReport(BaseModel):
    """All checks. `can_run` is the verdict: a Python program ran in the embedded sandbox."""

    model_config = ConfigDict(frozen=True)

    toolyard: str
    system: str
    processors: int
    python: str
    can_run: bool
    isolation: Level | None
    """The level of `isolation="best"`. None: the machine could not be probed."""
    memory_limit: str | None
    """How a process tree's memory is limited: `cgroup v1`, `cgroup v2`, `sampling`, `per process`."""
    checks: tuple[Check, ...]
    limiters: tuple[FoundLimiter, ...] = ()
    """Those alive in the Ray cluster, if one is running."""

    def of(self, group: Group) -> list[Check]:
        return [check for check in self.checks if check.group is group]


async def examine(python: str | None = None, *, tell: ReportProgress = lambda _: None) -> DoctorReport:
    """Try everything. `tell` is called with the name of what is being tried. A failure is a check, not an error."""
    tell("kernel features")
    checks: list[Check] = []
    grants = None
    can_run = False
    try:
        grants = await probe(python)
        checks += kernel_checks(grants, Host.read(root=grants.root))
        checks += await _examine_sandbox(python, grants, tell)
        can_run = any(check.name == "python" and check.status is Status.OK for check in checks)
    except SandboxError as error:
        remedy = f"check --python {python}" if python else None
        checks.append(Check(group=Group.SANDBOX, name="start", status=Status.BROKEN, detail=str(error), remedy=remedy))
    for extra, modules in EXTRAS.items():
        tell(f"the extra {extra}")
        checks.append(await check_extra(extra, modules))
    tell("torch and the GPU")
    torch = await _check_torch()
    checks += [torch, await _check_gpu(with_torch=torch.status is Status.OK)]
    limiters: tuple[FoundLimiter, ...] = ()
    if importlib.util.find_spec("ray") is not None:
        tell("the cluster's limiters")
        status, found = await _survey()
        checks += cluster_checks(status, found)
        limiters = found.limiters
    return DoctorReport(
        toolyard=__version__,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processors=len(os.sched_getaffinity(0)),
        python=f"{grants.python.version} ({grants.python.executable})" if grants else platform.python_version(),
        can_run=can_run,
        isolation=grants.level if grants else None,
        memory_limit=grants.memory_limit if grants else None,
        checks=tuple(checks),
        limiters=limiters,
    )


# Kernel ---------------------------------------------------------------------------------------------------------------


_LOST = {
    "mount namespace": "programs can read the system's files",
    "private root": "programs can read the system's files, and have no /dev/shm, so multiprocessing has no locks",
    "pid namespace": "CPU time is limited per process only",
    "network namespace": "programs have no Unix sockets except connected pairs",
    "uts namespace": "programs can read the host's name",
    "landlock": "read-only mounts alone protect files, and without namespaces programs cannot run",
    "seccomp": "all system calls are allowed, and without namespaces programs cannot run",
    "own user id": "programs keep root's user id, with none of its capabilities: they can look up names and sizes of "
    "root's files, and run only with Landlock 6 and a cgroup",
}
"""What programs or their host lose without a feature."""


def _lost(feature: str, grants: Grants) -> str | None:
    if feature == "cgroup":
        if grants.namespaces:
            return "memory is sampled and may exceed its limit for up to 20 ms"
        return "memory is limited per process only, and programs have no shared anonymous memory"
    return _LOST.get(feature)


def kernel_checks(grants: Grants, host: Host) -> list[Check]:
    """One check for each probed feature, with what is lost without it.

    The user id is left out where its absence is no loss: for ordinary users, and for root with namespaces.
    """
    details = {"landlock": f"ABI {grants.landlock_abi}", "cgroup": f"v{grants.cgroup[0]}" if grants.cgroup else ""}
    checks: list[Check] = []
    for feature, reason in grants.features.items():
        if feature == "own user id" and (not grants.root or (reason and grants.namespaces)):
            continue
        status = Status.MISSING if reason else Status.OK
        remedy = kernel_remedy(feature, reason, host) if reason else None
        lost = _lost(feature, grants) if reason else None
        detail = f"{reason}; lost: {lost}" if lost else reason or details.get(feature) or "works"
        checks.append(Check(group=Group.KERNEL, name=feature, status=status, detail=detail, remedy=remedy))
    return checks


# Sandbox and languages ------------------------------------------------------------------------------------------------


async def _examine_sandbox(python: str | None, grants: Grants, tell: ReportProgress) -> list[Check]:
    tell("the embedded sandbox")
    started = time.monotonic()
    async with LocalSandbox(python=python, gpu=True) as sandbox:
        opened = duration(time.monotonic() - started)
        checks = [Check(group=Group.SANDBOX, name="start", status=Status.OK, detail=f"ready in {opened}")]
        checks.append(await _check_speed(sandbox))
        checks.append(check_batches())
        checks.append(await _check_session(sandbox))
        # The sandbox runs one program per worker; the others wait, which does not count against their time limit.
        async with asyncio.TaskGroup() as group:
            tried = [group.create_task(_check_language(sandbox, grants, row, tell)) for row in languages.ALL]
        return checks + [task.result() for task in tried]


async def _check_speed(sandbox: LocalSandbox) -> Check:
    times: list[float] = []
    for _ in range(9):
        started = time.perf_counter()
        await sandbox.run(Program("print(1)"))
        times.append(time.perf_counter() - started)
    median = duration(statistics.median(times))
    return Check(group=Group.SANDBOX, name="speed", status=Status.OK, detail=f"a small Python program takes {median}")


def check_batches() -> Check:
    reason = native.why_not()
    status = Status.MISSING if reason else Status.OK
    detail = f"one by one, since the C library is {reason}" if reason else "forked from one prepared process"
    built = not reason or "TOOLYARD_NATIVE" in reason
    remedy = None if built else "with a C compiler: python -m toolyard.sandbox.guest.native.build"
    return Check(group=Group.SANDBOX, name="batches", status=status, detail=detail, remedy=remedy)


async def _check_session(sandbox: LocalSandbox) -> Check:
    try:
        async with sandbox.session() as session:
            await session.run("a, b = 20, 22")
            result = await session.run("print(a + b)")
    except ToolyardError as error:
        return Check(group=Group.SANDBOX, name="session", status=Status.BROKEN, detail=str(error))
    if result.stdout != "42\n":
        said = result.error.evalue if result.error else repr(result.stdout)
        return Check(group=Group.SANDBOX, name="session", status=Status.BROKEN, detail=f"{result.verdict}: {said}")
    return Check(group=Group.SANDBOX, name="session", status=Status.OK, detail="keeps its variables between cells")


async def _check_language(sandbox: LocalSandbox, grants: Grants, row: Language, tell: ReportProgress) -> Check:
    def check(status: Status, detail: str, remedy: str | None = None) -> Check:
        return Check(group=Group.LANGUAGES, name=row.name, status=status, detail=detail, remedy=remedy)

    try:
        toolchain = languages.resolve(row, settings.search_path())
    except ToolchainMissingError:
        return check(Status.MISSING, "no toolchain", toolchain_remedy(row))
    program = Program(row.self_test, row.name, stdin=languages.SELF_TEST_STDIN)
    try:
        execution = await sandbox.run(program, _SELF_TEST_LIMITS)
    except ToolyardError as error:
        return check(Status.BROKEN, str(error))
    tell(row.title)
    version = f"Python {grants.python.version}" if row.name == "python" else await _version(toolchain)
    if execution.ok and execution.run and languages.SELF_TEST_STDOUT in execution.run.stdout_bytes:
        return check(Status.OK, f"{version}, self-test in {duration(execution.wall_seconds)}")
    how, line = ending(execution, _SELF_TEST_LIMITS), summary_line(execution)
    return check(Status.BROKEN, f"{version}, self-test: {how}" + (f", {line}" if line else ""))


async def _version(toolchain: Toolchain) -> str:
    return await asyncio.to_thread(languages.probe_version, toolchain) or "unknown version"


# Optional packages and hardware ---------------------------------------------------------------------------------------


async def check_extra(extra: str, modules: tuple[str, ...]) -> Check:
    def check(status: Status, detail: str) -> Check:
        remedy = None if status is Status.OK else f"pip install 'toolyard[{extra}]'"
        return Check(group=Group.EXTRAS, name=extra, status=status, detail=detail, remedy=remedy)

    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if absent:
        return check(Status.MISSING, f"not installed: {', '.join(absent)}")
    worked, said = await _python(f"import {', '.join(modules)}")
    if not worked:
        return check(Status.BROKEN, f"import fails: {said}")
    return check(Status.OK, ", ".join(f"{module} {_installed_version(module)}" for module in modules))


def _installed_version(module: str) -> str:
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


async def _check_torch() -> Check:
    def check(status: Status, detail: str, remedy: str | None = None) -> Check:
        return Check(group=Group.HARDWARE, name="torch", status=status, detail=detail, remedy=remedy)

    if importlib.util.find_spec("torch") is None:
        return check(Status.MISSING, "not installed; the sandbox does not need it", "pip install 'toolyard[hf]'")
    worked, said = await _python(_TORCH)
    return check(Status.OK, f"{said}, works") if worked else check(Status.BROKEN, said, "reinstall torch")


async def _check_gpu(*, with_torch: bool) -> Check:
    def check(status: Status, detail: str, remedy: str | None = None) -> Check:
        return Check(group=Group.HARDWARE, name="gpu", status=status, detail=detail, remedy=remedy)

    tool = shutil.which("nvidia-smi", path=settings.search_path())
    listed, said = (False, "nvidia-smi is not installed")
    if tool is not None:
        query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
        listed, said = await _try(tool, *query, seconds=30)
    gpus = "; ".join(line.strip() for line in said.splitlines())
    if not with_torch:
        return check(Status.OK, f"{gpus} (not tested: no torch)") if listed else check(Status.MISSING, f"none: {gpus}")
    computes, output = await _python(_TORCH_GPU)
    if computes:
        return check(Status.OK, f"{gpus if listed else f'{output} seen by torch'}, works with torch")
    if listed:
        return check(Status.BROKEN, f"{gpus}, but {output}", "install the torch build for this driver's CUDA version")
    return check(Status.MISSING, f"none: {gpus}")


# The cluster ----------------------------------------------------------------------------------------------------------


def cluster_checks(status: int, found: Survey) -> list[Check]:
    """One check for each limiter that the survey found, or one that says why there is none."""

    def check(name: str, status: Status, detail: str, remedy: str | None = None) -> Check:
        return Check(group=Group.CLUSTER, name=name, status=status, detail=detail, remedy=remedy)

    if status == ray_survey.NO_CLUSTER:
        return [check("ray", Status.MISSING, f"no cluster is running: {found.error}")]
    if status != 0:
        return [check("ray", Status.BROKEN, f"cannot list its limiters: {found.error}")]
    if not found.limiters:
        return [check("ray", Status.OK, f"cluster at {found.cluster}, no limiters")]
    checks: list[Check] = []
    for one in found.limiters:
        where = f"namespace {one.namespace}" + (f", pid {one.pid}" if one.pid else "")
        where += f" on {one.node}" if one.node else ""
        if one.problem is not None and one.state in ("DEPENDENCIES_UNREADY", "PENDING_CREATION"):
            checks.append(check(one.name, Status.MISSING, f"is being created; {where}"))
        elif one.problem is None:
            use = f"limit {one.limit}, in flight {one.in_flight}, waiting {one.waiting}, processes {one.leases}"
            checks.append(check(one.name, Status.OK, f"{use}; {where}"))
        else:
            stop = f"toolyard doctor --stop-limiter {shlex.quote(one.name)} --namespace {shlex.quote(one.namespace)}"
            checks.append(check(one.name, Status.BROKEN, f"{one.problem} ({one.state}); {where}", f"{stop} --force"))
    return checks


async def stop_limiter(name: str, namespace: str | None, *, force: bool) -> FoundLimiter:
    """Stop a limiter of the cluster for good, and return its last state.

    Raises:
        LimiterError: there is no cluster or no such limiter, or it is in use and `force` is not set.
        MissingDependencyError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingDependencyError("ray", "ray", "stopping a cluster's limiter")
    options = [*(["--namespace", namespace] if namespace is not None else []), *(["--force"] if force else [])]
    status, found = await _survey("--stop", name, *options)
    if status == ray_survey.NO_CLUSTER:
        raise LimiterError(f"limiter {name!r} cannot be stopped: no cluster is running: {found.error}")
    if found.stopped is None:
        raise LimiterError(found.error or f"limiter {name!r} was not stopped")
    return found.stopped


async def _survey(*arguments: str) -> tuple[int, Survey]:
    """Run the survey in a separate process: Ray may be slow, and keeps its threads until the process ends."""
    command = (sys.executable, "-m", ray_survey.__name__, *arguments)
    status, printed, errors = await _run(*command, seconds=_SURVEY_SECONDS)
    try:
        return status, Survey.model_validate_json(_last_line(printed))
    except ValueError:
        return status or 1, Survey(error=_last_line(errors) or f"exit code {status}")


async def _python(code: str) -> tuple[bool, str]:
    return await _try(sys.executable, "-c", code, seconds=_IMPORT_SECONDS)


async def _try(*command: str, seconds: float) -> tuple[bool, str]:
    """Whether `command` succeeded, and its output; if it failed, the last line of its errors."""
    status, printed, errors = await _run(*command, seconds=seconds)
    if status == 0:
        return True, printed
    return False, _last_line(errors or printed) or f"exit code {status}"


def _last_line(text: str) -> str:
    return text.rpartition("\n")[2]


async def _run(*command: str, seconds: float) -> tuple[int, str, str]:
    """The exit status, stdout and stderr of `command`. It is killed after `seconds`."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return 127, "", f"{command[0]}: {error.strerror}"
    try:
        async with asyncio.timeout(seconds):
            printed, errors = await process.communicate()
    except TimeoutError:
        return 124, "", f"no answer within {seconds:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, _text(printed), _text(errors)


def _text(output: bytes) -> str:
    return output.decode("utf-8", "replace").strip()
