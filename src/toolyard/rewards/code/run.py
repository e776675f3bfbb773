"""Run the cases of one answer: in batches under permits, on as many workers as are free, retrying our failures."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from toolyard.errors import ConfigError, LimiterError, ProgramError, SandboxBusyError, SandboxError, ToolyardError
from toolyard.rewards.code.ledger import Ledger
from toolyard.rewards.code.protocol import CaseResult, CaseVerdict, CodeSettings
from toolyard.rewards.code.verdicts import JudgePlan, last_line, one_line, raised, read_execution
from toolyard.rewards.code.workplaces import Workplace
from toolyard.sandbox.protocol import MIB, Execution, Program, Sandbox, Verdict

_FIRST_DELAY, _LONGEST_DELAY, _LONGEST_ASKED = 0.05, 5.0, 60.0
"""Seconds between two attempts: first, maximum, and maximum if a service asks for it."""
_LARGE = 512 * 1024
"""Longer outputs are compared in a thread, so that they do not block the event loop."""
_MOST_INPUT = 16 * MIB
"""Maximum input of one batch, unless a single case has more."""
_random = random.SystemRandom()


class Run:
    """The cases of one answer. Results are in the ledger, even if cancelled. `settled`: called when a case ends."""

    def __init__(
        self,
        place: Workplace,
        plan: JudgePlan,
        ledger: Ledger,
        settings: CodeSettings,
        tenant: str,
        settled: Callable[[], None],
    ) -> None:
        self._place = place
        self._plan = plan
        self._ledger = ledger
        self._settings = settings
        self._tenant = tenant
        self._settled = settled
        self._at: dict[asyncio.Task[None], int] = {}
        """Which task runs which case."""
        self._given_up = False
        """Whether the last case was given up: if the next one is as well, it is not the case's fault."""
        self._kills_itself = False

    async def run(self) -> None:
        """Run all cases.

        Raises:
            ConfigError: the task or this machine's setup is invalid.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._start_worker()
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None

    def _start_worker(self) -> None:
        task = self._group.create_task(self._work())
        self._at[task] = 0
        self._place.busy += 1
        task.add_done_callback(self._leave)

    def _leave(self, task: asyncio.Task[None]) -> None:
        del self._at[task]
        self._place.busy -= 1

    async def _work(self) -> None:
        while todo := self._ledger.take(self._share()):
            await self._batch(todo)

    def _share(self) -> int:
        hands = len(self._at) + self._place.free
        return min(self._settings.cases_per_run, -(-self._ledger.pending // hands))

    # -------------------------------------------------------------------------------------------------- one batch
    async def _batch(self, todo: deque[int]) -> None:
        me, tries = asyncio.current_task(), 1
        assert me is not None
        while todo:
            first = self._at[me] = todo[0]
            try:
                async with self._place.permits(self._tenant):
                    await self._attempt(me, todo, tries)
            except (SandboxError, LimiterError) as error:
                if not todo:
                    return
                failed = tries if todo[0] == first else 1
                if error.retryable and failed <= self._settings.retries and not self._given_up:
                    tries = failed + 1
                    await asyncio.sleep(_delay(error, failed))
                else:
                    tries = 1
                    self._give_up(todo, error, failed)
            except ProgramError as error:
                if not self._plan.chosen_by_answer:
                    raise ConfigError(str(error)) from error
                # The model may name any language; that this one is not installed here is not the answer's fault.
                self._give_up(todo, error, tries)

    async def _attempt(self, me: asyncio.Task[None], todo: deque[int], tries: int) -> None:
        """Remove finished cases from `todo`; also the rest, if they are not needed or better run by others."""
        async with aclosing(self._executions(self._inputs(todo))) as executions:
            async for execution in executions:
                result = await self._result(todo[0], execution, tries)
                tries = 1
                todo.popleft()
                self._settle(result)
                if not todo:
                    return
                # A timeout took long: workers may have become free for the rest.
                if result.verdict is CaseVerdict.TIME_LIMIT or not self._ledger.needs(todo[0]):
                    self._ledger.put_back(todo)
                    todo.clear()
                    self._start_workers_for_rest()
                    return
                self._at[me] = todo[0]
        raise SandboxError(f"the sandbox ran fewer cases than requested: {len(todo)} are missing")

    def _settle(self, result: CaseResult) -> None:
        self._ledger.add(result)
        self._settled()
        self._given_up = result.verdict is CaseVerdict.INFRASTRUCTURE
        for task, index in self._at.items():
            if not self._ledger.needs(index) and task is not asyncio.current_task():
                task.cancel()
        # Not before the first case is known: most wrong answers fail there, and a compile error is reported once.
        self._start_workers_for_rest()

    def _start_workers_for_rest(self) -> None:
        for _ in range(min(self._place.free, self._ledger.pending)):
            self._start_worker()

    def _give_up(self, todo: deque[int], error: ToolyardError, tries: int) -> None:
        why = one_line(f"{type(error).__name__}: {error}")
        hopeless = self._given_up or not error.retryable
        rest = [*todo, *self._ledger.take(self._ledger.pending)] if hopeless else [todo[0]]
        for index in rest:
            self._settle(CaseResult(index, CaseVerdict.INFRASTRUCTURE, why=why, tries=tries))
            tries = 0 if hopeless else tries
        if hopeless:
            todo.clear()
        else:
            todo.popleft()

    # --------------------------------------------------------------------------------------------------- one case
    def _inputs(self, todo: deque[int]) -> list[str]:
        """Return the inputs of the first cases, as many as fit in one batch. The others are put back."""
        stdins: list[str] = []
        size = 0
        for index in todo:
            stdin = self._plan.stdin(index)
            size += len(stdin)
            if stdins and size > _MOST_INPUT:
                break
            stdins.append(stdin)
        if len(stdins) < len(todo):
            self._ledger.put_back(list(todo)[len(stdins) :])
            while len(todo) > len(stdins):
                todo.pop()
        return stdins

    def _executions(self, stdins: Sequence[str]) -> AsyncGenerator[Execution]:
        batches = self._place.batches
        # With a checker, one by one: a batch would occupy the worker that the checker needs.
        if batches is not None and self._plan.suite.checker is None:
            # One by one if a result may make others unnecessary, or workers wait for the first of them.
            all_wanted = not self._ledger.stops and not self._place.free
            return batches.run_each(self._plan.program, stdins, self._plan.limits, batch_results=all_wanted)
        return self._one_by_one(stdins)

    async def _one_by_one(self, stdins: Sequence[str]) -> AsyncGenerator[Execution]:
        for stdin in stdins:
            program = self._plan.program.model_copy(update={"stdin": stdin})
            yield await self._place.sandbox.run(program, self._plan.limits)

    async def _result(self, index: int, execution: Execution, tries: int) -> CaseResult:
        plan, stage = self._plan, execution.run
        self._doubt_kill(execution, tries)
        if stage is not None and len(stage.stdout_bytes) > _LARGE:
            result = await asyncio.to_thread(read_execution, plan, index, execution, tries)
        else:
            result = read_execution(plan, index, execution, tries)
        if result.verdict is CaseVerdict.COMPILE_ERROR and self._ledger.compiled:
            if execution.verdict is Verdict.COMPILE_FAILED:
                raise SandboxError(f"the program compiled before but does not now: {result.why}")
            return replace(result, verdict=CaseVerdict.RUNTIME_ERROR)  # the program only claims it
        if plan.suite.checker is not None and result.verdict is CaseVerdict.PASSED:
            return await check(self._place.sandbox, plan, result, execution)
        return result

    def _doubt_kill(self, execution: Execution, tries: int) -> None:
        """A machine that runs out of memory kills as well. Another run shows whether a program kills itself.

        Raises:
            SandboxError: it was killed for the first time.
        """
        if execution.exit_code != -signal.SIGKILL or execution.isolation == "unknown" or self._kills_itself:
            return
        if tries == 1 <= self._settings.retries:
            raise SandboxError("the program was killed")
        self._kills_itself = True


def _delay(error: ToolyardError, tries: int) -> float:
    delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2**tries) * _random.uniform(0.5, 1.0)
    asked = error.retry_after if isinstance(error, SandboxBusyError) else None
    return max(delay, min(asked or 0.0, _LONGEST_ASKED))


def first_of(failure: BaseException) -> BaseException:
    """Return the failure of a task group that came first: the others were cancelled because of it."""
    while isinstance(failure, BaseExceptionGroup):
        failure = cast("BaseException", failure.exceptions[0])  # pyright: ignore[reportUnknownMemberType]
    return failure


# A task's own checker: a Python program that reads `input`, `output` and `expected`, and decides by its exit code.


async def check(sandbox: Sandbox, plan: JudgePlan, result: CaseResult, execution: Execution) -> CaseResult:
    """Return the checker's result for a case whose program ran.

    If the checker fails (raises, hangs, crashes, or exits with a code other than 0 and 1), it is run again on the
    expected output. If it accepts that, the program's output was what it could not parse.

    Raises:
        ConfigError: the checker failed.
    """
    assert execution.run is not None
    verdict_run = await _ask(sandbox, plan, result.index, execution.run.stdout_bytes)
    if verdict_run.verdict is Verdict.OK:
        return result
    why = last_line(verdict_run.stderr) or last_line(verdict_run.stdout)
    if verdict_run.exit_code != 1 or raised(verdict_run.stderr):
        ending = verdict_run.verdict.value if verdict_run.exit_code is None else f"exit code {verdict_run.exit_code}"
        once_more = await _ask(sandbox, plan, result.index, _text(plan.suite.cases[result.index].expected))
        if once_more.verdict is not Verdict.OK:
            why = one_line(why) or "no message"
            raise ConfigError(f"case {result.index}: the checker failed ({ending}): {why}")
        why = f"it cannot parse the output: {why or ending}"
    return replace(
        result, verdict=CaseVerdict.WRONG_ANSWER, why=one_line(f"the checker rejects it: {why}".rstrip(": "))
    )


async def _ask(sandbox: Sandbox, plan: JudgePlan, index: int, output: bytes) -> Execution:
    case = plan.suite.cases[index]
    files = {"input": _text(case.stdin), "output": output, "expected": _text(case.expected)}
    assert plan.suite.checker is not None
    return await sandbox.run(Program(plan.suite.checker, "python", files=files), plan.limits)


def _text(value: object) -> bytes:
    return ("" if value is None else str(value)).encode("utf-8", "surrogatepass")
