"""The text that a model reads of an execution: what a person would see in a notebook.

Output comes first, unchanged; then stderr, with library frames removed from tracebacks; then notes in brackets, on
their own lines, on what the program cannot have said itself: that it was stopped, crashed, or that its output was cut.
An execution without output says so and gives a hint: small models take an empty answer for the value they expected, or
for a failure, when all that is missing is a `print`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from toolyard.sandbox.protocol import MIB, CellResult, Execution, Limits, StageResult, Verdict
from toolyard.tools.policy import Keep, truncate

NO_OUTPUT = "[no output: print what you want to see]"
LOST = "[the interpreter was lost: variables, imports and files of earlier calls are gone]"
_FRAME = re.compile(r'(?P<margin>[ |]*)  File "(?P<file>[^"\n]*)", line \d+, in ')
_LIBRARY = re.compile(r"/lib(64)?/python3|/(site|dist)-packages/|^<frozen ")
_FRAMES = 10
"""Maximum frames of one traceback; those in the middle are omitted."""


def execution_text(execution: Execution, limits: Limits, most_chars: int, *, python: bool) -> str:
    """Return the text of one run of a program, with at most `most_chars` each of stdout and stderr."""
    run = execution.run
    if run is None:
        return _compiler_text(execution.compile, limits, most_chars)
    error = own_frames(run.stderr) if python else run.stderr
    # A traceback is enough.
    explained = python and execution.verdict is Verdict.FAILED and run.exit_code == 1 and bool(error)
    trouble = "" if explained else _trouble(execution.verdict, run.exit_code, limits)
    return _joined(
        _shown(run.stdout, most_chars, limits, dropped=run.stdout_truncated),
        _shown(error, most_chars, limits, dropped=run.stderr_truncated),
        trouble,
    )


def cell_text(cell: CellResult, limits: Limits, most_chars: int, *, stateful: bool) -> str:
    """Return the text of a cell. `stateful`: later calls keep its variables, unless they are lost."""
    out = _lines(cell.stdout, *(bundle.get("text/plain", "") for bundle in cell.display))
    error = _lines(cell.stderr, own_frames("\n".join(cell.error.traceback)) if cell.error else "")
    explained = cell.verdict is Verdict.FAILED and bool(error)
    return _joined(
        _shown(out, most_chars, limits, dropped=cell.truncated),
        _shown(error, most_chars, limits),
        "" if explained else _trouble(cell.verdict, None, limits),
        LOST if cell.session_lost and stateful else "",
    )


def with_timeout_cut(text: str, seconds: float) -> str:
    """Add a note for a model that asked for more time than allowed."""
    return _lines(text, f"[timeout cut to {seconds:g} s: that is the maximum]")


def _compiler_text(stage: StageResult | None, limits: Limits, most_chars: int) -> str:
    """Return the compiler's messages; some compilers write them to stdout."""
    output = _lines(stage.stdout, stage.stderr) if stage else ""
    late = stage is not None and stage.verdict is Verdict.TIMED_OUT
    trouble = f"[compilation stopped after {limits.compile_seconds:g} s]" if late else "[compilation failed]"
    return _joined(_shown(output, most_chars, limits), trouble)


def _trouble(verdict: Verdict, exit_code: int | None, limits: Limits) -> str:
    match verdict:
        case Verdict.OK:
            return ""
        case Verdict.FAILED:
            return "[ended its interpreter]" if exit_code is None else f"[exited with code {exit_code}]"
        case Verdict.SIGNALED:
            return f"[crashed: {_signal_name(-exit_code)}]" if exit_code else "[crashed]"
        case Verdict.TIMED_OUT:
            return f"[stopped after {limits.run_seconds:g} s]"
        case Verdict.CPU_EXCEEDED:
            return "[stopped: too much processor time]"
        case Verdict.MEMORY_EXCEEDED:
            return f"[killed: more than {limits.memory_bytes // MIB} MB of memory]"
        case Verdict.OUTPUT_EXCEEDED:
            return f"[stopped: more than {limits.flood_bytes // MIB} MB of output]"
        case Verdict.DISK_EXCEEDED:
            return f"[stopped: more than {limits.disk_bytes // MIB} MB of files]"
        case Verdict.COMPILE_FAILED:
            return "[compilation failed]"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _shown(text: str, most_chars: int, limits: Limits, *, dropped: bool = False) -> str:
    shown, _ = truncate(text, most_chars, Keep.BOTH)
    # If the sandbox kept only the beginning, what looks like the end is not the end.
    return (
        _lines(shown, f"[… what was printed after {limits.output_bytes // MIB} MB was dropped …]") if dropped else shown
    )


def _joined(*parts: str) -> str:
    return _lines(*parts) or NO_OUTPUT


def _lines(*parts: str) -> str:
    """Put each part on its own lines; the last keeps its ending."""
    found = [part for part in parts if part]
    return "".join([part if part.endswith("\n") else part + "\n" for part in found[:-1]] + found[-1:])


# Tracebacks -----------------------------------------------------------------------------------------------------------


def own_frames(text: str) -> str:
    """Remove library frames from all tracebacks in `text`. A traceback with no other frames keeps its last one."""
    if '  File "' not in text:
        return text
    return "".join(_without_libraries(text.splitlines(keepends=True)))


def _without_libraries(lines: list[str]) -> Iterator[str]:
    frames: list[tuple[bool, list[str]]] = []
    """Frames of the current traceback: whether each is a library's, and its lines."""
    margin = ""
    for line in lines:
        if found := _FRAME.match(line):
            margin = found["margin"]
            frames.append((bool(_LIBRARY.search(found["file"])), [line]))
        elif frames and line.startswith((f"{margin}    ", f"{margin}  [Previous line repeated")):
            frames[-1][1].append(line)
        else:
            yield from _chosen(frames, margin)
            frames = []
            yield line
    yield from _chosen(frames, margin)


def _chosen(frames: list[tuple[bool, list[str]]], margin: str) -> Iterator[str]:
    own = [lines for is_library, lines in frames if not is_library] or [lines for _, lines in frames[-1:]]
    cut = len(own) - _FRAMES
    for index, lines in enumerate(own):
        if cut > 0 and index == _FRAMES // 2:
            yield f"{margin}  [… {cut} frames …]\n"
        if not (cut > 0 and _FRAMES // 2 <= index < _FRAMES // 2 + cut):
            yield from lines
