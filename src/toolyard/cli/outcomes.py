"""How an `Execution` is told to a person and to a shell."""

from __future__ import annotations

import signal

from toolyard.sandbox.protocol import MIB, Execution, Limits, StageResult, Verdict

TIMED_OUT = 124
"""As `timeout` exits."""

_STOPPED = {
    Verdict.TIMED_OUT: TIMED_OUT,
    Verdict.CPU_EXCEEDED: 128 + signal.SIGXCPU,
    Verdict.MEMORY_EXCEEDED: 128 + signal.SIGKILL,
    Verdict.OUTPUT_EXCEEDED: 128 + signal.SIGXFSZ,
    Verdict.DISK_EXCEEDED: 128 + signal.SIGXFSZ,
}
"""Where we stopped it: the status a shell shows when the kernel does so for the same reason."""


def exit_status(execution: Execution) -> int:
    """The program's own exit code where it has one; else what a shell would show for such an end."""
    stage = execution.run or execution.compile
    if execution.verdict in _STOPPED:
        return _STOPPED[execution.verdict]
    if stage is None or stage.exit_code is None:
        return _STOPPED.get(stage.verdict, 1) if stage else 1
    return 128 - stage.exit_code if stage.exit_code < 0 else stage.exit_code


def ending(execution: Execution, limits: Limits) -> str:
    """How it ended, in a few words: `exit code 3`, `died of SIGSEGV`, `stopped after 1 s`."""
    if execution.verdict is Verdict.COMPILE_FAILED:
        stage = execution.compile
        said = "" if stage is None else _stage_ending(stage, limits, limits.compile_seconds)
        return f"the compiler: {said}" if said else "did not compile"
    return _stage_ending(execution.run, limits, limits.run_seconds) if execution.run else execution.verdict.value


def _stage_ending(stage: StageResult, limits: Limits, seconds: float) -> str:
    match stage.verdict:
        case Verdict.TIMED_OUT:
            return f"stopped after {duration(seconds)}"
        case Verdict.CPU_EXCEEDED:
            return f"stopped after {duration(limits.cpu_seconds or 0)} of processor time"
        case Verdict.MEMORY_EXCEEDED:
            return f"killed at {size(limits.memory_bytes)} of memory"
        case Verdict.OUTPUT_EXCEEDED:
            return f"stopped after {size(limits.flood_bytes)} of output"
        case Verdict.DISK_EXCEEDED:
            return f"stopped at {size(limits.disk_bytes)} of files"
        case Verdict.SIGNALED if stage.exit_code is not None and stage.exit_code < 0:
            return f"died of {_signal_name(-stage.exit_code)}"
        case _:
            return f"exit code {stage.exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def telling_line(execution: Execution) -> str:
    """The one line of its output that says most: what it printed, or what it complained about."""
    if execution.verdict is Verdict.COMPILE_FAILED:
        complaints = _lines(execution.stderr)
        return next((line for line in complaints if "error" in line.casefold()), next(iter(complaints), ""))
    printed = _lines(execution.stdout)
    if execution.verdict is Verdict.FAILED and (complaints := _lines(execution.stderr)):
        return complaints[-1]
    return printed[0] if printed else ""


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def duration(seconds: float) -> str:
    """`2.1 ms`, `83.2 s`, `5 min 20 s`, `1 h 30 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    if round(seconds) < 3600:
        return _in_two(round(seconds), "min", "s")
    return _in_two(round(seconds / 60), "h", "min")


def _in_two(count: int, large: str, small: str) -> str:
    whole, rest = divmod(count, 60)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"


def size(count: int) -> str:
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB"
