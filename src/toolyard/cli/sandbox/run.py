"""What `toolyard sandbox run` does: read a file as a `Program`, run it, and print its `Execution`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from toolyard.cli.console import print_json
from toolyard.cli.outcomes import duration, ending, exit_status, size
from toolyard.errors import ConfigError
from toolyard.sandbox import languages
from toolyard.sandbox.protocol import Execution, Limits, Program, StageResult

if TYPE_CHECKING:
    from rich.console import Console

_STDIN = "-"

_SUFFIXES = {PurePath(row.source_name).suffix: row.name for row in reversed(languages.ALL)} | {
    ".cc": "cpp",
    ".cxx": "cpp",
    ".cjs": "nodejs",
    ".bash": "bash",
    ".r": "R",
}


@dataclass(frozen=True, slots=True)
class Where:
    """The sandbox to run in: the service at `url`, or an embedded one."""

    url: str | None = None
    token: str | None = None
    isolation: Literal["best", "required", "confined", "none"] = "best"
    python: str | None = None


def read_program(file: Path, language: str | None, stdin: Path | None, args: Sequence[str]) -> Program:
    """The program in `file`, in `language` or the language of the file's suffix.

    Raises:
        ConfigError: a file cannot be read, or the suffix is unknown.
        ProgramError: the language is unknown.
    """
    name = languages.find_language(language).name if language else _language_of(file)
    code = _read(file).decode("utf-8", "surrogateescape")
    return Program(code, name, stdin=_read(stdin) if stdin else None, args=args)


def _language_of(file: Path) -> str:
    found = _SUFFIXES.get(file.suffix)
    if found is None:
        names = ", ".join(row.name for row in languages.ALL)
        where = "standard input has no suffix" if str(file) == _STDIN else f"unknown suffix {file.suffix!r} of {file}"
        raise ConfigError(f"{where}: set --language to one of {names}")
    return found


def _read(file: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(file) == _STDIN else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error


async def run_program(program: Program, limits: Limits, where: Where) -> Execution:
    if where.url:
        from toolyard.sandbox.remote.sandbox import RemoteSandbox

        async with RemoteSandbox(where.url, where.token) as sandbox:
            return await sandbox.run(program, limits)
    from toolyard.sandbox.local import LocalSandbox

    async with LocalSandbox(workers=1, isolation=where.isolation, python=where.python) as sandbox:
        return await sandbox.run(program, limits)


def print_execution(execution: Execution, limits: Limits, *, as_json: bool, verdict_on: Console | None) -> int:
    """Print the program's output and verdict, or everything as JSON. Returns the exit status of the command."""
    if as_json:
        print_json(as_fields(execution))
        return exit_status(execution)
    if execution.compile:
        _write_raw(sys.stderr, execution.compile.stdout_bytes + execution.compile.stderr_bytes)
    if execution.run:
        _write_raw(sys.stdout, execution.run.stdout_bytes)
        _write_raw(sys.stderr, execution.run.stderr_bytes)
    if verdict_on is not None:
        verdict_on.print(_verdict_line(execution, limits), style="green" if execution.ok else "yellow", markup=False)
    return exit_status(execution)


def _write_raw(stream: Any, data: bytes) -> None:
    stream.buffer.write(data)
    stream.flush()


def _verdict_line(execution: Execution, limits: Limits) -> str:
    parts = [execution.verdict.value, ending(execution, limits)]
    if execution.compile:
        cached = " (cached)" if execution.compile_cached else ""
        parts.append(f"compiled in {duration(execution.compile.wall_seconds)}{cached}")
    if execution.run:
        parts.append(f"ran {duration(execution.run.wall_seconds)}")
        if execution.run.max_memory_bytes:
            parts.append(size(execution.run.max_memory_bytes))
    if execution.truncated:
        parts.append(f"output truncated at {size(limits.output_bytes)}")
    parts.append(f"isolation {execution.isolation}")
    return f"[{' · '.join(parts)}]"


def as_fields(execution: Execution) -> dict[str, Any]:
    """The JSON fields of an execution. Output bytes that are not UTF-8 appear as `\\xNN`."""
    return {
        "verdict": execution.verdict.value,
        "exit_code": execution.exit_code,
        "stdout": execution.stdout,
        "stderr": execution.stderr,
        "isolation": str(execution.isolation),
        "compile_cached": execution.compile_cached,
        "compile": _stage_fields(execution.compile),
        "run": _stage_fields(execution.run),
    }


def _stage_fields(stage: StageResult | None) -> dict[str, Any] | None:
    if stage is None:
        return None
    return {
        "verdict": stage.verdict.value,
        "exit_code": stage.exit_code,
        "stdout": stage.stdout,
        "stderr": stage.stderr,
        "stdout_truncated": stage.stdout_truncated,
        "stderr_truncated": stage.stderr_truncated,
        "wall_seconds": round(stage.wall_seconds, 6),
        "cpu_seconds": round(stage.cpu_seconds, 6),
        "max_memory_bytes": stage.max_memory_bytes,
    }
