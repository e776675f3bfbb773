"""The JSON of `POST /run_cases`, an extension of ours: one program on many inputs in one request.

The request is that of `/run_code` with `stdins` in place of `stdin`. The response has one line of JSON per input, in
order and as soon as it is known: what `/run_code` would have returned. A line with the status SandboxError is the last
one; its error also applies to all inputs that follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ValidationError

from toolyard.errors import ProgramError, SandboxError, ToolyardError
from toolyard.sandbox.protocol import MIB, Execution, Limits, Program
from toolyard.sandbox.wire import programs as wire

PATH = "/run_cases"
_MOST_CASES, _MOST_BYTES = 256, 16 * MIB
"""The most our client puts into one request, even if the server accepts more."""

Input = str | bytes | None


class RawStdin(BaseModel):
    """An input that is not UTF-8."""

    model_config = wire.OUTGOING

    base64: bytes


class RunCasesRequest(wire.RunCodeRequest):
    stdins: list[str | RawStdin | None]
    batch_results: bool = False
    """Results may arrive up to 50 ms late, in batches."""


def portion(stdins: Sequence[Input], most: int) -> Sequence[Input]:
    """Return the first of `stdins`, as many as fit into one request to a server that accepts `most`."""
    size = 0
    most = min(most, _MOST_CASES)
    for count, stdin in enumerate(stdins[:most]):
        size += len(stdin or "")
        if count and size > _MOST_BYTES:
            return stdins[:count]
    return stdins[:most]


def write_request(program: Program, stdins: Sequence[Input], limits: Limits, *, batch_results: bool) -> bytes:
    """
    Raises:
        ProgramError: it contains text that JSON cannot carry (lone surrogates).
    """
    fields = wire.request_fields(program, limits)
    written = list(map(_write_stdin, stdins))
    return wire.to_json(RunCasesRequest(**fields, stdins=written, batch_results=batch_results))


def _write_stdin(stdin: Input) -> str | RawStdin | None:
    text, raw = wire.split_stdin(stdin)
    return text if raw is None else RawStdin(base64=raw)


def read_request(request: RunCasesRequest, defaults: Limits) -> tuple[Program, list[Input], Limits]:
    """
    Raises:
        ProgramError: `files` contains something that is not base64, or there is a `stdin` beside `stdins`.
    """
    program, limits = wire.read_request(request, defaults)
    if program.stdin is not None:
        raise ProgramError("stdin: /run_cases takes its inputs from stdins; omit stdin")
    return program, [stdin.base64 if isinstance(stdin, RawStdin) else stdin for stdin in request.stdins], limits


def write_line(execution: Execution, *, extended: bool) -> bytes:
    return _line(wire.write_response(execution, extended=extended))


def write_failure(error: ToolyardError, *, extended: bool) -> bytes:
    return _line(wire.write_failure(error, extended=extended))


def _line(response: wire.RunCodeResponse) -> bytes:
    return response.__pydantic_serializer__.to_json(response) + b"\n"


def read_line(line: bytes, where: str) -> Execution:
    """
    Raises:
        ProgramError: the service refused the program itself.
        SandboxError: the service failed, or its response is invalid.
    """
    try:
        response = wire.ExtendedRunCodeResponse.model_validate_json(line)
    except ValidationError as error:
        raise SandboxError(f"{where}: the service's response is invalid: {error}") from error
    return wire.read_response(response)
