"""How an execution is reported to a person and to a shell, and how a file becomes a program."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from toolyard.cli.outcomes import duration, ending, exit_status, size, summary_line
from toolyard.cli.sandbox.run import as_fields, read_program
from toolyard.cli.sandbox.tour import accepted_verdicts
from toolyard.cli.sandbox.tour_programs import TourStop
from toolyard.errors import ConfigError, ProgramError
from toolyard.sandbox import languages
from toolyard.sandbox.protocol import MIB, Execution, Limits, Program, StageResult, Verdict

LIMITS = Limits(run_seconds=2, compile_seconds=5, cpu_seconds=0.5, memory_bytes=192 * MIB, flood_bytes=4 * MIB)


def ran(verdict: Verdict, code: int | None = None, out: bytes = b"", complaint: bytes = b"") -> Execution:
    return Execution(verdict, StageResult(verdict, code, out, complaint))


def rejected(verdict: Verdict, code: int | None, complaint: bytes = b"") -> Execution:
    return Execution(Verdict.COMPILE_FAILED, None, StageResult(verdict, code, b"", complaint))


@pytest.mark.parametrize(
    ("execution", "status"),
    [
        (ran(Verdict.OK, 0), 0),
        (ran(Verdict.FAILED, 3), 3),
        (ran(Verdict.SIGNALED, -signal.SIGSEGV), 139),
        (ran(Verdict.TIMED_OUT), 124),
        (ran(Verdict.CPU_EXCEEDED), 152),
        (ran(Verdict.MEMORY_EXCEEDED), 137),
        (ran(Verdict.OUTPUT_EXCEEDED), 153),
        (ran(Verdict.DISK_EXCEEDED), 153),
        (rejected(Verdict.FAILED, 1), 1),
        (rejected(Verdict.TIMED_OUT, None), 124),
        (rejected(Verdict.SIGNALED, -signal.SIGKILL), 137),
        (Execution(Verdict.COMPILE_FAILED, None), 1),
    ],
)
def test_the_exit_status_is_what_a_shell_would_show(execution: Execution, status: int) -> None:
    assert exit_status(execution) == status


def test_every_verdict_but_ok_exits_with_a_failure() -> None:
    for verdict in Verdict:
        code = {Verdict.OK: 0, Verdict.FAILED: 1, Verdict.SIGNALED: -6, Verdict.COMPILE_FAILED: 1}.get(verdict)
        assert (exit_status(ran(verdict, code)) == 0) == (verdict is Verdict.OK)


@pytest.mark.parametrize(
    ("execution", "words"),
    [
        (ran(Verdict.FAILED, 3), "exit code 3"),
        (ran(Verdict.SIGNALED, -signal.SIGSEGV), "killed by SIGSEGV"),
        (ran(Verdict.SIGNALED, -64), "killed by SIGRTMAX"),
        (ran(Verdict.SIGNALED, -50), "killed by signal 50"),
        (ran(Verdict.TIMED_OUT), "stopped after 2 s"),
        (ran(Verdict.CPU_EXCEEDED), "stopped after 500 ms of CPU time"),
        (ran(Verdict.MEMORY_EXCEEDED), "killed at 192 MiB of memory"),
        (ran(Verdict.OUTPUT_EXCEEDED), "stopped after 4 MiB of output"),
        (ran(Verdict.DISK_EXCEEDED), "stopped at 256 MiB of files"),
        (rejected(Verdict.FAILED, 1), "compiler: exit code 1"),
        (rejected(Verdict.TIMED_OUT, None), "compiler: stopped after 5 s"),
        (Execution(Verdict.COMPILE_FAILED, None), "did not compile"),
    ],
)
def test_the_ending_names_the_limit_or_the_signal(execution: Execution, words: str) -> None:
    assert ending(execution, LIMITS) == words


def test_the_summary_line_of_a_good_program_is_the_first_it_printed() -> None:
    assert summary_line(ran(Verdict.OK, 0, b"\n  hello\nworld\n", b"a warning\n")) == "hello"


def test_the_summary_line_of_a_failed_program_is_the_end_of_its_traceback() -> None:
    trace = b'Traceback (most recent call last):\n  File "main.py", line 1\nZeroDivisionError: division by zero\n'
    assert summary_line(ran(Verdict.FAILED, 1, b"before\n", trace)) == "ZeroDivisionError: division by zero"


def test_the_summary_line_of_a_compiler_is_the_first_error() -> None:
    complaint = b"main.cpp: In function 'int main()':\nmain.cpp:2:10: error: no\nmain.cpp:3:1: error: more\n"
    assert summary_line(rejected(Verdict.FAILED, 1, complaint)) == "main.cpp:2:10: error: no"


def test_a_silent_program_tells_nothing() -> None:
    assert summary_line(ran(Verdict.OK, 0)) == ""
    assert summary_line(rejected(Verdict.FAILED, 1)) == ""


def test_durations_and_sizes_are_short() -> None:
    assert [duration(seconds) for seconds in (0.0021, 0.0123, 0.5, 1, 83.2)] == [
        "2.1 ms",
        "12 ms",
        "500 ms",
        "1 s",
        "83.2 s",
    ]
    assert [duration(seconds) for seconds in (99.96, 100, 119.6, 300, 3599.7, 3600, 5400, 86_520, 1e7)] == [
        "100 s",
        "1 min 40 s",
        "2 min",
        "5 min",
        "1 h",
        "1 h",
        "1 h 30 min",
        "24 h 2 min",
        "2777 h 47 min",
    ]
    assert [size(count) for count in (2048, 5 * MIB)] == ["2 KiB", "5 MiB"]


class TestPrograms:
    @pytest.mark.parametrize("row", languages.ALL, ids=lambda row: row.name)
    def test_every_languages_own_suffix_is_known(self, row: languages.Language, tmp_path: Path) -> None:
        file = tmp_path / f"program{Path(row.source_name).suffix}"
        file.write_text(row.self_test)
        program = read_program(file, None, None, [])
        plain = {"pytest": "python", "python_gpu": "python", "jest": "typescript", "go_test": "go", "junit": "java"}
        assert (program.language, program.code) == (plain.get(row.name, row.name), row.self_test)

    @pytest.mark.parametrize(("suffix", "language"), [(".cc", "cpp"), (".cxx", "cpp"), (".cjs", "nodejs"), (".r", "R")])
    def test_other_usual_suffixes_are_known(self, suffix: str, language: str, tmp_path: Path) -> None:
        (tmp_path / f"x{suffix}").write_text("")
        assert read_program(tmp_path / f"x{suffix}", None, None, []).language == language

    def test_an_explicit_language_wins_and_may_be_an_alias(self, tmp_path: Path) -> None:
        (tmp_path / "x.txt").write_text("")
        assert read_program(tmp_path / "x.txt", "js", None, []).language == "nodejs"

    def test_an_unknown_suffix_asks_for_the_language(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"'\.foo'.*--language"):
            read_program(tmp_path / "x.foo", None, None, [])

    def test_an_unknown_language_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ProgramError, match="klingon"):
            read_program(tmp_path / "x.py", "klingon", None, [])

    @pytest.mark.parametrize("missing", ["program", "stdin"])
    def test_a_file_that_cannot_be_read_is_named(self, missing: str, tmp_path: Path) -> None:
        (tmp_path / "x.py").write_text("")
        program = tmp_path / ("nowhere.py" if missing == "program" else "x.py")
        with pytest.raises(ConfigError, match="nowhere"):
            read_program(program, None, tmp_path / "nowhere.txt" if missing == "stdin" else None, [])

    def test_source_and_input_that_are_not_utf8_arrive_as_they_are(self, tmp_path: Path) -> None:
        (tmp_path / "x.py").write_bytes(b"# \xff\n")
        (tmp_path / "in").write_bytes(b"\xfe\x00")
        program = read_program(tmp_path / "x.py", None, tmp_path / "in", ["a", "b"])
        assert program.code.encode("utf-8", "surrogateescape") == b"# \xff\n"
        assert program.stdin == b"\xfe\x00"
        assert list(program.args) == ["a", "b"]


def test_the_json_form_has_both_stages_and_plain_values() -> None:
    fields = as_fields(Execution(Verdict.OK, StageResult(Verdict.OK, 0, b"1\n"), StageResult(Verdict.OK, 0)))
    assert fields["verdict"] == "ok"
    assert fields["stdout"] == fields["run"]["stdout"] == "1\n"
    assert fields["compile"]["exit_code"] == 0
    assert as_fields(rejected(Verdict.FAILED, 1, b"no"))["run"] is None


class TestTour:
    HUNGRY = TourStop("", "", Program(""), Limits(), Verdict.MEMORY_EXCEEDED)
    GOOD = TourStop("", "", Program(""), Limits(), Verdict.OK)

    @pytest.mark.parametrize("memory_limit", ["cgroup v1", "cgroup v2", "sampling"])
    def test_a_hungry_program_must_be_killed_where_its_whole_tree_is_limited(self, memory_limit: str) -> None:
        assert accepted_verdicts(self.HUNGRY, memory_limit) == {Verdict.MEMORY_EXCEEDED}

    def test_it_may_fail_by_itself_where_only_processes_are_limited(self) -> None:
        assert Verdict.FAILED in accepted_verdicts(self.HUNGRY, "per process")
        assert Verdict.OK not in accepted_verdicts(self.HUNGRY, "per process")
        assert accepted_verdicts(self.GOOD, "per process") == {Verdict.OK}
