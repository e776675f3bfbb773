"""SandboxFusion's JSON for programs. Its names appear only here and, for notebooks, in `notebook`.

Three conversions, all pure: a request to `(Program, Limits)`, an `Execution` to a response, and a response back to an
`Execution` (for `RemoteSandbox`, which may be talking to a third-party server).

SandboxFusion's format cannot express everything (which limit was hit, what was truncated, the isolation level, bytes
that are not text). `RemoteSandbox` therefore adds one field, `toolyard`, to its request. A third-party server ignores
it; ours responds with a field of the same name, so that the `Execution` arrives unchanged. Clients that do not send it
get SandboxFusion's fields and no others.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticSerializationError

from toolyard import errors
from toolyard.errors import ProgramError, SandboxBusyError, SandboxError, ToolyardError
from toolyard.sandbox.protocol import MIB, Execution, Limits, Program, StageResult, Verdict

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
RunStatus = Literal["Success", "Failed", "SandboxError"]
StageStatus = Literal["Finished", "Error", "TimeLimitExceeded"]

KILLED = -9
"""The return code of a program we killed at a limit other than time: the one SIGKILL would produce."""

AT_TIME_LIMIT = frozenset({Verdict.TIMED_OUT, Verdict.CPU_EXCEEDED})
KILL_NOTES = {
    Verdict.MEMORY_EXCEEDED: "Killed: the memory limit was exceeded.",
    Verdict.OUTPUT_EXCEEDED: "Killed: the output limit was exceeded.",
    Verdict.DISK_EXCEEDED: "Killed: the disk limit was exceeded.",
}

INCOMING = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)
"""Clients of other versions may send unknown fields; we ignore them, as SandboxFusion does."""
OUTGOING = ConfigDict(frozen=True, extra="ignore", ser_json_bytes="base64", val_json_bytes="base64")


class RequestExtras(BaseModel):
    """What SandboxFusion's request cannot express. If present, the response has `ResponseExtras`."""

    model_config = OUTGOING

    limits: Limits | None = None
    """All limits, exactly. Overrides the request's own three."""
    stdin: bytes | None = None
    """Set if stdin is not UTF-8."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}


class RunCodeRequest(BaseModel):
    """`POST /run_code`."""

    model_config = INCOMING

    code: str
    language: str
    compile_timeout: Seconds = 10.0
    run_timeout: Seconds = 10.0
    memory_limit_mb: Annotated[int, Field(alias="memory_limit_MB", le=2**32)] = -1
    """Zero or less: the server's default."""
    stdin: str | None = None
    files: dict[str, str | None] = {}
    """Path to base64. Null: skipped."""
    fetch_files: list[str] = []
    toolyard: RequestExtras | None = None


class StageReport(BaseModel):
    """One stage of a response: the compiler's run, the program's, or a notebook's driver."""

    model_config = OUTGOING

    status: StageStatus
    execution_time: float | None = None
    return_code: int | None = None
    """Negative: killed by that signal. Null: stopped at a time limit."""
    stdout: str | None = None
    """Third-party servers may send null; we never do for a stage that ran."""
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    model_config = OUTGOING

    status: RunStatus
    message: str = ""
    """Empty unless `status` is SandboxError."""
    compile_result: StageReport | None = None
    run_result: StageReport | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


class StageExtras(BaseModel):
    model_config = OUTGOING

    verdict: Verdict
    exit_code: int | None
    stdout: bytes | None = None
    """Set if the stream is not UTF-8: the text next to it then has `\\xNN` escapes."""
    stderr: bytes | None = None
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    cpu_seconds: float = 0.0
    max_memory_bytes: int = 0
    starved_seconds: float = 0.0


class ResponseExtras(BaseModel):
    model_config = OUTGOING

    verdict: Verdict | None = None
    isolation: str = "unknown"
    queue_seconds: float = 0.0
    compile_cached: bool = False
    compile: StageExtras | None = None
    run: StageExtras | None = None
    max_cases: int = 0
    """How many inputs this server accepts per `/run_cases` request. 0: it has no such route."""
    error: str | None = None
    """Name of the `toolyard.errors` class that the service caught."""
    retryable: bool = False


class ExtendedRunCodeResponse(RunCodeResponse):
    """The response to a request that carried `toolyard`; without extras, the response of a third-party server."""

    toolyard: ResponseExtras | None = None


def decode_files(files: Mapping[str, str | None]) -> dict[str, bytes]:
    """Decode base64 files. Names with null are left out; line breaks in the base64 are allowed.

    Raises:
        ProgramError: one of them is not base64.
    """
    return {name: _decode(name, content) for name, content in files.items() if content is not None}


def encode_files(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode("ascii") for name, content in files.items()}


def _decode(name: str, content: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        # `base64 file` and `base64.encodebytes` insert line breaks, which strict decoding rejects.
        try:
            return base64.b64decode("".join(content.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ProgramError(f"files[{name!r}] is not base64: {error}") from None


def read_request(request: RunCodeRequest, defaults: Limits) -> tuple[Program, Limits]:
    """Return what to run and its limits. Fields that the client left out get the server's defaults.

    Raises:
        ProgramError: `files` contains something that is not base64.
    """
    extras = request.toolyard
    stdin: str | bytes | None = request.stdin
    if extras is not None and extras.stdin is not None:
        stdin = extras.stdin
    program = Program(
        request.code,
        request.language,
        stdin=stdin,
        files=decode_files(request.files),
        fetch_files=request.fetch_files,
        args=extras.args if extras else (),
        env=extras.env if extras else {},
    )
    if extras is not None and extras.limits is not None:
        return program, extras.limits
    asked = asked_limits(request)
    return program, defaults.model_copy(update=asked) if asked else defaults


def asked_limits(request: RunCodeRequest) -> dict[str, Any]:
    """The limits that the client set, keyed by `Limits` field."""
    if request.toolyard is not None and request.toolyard.limits is not None:
        return dict(request.toolyard.limits)
    asked: dict[str, Any] = {}
    if "run_timeout" in request.model_fields_set:
        asked["run_seconds"] = request.run_timeout
    if "compile_timeout" in request.model_fields_set:
        asked["compile_seconds"] = request.compile_timeout
    if request.memory_limit_mb > 0:
        asked["memory_bytes"] = request.memory_limit_mb * MIB
    return asked


def write_request(program: Program, limits: Limits) -> bytes:
    """The request body that `RemoteSandbox` posts. Valid for any SandboxFusion server, lossless with ours.

    Raises:
        ProgramError: the program contains text that JSON cannot carry (lone surrogates).
    """
    return to_json(RunCodeRequest(**request_fields(program, limits)))


def request_fields(program: Program, limits: Limits) -> dict[str, Any]:
    text, raw = split_stdin(program.stdin)
    return {
        "code": program.code,
        "language": program.language,
        "compile_timeout": limits.compile_seconds,
        "run_timeout": limits.run_seconds,
        # SandboxFusion limits the address space, under which numpy cannot start: send it only if the caller set it.
        "memory_limit_mb": max(1, limits.memory_bytes // MIB) if "memory_bytes" in limits.model_fields_set else -1,
        "stdin": text,
        "files": encode_files(program.files),
        "fetch_files": list(program.fetch_files),
        "toolyard": RequestExtras(limits=limits, stdin=raw, args=tuple(program.args), env=dict(program.env)),
    }


def to_json(message: BaseModel) -> bytes:
    """Raises ProgramError: it contains text that JSON cannot carry (lone surrogates)."""
    try:
        return message.model_dump_json(by_alias=True).encode()
    except (PydanticSerializationError, UnicodeEncodeError) as error:
        raise ProgramError(f"this cannot be sent as JSON: {error}") from None


def needs_extras(program: Program) -> str | None:
    """What `program` needs that a third-party server would silently ignore, or None."""
    if program.args:
        return "args"
    if program.env:
        return "env"
    return "stdin that is not UTF-8" if split_stdin(program.stdin)[1] is not None else None


def split_stdin(stdin: str | bytes | None) -> tuple[str | None, bytes | None]:
    """Return stdin as text if it is UTF-8, otherwise as bytes."""
    if not isinstance(stdin, bytes):
        return stdin, None
    try:
        return stdin.decode(), None
    except UnicodeDecodeError:
        return None, stdin


def write_response(execution: Execution, *, extended: bool, max_cases: int = 0) -> RunCodeResponse:
    """`extended`: the client sent `toolyard`, so the response carries verdicts and stderr gets no kill note."""
    fields: dict[str, Any] = {
        "status": "Success" if execution.verdict is Verdict.OK else "Failed",
        "compile_result": _report(execution.compile, extended),
        "run_result": _report(execution.run, extended),
        "files": encode_files(execution.files) if execution.files else {},
    }
    if not extended:
        return RunCodeResponse(**fields)
    extras = ResponseExtras(
        verdict=execution.verdict,
        isolation=execution.isolation,
        queue_seconds=execution.queue_seconds,
        compile_cached=execution.compile_cached,
        max_cases=max_cases,
        compile=_stage_extras(execution.compile),
        run=_stage_extras(execution.run),
    )
    return ExtendedRunCodeResponse(**fields, toolyard=extras)


def write_failure(error: ToolyardError, *, extended: bool) -> RunCodeResponse:
    """The response for our own failure, or for a request that cannot be run: a message and no stages."""
    message = str(error) or type(error).__name__
    if not extended:
        return RunCodeResponse(status="SandboxError", message=message)
    extras = ResponseExtras(error=type(error).__name__, retryable=error.retryable)
    return ExtendedRunCodeResponse(status="SandboxError", message=message, toolyard=extras)


def _report(stage: StageResult | None, extended: bool) -> StageReport | None:
    if stage is None:
        return None
    timed_out = stage.verdict in AT_TIME_LIMIT
    code = stage.exit_code
    stderr = stage.stderr
    if timed_out:
        code = None
    elif code is None:
        code = KILLED
        if not extended:
            stderr = _with_note(stderr, KILL_NOTES.get(stage.verdict, "Killed."))
    return StageReport(
        status="TimeLimitExceeded" if timed_out else "Finished",
        execution_time=stage.wall_seconds,
        return_code=code,
        stdout=stage.stdout,
        stderr=stderr,
    )


def _with_note(text: str, note: str) -> str:
    separator = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{separator}{note}\n"


def _stage_extras(stage: StageResult | None) -> StageExtras | None:
    if stage is None:
        return None
    return StageExtras(
        verdict=stage.verdict,
        exit_code=stage.exit_code,
        stdout=_unless_utf8(stage.stdout_bytes),
        stderr=_unless_utf8(stage.stderr_bytes),
        stdout_truncated=stage.stdout_truncated,
        stderr_truncated=stage.stderr_truncated,
        cpu_seconds=stage.cpu_seconds,
        max_memory_bytes=stage.max_memory_bytes,
        starved_seconds=stage.starved_seconds,
    )


def _unless_utf8(raw: bytes) -> bytes | None:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return raw
    return None


def read_response(response: ExtendedRunCodeResponse) -> Execution:
    """Convert a response, from our service or a third-party one, to an `Execution`.

    Raises:
        ProgramError: our service refused the program.
        SandboxError: the service failed, or its response is invalid.
    """
    extras = response.toolyard or ResponseExtras()
    stages = (response.compile_result, response.run_result)
    if response.status == "SandboxError" or any(stage and stage.status == "Error" for stage in stages):
        raise _reported_error(response)
    compiled = _stage(response.compile_result, extras.compile)
    ran = _stage(response.run_result, extras.run)
    if ran is not None:
        verdict = ran.verdict
    elif compiled is not None and compiled.verdict is not Verdict.OK:
        verdict = Verdict.COMPILE_FAILED
    else:
        raise SandboxError(f"the service responded {response.status!r} with neither a run nor a failed compilation")
    try:
        files = decode_files(response.files)
    except ProgramError as error:
        raise SandboxError(f"the service's response is invalid: {error}") from None
    return Execution(
        verdict=extras.verdict or verdict,
        run=ran,
        compile=compiled,
        files=files,
        isolation=extras.isolation,
        queue_seconds=extras.queue_seconds,
        compile_cached=extras.compile_cached,
    )


def _stage(report: StageReport | None, extras: StageExtras | None) -> StageResult | None:
    if report is None:
        return None
    stdout, stderr = (report.stdout or "").encode(), (report.stderr or "").encode()
    wall_seconds = report.execution_time or 0.0
    if extras is None:
        return StageResult(*_foreign_ending(report), stdout, stderr, wall_seconds=wall_seconds)
    return StageResult(
        extras.verdict,
        extras.exit_code,
        stdout if extras.stdout is None else extras.stdout,
        stderr if extras.stderr is None else extras.stderr,
        extras.stdout_truncated,
        extras.stderr_truncated,
        wall_seconds,
        extras.cpu_seconds,
        extras.max_memory_bytes,
        extras.starved_seconds,
    )


def _foreign_ending(report: StageReport) -> tuple[Verdict, int | None]:
    if report.status == "TimeLimitExceeded":
        return Verdict.TIMED_OUT, None
    if report.return_code is None:
        raise SandboxError("the service reports a finished stage without a return code")
    if report.return_code == 0:
        return Verdict.OK, 0
    return (Verdict.SIGNALED if report.return_code < 0 else Verdict.FAILED), report.return_code


def _reported_error(response: ExtendedRunCodeResponse) -> ToolyardError:
    message = response.message or "the service reports SandboxError without a message"
    if response.toolyard is None or response.toolyard.error is None:
        # A third-party server does not say whose fault it was. Its own client tries again, so we allow that.
        return SandboxError(message)
    return named_error(response.toolyard.error, message, retryable=response.toolyard.retryable)


def named_error(name: str, message: str, *, retryable: bool) -> ToolyardError:
    """Recreate the error that the service caught from its class name. An unknown name becomes a `SandboxError`."""
    found = getattr(errors, name, None)
    if not (isinstance(found, type) and issubclass(found, (ProgramError, SandboxError))):
        found = SandboxError
    error = found(message)
    if not isinstance(error, SandboxBusyError):
        error.retryable = retryable
    return error
