"""The corpus of solutions with known verdicts, scored through every kind of sandbox, with identical results.

Three kinds: the embedded one, our service, and a plain SandboxFusion server. The last is our
service behind a proxy that removes our own field from every request, so that it answers like SandboxFusion.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from serving import http, peer, service

from corpus import Problem, Solution, read_corpus
from toolyard.errors import RewardError
from toolyard.limits.local import LocalLimiter
from toolyard.rewards import sandbox_fusion
from toolyard.rewards.code.extraction import extract_code
from toolyard.rewards.code.judge import CodeJudge
from toolyard.rewards.code.protocol import Aggregation, CaseVerdict, CodeResult, Submission
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Limits, Program, Sandbox
from toolyard.sandbox.remote.sandbox import RemoteSandbox, Retries

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.toolchain("cpp")]

CORPUS = read_corpus()
SOLUTIONS = [solution for problem in CORPUS for solution in problem.solutions]
SETTINGS: dict[str, Any] = {"run_seconds": 1.0, "compile_seconds": 60.0, "memory_limit_mb": 256}
FAILED = frozenset(CaseVerdict) - {CaseVerdict.PASSED}


# The three kinds ------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def plain_sandbox_fusion(url: str) -> AsyncIterator[str]:
    """The URL of a server that knows `/run_code` with SandboxFusion's own fields, and nothing else."""

    async def run_code(request: web.Request) -> web.Response:
        body = await request.json()
        body.pop("toolyard", None)
        async with session.post(f"{url}/run_code", json=body) as answer:
            return web.json_response(await answer.json(), status=answer.status)

    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/run_code", run_code)
    runner = web.AppRunner(application)
    async with aiohttp.ClientSession() as session:
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local() -> AsyncIterator[LocalSandbox]:
    """Behind both servers, so that each C++ program is compiled once."""
    async with LocalSandbox(workers=4) as sandbox:
        yield sandbox


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def our_url(local: LocalSandbox) -> AsyncIterator[str]:
    async with service(local, max_wait_seconds=60) as running:
        yield running.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def foreign_url(our_url: str) -> AsyncIterator[str]:
    async with plain_sandbox_fusion(our_url) as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes(local: LocalSandbox, our_url: str, foreign_url: str) -> AsyncIterator[dict[str, Sandbox | None]]:
    async with (
        RemoteSandbox(our_url, margin_seconds=60) as ours,
        RemoteSandbox(foreign_url, margin_seconds=60) as foreign,
    ):
        yield {"of the judge": None, "embedded": local, "service": ours, "foreign": foreign}


async def score(sandbox: Sandbox | None, aggregation: Aggregation) -> dict[Solution, CodeResult]:
    """The whole corpus at once, by one judge for all problems with the same settings. None: with its own sandbox."""
    groups: dict[str, list[Problem]] = {}
    for problem in CORPUS:
        groups.setdefault(repr(problem.settings), []).append(problem)
    limiter = LocalLimiter(8)

    async def score_some(problems: list[Problem]) -> dict[Solution, CodeResult]:
        settings: dict[str, Any] = {**SETTINGS, **problems[0].settings, "aggregation": aggregation}
        pairs = [(one, dict(problem.tests)) for problem in problems for one in problem.solutions]
        async with CodeJudge(sandbox=sandbox, limiter=limiter, **settings) as judge:
            results = await judge.judge_all([Submission(one.answer, tests) for one, tests in pairs])
        return dict(zip([solution for solution, _ in pairs], results, strict=True))

    async with asyncio.TaskGroup() as group:
        scoring = [group.create_task(score_some(problems)) for problems in groups.values()]
    return {solution: result for task in scoring for solution, result in task.result().items()}


# The corpus itself ----------------------------------------------------------------------------------------------------


async def test_the_corpus_is_large_and_has_every_verdict_in_both_languages() -> None:
    languages = Counter(solution.language for solution in SOLUTIONS)
    assert languages["python"] >= 48
    assert languages["cpp"] >= 24
    seen = {(solution.language, verdict) for solution in SOLUTIONS for verdict in solution.verdicts}
    programs = set(CaseVerdict) - {CaseVerdict.INFRASTRUCTURE, CaseVerdict.NOT_RUN}
    assert {(language, verdict) for language in languages for verdict in programs} <= seen
    assert len(set(map(str, SOLUTIONS))) == len(SOLUTIONS)


async def test_the_scores_that_the_corpus_states_follow_from_its_verdicts() -> None:
    for solution in SOLUTIONS:
        share = solution.verdicts.count(CaseVerdict.PASSED) / len(solution.verdicts)
        assert solution.scores == {
            Aggregation.ALL: float(share == 1),
            Aggregation.FRACTION: pytest.approx(share, abs=1e-4),
        }


# Scoring it -----------------------------------------------------------------------------------------------------------


def stated(solution: Solution, aggregation: Aggregation) -> tuple[CaseVerdict, ...]:
    """The expected verdict of each case. ALL stops at the first failure, unless no case had to run."""
    verdicts = solution.verdicts
    if aggregation is Aggregation.FRACTION or set(verdicts) <= {CaseVerdict.COMPILE_ERROR, CaseVerdict.NOT_RUN}:
        return verdicts
    ran = next((index for index, verdict in enumerate(verdicts) if verdict in FAILED), len(verdicts)) + 1
    return (*verdicts[:ran], *[CaseVerdict.NOT_RUN] * len(verdicts[ran:]))


def differences(results: dict[Solution, CodeResult], aggregation: Aggregation) -> list[str]:
    """Where scoring differs from what the corpus states, one line for each solution."""
    lines: list[str] = []
    for solution, result in results.items():
        found = tuple(case.verdict for case in result.cases)
        right = (
            found == stated(solution, aggregation)
            and result.score == pytest.approx(solution.scores[aggregation], abs=1e-4)
            and {name: getattr(result.extracted, name) for name in solution.extracted} == solution.extracted
        )
        if not right:
            extracted = {name: getattr(result.extracted, name) for name in solution.extracted}
            lines.append(f"{solution}: {' '.join(found)}; score {result.score}; {extracted}; {result.why}")
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "aggregation"),
    [
        pytest.param("of the judge", Aggregation.FRACTION, marks=pytest.mark.exhaustive),  # once: it compiles all of it
        ("embedded", Aggregation.ALL),
        pytest.param("service", Aggregation.ALL, marks=pytest.mark.exhaustive),
        ("foreign", Aggregation.FRACTION),
    ],
)
async def test_the_whole_corpus_is_scored_as_stated(
    sandboxes: dict[str, Sandbox | None], kind: str, aggregation: Aggregation
) -> None:
    results = await score(sandboxes[kind], aggregation)
    assert set(results) == set(SOLUTIONS)
    lines = differences(results, aggregation)
    if lines and all(": time_limit: " in line for line in lines):  # seen once, beside other tests; a defect stays
        lines = differences(await score(sandboxes[kind], aggregation), aggregation)
    assert not lines, "\n".join(lines)


async def test_the_foreign_server_knows_nothing_of_ours(local: LocalSandbox, our_url: str, foreign_url: str) -> None:
    async with RemoteSandbox(our_url) as ours, RemoteSandbox(foreign_url) as foreign:
        found = [(await sandbox.run(Program("print(1)"))).isolation for sandbox in (local, ours, foreign)]
    assert found == [local.level, local.level, "unknown"]


# verl's numbers -------------------------------------------------------------------------------------------------------


def numbers_of(solution: Solution) -> list[object]:
    """What verl calls those verdicts. To its eyes a Python program is not compiled, and hunger is a crash."""
    names: dict[CaseVerdict, object] = {
        CaseVerdict.PASSED: True,
        CaseVerdict.WRONG_ANSWER: False,
        CaseVerdict.RUNTIME_ERROR: -2,
        CaseVerdict.MEMORY_LIMIT: -2,
        CaseVerdict.TIME_LIMIT: -3,
        CaseVerdict.COMPILE_ERROR: -4 if solution.language == "cpp" else -2,
    }
    return [names[verdict] for verdict in solution.verdicts]


def as_we_compare(result: object, metadata: dict[str, Any]) -> object:
    """verl forgives line ends at the very end and nothing else; we, white space at the ends of all lines."""
    expected, found = metadata["expected_output"], metadata["stdout"] or ""
    lines, seen = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (expected, found))
    if result is False and lines == seen:
        assert expected.rstrip("\n") != found.rstrip("\n")
        return True
    return result


STDIO = [(problem, solution) for problem in CORPUS if problem.stdio for solution in problem.solutions]


@pytest.mark.slow
async def test_verls_scorer_agrees_on_every_python_program(foreign_url: str) -> None:
    def score_one(problem: Problem, solution: Solution) -> str | None:
        score, metadata = sandbox_fusion.compute_score(
            foreign_url,
            None,
            problem.settings.get("memory_limit_mb", SETTINGS["memory_limit_mb"]),
            solution.answer,
            problem.tests,
            timeout=problem.settings.get("run_seconds", SETTINGS["run_seconds"]),
        )
        if not solution.extracted["blocks"]:
            return None if score == 0.0 else f"{solution}: {score}"
        statuses = {"success": True, "wrong_answer": False, "runtime_error": -2, "timeout": -3, "compile_error": -4}
        found = [statuses[case["status"]] for case in metadata]
        seen = [as_we_compare(result, case) for result, case in zip(found, metadata, strict=True)]
        if seen == numbers_of(solution) and score == found.count(True) / len(found):
            return None
        return f"{solution}: {seen}, {score}"

    python = [(problem, solution) for problem, solution in STDIO if solution.language == "python"]
    async with asyncio.TaskGroup() as group:
        scoring = [group.create_task(asyncio.to_thread(score_one, *pair)) for pair in python]
    assert [line for task in scoring if (line := task.result())] == []


@pytest.mark.slow
async def test_verls_scorer_agrees_on_every_cpp_program(local: LocalSandbox, foreign_url: str) -> None:
    async def check(problem: Problem, solution: Solution) -> str | None:
        code = extract_code(solution.answer, language="cpp").code
        assert code is not None
        # verl has one time-out for compiling and running. Compiled before, it need only be looked up.
        await local.run(Program(code, "cpp"), Limits(compile_seconds=60, run_seconds=1))
        found, metadata = await asyncio.to_thread(
            sandbox_fusion.check_correctness,
            foreign_url,
            problem.tests,
            code,
            problem.settings.get("run_seconds", SETTINGS["run_seconds"]),
            problem.settings.get("memory_limit_mb", SETTINGS["memory_limit_mb"]),
            "cpp",
        )
        seen = [as_we_compare(result, case) for result, case in zip(found, metadata, strict=True)]
        return None if seen == numbers_of(solution) else f"{solution}: {seen}"

    async with asyncio.TaskGroup() as group:
        checking = [group.create_task(check(*pair)) for pair in STDIO if pair[1].language == "cpp"]
    assert [line for task in checking if (line := task.result())] == []


# Our own failures -----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def nobody() -> AsyncIterator[str]:
    """The URL of a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def broken() -> AsyncIterator[str]:
    """The URL of a server that has only one answer."""
    async with peer(http(500, "Internal Server Error")) as server:
        yield server.url


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("away", [nobody, broken])
@pytest.mark.parametrize("language", ["python", "cpp"])
async def test_a_sandbox_that_is_away_gives_no_score_at_all(
    away: Callable[[], contextlib.AbstractAsyncContextManager[str]], language: str, aggregation: Aggregation
) -> None:
    pairs = [(one, problem) for problem in CORPUS for one in problem.solutions if one.language == language]
    async with (
        away() as url,
        RemoteSandbox(url, retries=Retries(attempts=1)) as sandbox,
        CodeJudge(sandbox=sandbox, aggregation=aggregation, retries=1) as judge,
    ):
        results = await judge.judge_all([Submission(one.answer, dict(problem.tests)) for one, problem in pairs])
    for (solution, _), result in zip(pairs, results, strict=True):
        if solution.extracted["blocks"]:
            assert (result.score, result.counts()) == (None, {"infrastructure": len(solution.verdicts)}), solution
            assert result.why
        else:
            assert result.score == 0.0, "there is no program to run, whoever is away"


async def test_verls_scorer_refuses_to_score_an_outage() -> None:
    problem, solution = STDIO[0]
    async with broken() as url:
        with pytest.raises(RewardError, match="500"):
            await asyncio.to_thread(
                sandbox_fusion.compute_score, f"{url}/run_code", None, 256, solution.answer, problem.tests
            )
