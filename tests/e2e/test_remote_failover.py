"""`RemoteSandbox` with several servers, some of which misbehave: programs complete elsewhere, with default settings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from interpreting import texts
from judging import copies, fenced, verdicts
from serving import (
    OK,
    EchoSession,
    Peer,
    ScriptedSandbox,
    http,
    peer,
    raising,
    server_process,
    service,
    until,
    until_busy,
    with_session,
)

from toolyard.errors import ConfigError, ProgramError, SandboxBusyError, SandboxError
from toolyard.rewards.code.judge import CodeJudge
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Execution, Limits, Program, StageResult, Verdict
from toolyard.sandbox.remote.sandbox import RemoteSandbox, Retries
from toolyard.tools.code_interpreter.text import LOST
from toolyard.tools.instance import open_instance
from toolyard.tools.registry import initialize_tools_from_config

PONG = http(200, '"pong"')
FAILED = {"status": "SandboxError", "message": "no space left", "compile_result": None, "run_result": None}


async def echo(program: Program, limits: Limits) -> Execution:
    await asyncio.sleep(0.01)
    return Execution(Verdict.OK, StageResult(Verdict.OK, 0, f"{program.stdin}\n".encode()), isolation="full")


async def run_all(remote: RemoteSandbox, count: int = 64) -> list[str]:
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(remote.run(Program("x", stdin=str(number)))) for number in range(count)]
    return [run.result().stdout for run in runs]


def echoes(count: int = 64) -> list[str]:
    return [f"{number}\n" for number in range(count)]


@contextlib.asynccontextmanager
async def resetting() -> AsyncIterator[Peer]:
    """A server that resets every connection once it was asked for something."""
    one = Peer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        one.requests.append(await reader.read(1))
        writer.transport.abort()  # with something unread, which resets it

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield one


@contextlib.asynccontextmanager
async def refusing() -> AsyncIterator[Peer]:
    async with peer() as gone:
        pass
    yield gone


FAULTS = {
    "stalls": lambda: peer(silent=True),
    "stalls, and its health check fails": lambda: peer(silent=True, ping=http(500)),
    "resets": resetting,
    "refuses": refusing,
    "hangs up": lambda: peer(None),
    "answers 500": lambda: peer(http(500, "boom"), ping=PONG),
    "answers 502": lambda: peer(http(502, "bad gateway"), ping=PONG),
    "answers 503": lambda: peer(http(503, "no upstream"), ping=PONG),
    "answers 404": lambda: peer(http(404, "no such backend"), ping=PONG),
    "wants another token": lambda: peer(http(401, "who are you?"), ping=PONG),
    "answers nonsense": lambda: peer(http(200, "<html>"), ping=PONG),
    "reports failures of its own": lambda: peer(http(200, FAILED), ping=PONG),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_all_programs_complete_while_one_of_two_servers(fault: str) -> None:
    begun = time.monotonic()
    async with (
        FAULTS[fault]() as bad,
        service(ScriptedSandbox(echo, workers=64)) as good,
        RemoteSandbox([bad.url, good.url]) as remote,
    ):
        assert await run_all(remote) == echoes()
        asked = len(bad.requests)
        assert await run_all(remote) == echoes()
    # With one server, the programs that stall would wait for 30 s: compilation, run and margin.
    assert time.monotonic() - begun < 20
    assert asked <= 40, "half of the first wave, and one now and then that tries it again"
    assert len(bad.requests) <= asked + 10, "the second wave keeps away from it"


@pytest.mark.slow
async def test_programs_that_wait_for_a_connection_do_not_follow_others_to_a_stalled_server() -> None:
    """Four waves, one behind the other, would take four times as long."""
    begun = time.monotonic()
    async with (
        peer(silent=True) as bad,
        service(ScriptedSandbox(echo, workers=64)) as good,
        RemoteSandbox([bad.url, good.url], connections=16) as remote,
    ):
        assert await run_all(remote) == echoes()
    assert time.monotonic() - begun < 20


@pytest.mark.slow
async def test_a_server_that_runs_a_long_program_answers_pings_and_keeps_it() -> None:
    async def slowly(program: Program, limits: Limits) -> Execution:
        await asyncio.sleep(7)
        return OK

    one, other = ScriptedSandbox(slowly), ScriptedSandbox(slowly)
    async with service(one) as first, service(other) as second, RemoteSandbox([first.url, second.url]) as remote:
        assert (await remote.run(Program("x"))).ok
    assert len(one.programs) + len(other.programs) == 1


async def test_a_single_server_is_not_pinged() -> None:
    async with peer(2.5, ping=PONG) as server, RemoteSandbox([server.url]) as remote:
        with pytest.raises(SandboxError, match="broke the connection"):
            await remote.run(Program("x"))
    assert (len(server.requests), server.pings) == (1, 0)


async def test_a_busy_server_sends_programs_to_a_free_one() -> None:
    begun = time.monotonic()
    async with (
        peer(http(429, "", Retry_After="30"), ping=PONG) as busy,
        service(ScriptedSandbox(echo, workers=64)) as free,
        RemoteSandbox([busy.url, free.url]) as remote,
    ):
        assert await run_all(remote) == echoes()
    assert time.monotonic() - begun < 10


async def test_all_servers_busy_is_a_busy_sandbox() -> None:
    async with (
        peer(http(429, "", Retry_After="0")) as one,
        peer(http(504, "", Retry_After="0")) as other,
        RemoteSandbox([one.url, other.url], retries=Retries(attempts=2)) as remote,
    ):
        with pytest.raises(SandboxBusyError, match="4 attempts") as caught:
            await remote.run(Program("x"))
    assert (len(one.requests), len(other.requests), caught.value.retry_after) == (2, 2, 0)


async def test_programs_are_spread_evenly() -> None:
    one, other = ScriptedSandbox(echo, workers=64), ScriptedSandbox(echo, workers=64)
    async with service(one) as first, service(other) as second, RemoteSandbox([first.url, second.url]) as remote:
        assert await run_all(remote) == echoes()
        for number in range(10):
            await remote.run(Program("x", stdin=str(number)))
    assert (len(one.programs), len(other.programs)) == (37, 37)


# Errors ---------------------------------------------------------------------------------------------------------------


async def test_an_error_names_the_server_its_cause_and_the_others_that_were_tried() -> None:
    async with (
        peer(http(500, "boom")) as one,
        peer(http(500, "boom")) as other,
        RemoteSandbox([one.url, other.url]) as remote,
    ):
        with pytest.raises(SandboxError) as caught:
            await remote.run(Program("x"))
    last, first = (one, other) if str(caught.value).startswith(one.url) else (other, one)
    assert str(caught.value) == f"{last.url}/run_code failed (HTTP 500): boom (2 attempts; also tried {first.url})"
    assert (caught.value.retryable, caught.value.source) == (True, last.url)
    assert (len(one.requests), len(other.requests)) == (1, 1), "what a server answered, it would answer again"


async def test_servers_that_cannot_be_reached_are_tried_as_often_as_one() -> None:
    async with refusing() as one, refusing() as other, RemoteSandbox([one.url, other.url]) as remote:
        with pytest.raises(SandboxError, match=r"cannot connect: .* \(10 attempts; also tried http:") as caught:
            await remote.run(Program("x"))
    assert (type(caught.value), caught.value.retryable) == (SandboxError, True)
    async with refusing() as one, RemoteSandbox(one.url) as remote:
        with pytest.raises(SandboxError, match=r"cannot connect: .* \(5 tries\)"):
            await remote.run(Program("x"))


async def test_a_failure_that_a_server_reports_says_which_server_it_was() -> None:
    failing = ScriptedSandbox(raising(SandboxError("no room")))
    async with service(failing) as one, service(failing) as other:
        async with RemoteSandbox([one.url, other.url]) as remote:
            with pytest.raises(SandboxError, match=r"^http://127.0.0.1:\d+: no room \(2 attempts; also") as caught:
                await remote.run(Program("x"))
        assert str(caught.value).startswith(f"{caught.value.source}: ")
        async with RemoteSandbox(one.url) as remote:
            with pytest.raises(SandboxError, match=r"^no room$") as caught:
                await remote.run(Program("x"))
        assert caught.value.source == one.url


async def test_a_wrong_token_for_all_is_told_once_each_server_has_said_so() -> None:
    async with (
        peer(http(401, "no")) as one,
        peer(http(401, "no")) as other,
        RemoteSandbox([one.url, other.url]) as remote,
    ):
        with pytest.raises(SandboxError, match="token") as caught:
            await remote.run(Program("x"))
    assert (caught.value.retryable, len(one.requests), len(other.requests)) == (False, 1, 1)


async def test_a_program_that_is_refused_is_not_offered_elsewhere() -> None:
    refusal = ScriptedSandbox(raising(ProgramError("no such language")))
    async with service(refusal) as one, service(refusal) as other, RemoteSandbox([one.url, other.url]) as remote:
        with pytest.raises(ProgramError, match="no such language"):
            await remote.run(Program("x"))
    assert len(refusal.programs) == 1


@pytest.mark.parametrize("urls", [[], ["http://a", "b"]])
def test_a_list_of_urls_that_is_none_is_named(urls: list[str]) -> None:
    with pytest.raises(ConfigError, match="sandbox URL"):
        RemoteSandbox(urls)


# Servers that go and come ---------------------------------------------------------------------------------------------


@pytest.mark.kernel("confined")
async def test_all_programs_complete_though_one_of_two_services_is_killed_meanwhile() -> None:
    async with (
        server_process() as (process, one),
        server_process() as (_, other),
        RemoteSandbox([one, other]) as remote,
        asyncio.TaskGroup() as group,
    ):
        program = "import time; time.sleep(0.2); print(input())"
        runs = [group.create_task(remote.run(Program(program, stdin=str(number)))) for number in range(40)]
        await until_busy(one)
        process.send_signal(signal.SIGKILL)
    assert [run.result().stdout for run in runs] == echoes(40)


@pytest.mark.slow
async def test_a_stopped_service_is_left_and_is_used_again_once_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "toolyard.sandbox.remote")
    good = ScriptedSandbox(echo, workers=64)
    async with (
        server_process(takes=0) as (process, stopping),
        service(good) as running,
        RemoteSandbox([stopping, running.url]) as remote,
    ):
        process.send_signal(signal.SIGSTOP)
        assert len(await run_all(remote)) == 64
        process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(60):
            while (await remote.run(Program("x", stdin="?"))).stdout == "?\n":
                pass
    left, back = (record.message for record in caplog.records)
    assert left == (
        f"{stopping} stopped answering and missed two pings; requests go to other servers; this one "
        "is tried again later"
    )
    assert back == f"{stopping} answers again"


async def test_a_server_that_was_down_is_used_again_after_its_rest() -> None:
    late = ScriptedSandbox(echo)
    async with (
        refusing() as away,
        service(ScriptedSandbox(echo, workers=64)) as good,
        RemoteSandbox([away.url, good.url]) as remote,
    ):
        assert await run_all(remote) == echoes()
        async with service(late, port=int(away.url.rsplit(":", 1)[1])), asyncio.timeout(30):
            while len(late.programs) < 3:
                await remote.run(Program("x", stdin="?"))


async def test_a_sandbox_can_be_closed_while_programs_wait_for_a_server_that_stalls() -> None:
    async with peer(silent=True) as one, peer(silent=True) as other:
        async with RemoteSandbox([one.url, other.url]) as remote:
            runs = [asyncio.create_task(remote.run(Program("x"))) for _ in range(8)]
            await until(lambda: len(one.requests) + len(other.requests) == 8)
        async with asyncio.timeout(5):
            failures = await asyncio.gather(*runs, return_exceptions=True)
    assert {type(failure).__name__ for failure in failures} == {"SandboxClosedError"}


# Many inputs ----------------------------------------------------------------------------------------------------------

ECHO = Program("print(input())")
CASE = {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "bad\n", "stderr": ""}}


@contextlib.asynccontextmanager
async def answering_some(lines: int, *, stalls: bool) -> AsyncIterator[Peer]:
    """A server that takes batches, answers the first few cases, and then hangs up or says nothing more."""
    one = Peer()
    known = {**CASE, "toolyard": {"max_cases": 9, "run": {"verdict": "ok", "exit_code": 0}}}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/run_cases" in head:
            one.requests.append(head)
            sent = (json.dumps(CASE) + "\n") * lines
            writer.write(f"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n{len(sent):x}\r\n{sent}\r\n".encode())
            if stalls:
                await reader.read()
        elif b"/run_code" in head:
            writer.write(http(200, known, Connection="close"))
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield one


@pytest.mark.parametrize("stalls", [False, True])
async def test_cases_that_a_server_has_not_answered_go_to_another(stalls: bool) -> None:
    begun = time.monotonic()
    async with (
        answering_some(2, stalls=stalls) as bad,
        service(ScriptedSandbox(echo)) as good,
        RemoteSandbox([bad.url, good.url]) as remote,
    ):
        for _ in range(2):  # both have reported that they accept batches
            await remote.run(Program("x", stdin="?"))
        found: list[list[str]] = []
        while not bad.requests:
            found.append([one.stdout async for one in remote.run_each(ECHO, [str(number) for number in range(8)])])
    assert found.pop() == ["bad\n", "bad\n", *echoes(8)[2:]], "in order, and each of them once"
    assert time.monotonic() - begun < 20


async def test_a_case_that_fails_everywhere_is_a_failure_after_those_before_it() -> None:
    async def act(program: Program, limits: Limits) -> Execution:
        if program.stdin == "2":
            raise SandboxError("the worker died")
        return await echo(program, limits)

    one, other = ScriptedSandbox(act), ScriptedSandbox(act)
    async with service(one) as first, service(other) as second, RemoteSandbox([first.url, second.url]) as remote:
        executions = remote.run_each(ECHO, ["0", "1", "2", "3"])
        assert [(await anext(executions)).stdout for _ in range(2)] == echoes(2)
        with pytest.raises(SandboxError, match=r"the worker died \(2 attempts; also tried"):
            await anext(executions)


# Sessions -------------------------------------------------------------------------------------------------------------


async def test_a_session_is_opened_where_it_can_be_and_stays_there() -> None:
    async with (
        peer(http(404, "no sessions here")) as foreign,
        refusing() as away,
        service(with_session(EchoSession())) as good,
        RemoteSandbox([foreign.url, away.url, good.url]) as remote,
    ):
        for _ in range(6):
            async with remote.session() as session:
                assert [(await session.run(cell)).stdout for cell in "abc"] == ["a", "b", "c"]


@pytest.mark.kernel("confined")
@pytest.mark.slow
async def test_a_session_is_lost_with_its_server_and_the_next_is_opened_elsewhere() -> None:
    async with (
        server_process() as (first, one),
        server_process() as (second, other),
        RemoteSandbox([one, other]) as remote,
    ):
        async with remote.session() as session:
            await session.run("x = 1")
            mine = first if one in session._where else second
            mine.send_signal(signal.SIGSTOP)
            with pytest.raises(SandboxError, match="stopped answering") as caught:
                await session.run("x += 1")
            assert caught.value.retryable
            assert caught.value.source in (one, other)
            async with remote.session() as another:
                assert (await another.run("print(2)")).stdout == "2\n"
        mine.send_signal(signal.SIGCONT)


# The tool -------------------------------------------------------------------------------------------------------------


def tools_of(folder: Path, config: dict[str, Any]) -> Any:
    tool = {"class_name": "toolyard.tools.code_interpreter.SandboxFusionTool", "config": {"type": "native", **config}}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [tool]}))  # JSON is YAML
    return initialize_tools_from_config(folder / "tools.yaml")[0]


async def test_the_code_interpreter_takes_a_list_of_urls_from_yaml(tmp_path: Path) -> None:
    good = ScriptedSandbox(echo, workers=64)
    async with resetting() as bad, service(good) as running:
        tool = tools_of(tmp_path, {"sandbox_fusion_url": [f"{bad.url}/run_code", f"{running.url}/run_code"]})
        assert await texts(tool, *["x"] * 20) == ["None\n"] * 20
        await tool.close()
    assert bad.requests, "it was one of those asked"


def test_a_wrong_url_in_the_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.sandbox_fusion_url: sandbox URL 'localhost:1': expected http"):
        tools_of(tmp_path, {"sandbox_fusion_url": ["http://localhost:1", "localhost:1"]})


@pytest.mark.kernel("confined")
async def test_a_stateful_interpreter_begins_anew_elsewhere_when_its_server_is_killed(tmp_path: Path) -> None:
    async with server_process() as (first, one), server_process() as (second, other):
        tool = tools_of(tmp_path, {"sandbox_fusion_url": [one, other], "stateful": True})

        async with open_instance(tool, "r1") as instance:
            before = await instance.call({"code": "x = 1; print(x)"})
            session = tool._trajectories.of("r1", {})._session
            process = first if one in session._where else second
            process.kill()
            await process.wait()
            after = await instance.call({"code": "print('x' in globals())"})
        await tool.close()
    assert (before.response.text, after.response.text) == ("1\n", f"{LOST}\nFalse\n")


@pytest.mark.kernel("confined")
async def test_the_judge_of_code_takes_a_list_of_urls() -> None:
    async with (
        resetting() as bad,
        LocalSandbox(workers=2) as local,
        service(local) as good,
        CodeJudge(sandbox_fusion_url=[bad.url, good.url], aggregation="fraction") as judge,
    ):
        result = await judge.judge(fenced("print(input())"), copies(20))
    assert (result.score, verdicts(result)) == (1.0, ["passed"] * 20)
    assert {case.tries for case in result.cases} == {1}, "the judge itself did not have to try again"
