"""The nouns of scoring by running: test cases in, results out, and the settings between them.

    suite = read_suite(test_cases)                        # `cases`: the common forms
    answer = extract_code(text)                           # `extraction`: which block of an answer is the program
    result = await judge.judge(text, suite)               # `judge`: runs it, case by case
    result.score                                          # None if it is our failure, and never 0 for that

What the program did is a `CaseVerdict`. What we failed to do is one too, `INFRASTRUCTURE`, so that the other cases'
results are not lost; it takes the score away, and says why.
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
    """It ran well and said something else (or nothing); an assertion of the test that failed."""
    RUNTIME_ERROR = "runtime_error"
    """It crashed or ended with a non-zero exit code, or wrote more than it may."""
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    COMPILE_ERROR = "compile_error"
    """The compiler refused it; of Python, a SyntaxError of the program's own text. Then every case has this verdict."""
    INFRASTRUCTURE = "infrastructure"
    """Our failure, again after every retry. Neither right nor wrong: there is no score."""
    NOT_RUN = "not_run"
    """The score was decided without it: an earlier case failed, or it is past the first N."""


class SuiteKind(StrEnum):
    STDIO = "stdio"
    """A program that reads stdin and writes stdout."""
    FUNCTION = "function"
    """A function, or a method of `Solution`, that is called with arguments and returns."""
    ASSERTS = "asserts"
    """Test code that runs after the program, in the same process, and raises if it is not content."""


class Comparison(BaseModel):
    """When two outputs are the same. Line ends and white space at the ends of lines and of the whole never count."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["lines", "trimmed", "tokens", "exact"] = "lines"
    """`lines`: line by line, each without white space at its end. `trimmed`: the same without white space at their
    beginning, and without empty lines. `tokens`: white space of any kind and amount separates. `exact`: byte by byte,
    whatever else is set here."""
    absolute_tolerance: float = Field(default=0.0, ge=0)
    relative_tolerance: float = Field(default=0.0, ge=0)
    """Where both are 0, `1.0` and `1` differ in stdout. Above that, tokens that both read as numbers, one of them not
    an integer, may differ by the larger of the two. Returned floats get a relative 1e-9 where both are 0."""
    unordered: Literal["no", "lines", "tokens"] = "no"
    """Lines, or tokens within a line, may come in any order. Of a returned list: its elements."""
    ignore_case: bool = False


PRIME_CODE = Comparison(mode="trimmed", absolute_tolerance=1e-8, relative_tolerance=1e-5)
"""What verl's `prime_code` forgives."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test case, in the words of its suite's kind."""

    stdin: str = ""
    """STDIO: what the program reads."""
    arguments: tuple[Any, ...] = ()
    """FUNCTION: positional, in JSON's terms."""
    expected: Any = None
    """STDIO: the text; FUNCTION: the value, in JSON's terms; ASSERTS: nothing."""
    test: str = ""
    """ASSERTS: the code."""


@dataclass(frozen=True, slots=True)
class Suite:
    """All test cases of a task."""

    kind: SuiteKind
    cases: tuple[Case, ...]
    function: str | None = None
    """FUNCTION: its name."""
    language: str | None = None
    """None: the answer's own, or the settings' default."""
    checker: str | None = None
    """STDIO: a Python program that decides instead of the comparison. Files `input`, `output` and `expected` lie in its
    working directory; exit code 0 accepts, 1 refuses. If it breaks, the output is wrong where it accepts the
    expected one, and else the task is not in order."""
    setup: str = ""
    """FUNCTION and ASSERTS: code that runs before the program (imports, helpers)."""
    comparison: Comparison | None = None
    """None: the settings'."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What became of one test case."""

    index: int
    verdict: CaseVerdict
    stdout: str = ""
    """As much as was kept; FUNCTION: what the program itself printed."""
    stderr: str = ""
    """Of the run; of the compiler for COMPILE_ERROR."""
    exit_code: int | None = None
    """Negative: died of that signal. None: stopped at a limit, or not run."""
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    max_memory_bytes: int = 0
    """0 where the sandbox cannot tell."""
    why: str = ""
    """In one line: the first difference, the exception, the limit, or our failure. Empty for PASSED."""
    returned: Any = None
    """FUNCTION: the value, in JSON's terms, cut where it is huge."""
    tries: int = 1


@dataclass(frozen=True, slots=True)
class ExtractedCode:
    """The program in an answer."""

    code: str | None
    """None: there is none."""
    language: str | None
    """As the fence names it, in the languages table's own word. None: it does not say."""
    blocks: int
    """Fenced blocks in the answer."""
    chosen: int | None
    """Which of them it is, from 0; None: none, or the whole text."""
    unclosed: bool = False
    """The block's fence was never closed: the answer was cut off."""


class Aggregation(StrEnum):
    """From cases to one number."""

    ALL = "all"
    """1.0 if every case passed, else 0.0."""
    FRACTION = "fraction"
    """The share of cases that passed."""
    CONTINUOUS = "continuous"
    """The share of the first `first_n` that passed. Later cases are not run."""


class CodeSettings(BaseModel):
    """How answers are scored. `code_reward` of a config file, and keyword arguments of `CodeJudge`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    aggregation: Aggregation = Aggregation.ALL
    first_n: PositiveInt = 10
    """Of CONTINUOUS."""
    stop_at_first_failure: bool | None = None
    """Cases after a failed one are NOT_RUN. None: with ALL, where they cannot change the score. True with another
    aggregation counts them as failed."""
    language: str = "python"
    """Of answers and suites that name none."""
    run_seconds: Seconds = 10.0
    """For one case."""
    compile_seconds: Seconds = 30.0
    memory_limit_mb: int = Field(default=1024, gt=0, lt=1 << 42)
    """A foreign SandboxFusion service is told of it only if it is set."""
    comparison: Comparison = Comparison()
    without_fences: Literal["refuse", "whole"] = "refuse"
    """An answer without a fenced block: no program (score 0), or all of it is the program."""
    block: Literal["last", "first", "longest", "joined"] = "last"
    """Which block is the program where there are several in the language."""
    retries: int = Field(default=2, ge=0)
    """Of a case that our failure kept from running, before it counts as INFRASTRUCTURE."""
    cases_per_run: PositiveInt = 16
    """How many cases of one program are run one after the other under one permit, from one prepared parent."""
    sandbox_fusion_url: str | tuple[str, ...] = ""
    """URL of `toolyard sandbox serve` or any SandboxFusion service, or a list of them: what one fails to run goes to
    another. Empty: the embedded sandbox."""
    rate_limit: PositiveInt = 10
    """Executions in flight, as in `code_interpreter`, whose limiter it shares."""
    enable_global_rate_limit: bool = True
    num_workers: PositiveInt = 10
    """Executions of this process at once."""
    max_output_bytes: PositiveInt = 16 << 20
    """Kept of stdout for comparing. An answer longer than that cannot be right unless the checker says so."""


@dataclass(frozen=True, slots=True)
class CodeResult:
    """What an answer is worth, and why."""

    score: float | None
    """None: it could not be told, by our failure (`why`). Never 0 for that."""
    cases: tuple[CaseResult, ...]
    """One for each case of the suite, in its order."""
    extracted: ExtractedCode
    why: str = ""
    """Why there is no score, or why it is below 1: the first case that failed, or the missing program."""
    wall_seconds: float = 0.0
    """From begin to end, waiting included."""

    @property
    def passed(self) -> int:
        return sum(case.verdict is CaseVerdict.PASSED for case in self.cases)

    def counts(self) -> dict[str, int]:
        """Cases by verdict, those that occur."""
        found: dict[str, int] = {}
        for case in self.cases:
            found[case.verdict.value] = found.get(case.verdict.value, 0) + 1
        return found


@dataclass(frozen=True, slots=True)
class Submission:
    """One answer to be scored, for `CodeJudge.judge_all`."""

    answer: str
    tests: Suite | str | dict[str, Any] | list[Any]
    """A suite, or one of the forms that `read_suite` reads."""
    tenant: str = ""
    """Unit of fairness at the limiter."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
