"""Between the sandbox's nouns and a worker's frames: limits to header bytes, replies to results, file records."""

from __future__ import annotations

import os
from collections.abc import Sequence

from toolyard.errors import SandboxError

from .guest import frames
from .protocol import Limits, StageResult, Verdict
from .zygote import Reply

_REASONS = {
    frames.TIMED_OUT: Verdict.TIMED_OUT,
    frames.CPU_EXCEEDED: Verdict.CPU_EXCEEDED,
    frames.MEMORY_EXCEEDED: Verdict.MEMORY_EXCEEDED,
    frames.OUTPUT_EXCEEDED: Verdict.OUTPUT_EXCEEDED,
    frames.DISK_EXCEEDED: Verdict.DISK_EXCEEDED,
}


def as_bytes(text: str) -> bytes:
    """UTF-8. Lone surrogates, which JSON can carry, become bytes that a reader will find invalid, as they are."""
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


def verdict_of(reply: Reply) -> tuple[Verdict, int | None]:
    """The verdict and the exit code: None where we stopped it, negative for a signal of its own."""
    if reply.reason != frames.ENDED:
        return _REASONS[reply.reason], None
    code = os.waitstatus_to_exitcode(reply.status)
    if code == 0:
        return Verdict.OK, 0
    return (Verdict.SIGNALED if code < 0 else Verdict.FAILED), code


def stage_result(reply: Reply) -> StageResult:
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
        max_memory_bytes=reply.peak,
    )


def unpack_files(records: bytes) -> dict[str, bytes]:
    """File records as a worker's child wrote them.

    Raises:
        SandboxError: they are cut short, because more was asked back than one reply carries.
    """
    files: dict[str, bytes] = {}
    at = 0
    while at < len(records):
        if at + frames.FILE.size > len(records):
            raise SandboxError("the list of files that came back is damaged")
        name_size, size = frames.FILE.unpack_from(records, at)
        at += frames.FILE.size
        name = os.fsdecode(records[at : at + name_size])
        at += name_size
        files[name] = records[at : at + size]
        at += size
    return files
