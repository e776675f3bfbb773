"""`POST /run_cases` and `RemoteSandbox.run_each` over real sockets: answers and failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from judging import copies, fenced, judge_of, verdicts
from serving import Got, ScriptedSandbox, forever, http, peer, post_code, raising, request, service, until

from toolyard import Execution, Limits, LocalSandbox, Program, RemoteSandbox, SandboxError
from toolyard.errors import ProgramError, SandboxBusyError
from toolyard.sandbox.protocol import StageResult, Verdict
from toolyard.sandbox.remote.http import Retries
from toolyard.sandbox.service.server import RunningService

ECHO = Program("print(input())")


async def echo(program: Program, limits: Limits) -> Execution:
    assert isinstance(program.stdin, str)
    return Execution(Verdict.OK, StageResult(Verdict.OK, 0, f"{program.stdin}\n".encode()), isolation="full")


async def echo_until_told(program: Program, limits: Limits) -> Execution:
    """`wait` never ends, `fail` is an infrastructure failure."""
    if program.stdin == "wait":
        await asyncio.Event().wait()
    if program.stdin == "fail":
        raise SandboxError("the worker died")
    return await echo(program, limits)


async def post_cases(running: RunningService, stdins: list[Any], **fields: Any) -> Got:
    body = {"code": "print(input())", "language": "python", "stdins": stdins, **fields}
    return await request(f"{running.url}/run_cases", "POST", body)


def lines_of(got: Got) -> list[Any]:
    return [json.loads(line) for line in got.body.splitlines()]


async def knowing(sandbox: RemoteSandbox) -> RemoteSandbox:
    """After its first answer it knows what the server takes."""
    assert (await sandbox.run(Program("", stdin="-"))).ok
    return sandbox


async def collect(sandbox: RemoteSandbox, stdins: list[str | bytes | None]) -> list[str]:
    return [execution.stdout async for execution in sandbox.run_each(ECHO, stdins)]


# The route ------------------------------------------------------------------------------------------------------------


async def test_each_line_is_what_run_code_would_have_answered() -> None:
    async with service(ScriptedSandbox(echo)) as running:
        got = await post_cases(running, ["a", "b\nc", "ü"])
        alone = [(await post_code(running, "print(input())", stdin=stdin)).json for stdin in ("a", "b\nc", "ü")]
    assert (got.status, got.headers["content-type"]) == (200, "application/x-ndjson")
    assert lines_of(got) == alone
    assert [line["run_result"]["stdout"] for line in alone] == ["a\n", "b\nc\n", "ü\n"]


async def test_no_inputs_give_an_empty_answer() -> None:
    async with service(ScriptedSandbox(echo)) as running:
        got = await post_cases(running, [])
    assert (got.status, got.body) == (200, b"")


async def test_a_huge_batch_is_refused_by_name() -> None:
    async with service(ScriptedSandbox(echo), max_cases=3) as running:
        assert (await post_cases(running, ["1"] * 3)).status == 200
        got = await post_cases(running, ["1"] * 4)
    assert got.status == 413
    assert got.json == {"detail": "stdins: 4 cases; this server accepts at most 3 at once (max_cases)"}


@pytest.mark.parametrize("stdins", [None, "text", [1], [{"base64": "?"}], [["a"]]])
async def test_what_is_no_list_of_inputs_is_refused(stdins: Any) -> None:
    async with service(ScriptedSandbox(echo)) as running:
        got = await post_cases(running, stdins)
    assert (got.status, got.json["detail"][0]["loc"][:2]) == (422, ["body", "stdins"])


async def test_a_stdin_beside_them_is_refused() -> None:
    async with service(ScriptedSandbox(echo)) as running:
        (line,) = lines_of(await post_cases(running, ["1", "2"], stdin="3"))
    assert (line["status"], "stdins" in line["message"]) == ("SandboxError", True)


async def test_a_token_is_wanted_here_as_well() -> None:
    async with service(ScriptedSandbox(echo), token="secret") as running:
        assert (await post_cases(running, ["1"])).status == 401


async def test_what_cannot_start_in_time_is_told_by_a_status() -> None:
    sandbox = ScriptedSandbox(forever, workers=1)
    async with service(sandbox, max_wait_seconds=0.05) as running, asyncio.TaskGroup() as group:
        first = group.create_task(post_code(running))
        await sandbox.started.wait()
        got = await post_cases(running, ["1", "2"])
        first.cancel()
    assert (got.status, got.headers["retry-after"]) == (504, "3")


async def test_our_failure_is_the_last_line() -> None:
    async with service(ScriptedSandbox(echo_until_told)) as running:
        first, last = lines_of(await post_cases(running, ["1", "fail", "2"]))
    assert (first["status"], last["status"], last["message"]) == ("Success", "SandboxError", "the worker died")


async def test_metrics_count_every_case() -> None:
    async with service(ScriptedSandbox(echo)) as running:
        await post_cases(running, ["1", "2", "3"])
        metrics = (await request(f"{running.url}/metrics")).body
    assert b'toolyard_executions_total{language="python",verdict="ok"} 3.0' in metrics
    assert b'toolyard_http_responses_total{route="/run_cases",status="200"} 1.0' in metrics


@pytest.mark.parametrize("taken", [0, 1, 2])
async def test_a_client_that_hangs_up_stops_what_runs_and_the_rest_is_not_run(taken: int) -> None:
    sandbox = ScriptedSandbox(echo_until_told)
    async with service(sandbox) as running:
        body = {"code": "", "language": "python", "stdins": [*["1"] * taken, "wait", "2"]}
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            posting = group.create_task(session.post(f"{running.url}/run_cases", json=body).__aenter__())
            if taken:
                response = await posting
                for _ in range(taken):
                    assert b"Success" in await response.content.readline()
            await until(lambda: len(sandbox.programs) == taken + 1)
            posting.cancel()
            if taken:
                response.close()
        async with asyncio.timeout(5):
            await sandbox.cancelled.wait()
        await until(lambda: sandbox.statistics().busy == 0)
    assert len(sandbox.programs) == taken + 1


async def test_a_service_that_stops_says_so_in_the_last_line() -> None:
    sandbox = ScriptedSandbox(echo_until_told)
    async with asyncio.TaskGroup() as group:
        async with service(sandbox, grace_seconds=0.1) as running:
            asked = group.create_task(post_cases(running, ["1", "wait", "2"]))
            await until(lambda: len(sandbox.programs) == 2)
        first, last = lines_of(await asked)
    assert (first["status"], last["status"], last["message"]) == ("Success", "SandboxError", "the service is stopping")


# RemoteSandbox.run_each -----------------------------------------------------------------------------------------------


async def test_many_go_in_one_request_once_the_server_has_told_that_it_takes_them() -> None:
    async with service(ScriptedSandbox(echo)) as running, RemoteSandbox(running.url) as sandbox:
        assert await collect(sandbox, ["1", "2", "3"]) == ["1\n", "2\n", "3\n"]
        assert await collect(sandbox, ["4", "5"]) == ["4\n", "5\n"]
        assert await collect(sandbox, ["6"]) == ["6\n"]
        metrics = (await request(f"{running.url}/metrics")).body
    assert b'toolyard_http_responses_total{route="/run_code",status="200"} 2.0' in metrics
    assert b'toolyard_http_responses_total{route="/run_cases",status="200"} 2.0' in metrics


async def test_more_than_the_server_takes_go_in_several() -> None:
    async with service(ScriptedSandbox(echo), max_cases=3) as running, RemoteSandbox(running.url) as sandbox:
        assert await collect(await knowing(sandbox), [str(number) for number in range(8)]) == [
            f"{number}\n" for number in range(8)
        ]
        metrics = (await request(f"{running.url}/metrics")).body
    assert b'toolyard_http_responses_total{route="/run_cases",status="200"} 3.0' in metrics


RAN = {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "1\n", "stderr": ""}}


async def test_a_foreign_server_is_never_asked_for_what_it_does_not_have() -> None:
    async with peer(http(200, RAN)) as foreign, RemoteSandbox(foreign.url) as sandbox:
        assert await collect(sandbox, ["1", "2", "3"]) == ["1\n"] * 3
    assert [json.loads(body)["stdin"] for body in foreign.requests] == ["1", "2", "3"]


async def test_an_older_server_behind_the_same_address_gets_them_one_by_one() -> None:
    ours = {**RAN, "toolyard": {"max_cases": 9, "run": {"verdict": "ok", "exit_code": 0}}}
    older = {**RAN, "toolyard": {"run": {"verdict": "ok", "exit_code": 0}}}
    script = (http(200, ours), http(404, {"detail": "Not Found"}), http(200, older))
    async with peer(*script) as server, RemoteSandbox(server.url) as sandbox:
        assert await collect(await knowing(sandbox), ["1", "2"]) == ["1\n"] * 2
    assert len(server.requests) == 4


async def test_a_failure_comes_after_what_was_done() -> None:
    async with service(ScriptedSandbox(echo_until_told)) as running, RemoteSandbox(running.url) as sandbox:
        executions = (await knowing(sandbox)).run_each(ECHO, ["1", "2", "fail", "3"])
        assert [(await anext(executions)).stdout for _ in range(2)] == ["1\n", "2\n"]
        with pytest.raises(SandboxError, match="the worker died") as caught:
            await anext(executions)
        assert caught.value.retryable


async def test_a_refused_program_is_a_program_error() -> None:
    async with service(ScriptedSandbox(echo)) as running, RemoteSandbox(running.url) as sandbox:
        await knowing(sandbox)
        async with service(ScriptedSandbox(raising(ProgramError("no such language")))) as other:
            [server] = sandbox._servers._all.values()
            server.http._base = other.url
            with pytest.raises(ProgramError, match="no such language"):
                await collect(sandbox, ["1", "2"])


@contextlib.asynccontextmanager
async def breaking_off_after(sent: str) -> AsyncIterator[str]:
    """The URL of a server that says it takes batches, and hangs up in the midst of its answer to one."""
    ours = {**RAN, "toolyard": {"max_cases": 9, "run": {"verdict": "ok", "exit_code": 0}}}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/run_cases" not in head:
            writer.write(http(200, ours, Connection="close"))
        elif sent:
            head = "HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(f"{head}{len(sent):x}\r\n{sent}\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("sent", "whole"), [("", 0), ('{"status": "Succ', 0), (json.dumps(RAN) + "\n", 1), (json.dumps(RAN) + '\n{"', 1)]
)
async def test_a_server_that_breaks_off_is_a_failure_that_may_be_tried_again(sent: str, whole: int) -> None:
    async with breaking_off_after(sent) as url, RemoteSandbox(url, retries=Retries(attempts=1)) as sandbox:
        executions = (await knowing(sandbox)).run_each(ECHO, ["1", "2"])
        async with asyncio.timeout(5):
            for _ in range(whole):
                assert (await anext(executions)).stdout == "1\n"
            with pytest.raises(SandboxError, match="/run_cases") as caught:
                await anext(executions)
        assert caught.value.retryable


async def test_a_busy_server_is_told_from_a_broken_one() -> None:
    behind = ScriptedSandbox(forever, workers=1)
    async with service(behind, max_wait_seconds=0.05) as running:
        sandbox = RemoteSandbox(running.url, retries=Retries(attempts=1))
        async with sandbox, asyncio.TaskGroup() as group:
            [server] = sandbox._servers._all.values()
            server.max_cases = 9
            first = group.create_task(post_code(running))
            await behind.started.wait()
            with pytest.raises(SandboxBusyError):
                await collect(sandbox, ["1", "2"])
            first.cancel()


# The judge ------------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def local() -> AsyncIterator[LocalSandbox]:
    async with LocalSandbox(workers=2) as sandbox:
        yield sandbox


async def test_the_judge_sends_its_cases_together(local: LocalSandbox) -> None:
    async with service(local) as running, RemoteSandbox(running.url) as sandbox:
        async with judge_of(await knowing(sandbox), num_workers=1, aggregation="fraction") as judge:
            result = await judge.judge(fenced("print(input())"), copies(40))
        metrics = (await request(f"{running.url}/metrics")).body
    assert (result.score, verdicts(result)) == (1.0, ["passed"] * 40)
    assert b'toolyard_http_responses_total{route="/run_cases",status="200"} 3.0' in metrics


async def test_the_judge_leaves_a_batch_at_the_first_failure(local: LocalSandbox) -> None:
    code = "import time\nn = input()\ntime.sleep(60 if n == '2' else 0)\nprint(n if n == '0' else 'x')"
    async with service(local) as running, RemoteSandbox(running.url) as sandbox:
        async with judge_of(await knowing(sandbox), num_workers=1, run_seconds=90) as judge, asyncio.timeout(20):
            result = await judge.judge(fenced(code), copies(4))
        await until(lambda: local.statistics().busy == 0)
    assert (result.score, verdicts(result)) == (0.0, ["passed", "wrong_answer", "not_run", "not_run"])
