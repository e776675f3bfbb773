"""What the model reads, to the letter, for every way in which a program can end."""

from __future__ import annotations

from typing import Any

import pytest

from toolyard.sandbox.protocol import MIB, CellError, CellResult, Execution, Limits, StageResult, Verdict
from toolyard.tools.code_interpreter.text import LOST, NO_OUTPUT, cell_text, execution_text, own_frames

LIMITS = Limits(run_seconds=30, compile_seconds=45, memory_bytes=1024 * MIB)
TRACEBACK = """\
Traceback (most recent call last):
  File "/sandbox/main.py", line 1, in <module>
    1/0
    ~^~
ZeroDivisionError: division by zero
"""


def run_text(
    verdict: Verdict = Verdict.OK,
    out: str = "",
    err: str = "",
    code: int | None = 0,
    *,
    python: bool = True,
    **rest: Any,
) -> str:
    stage = StageResult(verdict, code, out.encode(), err.encode(), **rest)
    return execution_text(Execution(verdict, stage), LIMITS, 200, python=python)


# Programs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["42\n", "42", "\n", "a\n\n\n", "  indented\n", "Straße 🙂\n"])
def test_what_was_printed_is_shown_as_it_was(out: str) -> None:
    assert run_text(out=out) == out


def test_a_program_without_output_is_told_what_is_missing() -> None:
    assert run_text() == NO_OUTPUT == "[no output: print what you want to see]"


def test_stderr_follows_stdout_on_a_line_of_its_own() -> None:
    assert run_text(out="1", err="careful\n") == "1\ncareful\n"
    assert run_text(err="careful") == "careful"


def test_a_traceback_says_it_all() -> None:
    assert run_text(Verdict.FAILED, "1\n", TRACEBACK, 1) == f"1\n{TRACEBACK}"


@pytest.mark.parametrize(
    ("verdict", "code", "sentence"),
    [
        (Verdict.TIMED_OUT, None, "[stopped after 30 s]"),
        (Verdict.MEMORY_EXCEEDED, None, "[killed: more than 1024 MB of memory]"),
        (Verdict.OUTPUT_EXCEEDED, None, "[stopped: more than 64 MB of output]"),
        (Verdict.DISK_EXCEEDED, None, "[stopped: more than 256 MB of files]"),
        (Verdict.CPU_EXCEEDED, None, "[stopped: too much processor time]"),
        (Verdict.SIGNALED, -11, "[crashed: SIGSEGV]"),
        (Verdict.SIGNALED, -63, "[crashed: signal 63]"),
        (Verdict.FAILED, 1, "[exited with code 1]"),
        (Verdict.FAILED, 3, "[exited with code 3]"),
    ],
)
def test_what_a_program_cannot_say_itself_is_said_in_brackets(verdict: Verdict, code: Any, sentence: str) -> None:
    assert run_text(verdict, code=code) == sentence
    assert run_text(verdict, "so far\n", code=code) == f"so far\n{sentence}"
    assert run_text(verdict, "so far", code=code) == f"so far\n{sentence}"


def test_an_exit_code_that_stderr_does_not_explain_is_told() -> None:
    assert run_text(Verdict.FAILED, err="careful\n", code=3) == "careful\n[exited with code 3]"
    assert run_text(Verdict.FAILED, err="no such file\n", code=1, python=False) == "no such file\n[exited with code 1]"


def test_a_time_limit_of_less_than_a_second_is_readable() -> None:
    stage = StageResult(Verdict.TIMED_OUT, None)
    limits = Limits(run_seconds=0.5)
    assert execution_text(Execution(Verdict.TIMED_OUT, stage), limits, 200, python=True) == "[stopped after 0.5 s]"


# Compilers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("out", "err"), [("", "main.c:1: error\n"), ("main.c:1: error\n", "")])
def test_a_compiler_is_heard_wherever_it_complains(out: str, err: str) -> None:
    stage = StageResult(Verdict.FAILED, 1, out.encode(), err.encode())
    execution = Execution(Verdict.COMPILE_FAILED, None, stage)
    assert execution_text(execution, LIMITS, 200, python=False) == "main.c:1: error\n[compilation failed]"


def test_a_compiler_that_was_stopped_is_told_apart() -> None:
    execution = Execution(Verdict.COMPILE_FAILED, None, StageResult(Verdict.TIMED_OUT, None))
    assert execution_text(execution, LIMITS, 200, python=False) == "[compilation stopped after 45 s]"


def test_warnings_of_a_compiler_that_succeeded_are_not_shown() -> None:
    compiled = StageResult(Verdict.OK, 0, b"", b"warning: unused\n")
    execution = Execution(Verdict.OK, StageResult(Verdict.OK, 0, b"42\n"), compiled)
    assert execution_text(execution, LIMITS, 200, python=False) == "42\n"


# Length ---------------------------------------------------------------------------------------------------------------


def test_each_stream_keeps_its_head_and_its_tail() -> None:
    out, err = "a" * 150 + "b" * 150, "c" * 150 + "d" * 150
    shown = run_text(out=out, err=err)
    mark = "\n[… 126 characters cut …]\n"
    parts = [f"{'a' * 87}{mark}{'b' * 87}", f"{'c' * 87}{mark}{'d' * 87}"]
    assert shown == "\n".join(parts)
    assert [len(part) for part in parts] == [200, 200]


def test_what_the_sandbox_dropped_is_not_taken_for_the_end() -> None:
    assert run_text(out="so far\n", stdout_truncated=True) == "so far\n[… what was printed after 1 MB was dropped …]"
    shown = run_text(Verdict.OUTPUT_EXCEEDED, "x" * MIB, code=None, stdout_truncated=True)
    assert shown.endswith("x\n[… what was printed after 1 MB was dropped …]\n[stopped: more than 64 MB of output]")
    assert len(shown) < 300


# Cells ----------------------------------------------------------------------------------------------------------------


def of_cell(verdict: Verdict = Verdict.OK, out: str = "", err: str = "", *, stateful: bool = True, **rest: Any) -> str:
    return cell_text(CellResult(verdict, out, err, **rest), LIMITS, 200, stateful=stateful)


def test_a_cell_shows_what_it_printed_then_what_it_displayed() -> None:
    assert of_cell(out="a", display=({"text/plain": "5"}, {"text/plain": "6", "text/html": "<b>"})) == "a\n5\n6"
    assert of_cell() == NO_OUTPUT


def test_a_cell_that_raised_shows_its_traceback() -> None:
    error = CellError("ZeroDivisionError", "division by zero", tuple(TRACEBACK.splitlines()))
    assert of_cell(Verdict.FAILED, "1\n", "careful\n", error=error) == f"1\ncareful\n{TRACEBACK.rstrip()}"


def test_a_cell_that_was_stopped_shows_where() -> None:
    error = CellError("KeyboardInterrupt", "", ("KeyboardInterrupt",))
    assert of_cell(Verdict.TIMED_OUT, error=error) == "KeyboardInterrupt\n[stopped after 30 s]"


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        (Verdict.MEMORY_EXCEEDED, "[killed: more than 1024 MB of memory]"),
        (Verdict.TIMED_OUT, "[stopped after 30 s]"),
        (Verdict.SIGNALED, "[crashed]"),
        (Verdict.FAILED, "[ended its interpreter]"),
    ],
)
def test_a_lost_interpreter_is_told_where_one_was_to_be_kept(verdict: Verdict, sentence: str) -> None:
    lost = {"error": CellError("SessionLost", "the interpreter ended", ()), "session_lost": True}
    assert of_cell(verdict, **lost) == f"{sentence}\n{LOST}"
    assert of_cell(verdict, stateful=False, **lost) == sentence
    assert LOST == "[the interpreter was lost: variables, imports and files of earlier calls are gone]"


# Tracebacks -----------------------------------------------------------------------------------------------------------


def test_frames_of_libraries_are_left_out() -> None:
    assert own_frames("""\
Traceback (most recent call last):
  File "/sandbox/main.py", line 2, in <module>
    json.loads('x')
  File "/usr/lib/python3.11/json/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/numpy/linalg.py", line 355, in raw_decode
    raise JSONDecodeError("Expecting value", s, err.value) from None
  File "<frozen importlib._bootstrap>", line 1, in _load
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
    with a second line
""") == """\
Traceback (most recent call last):
  File "/sandbox/main.py", line 2, in <module>
    json.loads('x')
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
    with a second line
"""  # fmt: skip


def test_frames_between_calls_back_into_the_program_are_left_out() -> None:
    assert own_frames("""\
Exception in thread Thread-1 (f):
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner
    self.run()
  File "/sandbox/main.py", line 2, in f
    def f(): 1/0
             ~^~
ZeroDivisionError: division by zero
""") == """\
Exception in thread Thread-1 (f):
Traceback (most recent call last):
  File "/sandbox/main.py", line 2, in f
    def f(): 1/0
             ~^~
ZeroDivisionError: division by zero
"""  # fmt: skip


def test_a_traceback_of_nothing_but_libraries_keeps_its_last_frame() -> None:
    assert own_frames("""\
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 1, in run
    self.a()
  File "/usr/lib/python3.11/threading.py", line 2, in a
    self.b()
ValueError: no
""") == """\
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 2, in a
    self.b()
ValueError: no
"""  # fmt: skip


def test_chained_and_grouped_tracebacks_are_trimmed_each() -> None:
    library = '  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode\n    raise\n'
    own = '  File "/sandbox/main.py", line 2, in <module>\n    json.loads(1)\n'
    head, between = "Traceback (most recent call last):\n", "\nDuring handling of the above exception, another …:\n\n"
    chained = f"{head}{own}{library}A: 1\n{between}{head}{own}{library}B: 2\n"
    assert own_frames(chained) == f"{head}{own}A: 1\n{between}{head}{own}B: 2\n"
    grouped = "".join(f"  | {line}\n" for line in chained.splitlines())
    assert own_frames(grouped) == "".join(f"  | {line}\n" for line in own_frames(chained).splitlines())


def test_a_deep_recursion_is_shown_by_its_ends() -> None:
    frame = '  File "/sandbox/main.py", line {}, in f\n    f()\n'
    head, end = "Traceback (most recent call last):\n", "RecursionError: maximum recursion depth exceeded\n"
    shown = own_frames(head + "".join(frame.format(line) for line in range(1000)) + end)
    ends = ["".join(frame.format(line) for line in lines) for lines in (range(5), range(995, 1000))]
    assert shown == f"{head}{ends[0]}  [… 990 frames …]\n{ends[1]}{end}"


def test_repeated_frames_stay_with_theirs() -> None:
    repeated = '  File "/sandbox/main.py", line 1, in f\n    f()\n  [Previous line repeated 982 more times]\n'
    library = repeated.replace("/sandbox", "/usr/lib/python3.11")
    assert own_frames(f"{repeated}{library}RecursionError\n") == f"{repeated}RecursionError\n"


@pytest.mark.parametrize("text", ["", "plain\n", '  File "main.py", line 1\n    print(\n         ^\nSyntaxError: no\n'])
def test_anything_else_is_left_as_it_is(text: str) -> None:
    assert own_frames(text) == text
