"""`CodeJudge`: scores an answer by running its program on a task's test cases.

    async with CodeJudge(aggregation="fraction") as judge:
        result = await judge.judge(answer, {"inputs": ["1 2\\n"], "outputs": ["3\\n"]})
        result.score, result.why, result.cases[0].verdict

What the program does is a verdict. A mistake in the task, or in the setup of this machine, is a `ConfigError`. Our own
failures are retried; if they persist, the score is None, never 0, and `why` gives the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Self

from toolyard.errors import ConfigError, ProgramError
from toolyard.execution.workplaces import check_place
from toolyard.limits.protocol import Limiter
from toolyard.rewards.code.cases import read_suite
from toolyard.rewards.code.extraction import extract_code
from toolyard.rewards.code.harness import Harness, writable
from toolyard.rewards.code.ledger import Ledger, explain_score
from toolyard.rewards.code.protocol import (
    CaseResult,
    CodeResult,
    CodeSettings,
    ExtractedCode,
    Submission,
    Suite,
    SuiteKind,
)
from toolyard.rewards.code.run import Run, first_of
from toolyard.rewards.code.verdicts import JudgePlan
from toolyard.rewards.code.workplaces import code_workplaces
from toolyard.rewards.protocol import read_options
from toolyard.sandbox.languages import find_language, own_name
from toolyard.sandbox.protocol import MIB, Limits, Program, Sandbox
from toolyard.sandbox.remote.sandbox import RemoteSandbox

__all__ = ["CodeJudge"]

_log = logging.getLogger(__name__)

_MOST_OUTPUT = 256 * MIB
"""The most a sandbox keeps."""

Tests = Suite | str | Mapping[str, Any] | list[Any]


class CodeJudge:
    """Scores answers. May be used from any number of tasks and event loops; each loop has its own sandbox.

    `sandbox` and `limiter` are used as they are and stay open; what is not given is opened on first use and closed by
    `close()`. Other keyword arguments are fields of `CodeSettings` and override those of `settings`.

    Raises:
        ConfigError: a setting is invalid.
    """

    def __init__(
        self,
        settings: CodeSettings | None = None,
        *,
        sandbox: Sandbox | None = None,
        limiter: Limiter | None = None,
        **options: Any,
    ) -> None:
        self.settings = _checked(settings, options, any_language=sandbox is not None)
        self._places = code_workplaces(self.settings, sandbox, limiter)
        output = min(self.settings.max_output_bytes, _MOST_OUTPUT)
        limits = Limits(
            run_seconds=self.settings.run_seconds,
            compile_seconds=self.settings.compile_seconds,
            output_bytes=output,
            flood_bytes=max(4 * output, MIB),
        )
        if "memory_limit_mb" in self.settings.model_fields_set:
            limits = limits.model_copy(update={"memory_bytes": self.settings.memory_limit_mb * MIB})
        self._limits = limits

    async def __aenter__(self) -> Self:
        await self._places.here()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close what was opened here for this event loop. Judging again reopens it."""
        await self._places.close()

    # ------------------------------------------------------------------------------------------------- one answer
    async def judge(
        self,
        answer: str,
        tests: Tests,
        *,
        tenant: str = "",
        deadline_seconds: float | None = None,
        patience_seconds: float | None = None,
        on_case: Callable[[CaseResult], None] | None = None,
    ) -> CodeResult:
        """Score one answer.

        Args:
            answer: The whole text; `extract_code` finds the program in it. Without one the score is 0.
            tests: A suite, or any form that `read_suite` reads.
            tenant: Unit of fairness at the limiter.
            deadline_seconds: Total time limit, including waiting. Cases that have not ended by then are our failure.
            patience_seconds: How much longer than its own time limit the next case may take once this answer is
                admitted; only as many are admitted as pays off. Neither other answers can exhaust it, nor a program
                that uses up its own time, which is its own fault.
            on_case: Called once per case, in order, as soon as it and all before it are known.

        Raises:
            ConfigError: the tests are invalid, or what the task requires is not available here.
            SandboxError: no sandbox could be opened.
        """
        began = asyncio.get_running_loop().time()
        deadline = None if deadline_seconds is None else began + deadline_seconds
        return await self._judge(answer, tests, tenant, began, deadline, patience_seconds, on_case)

    async def _judge(
        self,
        answer: str,
        tests: Tests,
        tenant: str,
        began: float,
        deadline: float | None,
        patience: float | None = None,
        on_case: Callable[[CaseResult], None] | None = None,
    ) -> CodeResult:
        suite = read_suite(tests)
        _refuse_unreachable(suite, self._limits.output_bytes)
        language = _language_of(suite)
        extracted = extract_code(
            answer, language=language, block=self.settings.block, without_fences=self.settings.without_fences
        )
        ledger = Ledger(len(suite.cases), self.settings, on_case)
        why = ""
        if extracted.code is None:
            ledger.skip()
            why = "no program in the answer: " + (
                "its fenced blocks are empty" if extracted.blocks else "no fenced block"
            )
        else:
            plan = self._plan(suite, extracted.code, language, extracted.language)
            ledger.cut_short = await self._run(plan, ledger, tenant, deadline, patience)
        results = ledger.close()
        score = ledger.score(results)
        seconds = asyncio.get_running_loop().time() - began
        return CodeResult(score, results, extracted, why or explain_score(results, score), seconds)

    async def _run(
        self, plan: JudgePlan, ledger: Ledger, tenant: str, deadline: float | None, patience: float | None
    ) -> str:
        """Return why some cases were not run; empty if all were."""
        clock = asyncio.get_running_loop().time
        if deadline is not None and clock() >= deadline:
            return "the deadline had passed before it started"

        strict, patient = asyncio.timeout_at(deadline), asyncio.timeout(None)

        def restart_deadline() -> None:
            if patience is not None and not patient.expired():
                patient.reschedule(clock() + patience + plan.longest_case)

        try:
            async with strict:
                place = await self._places.here()
                async with nullcontext() if patience is None else place.turns, patient:
                    restart_deadline()
                    await Run(place, plan, ledger, self.settings, tenant, restart_deadline).run()
        except TimeoutError:
            if not (strict.expired() or patient.expired()):
                raise
            return "the deadline passed"
        return ""

    def _plan(self, suite: Suite, code: str, language: str | None, fence: str | None) -> JudgePlan:
        harness = None if suite.kind is SuiteKind.STDIO else Harness(suite, code)
        return JudgePlan(
            suite,
            Program(
                writable(code) if harness is None else harness.program, language or fence or self.settings.language
            ),
            self._limits,
            suite.comparison or self.settings.comparison,
            harness,
            chosen_by_answer=language is None and fence is not None,
        )

    # ------------------------------------------------------------------------------------------------ many answers
    async def judge_all(
        self,
        submissions: Sequence[Submission],
        *,
        deadline_seconds: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[CodeResult]:
        """Score many answers, a bounded number at a time; return one result each, in the same order.

        Tenants take turns. An invalid task does not stop the others: its answers have no score, and `why` gives the
        reason. `progress` is called with the number of results so far and the total.

        Raises:
            SandboxError: no sandbox could be opened.
        """
        clock = asyncio.get_running_loop().time
        deadline = None if deadline_seconds is None else clock() + deadline_seconds
        results: list[CodeResult | None] = [None] * len(submissions)
        done, refused = 0, list[str]()
        turns = _turns(submissions)

        async def work() -> None:
            nonlocal done
            for index in turns:
                one = submissions[index]
                try:
                    result = await self._judge(one.answer, one.tests, one.tenant, clock(), deadline)
                except ConfigError as error:
                    refused.append(f"submission {index}: {error}")
                    result = CodeResult(None, (), ExtractedCode(None, None, 0, None), str(error))
                results[index] = result
                done += 1
                if progress is not None:
                    progress(done, len(submissions))
                await asyncio.sleep(0)  # answers without a program never yield otherwise

        at_once = min(len(submissions), (await self._places.here()).at_once) if submissions else 0
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None
        if refused:
            _log.warning("%d of %d answers have no score; %s", len(refused), len(submissions), refused[0])
        return [result for result in results if result is not None]


def _checked(settings: CodeSettings | None, options: Mapping[str, Any], *, any_language: bool) -> CodeSettings:
    given = {name: getattr(settings, name) for name in settings.model_fields_set} if settings else {}
    checked = read_options(CodeSettings, {**given, **options})
    check_place(checked.sandbox, checked.sandbox_fusion_url)
    try:
        if checked.sandbox_fusion_url:
            RemoteSandbox(checked.sandbox_fusion_url)  # validates the URL
        elif not any_language:
            find_language(checked.language)
    except ProgramError as error:
        raise ConfigError(f"option 'language': {error}") from None
    except ConfigError as error:
        raise ConfigError(f"option 'sandbox_fusion_url': {error}") from None
    return checked.model_copy(update={"language": own_name(checked.language) or checked.language})


def _language_of(suite: Suite) -> str | None:
    """Return the language that the suite requires; None: the answer chooses.

    Raises:
        ConfigError: calls and test code are supported in Python only.
    """
    language = suite.language and (own_name(suite.language) or suite.language)
    if suite.kind is SuiteKind.STDIO:
        return language
    if language not in (None, "python"):
        raise ConfigError(f"language {suite.language!r}: a suite of kind {suite.kind.value!r} is for python only")
    return "python"


def _refuse_unreachable(suite: Suite, most: int) -> None:
    """Reject suites that no answer can pass.

    Raises:
        ConfigError: no answer could be right.
    """
    if suite.kind is not SuiteKind.STDIO or suite.checker is not None:
        return
    for index, case in enumerate(suite.cases):
        if not isinstance(case.expected, str):
            raise ConfigError(f"case {index}: expected output {case.expected!r:.80}: expected text")
        if len(case.expected) > most:
            raise ConfigError(
                f"case {index}: {len(case.expected)} characters are expected, but max_output_bytes is {most}"
            )


def _turns(submissions: Sequence[Submission]) -> Iterator[int]:
    """Yield their indexes, one of each tenant at a time."""
    waiting: dict[str, deque[int]] = {}
    for index, submission in enumerate(submissions):
        waiting.setdefault(submission.tenant, deque()).append(index)
    while waiting:
        for tenant in list(waiting):
            yield waiting[tenant].popleft()
            if not waiting[tenant]:
                del waiting[tenant]
