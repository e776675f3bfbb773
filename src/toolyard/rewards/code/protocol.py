"""Types for scoring by running code: test cases in, results out, and settings.

    suite = read_suite(test_cases)                        # `cases`: the common forms
    answer = extract_code(text)                           # `extraction`: finds the program in an answer
    result = await judge.judge(text, suite)               # `judge`: runs it, case by case
    result.score                                          # None, never 0, if we failed

What the program did is a `CaseVerdict`. Our own failure is one too, `INFRASTRUCTURE`, so that the other cases' results
are not lost; then there is no score, and `why` gives the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from toolyard.sandbox.protocol import Seconds


class CaseVerdict(StrEnum):
    """How one test case ended."""

    PASSED = "passed"
    WRONG_ANSWER = "wrong_answer"
    """The program ran, but its output is wrong or missing; or an assertion of the test failed."""
    RUNTIME_ERROR = "runtime_error"
    """It crashed, exited with a non-zero code, or wrote more than allowed."""
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    COMPILE_ERROR = "compile_error"
    """The compiler rejected it; for Python, a SyntaxError in the program's own text. Every case has this verdict."""
    INFRASTRUCTURE = "infrastructure"
    """Our failure, even after all retries. Neither right nor wrong: there is no score."""
    NOT_RUN = "not_run"
    """The score was decided without it: an earlier case failed, or it is beyond the first N."""


class SuiteKind(StrEnum):
    STDIO = "stdio"
    """A program that reads stdin and writes stdout."""
    FUNCTION = "function"
    """A function, or a method of `Solution`, whose return value is compared."""
    ASSERTS = "asserts"
    """Test code that runs after the program, in the same process, and raises on failure."""


class Comparison(BaseModel):
    """When two outputs are equal. Line ends and white space at the ends of lines and of the text are always ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["lines", "trimmed", "tokens", "exact"] = "lines"
    """`lines`: line by line, each without trailing white space. `trimmed`: also without leading white space and empty
    lines. `tokens`: words separated by any white space. `exact`: byte by byte; other settings have no effect."""
    absolute_tolerance: float = Field(default=0.0, ge=0)
    relative_tolerance: float = Field(default=0.0, ge=0)
    """If both are 0, `1.0` and `1` differ in stdout. Otherwise two tokens that are numbers, at least one of them not an
    integer, may differ by the larger of the two. If both are 0, returned floats get a relative tolerance of 1e-9."""
    unordered: Literal["no", "lines", "tokens"] = "no"
    """Lines, or tokens within a line, may come in any order; for a returned list, its elements."""
    ignore_case: bool = False


PRIME_CODE = Comparison(mode="trimmed", absolute_tolerance=1e-8, relative_tolerance=1e-5)
"""The comparison of verl's `prime_code`."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test case; which fields it uses depends on its suite's kind."""

    stdin: str = ""
    """STDIO: the program's input."""
    arguments: tuple[Any, ...] = ()
    """FUNCTION: positional arguments, as JSON values."""
    expected: Any = None
    """STDIO: the text; FUNCTION: the JSON value; ASSERTS: unused."""
    test: str = ""
    """ASSERTS: the code."""


@dataclass(frozen=True, slots=True)
class Suite:
    """All test cases of a task."""

    kind: SuiteKind
    cases: tuple[Case, ...]
    function: str | None = None
    """FUNCTION: the function's name."""
    language: str | None = None
    """None: the answer's own, or the default of the settings."""
    checker: str | None = None
    """STDIO: a Python program that replaces the comparison. Files `input`, `output` and `expected` are in its working
    directory; exit code 0 accepts, 1 rejects. If it fails, the output is wrong if it accepts the expected output;
    otherwise the task is invalid."""
    setup: str = ""
    """FUNCTION and ASSERTS: code that runs before the program (imports, helpers)."""
    comparison: Comparison | None = None
    """None: that of the settings."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one test case."""

    index: int
    verdict: CaseVerdict
    stdout: str = ""
    """As much as was kept; FUNCTION: what the program itself printed."""
    stderr: str = ""
    """The program's stderr; for COMPILE_ERROR, the compiler's."""
    exit_code: int | None = None
    """Negative: killed by that signal. None: stopped at a limit, or not run."""
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    max_memory_bytes: int = 0
    """0 if the sandbox does not report it."""
    why: str = ""
    """One line: the first difference, the exception, the limit, or our failure. Empty for PASSED."""
    returned: Any = None
    """FUNCTION: the return value as JSON, cut if huge."""
    tries: int = 1


@dataclass(frozen=True, slots=True)
class ExtractedCode:
    """The program in an answer."""

    code: str | None
    """None if there is none."""
    language: str | None
    """The fence's language, by its name in the languages table. None: not given."""
    blocks: int
    """Number of fenced blocks in the answer."""
    chosen: int | None
    """Index of the chosen block; None: none, or the whole text."""
    unclosed: bool = False
    """The block's fence was never closed: the answer was truncated."""


class Aggregation(StrEnum):
    """How the cases are combined into one number."""

    ALL = "all"
    """1.0 if every case passed, else 0.0."""
    FRACTION = "fraction"
    """The share of cases that passed."""
    CONTINUOUS = "continuous"
    """The share of the first `first_n` cases that passed. Later cases are not run."""


class CodeSettings(BaseModel):
    """How answers are scored: `code_reward` in a config file, and keyword arguments of `CodeJudge`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    aggregation: Aggregation = Aggregation.ALL
    first_n: PositiveInt = 10
    """Number of cases that CONTINUOUS counts."""
    stop_at_first_failure: bool | None = None
    """Cases after a failed one are NOT_RUN. None: only with ALL, where they cannot change the score. True with another
    aggregation counts them as failed."""
    language: str = "python"
    """Language of answers and suites that do not name one."""
    run_seconds: Seconds = 10.0
    """Time limit of one case."""
    compile_seconds: Seconds = 30.0
    memory_limit_mb: int = Field(default=1024, gt=0, lt=1 << 42)
    """Sent to a SandboxFusion service only if set explicitly."""
    comparison: Comparison = Comparison()
    without_fences: Literal["refuse", "whole"] = "refuse"
    """An answer without a fenced block: `refuse` finds no program (score 0), `whole` takes all of it."""
    block: Literal["last", "first", "longest", "joined"] = "last"
    """Which block is the program if several are in the language."""
    retries: int = Field(default=2, ge=0)
    """Retries of a case that our failure kept from running, before it counts as INFRASTRUCTURE."""
    cases_per_run: PositiveInt = 16
    """Maximum cases of one program that run in sequence under one permit, from one prepared parent process."""
    sandbox_fusion_url: str | tuple[str, ...] = ""
    """URL of `toolyard sandbox serve` or any SandboxFusion service, or a list of URLs: if one fails, the next is tried.
    Empty: the embedded sandbox."""
    sandbox: Literal["ray"] | None = None
    """`ray`: the sandboxes of all nodes of the Ray cluster, shared by all its processes. None: see
    `sandbox_fusion_url`."""
    rate_limit: PositiveInt = 10
    """Maximum executions in flight; the limiter is shared with `code_interpreter`."""
    enable_global_rate_limit: bool = True
    num_workers: PositiveInt = 10
    """Maximum concurrent executions in this process."""
    max_output_bytes: PositiveInt = 16 << 20
    """How much stdout is kept for comparison. A longer output cannot be right unless the checker accepts it."""


@dataclass(frozen=True, slots=True)
class CodeResult:
    """The score of an answer, and why."""

    score: float | None
    """None, never 0, if our failure prevented it (see `why`)."""
    cases: tuple[CaseResult, ...]
    """One per case of the suite, in order."""
    extracted: ExtractedCode
    why: str = ""
    """Why there is no score, or why it is below 1: the first failed case, or the missing program."""
    wall_seconds: float = 0.0
    """Total time, including waiting."""

    @property
    def passed(self) -> int:
        return sum(case.verdict is CaseVerdict.PASSED for case in self.cases)

    def counts(self) -> dict[str, int]:
        """Number of cases by verdict, for those that occur."""
        found: dict[str, int] = {}
        for case in self.cases:
            found[case.verdict.value] = found.get(case.verdict.value, 0) + 1
        return found


@dataclass(frozen=True, slots=True)
class Submission:
    """One answer to be scored, for `CodeJudge.judge_all`."""

    answer: str
    tests: Suite | str | dict[str, Any] | list[Any]
    """A suite, or any form that `read_suite` reads."""
    tenant: str = ""
    """Unit of fairness at the limiter."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
