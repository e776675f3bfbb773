"""An `Execution` in words, for people, and as an exit status, for shells."""

from __future__ import annotations

import signal

from toolyard.durations import duration
from toolyard.sandbox.protocol import MIB, Execution, Limits, StageResult, Verdict

TIMED_OUT = 124
"""The exit status of the `timeout` command."""

_STOPPED = {
    Verdict.TIMED_OUT: TIMED_OUT,
    Verdict.CPU_EXCEEDED: 128 + signal.SIGXCPU,
    Verdict.MEMORY_EXCEEDED: 128 + signal.SIGKILL,
    Verdict.OUTPUT_EXCEEDED: 128 + signal.SIGXFSZ,
    Verdict.DISK_EXCEEDED: 128 + signal.SIGXFSZ,
}
"""When we stopped the program: the status a shell shows when the kernel stops one for the same reason."""


def exit_status(execution: Execution) -> int:
    """The program's own exit code if it has one; otherwise what a shell would show."""
    stage = execution.run or execution.compile
    if execution.verdict in _STOPPED:
        return _STOPPED[execution.verdict]
    if stage is None or stage.exit_code is None:
        return _STOPPED.get(stage.verdict, 1) if stage else 1
    return 128 - stage.exit_code if stage.exit_code < 0 else stage.exit_code


def ending(execution: Execution, limits: Limits) -> str:
    """How it ended, in a few words: `exit code 3`, `killed by SIGSEGV`, `stopped after 1 s`."""
    if execution.verdict is Verdict.COMPILE_FAILED:
        stage = execution.compile
        detail = "" if stage is None else _stage_ending(stage, limits, limits.compile_seconds)
        return f"compiler: {detail}" if detail else "did not compile"
    return _stage_ending(execution.run, limits, limits.run_seconds) if execution.run else execution.verdict.value


def _stage_ending(stage: StageResult, limits: Limits, seconds: float) -> str:
    match stage.verdict:
        case Verdict.TIMED_OUT:
            return f"stopped after {duration(seconds)}"
        case Verdict.CPU_EXCEEDED:
            return f"stopped after {duration(limits.cpu_seconds or 0)} of CPU time"
        case Verdict.MEMORY_EXCEEDED:
            return f"killed at {size(limits.memory_bytes)} of memory"
        case Verdict.OUTPUT_EXCEEDED:
            return f"stopped after {size(limits.flood_bytes)} of output"
        case Verdict.DISK_EXCEEDED:
            return f"stopped at {size(limits.disk_bytes)} of files"
        case Verdict.SIGNALED if stage.exit_code is not None and stage.exit_code < 0:
            return f"killed by {_signal_name(-stage.exit_code)}"
        case _:
            return f"exit code {stage.exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def summary_line(execution: Execution) -> str:
    """The most telling line of its output: the first line of stdout, or the error if it failed."""
    if execution.verdict is Verdict.COMPILE_FAILED:
        errors = _lines(execution.stderr)
        return next((line for line in errors if "error" in line.casefold()), next(iter(errors), ""))
    printed = _lines(execution.stdout)
    if execution.verdict is Verdict.FAILED and (errors := _lines(execution.stderr)):
        return errors[-1]
    return printed[0] if printed else ""


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def size(count: int) -> str:
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB"
