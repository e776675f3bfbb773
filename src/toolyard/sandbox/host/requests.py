"""Converts between the sandbox's types and a worker's frames: limits to headers, replies to results, file records."""

from __future__ import annotations

import marshal
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolyard.errors import ProgramError, SandboxError
from toolyard.sandbox.guest import frames
from toolyard.sandbox.host.worker import Worker, WorkerReply
from toolyard.sandbox.protocol import MIB, Limits, Program, StageResult, Verdict

_REASONS = {
    frames.TIMED_OUT: Verdict.TIMED_OUT,
    frames.CPU_EXCEEDED: Verdict.CPU_EXCEEDED,
    frames.MEMORY_EXCEEDED: Verdict.MEMORY_EXCEEDED,
    frames.OUTPUT_EXCEEDED: Verdict.OUTPUT_EXCEEDED,
    frames.DISK_EXCEEDED: Verdict.DISK_EXCEEDED,
}


MAX_PROGRAM_BYTES = 256 * MIB
Input = str | bytes | None


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to run, without the input."""

    operation: int
    meta: tuple[Any, ...]
    code: str
    files: Mapping[str, bytes]
    fetch: Sequence[str] = ()

    def parts(self, stdin: bytes) -> list[bytes]:
        """The body of the request, in the order of `frames.REQUEST`."""
        return [
            marshal.dumps(self.meta, 4),
            as_bytes(self.code),
            b"".join(self.files.values()),
            stdin,
            marshal.dumps(list(self.fetch), 4) if self.fetch else b"",
        ]


def refuse_oversize(program: Program, stdins: Sequence[Input]) -> None:
    """
    Raises:
        ProgramError: it is larger than a worker accepts.
    """
    size = len(program.code) + sum(len(stdin or "") for stdin in stdins) + sum(map(len, program.files.values()))
    if size > MAX_PROGRAM_BYTES:
        raise ProgramError(f"code, stdin and files are {size} bytes in total; the maximum is {MAX_PROGRAM_BYTES}")


def input_bytes(stdin: Input) -> bytes:
    return as_bytes(stdin) if isinstance(stdin, str) else stdin or b""


def inputs_part(stdins: Sequence[bytes], processor: int, *, batch_results: bool) -> bytes:
    """The stdin part of an EACH request."""
    table = struct.pack(f"<{len(stdins)}Q", *map(len, stdins))
    return b"".join((frames.CASES.pack(len(stdins), processor, batch_results), table, *stdins))


def manifest(files: Mapping[str, bytes], mode: int) -> tuple[tuple[str, int, int], ...]:
    return tuple((name, len(content), mode) for name, content in files.items())


def as_bytes(text: str) -> bytes:
    """Encode as UTF-8. Lone surrogates, which JSON can carry, become bytes that are equally invalid."""
    return text.encode("utf-8", "surrogatepass")


def header_of(operation: int, limits: Limits, seconds: float, parts: Sequence[bytes]) -> bytes:
    return frames.REQUEST.pack(
        operation,
        seconds,
        limits.cpu_seconds or frames.NO_CPU_LIMIT,
        limits.memory_bytes,
        limits.processes,
        limits.open_files,
        limits.file_bytes,
        limits.disk_bytes,
        limits.output_bytes,
        max(limits.flood_bytes, limits.output_bytes),
        *map(len, parts),
    )


async def ask(worker: Worker, order: Order, limits: Limits, seconds: float, stdin: Input) -> WorkerReply:
    """
    Raises:
        ProgramError: it cannot be run as requested.
        SandboxError: it was not run.
    """
    parts = order.parts(input_bytes(stdin))
    return accepted(await worker.request(header_of(order.operation, limits, seconds, parts), parts, seconds))


def accepted(reply: WorkerReply) -> WorkerReply:
    if reply.reason == frames.REFUSED:
        raise ProgramError(reply.extra.decode("utf-8", "replace"))
    if reply.reason == frames.STARVED:
        raise SandboxError(
            f"the machine is too busy: the program waited {reply.starved:.1f} s of {reply.wall:.1f} s for a CPU and "
            "was stopped; it can be run again"
        )
    if reply.reason == frames.CANCELLED:
        raise SandboxError("the program was cancelled")
    return reply


def verdict_of(reply: WorkerReply) -> tuple[Verdict, int | None]:
    """The verdict and the exit code: None if we stopped it, negative if a signal killed it."""
    if reply.reason != frames.ENDED:
        return _REASONS[reply.reason], None
    code = os.waitstatus_to_exitcode(reply.status)
    if code == 0:
        return Verdict.OK, 0
    return (Verdict.SIGNALED if code < 0 else Verdict.FAILED), code


def stage_result(reply: WorkerReply) -> StageResult:
    verdict, code = verdict_of(reply)
    return StageResult(
        verdict=verdict,
        exit_code=code,
        stdout_bytes=reply.stdout,
        stderr_bytes=reply.stderr,
        stdout_truncated=bool(reply.flags & frames.STDOUT_CUT),
        stderr_truncated=bool(reply.flags & frames.STDERR_CUT),
        wall_seconds=reply.wall,
        cpu_seconds=reply.cpu,
        starved_seconds=reply.starved,
        max_memory_bytes=reply.peak,
    )


def unpack_files(records: bytes) -> dict[str, bytes]:
    """Parse file records written by a worker's child.

    Raises:
        SandboxError: they are truncated, because more was requested than fits into one reply.
    """
    files: dict[str, bytes] = {}
    at = 0
    while at < len(records):
        if at + frames.FILE.size > len(records):
            raise SandboxError("the returned files are truncated")
        name_size, size = frames.FILE.unpack_from(records, at)
        at += frames.FILE.size
        name = os.fsdecode(records[at : at + name_size])
        at += name_size
        files[name] = records[at : at + size]
        at += size
    return files
