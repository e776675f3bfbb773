"""`stateful` and `display_last`: what a trajectory keeps between its calls, and what happens when that is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from interpreting import interpreter, texts, trajectory
from serving import EchoSession, http, peer, service, service_in_thread, until, with_session

from left_behind import alive
from toolyard.errors import SandboxClosedError
from toolyard.sandbox.local import LocalSandbox
from toolyard.tools.code_interpreter import tool as code_interpreter
from toolyard.tools.code_interpreter.session import TrajectorySession
from toolyard.tools.code_interpreter.text import LOST, NO_OUTPUT
from toolyard.tools.code_interpreter.tool import SandboxFusionTool
from toolyard.tools.instance import ToolOutcome, open_instance

pytestmark = pytest.mark.kernel("confined")

ZERO_DIVISION = """\
Traceback (most recent call last):
  File "<cell 3>", line 1, in <module>
    1/0
    ~^~
ZeroDivisionError: division by zero"""


@pytest.fixture(scope="module", params=["embedded", "service"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "embedded":
        yield ""
    else:
        with service_in_thread(LocalSandbox) as url:
            yield url


async def embedded(tool: SandboxFusionTool) -> LocalSandbox:
    sandbox = (await tool._places.here()).sandbox
    assert isinstance(sandbox, LocalSandbox)
    return sandbox


# What is kept ---------------------------------------------------------------------------------------------------------


async def test_variables_imports_and_files_are_kept_between_calls(url: str) -> None:
    async with interpreter(url, stateful=True) as tool:
        assert await texts(
            tool,
            "import math\nx = 20\nopen('notes', 'w').write('kept')",
            "x += 1\nprint(x, math.floor(2.5), open('notes').read())",
            "1/0",
            "print(x)",
        ) == [
            NO_OUTPUT,
            "21 2 kept\n",
            ZERO_DIVISION,
            "21\n",
        ]


async def test_without_stateful_nothing_is_kept(url: str) -> None:
    async with interpreter(url) as tool:
        assert await texts(tool, "x = 1", "print('x' in globals())") == [NO_OUTPUT, "False\n"]


async def test_trajectories_keep_theirs_apart_also_at_the_same_time(url: str) -> None:
    async with interpreter(url, stateful=True) as tool:

        async def one(name: str) -> list[str | None]:
            cells = [f"x{name} = {name}", f"print(x{name})", "print([name for name in globals() if name[0] == 'x'])"]
            return await texts(tool, *cells, request_id=name)

        async with asyncio.TaskGroup() as group:
            running = {name: group.create_task(one(name)) for name in map(str, range(8))}
    assert {name: task.result()[1:] for name, task in running.items()} == {
        name: [f"{name}\n", f"['x{name}']\n"] for name in running
    }


async def test_calls_of_one_trajectory_at_the_same_time_run_one_after_the_other(url: str) -> None:
    async with interpreter(url, stateful=True, num_workers=4) as tool, open_instance(tool, "r1") as instance:
        await instance.call({"code": "x = 0"})
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(instance.call({"code": "y = x\nimport time; time.sleep(0.01)\nx = y + 1"}))
        assert (await instance.call({"code": "print(x)"})).response.text == "8\n"


async def test_a_call_that_waits_for_its_trajectory_holds_no_permit(url: str) -> None:
    async with (
        interpreter(url, stateful=True, num_workers=2) as tool,
        open_instance(tool, "r1") as greedy,
        asyncio.TaskGroup() as group,
    ):
        await greedy.call({"code": "import time"})
        slow = [group.create_task(greedy.call({"code": "time.sleep(30)"})) for _ in range(2)]
        await until(lambda: tool._workers.read_statistics().in_flight > 0)
        assert await texts(tool, "print('at once')", request_id="r2") == ["at once\n"]
        assert not any(call.done() for call in slow)
        for call in slow:
            call.cancel()


async def test_other_languages_run_as_ever() -> None:
    async with interpreter(stateful=True) as tool:
        assert await texts(tool, "x = 1", {"code": "echo $x.", "language": "bash"}, "print(x)") == [
            NO_OUTPUT,
            ".\n",
            "1\n",
        ]


async def test_a_framework_that_releases_around_every_call_keeps_its_sessions() -> None:
    async with interpreter(stateful=True) as tool:

        async def call(request_id: str, code: str) -> str | None:
            instance_id, _ = await tool.create(create_kwargs={"ground_truth": "18"})
            agent_data = SimpleNamespace(request_id=request_id)
            response, _, _ = await tool.execute(instance_id, {"code": code}, agent_data=agent_data)
            await tool.release(instance_id)
            return response.text

        await call("a", "x = 'of a'")
        await call("b", "x = 'of b'")
        assert [await call(name, "print(x)") for name in ("a", "b")] == ["of a\n", "of b\n"]
        assert (await embedded(tool)).statistics().sessions == 2
    assert len(tool._trajectories) == 0


async def test_of_too_many_kept_sessions_the_longest_unused_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_interpreter, "_SESSIONS", 2)
    async with interpreter(stateful=True) as tool:
        for name in "abc":
            instance_id, _ = await tool.create()
            await tool.execute(instance_id, {"code": "x = 1"}, agent_data=SimpleNamespace(request_id=name))
            await tool.release(instance_id)
        assert (await embedded(tool)).statistics().sessions == 2


# What is lost ---------------------------------------------------------------------------------------------------------


LOSSES = {
    "import os; os._exit(3)": "[ended its interpreter]",
    "import os; os.abort()": "[crashed]",
    "x = bytearray(1 << 30)": "[killed: more than 256 MB of memory]",
    "import time\nwhile True:\n try: time.sleep(9)\n except BaseException: pass": "[stopped after 1 s]",
}


async def test_the_model_learns_of_a_loss_once_and_goes_on_afresh(url: str) -> None:
    async def one(code: str) -> list[str | None]:
        loses = {"code": code, "timeout": 1 if "sleep" in code else 10}
        cells = ["x = 1", loses, "print('x' in globals())", "y = 2", "print(y)"]
        return await texts(tool, *cells, request_id=code)

    async with interpreter(url, stateful=True, memory_limit_mb=256) as tool, asyncio.TaskGroup() as group:
        running = {code: group.create_task(one(code)) for code in LOSSES}
    assert {code: task.result() for code, task in running.items()} == {
        code: [NO_OUTPUT, f"{sentence}\n{LOST}", "False\n", NO_OUTPUT, "2\n"] for code, sentence in LOSSES.items()
    }


async def test_a_time_out_loses_nothing_if_the_program_can_be_interrupted(url: str) -> None:
    async with interpreter(url, stateful=True) as tool:
        _, stopped, after = await texts(tool, "x = 1", {"code": "while True: pass", "timeout": 0.5}, "print(x)")
    assert (stopped or "").endswith("KeyboardInterrupt\n[stopped after 0.5 s]")
    assert after == "1\n"


async def test_an_interpreter_that_died_between_two_calls_is_told_before_the_next_answer() -> None:
    async with interpreter(stateful=True) as tool, open_instance(tool, "r1") as instance:
        await instance.call({"code": "x = 1"})
        sandbox = await embedded(tool)
        [session] = sandbox._sessions
        os.kill(sandbox.process_ids["session"], signal.SIGKILL)
        await until(lambda: session._worker is None or not session._worker.alive)
        result = await instance.call({"code": "print('x' in globals())"})
        assert (result.outcome, result.response.text) == (ToolOutcome.OK, f"{LOST}\nFalse\n")
        assert (await instance.call({"code": "print('told once')"})).response.text == "told once\n"


async def test_an_expired_session_is_told_before_the_next_answer() -> None:
    async with (
        LocalSandbox(session_idle_seconds=0.2) as sandbox,
        service(sandbox) as running,
        interpreter(running.url, stateful=True) as tool,
        open_instance(tool, "r1") as instance,
    ):
        await instance.call({"code": "x = 1"})
        await until(lambda: sandbox.statistics().sessions == 0)
        assert (await instance.call({"code": "print('x' in globals())"})).response.text == f"{LOST}\nFalse\n"


async def test_a_worker_that_dies_in_mid_cell_is_our_failure_and_the_cell_runs_again_afresh() -> None:
    async with interpreter(stateful=True) as tool, open_instance(tool, "r1") as instance:
        await instance.call({"code": "x = 1"})
        sandbox = await embedded(tool)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(
                instance.call({"code": "import time; time.sleep(1.5); print('x' in globals())"})
            )
            await until(lambda: sandbox.statistics().busy == 1)
            await asyncio.sleep(0.1)
            os.kill(sandbox.process_ids["session"], signal.SIGKILL)
        result = running.result()
        assert (result.outcome, result.attempts) == (ToolOutcome.OK, 2)
        assert result.response.text == f"{LOST}\nFalse\n"


async def test_nothing_is_said_of_a_loss_where_there_was_nothing_to_lose() -> None:
    async with interpreter(stateful=True) as tool, open_instance(tool, "r1") as instance:
        sandbox = await embedded(tool)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(instance.call({"code": "import time; time.sleep(1.5); print('done')"}))
            await until(lambda: sandbox.statistics().busy == 1)
            await asyncio.sleep(0.1)
            os.kill(sandbox.process_ids["session"], signal.SIGKILL)
        assert (running.result().response.text, running.result().attempts) == ("done\n", 2)


async def test_a_cell_whose_fate_is_unknown_is_not_run_again_in_the_same_session() -> None:
    opened, other = (http(201, {"session_id": name, "idle_seconds": 60}) for name in ("s1", "s2"))
    cell = http(200, {"verdict": "ok", "stdout": "1\n", "stderr": ""})
    # The second cell's connection breaks; the session is closed, and its successor opened on new connections.
    script = (opened, cell, None, http(204), other, cell, http(204))
    async with peer(*script) as server, interpreter(server.url, stateful=True) as tool:
        results = await trajectory(tool, "x = 0", "x += 1")
    assert [result.response.text for result in results] == ["1\n", f"{LOST}\n1\n"]
    assert results[1].attempts == 2


async def test_a_cell_that_a_busy_service_did_not_begin_is_tried_again_in_its_session() -> None:
    opened = http(201, {"session_id": "s1", "idle_seconds": 60})
    cell = http(200, {"verdict": "ok", "stdout": "1\n", "stderr": ""})
    async with peer(opened, cell, http(503), cell, http(204)) as server, interpreter(server.url, stateful=True) as tool:
        results = await trajectory(tool, "x = 0", "x += 1")
    assert [(result.response.text, result.attempts) for result in results] == [("1\n", 1), ("1\n", 2)]


# Letting go -----------------------------------------------------------------------------------------------------------


async def test_sessions_are_closed_at_release_and_the_sandbox_at_close() -> None:
    async with interpreter(stateful=True) as tool:
        async with open_instance(tool, "r1") as instance:
            await instance.call({"code": "x = 1"})
            sandbox = await embedded(tool)
            assert sandbox.statistics().sessions == 1
            kept = tool._trajectories.of("r1", {})  # or the collection of garbage would close it, some time
        assert sandbox.statistics().sessions == 0, kept
        pids = list(sandbox.process_ids.values())
        assert [alive(pid) for pid in pids] == [True, True]
    assert [alive(pid) for pid in pids] == [False, False]
    with pytest.raises(SandboxClosedError):
        await sandbox.open_session()


async def test_a_session_of_the_service_is_closed_there() -> None:
    session = EchoSession()
    async with service(with_session(session)) as running, interpreter(running.url, stateful=True) as tool:
        await trajectory(tool, "hello")
        await until(session.closed.is_set)


async def test_a_cancelled_trajectory_leaves_no_session() -> None:
    async with interpreter(stateful=True) as tool:
        sandbox = await embedded(tool)
        running = asyncio.create_task(trajectory(tool, "x = 1", "import time; time.sleep(60)"))
        await until(lambda: sandbox.statistics().busy == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sandbox.statistics().sessions == 0


async def test_a_session_opened_too_late_is_closed_at_once() -> None:
    class Slow:
        entered = left = 0

        async def __aenter__(self) -> Any:
            await asyncio.sleep(0.05)
            self.entered += 1
            return EchoSession()

        async def __aexit__(self, *_: object) -> None:
            self.left += 1

    opening = Slow()
    kept = TrajectorySession()
    sandbox: Any = SimpleNamespace(session=lambda limits: opening)
    running = asyncio.create_task(kept.run(sandbox, code_interpreter.Limits(), "1", 1))
    await asyncio.sleep(0.01)
    await kept.close()
    with pytest.raises(SandboxClosedError):
        await running
    assert (opening.entered, opening.left) == (1, 1)


# The last expression --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stateful", [False, True])
async def test_the_last_expression_is_shown_where_that_is_asked_for(url: str, stateful: bool) -> None:
    async with interpreter(url, stateful=stateful, display_last=True) as tool:
        assert await texts(tool, "x = 6\nx * 7", "print('a', end='')\n'b'", "None", "import os; os._exit(3)") == [
            "42",
            "a\n'b'",
            NO_OUTPUT,
            "[ended its interpreter]" + (f"\n{LOST}" if stateful else ""),
        ]


async def test_the_last_expression_is_not_shown_otherwise_but_what_is_displayed_is(url: str) -> None:
    async with interpreter(url, stateful=True) as tool:
        assert await texts(tool, "6 * 7", "display(6)\n7", "print(1)  # the end", "if True:\n    8") == [
            NO_OUTPUT,
            "6",
            "1\n",
            NO_OUTPUT,
        ]


async def test_a_call_that_shows_its_last_expression_leaves_nothing_behind() -> None:
    async with interpreter(display_last=True) as tool:
        assert await texts(tool, "x = 1\nx", "'x' in globals()") == ["1", "False"]
        assert (await embedded(tool)).statistics().sessions == 0
