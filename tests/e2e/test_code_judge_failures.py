"""Infrastructure failures never look like the model's: retried, then no score. No ending leaves anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import pytest
import pytest_asyncio
from judging import copies, verdicts
from serving import ScriptedSandbox, forever, http, peer, raising, service, until

from left_behind import nothing_is_left_behind  # noqa: F401 - a fixture
from patience import patient
from toolyard.errors import (
    ConfigError,
    LimiterClosedError,
    SandboxBusyError,
    SandboxClosedError,
    SandboxError,
)
from toolyard.limits.local import LocalLimiter
from toolyard.rewards.code.judge import CodeJudge
from toolyard.rewards.code.protocol import Case, CaseResult, Submission, Suite, SuiteKind
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Execution, Limits, Program, StageResult, Verdict

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "```python\nprint(input())\n```"
SLEEP = "```python\nimport time\ntime.sleep(60)\n```"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[LocalSandbox]:
    async with LocalSandbox(workers=2) as sandbox:
        yield sandbox


class Unreliable:
    """A real sandbox that fails when `fails` says so, by the number of the call and what the program reads."""

    def __init__(self, sandbox: LocalSandbox, fails: Callable[[int, str], Exception | None]) -> None:
        self._sandbox = sandbox
        self._fails = fails
        self.calls: list[str] = []

    async def run(self, program: Program, limits: Limits | None = None) -> Execution:
        assert isinstance(program.stdin, str)
        self.calls.append(program.stdin.strip())
        error = self._fails(len(self.calls), program.stdin.strip())
        if error is not None:
            raise error
        return await self._sandbox.run(program, limits)

    def session(self, limits: Limits | None = None) -> Any:
        return self._sandbox.session(limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        raise AssertionError("it was given, and is not the judge's to close")


def judge_of(sandbox: Any, limiter: LocalLimiter | None = None, **settings: Any) -> CodeJudge:
    return CodeJudge(
        sandbox=sandbox, limiter=limiter, **{"enable_global_rate_limit": False, "num_workers": 1, **settings}
    )


# Retries --------------------------------------------------------------------------------------------------------------


async def test_a_failure_of_ours_is_retried_and_only_what_was_not_done(sandbox: LocalSandbox) -> None:
    unreliable = Unreliable(sandbox, lambda call, _: SandboxError("lost") if call in (3, 4) else None)
    async with judge_of(unreliable) as judge:
        result = await judge.judge(ECHO, copies(5))
    assert (result.score, verdicts(result)) == (1.0, ["passed"] * 5)
    assert unreliable.calls == ["0", "1", "2", "2", "2", "3", "4"]
    assert [case.tries for case in result.cases] == [1, 1, 3, 1, 1]


async def test_a_case_that_cannot_be_run_takes_the_score_away_and_the_others_are_kept(sandbox: LocalSandbox) -> None:
    unreliable = Unreliable(sandbox, lambda _, stdin: SandboxError(f"no worker for {stdin}") if stdin == "2" else None)
    async with judge_of(unreliable, aggregation="fraction") as judge:
        result = await judge.judge(ECHO, copies(5))
    assert verdicts(result) == ["passed", "passed", "infrastructure", "passed", "passed"]
    assert (result.score, result.why) == (None, "case 2: infrastructure: SandboxError: no worker for 2")
    assert (unreliable.calls.count("2"), result.cases[2].tries) == (3, 3)


async def test_all_or_nothing_a_case_that_failed_decides_whatever_else_could_not_be_run(sandbox: LocalSandbox) -> None:
    unreliable = Unreliable(sandbox, lambda _, stdin: SandboxError("lost") if stdin == "1" else None)
    async with judge_of(unreliable, retries=0) as judge:
        result = await judge.judge("```python\nn = input()\nprint(n if n != '3' else 'x')\n```", copies(5))
        assert verdicts(result) == ["passed", "infrastructure", "passed", "wrong_answer", "not_run"]
        assert (result.score, result.why.partition(" line")[0]) == (0.0, "case 3: wrong_answer:")
        result = await judge.judge(ECHO, copies(5))
        assert result.score is None, "but never 0 for our failure alone"


async def test_an_outage_is_not_waited_for_case_by_case(sandbox: LocalSandbox) -> None:
    unreliable = Unreliable(sandbox, lambda call, _: SandboxError("all is lost") if call > 2 else None)
    async with judge_of(unreliable) as judge:
        result = await judge.judge(ECHO, copies(100))
    assert verdicts(result) == ["passed"] * 2 + ["infrastructure"] * 98
    assert len(unreliable.calls) == 2 + 3 + 1
    assert result.score is None
    assert {case.why for case in result.cases[2:]} == {"SandboxError: all is lost"}


async def test_what_trying_again_cannot_help_is_not_tried_again(sandbox: LocalSandbox) -> None:
    unreliable = Unreliable(sandbox, lambda call, _: SandboxClosedError("closed") if call > 1 else None)
    async with judge_of(unreliable) as judge:
        result = await judge.judge(ECHO, copies(5))
    assert (len(unreliable.calls), result.score) == (2, None)
    assert verdicts(result) == ["passed"] + ["infrastructure"] * 4


async def test_a_busy_service_is_given_the_time_it_asks_for(sandbox: LocalSandbox) -> None:
    unreliable = Unreliable(sandbox, lambda call, _: SandboxBusyError("full", retry_after=0.5) if call == 1 else None)
    async with judge_of(unreliable) as judge:
        began = time.monotonic()
        assert (await judge.judge(ECHO, copies(2))).score == 1.0
    assert time.monotonic() - began >= 0.5


async def test_a_limiter_that_was_closed_takes_the_score_away(sandbox: LocalSandbox) -> None:
    limiter = LocalLimiter(2)
    await limiter.close()
    async with judge_of(sandbox, limiter) as judge:
        result = await judge.judge(ECHO, copies(3))
    assert (result.score, set(verdicts(result))) == (None, {"infrastructure"})
    assert LimiterClosedError.__name__ in result.why


async def test_in_a_batch_a_failure_of_ours_costs_one_score_and_no_other(sandbox: LocalSandbox) -> None:
    unreliable = Unreliable(sandbox, lambda _, stdin: SandboxError("lost") if stdin == "cursed" else None)
    cursed = Suite(SuiteKind.STDIO, (Case(stdin="cursed", expected="cursed"),))
    submissions = [Submission(ECHO, cursed if number == 5 else copies(2)) for number in range(12)]
    async with judge_of(unreliable, num_workers=4) as judge:
        results = await judge.judge_all(submissions)
    assert [result.score for result in results] == [None if number == 5 else 1.0 for number in range(12)]


async def test_a_service_that_is_away_gives_no_score() -> None:
    async with peer(None) as gone:
        url = gone.url
    async with CodeJudge(sandbox_fusion_url=url, retries=0, enable_global_rate_limit=False) as judge:
        result = await judge.judge(ECHO, copies(1), deadline_seconds=30)
    assert (result.score, verdicts(result)) == (None, ["infrastructure"])
    assert "cannot connect" in result.why


async def test_a_program_whose_harness_never_began_is_our_failure() -> None:
    stopped = Execution(Verdict.TIMED_OUT, StageResult(Verdict.TIMED_OUT, None))

    async def act(program: Program, limits: Limits) -> Execution:
        return stopped

    async with judge_of(ScriptedSandbox(act), retries=1) as judge:
        result = await judge.judge(ECHO, Suite(SuiteKind.FUNCTION, (Case(),), function="f"))
    assert (result.score, result.cases[0].tries) == (None, 2)
    assert "the harness did not start (timed_out)" in result.why


async def test_what_was_compiled_before_and_is_not_now_is_our_failure() -> None:
    answers = [
        Execution(Verdict.OK, StageResult(Verdict.OK, 0, b"0\n")),
        Execution(Verdict.COMPILE_FAILED, None, StageResult(Verdict.TIMED_OUT, None)),
        Execution(Verdict.OK, StageResult(Verdict.OK, 0, b"1\n")),
    ]

    async def act(program: Program, limits: Limits) -> Execution:
        return answers.pop(0)

    async with judge_of(ScriptedSandbox(act)) as judge:
        assert (await judge.judge("```cpp\nx\n```", copies(2))).score == 1.0


async def test_a_program_that_somebody_killed_is_run_again(sandbox: LocalSandbox) -> None:
    killed = Execution(Verdict.SIGNALED, StageResult(Verdict.SIGNALED, -9), isolation="full")
    lost = ["1", "3"]

    async def act(program: Program, limits: Limits) -> Execution:
        if program.stdin in lost:
            lost.remove(program.stdin)
            return killed
        return await sandbox.run(program, limits)

    cases = tuple(Case(stdin=str(number), expected=str(number)) for number in range(5))
    async with judge_of(ScriptedSandbox(act)) as judge:
        result = await judge.judge(ECHO, Suite(SuiteKind.STDIO, cases))
    assert (result.score, [case.tries for case in result.cases]) == (1.0, [1, 2, 1, 2, 1])


async def test_a_program_that_kills_itself_is_believed_at_the_second_time(sandbox: LocalSandbox) -> None:
    suicide = "```python\nimport os\nos.kill(os.getpid(), 9)\n```"
    counted = Unreliable(sandbox, lambda *_: None)
    async with judge_of(counted, aggregation="fraction") as judge:
        result = await judge.judge(suicide, copies(6))
    assert (result.score, set(verdicts(result)), len(counted.calls)) == (0.0, {"runtime_error"}, 7)
    assert result.why == "case 0: runtime_error: died of SIGKILL"
    async with judge_of(sandbox, retries=0) as judge:
        assert (await judge.judge(suicide, copies(1))).score == 0.0


# Through services -----------------------------------------------------------------------------------------------------


async def test_our_own_service_gives_the_same_verdicts(sandbox: LocalSandbox) -> None:
    code = "```python\nn = int(input())\nprint(n if n else 1 / n) if n < 3 else print(x)\n```"
    async with (
        service(sandbox) as running,
        CodeJudge(sandbox_fusion_url=running.url, aggregation="fraction", enable_global_rate_limit=False) as remote,
        judge_of(sandbox, aggregation="fraction") as local,
    ):
        there, here = await remote.judge(code, copies(5)), await local.judge(code, copies(5))
        assert verdicts(there) == ["runtime_error", "passed", "passed", "runtime_error", "runtime_error"]
        assert [(case.stdout, case.stderr, case.exit_code, case.why) for case in there.cases] == [
            (case.stdout, case.stderr, case.exit_code, case.why) for case in here.cases
        ]
        call = Suite(SuiteKind.FUNCTION, (Case(arguments=("ü",), expected="ü!"),), function="f")
        result = await remote.judge("```python\ndef f(x):\n    print('é')\n    return x + '!'\n```", call)
        assert (result.score, result.cases[0].stdout, result.cases[0].returned) == (1.0, "é\n", "ü!")


@pytest.mark.parametrize(
    ("status", "code", "stderr", "verdict"),
    [
        ("Finished", 0, "", "wrong_answer"),
        ("Finished", 1, "Traceback (most recent call last):\n…\nValueError: x", "runtime_error"),
        ("Finished", -9, "", "memory_limit"),
        ("Finished", 137, "Killed", "memory_limit"),
        ("Finished", 1, "Traceback (most recent call last):\n…\nMemoryError", "memory_limit"),
        ("Finished", 1, '  File "/tmp/x/a.py", line 1\n    (\n    ^\nSyntaxError: x', "compile_error"),
        ("TimeLimitExceeded", None, "", "time_limit"),
    ],
)
async def test_a_foreign_services_words_mean_the_same(status: str, code: int | None, stderr: str, verdict: str) -> None:
    run = {"status": status, "return_code": code, "stdout": "", "stderr": stderr, "execution_time": 0.1}
    body = {"status": "Success" if code == 0 else "Failed", "message": "", "run_result": run, "files": {}}
    async with peer(http(200, body)) as foreign, CodeJudge(sandbox_fusion_url=foreign.url) as judge:
        result = await judge.judge(ECHO, copies(1))
    assert (result.score, verdicts(result)) == (0.0, [verdict])


@pytest.mark.parametrize(
    ("kept", "score"), [("12\n" * 400_000, None), ("12\n" * 399_990 + "13\n" * 10, 0.0), ("12\n" * 100_000, 0.0)]
)
async def test_an_output_that_a_foreign_service_may_have_cut_is_not_called_wrong(
    kept: str, score: float | None
) -> None:
    run = {"status": "Finished", "return_code": 0, "stdout": kept, "stderr": "", "execution_time": 0.1}
    body = {"status": "Success", "message": "", "run_result": run, "files": {}}
    whole = Suite(SuiteKind.STDIO, (Case(expected="12\n" * 500_000),))
    async with peer(http(200, body)) as foreign, CodeJudge(sandbox_fusion_url=foreign.url) as judge:
        result = await judge.judge(ECHO, whole)
    assert result.score == score
    assert (score is None) == ("the service kept only 1200000 bytes of the output" in result.why)


@pytest.mark.parametrize(
    ("code", "kept", "verdict", "why"),
    [
        (0, "\n{nonce} ready 0\n" + "x" * (1 << 20), "wrong_answer", "printed more than the service keeps"),
        (0, "\n{nonce} ready 0\n", "runtime_error", "ended with exit code 0 before it returned"),
        (-9, "\n{nonce} ready 0\n", "runtime_error", "killed by the service after 2000000 bytes of output"),
    ],
)
async def test_a_function_whose_result_a_foreign_service_did_not_keep_printed_too_much(
    code: int, kept: str, verdict: str, why: str
) -> None:
    async def act(program: Program, limits: Limits) -> Execution:
        assert isinstance(program.stdin, str)
        stdout = kept.format(nonce=program.stdin.partition("\n")[0]).encode()[: 1 << 20]
        ending = Verdict.SIGNALED if code else Verdict.OK
        return Execution(ending, StageResult(ending, code, stdout, b"e" * 2_000_000 if code else b""))

    async with judge_of(ScriptedSandbox(act)) as judge:
        result = await judge.judge(ECHO, Suite(SuiteKind.FUNCTION, (Case(),), function="f"))
    assert (result.score, verdicts(result), result.cases[0].why) == (0.0, [verdict], why)


async def test_an_expected_output_beyond_what_is_kept_is_a_mistake_of_the_settings(sandbox: LocalSandbox) -> None:
    tests = Suite(SuiteKind.STDIO, (Case(expected="1"), Case(expected="x" * 2001)))
    async with judge_of(sandbox, max_output_bytes=2000) as judge:
        with pytest.raises(ConfigError, match="case 1: 2001 characters are expected, but max_output_bytes is 2000"):
            await judge.judge(ECHO, tests)
    async with judge_of(sandbox, max_output_bytes=2001) as judge:
        assert (await judge.judge(ECHO, tests)).score == 0.0


async def test_a_foreign_services_own_error_gives_no_score() -> None:
    body = {"status": "SandboxError", "message": "disk full", "run_result": None, "files": {}}
    async with peer(http(200, body)) as foreign, CodeJudge(sandbox_fusion_url=foreign.url) as judge:
        result = await judge.judge(ECHO, copies(1))
    assert (result.score, result.why) == (None, "case 0: infrastructure: SandboxError: disk full")
    assert len(foreign.requests) == 3


# Deadlines ------------------------------------------------------------------------------------------------------------


async def test_a_deadline_ends_what_runs_and_takes_the_score_away(sandbox: LocalSandbox) -> None:
    limiter = LocalLimiter(4)
    code = "```python\nimport time\nn = input()\ntime.sleep(60 if n == '2' else 0)\nprint(n)\n```"
    async with judge_of(sandbox, limiter, aggregation="fraction", run_seconds=90) as judge:
        told: list[CaseResult] = []
        result = await judge.judge(code, copies(4), deadline_seconds=1.0, on_case=told.append)
    assert verdicts(result) == ["passed", "passed", "infrastructure", "infrastructure"]
    assert (result.score, result.why) == (None, "case 2: infrastructure: the deadline passed")
    assert 0.9 < result.wall_seconds < patient(5)
    assert told == list(result.cases)
    assert (limiter.read_statistics().in_flight, sandbox.statistics().busy) == (0, 0)


async def test_a_deadline_after_the_score_is_decided_changes_nothing(sandbox: LocalSandbox) -> None:
    code = "```python\nimport time\nn = input()\ntime.sleep(60 if n == '1' else 0)\nprint('x')\n```"
    async with judge_of(sandbox, stop_at_first_failure=False, run_seconds=90) as judge:
        result = await judge.judge(code, copies(3), deadline_seconds=1.0)
    assert (result.score, verdicts(result)) == (0.0, ["wrong_answer", "not_run", "not_run"])


async def test_a_deadline_counts_the_wait_for_a_permit(sandbox: LocalSandbox) -> None:
    limiter = LocalLimiter(1)
    async with judge_of(sandbox, limiter) as judge, limiter.permit("somebody else"):
        result = await judge.judge(ECHO, copies(2), deadline_seconds=0.2)
    assert (result.score, set(verdicts(result))) == (None, {"infrastructure"})


async def test_a_batchs_deadline_leaves_every_answer_a_result(sandbox: LocalSandbox) -> None:
    submissions = [Submission(ECHO if number < 4 else SLEEP, copies(2)) for number in range(200)]
    async with judge_of(sandbox, run_seconds=90, num_workers=2) as judge:
        began = time.monotonic()
        results = await judge.judge_all(submissions, deadline_seconds=1.0)
    assert time.monotonic() - began < patient(5)
    assert [result.score for result in results] == [1.0] * 4 + [None] * 196
    assert all(len(result.cases) == 2 for result in results)
    assert results[-1].why == "case 0: infrastructure: the deadline had passed before it started"


# Cancelling and closing -----------------------------------------------------------------------------------------------


async def test_cancelling_leaves_no_permit_and_no_program_behind(sandbox: LocalSandbox) -> None:
    limiter = LocalLimiter(3)
    async with judge_of(sandbox, limiter, num_workers=8, run_seconds=90) as judge:
        submissions = [Submission(SLEEP, copies(5), tenant=f"t{number % 3}") for number in range(50)]
        batch = asyncio.create_task(judge.judge_all(submissions))
        lone = asyncio.create_task(judge.judge(SLEEP, copies(5)))
        await until(lambda: sandbox.statistics().busy == 2 and limiter.read_statistics().in_flight == 3)
        for task in (batch, lone):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        held = limiter.read_statistics()
        assert (held.in_flight, held.waiting) == (0, 0)
        assert sandbox.statistics().busy == 0
        assert (await judge.judge(ECHO, copies(3))).score == 1.0, "and it goes on"


async def test_cancelling_again_and_again_at_any_moment_loses_no_permit(sandbox: LocalSandbox) -> None:
    limiter = LocalLimiter(2)
    async with judge_of(sandbox, limiter, num_workers=4, aggregation="fraction", cases_per_run=2) as judge:
        for moment in range(40):
            task = asyncio.create_task(judge.judge(ECHO, copies(12)))
            await asyncio.sleep(moment * 0.0007)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        held = limiter.read_statistics()
        assert (held.in_flight, held.waiting, sandbox.statistics().busy) == (0, 0, 0)
        assert (await judge.judge(ECHO, copies(12))).score == 1.0


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.usefixtures("nothing_is_left_behind")
async def test_what_the_judge_opened_is_closed_with_it() -> None:
    async with CodeJudge() as judge:
        assert (await judge.judge(ECHO, copies(3))).score == 1.0
        at_hand = "```python\nimport sys\nprint('heapq' in sys.modules)\n```"
        assert (await judge.judge(at_hand, copies(1))).cases[0].stdout == "True\n", "what many import is at hand"
        task = asyncio.create_task(judge.judge(SLEEP, copies(3)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await LocalLimiter(3, name="rate-limiter").close()  # its limiter's name is free again


async def test_who_is_cancelled_while_opening_leaves_no_limiter_behind() -> None:
    judge = CodeJudge(rate_limit=7)
    for _ in range(5):
        task = asyncio.create_task(judge.judge(ECHO, copies(1)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await judge.judge(ECHO, copies(1))).score == 1.0
    await judge.close()
    await LocalLimiter(3, name="rate-limiter").close()


async def test_closing_while_an_answer_is_judged_gives_no_score(sandbox: LocalSandbox) -> None:
    judge = CodeJudge(run_seconds=90, enable_global_rate_limit=False)
    task = asyncio.create_task(judge.judge(SLEEP, copies(2)))
    await asyncio.sleep(1.0)
    await judge.close()
    result = await task
    assert (result.score, set(verdicts(result))) == (None, {"infrastructure"})


async def test_a_judge_opens_by_itself_and_in_every_event_loop_anew() -> None:
    judge = CodeJudge(enable_global_rate_limit=False)

    async def use() -> float | None:
        try:
            return (await judge.judge(ECHO, copies(2))).score
        finally:
            await judge.close()

    assert [await asyncio.to_thread(asyncio.run, use()) for _ in range(2)] == [1.0, 1.0]


async def test_closing_in_one_event_loop_leaves_the_others_their_limiter(sandbox: LocalSandbox) -> None:
    judge = CodeJudge(sandbox=sandbox, rate_limit=3)
    await judge.__aenter__()

    async def elsewhere() -> None:
        async with judge:
            pass

    await asyncio.to_thread(asyncio.run, elsewhere())
    assert (await judge.judge(ECHO, copies(2))).score == 1.0
    await judge.close()
    await LocalLimiter(4, name="rate-limiter").close()  # the name is free


async def test_its_rate_limit_is_that_of_the_code_interpreters() -> None:
    tool = LocalLimiter(4, name="rate-limiter")
    try:
        with pytest.raises(ConfigError, match="limiter 'rate-limiter' exists with limit 4, but limit 5 was requested"):
            await CodeJudge(rate_limit=5).__aenter__()
        async with (
            service(ScriptedSandbox(forever, workers=64)) as running,
            CodeJudge(rate_limit=4, sandbox_fusion_url=running.url) as judge,
        ):
            task = asyncio.create_task(judge.judge_all([Submission(ECHO, copies(1))] * 20))
            await until(lambda: tool.read_statistics().in_flight == 4)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert tool.read_statistics().in_flight == 0
    finally:
        await tool.close()


async def test_a_batch_never_has_more_answers_in_progress_than_it_can_run() -> None:
    most = running = 0

    async def act(program: Program, limits: Limits) -> Execution:
        nonlocal most, running
        running += 1
        most = max(most, running, len([task for task in asyncio.all_tasks() if "judge_all" in repr(task)]))
        await asyncio.sleep(0.0005)
        running -= 1
        return Execution(Verdict.OK, StageResult(Verdict.OK, 0, b"0\n"))

    async with judge_of(ScriptedSandbox(act, workers=64), num_workers=5) as judge:
        results = await judge.judge_all([Submission(ECHO, copies(1))] * 1000)
    assert [result.score for result in results] == [1.0] * 1000
    assert most == 10


async def test_an_unexpected_error_is_told_as_it_is() -> None:
    async with judge_of(ScriptedSandbox(raising(ZeroDivisionError("a bug")))) as judge:
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await judge.judge(ECHO, copies(20))
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await judge.judge_all([Submission(ECHO, copies(2))] * 5)
