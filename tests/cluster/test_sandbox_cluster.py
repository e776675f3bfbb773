"""One sandbox of several nodes: where programs run, and what happens to them when something dies."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
import ray
import yaml
from cluster_rollouts import Job, Nodes, call, kill, ray_nodes, until

from left_behind import alive
from patience import patient
from toolyard.errors import ConfigError, SessionLostError
from toolyard.messages import Message
from toolyard.records.lines import to_line
from toolyard.sandbox.cluster.ray import RaySandbox
from toolyard.sandbox.protocol import Execution, Limits, Program
from toolyard.sandbox.remote.sandbox import RemoteSandbox
from trajectory_samples import good_trajectory

pytestmark = [
    pytest.mark.kernel("confined"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own processes and files
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]

SERVICE = "ray::SandboxActor"
SLEEP = Program("import time; time.sleep(60)")
NAP = Program("import time; time.sleep(1); print(1)")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(2) as nodes:
        ray.init(nodes.address, _node_ip_address="127.0.0.2", log_to_driver=False, logging_level="error")
        yield nodes
        ray.shutdown()


async def busy(sandbox: RaySandbox) -> dict[str, int]:
    """Programs that run or wait, by node."""
    found = dict[str, int]()
    async with aiohttp.ClientSession() as session:
        for url in list(sandbox._servers):
            async with session.get(f"{url}/healthz") as reply:
                pool = (await reply.json())["pool"]
            found[urlsplit(url).hostname or ""] = pool["busy"] + pool["waiting"]
    return found


@asynccontextmanager
async def running(
    sandbox: RaySandbox | RemoteSandbox, program: Program, count: int
) -> AsyncIterator[list[asyncio.Task[Execution]]]:
    tasks = [asyncio.create_task(sandbox.run(program)) for _ in range(count)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def until_busy(sandbox: RaySandbox, count: int) -> dict[str, int]:
    async with asyncio.timeout(patient(60)):
        while True:
            found = await busy(sandbox)
            if sum(found.values()) == count:
                return found
            await asyncio.sleep(0.02)


async def until_reported(sandbox: RaySandbox, loads: dict[str, int]) -> None:
    """Until this process has heard what others run on each node."""
    servers = sandbox._servers._router._servers
    async with asyncio.timeout(patient(60)):
        while {urlsplit(url).hostname: server.reported for url, server in servers.items()} != loads:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_there(sandbox: RaySandbox, count: int) -> None:
    async with asyncio.timeout(patient(60)):
        while len(sandbox._servers) != count:  # noqa: ASYNC110 - nothing would set an event
            await asyncio.sleep(0.02)


def service_on(nodes: Nodes, host: str) -> int:
    """The process of a node's service."""
    address = socket.inet_aton(host)[::-1].hex().upper()
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and row[1].startswith(address)}
    for pid in nodes.processes(SERVICE):
        if listening & {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}:
            return pid
    raise AssertionError(f"no service on {host}")


def descendants(pid: int) -> list[int]:
    children = [int(one) for one in Path(f"/proc/{pid}").glob("task/*/children") for one in one.read_text().split()]
    return [*children, *(one for child in children for one in descendants(child))]


@pytest.mark.exhaustive
async def test_programs_go_to_the_node_with_the_most_room(nodes: Nodes) -> None:
    async with RaySandbox() as sandbox:
        async with running(sandbox, SLEEP, 6):
            assert await until_busy(sandbox, 6) == {"127.0.0.2": 3, "127.0.0.3": 3}
        await until_busy(sandbox, 0)
        # The programs of another process.
        url = next(url for url in sandbox._servers if urlsplit(url).hostname == "127.0.0.2")
        async with RemoteSandbox(url, sandbox._tokens[url]) as other, running(other, SLEEP, 3):
            await until_busy(sandbox, 3)
            await until_reported(sandbox, {"127.0.0.2": 3, "127.0.0.3": 0})
            async with running(sandbox, SLEEP, 3):
                assert await until_busy(sandbox, 6) == {"127.0.0.2": 3, "127.0.0.3": 3}


@pytest.mark.slow
async def test_a_killed_service_costs_no_program_and_no_batch_and_its_sessions_say_that_they_are_lost(
    nodes: Nodes,
) -> None:
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(RaySandbox())
        await until_there(sandbox, 2)
        sessions = {
            urlsplit(session._server.base).hostname: session
            for session in [await stack.enter_async_context(sandbox.session()) for _ in range(2)]
        }
        assert sessions.keys() == {"127.0.0.2", "127.0.0.3"}
        for _ in range(3):
            for host, session in sessions.items():
                assert (await session.run(f"x = {host!r}")).ok  # on its own node each time, or it were lost
        found = list[str]()
        napping = Program("import time; time.sleep(0.3); print(input())")
        async for execution in sandbox.run_each(napping, [str(number) for number in range(6)]):
            found.append(execution.stdout.strip())
            if len(found) == 2:
                where = {host: count for host, count in (await busy(sandbox)).items() if count}
                assert len(where) == 1, "a batch is not split"
                dead = next(iter(where))
                async with running(sandbox, NAP, 4) as tasks:
                    await until_busy(sandbox, 5)
                    kill([service_on(nodes, dead)])
                    async with asyncio.timeout(patient(60)):
                        assert [(await task).stdout for task in tasks] == ["1\n"] * 4
        assert found == [str(number) for number in range(6)]
        with pytest.raises(SessionLostError, match="lost with its server"):
            await sessions.pop(dead).run("x")
        ((host, alive),) = sessions.items()
        assert (await alive.run("x")).display[0]["text/plain"] == repr(host)
        await until_there(sandbox, 2)  # it is started again, and gets work
        async with running(sandbox, SLEEP, 4):
            assert await until_busy(sandbox, 4) == {"127.0.0.2": 2, "127.0.0.3": 2}


@pytest.mark.slow
async def test_cancelling_stops_the_program(nodes: Nodes) -> None:
    async with RaySandbox() as sandbox:
        async with running(sandbox, SLEEP, 2):
            await until_busy(sandbox, 2)
        await until_busy(sandbox, 0)
        assert (await sandbox.run(SLEEP, Limits(run_seconds=0.2))).verdict.value == "timed_out"


USER = """
import asyncio, ray, sys
from toolyard.sandbox import RaySandbox
async def main():
    async with RaySandbox() as sandbox, sandbox.session() as session:
        await session.run("x = 1")
        print("open", flush=True)
        await asyncio.sleep(600)
ray.init(sys.argv[1], log_to_driver=False, logging_level="error")
asyncio.run(main())
"""


@pytest.mark.slow
def test_nothing_is_left_when_the_last_user_is_killed(nodes: Nodes) -> None:
    user = subprocess.Popen([sys.executable, "-c", USER, nodes.address], stdout=subprocess.PIPE, text=True)
    try:
        assert user.stdout is not None
        assert user.stdout.readline() == "open\n"
        services = nodes.processes(SERVICE)
        assert len(services) == 2, "shared with those of the tests before"
        inside = [child for pid in services for child in descendants(pid)]
        assert inside
    finally:
        user.kill()
        user.communicate()
    until(lambda: not nodes.processes(SERVICE), "the end of the services")
    until(lambda: not any(map(alive, inside)), "the end of their processes")
    assert not [one for one in ray.util.list_named_actors(all_namespaces=True) if one["name"].startswith("sandbox:")]


@pytest.mark.slow
async def test_nodes_that_join_get_work_and_those_that_are_lost_cost_nothing(nodes: Nodes) -> None:
    async with RaySandbox() as sandbox:
        await until_there(sandbox, 2)
        joined = nodes.add("127.0.0.9")  # Ray insists on the main thread
        await until_there(sandbox, 3)
        long = Program("import time; time.sleep(5); print(1)")
        async with AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(sandbox.session()) for _ in range(3)]
            on_it = [one for one in sessions if urlsplit(one._server.base).hostname == "127.0.0.9"]
            assert len(on_it) == 1
            tasks = await stack.enter_async_context(running(sandbox, long, 6))
            assert await until_busy(sandbox, 6) == {"127.0.0.2": 2, "127.0.0.3": 2, "127.0.0.9": 2}
            nodes.remove(joined)
            async with asyncio.timeout(patient(60)):
                assert [(await task).stdout for task in tasks] == ["1\n"] * 6
            assert len(sandbox._servers) == 2
            with pytest.raises(SessionLostError, match="lost with its server"):
                await on_it[0].run("1")


@pytest.mark.slow
def test_a_rollout_runs_its_programs_and_sessions_on_all_nodes(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=6)
    codes = [f"print({number} + 1)" for number in range(3)]
    calls = [f"{call('code_interpreter', code=code)}\n{call('notebook', code=code)}" for code in codes]
    (job.folder / "script.json").write_text(json.dumps([*calls, "Done."]))
    parameters = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    function = {"name": "notebook", "description": "Run a cell.", "parameters": parameters}
    entry = {"class_name": "toolyard.tools.code_interpreter.SandboxFusionTool"}
    config = {"type": "native", "sandbox": "ray"}
    schema = {"tool_schema": {"type": "function", "function": function}}
    tools = [{**entry, "config": config}, {**entry, **schema, "config": {**config, "stateful": True}}]
    (job.folder / "tools.yaml").write_text(yaml.safe_dump({"tools": tools}))
    run = job.start("--ray", nodes.address)
    until(lambda: len(nodes.processes(SERVICE)) == 2, "services")
    told = job.end(run)
    assert told["completed"] == 6
    said = [message["content"] for line in job.lines() for message in line["messages"] if message["role"] == "tool"]
    assert sorted(said) == ["1\n"] * 12 + ["2\n"] * 12 + ["3\n"] * 12
    until(lambda: not nodes.processes(SERVICE), "the end of the services")


@pytest.mark.slow
def test_a_dump_is_scored_on_all_nodes(nodes: Nodes, tmp_path: Path) -> None:
    tests = json.dumps({"inputs": ["1", "2"], "outputs": ["2", "3"]})
    right, wrong = "```python\nprint(int(input()) + 1)\n```", "```python\nprint(0)\n```"
    made = [good_trajectory(number + 1, turns=2) for number in range(8)]
    answers = [Message("assistant", right if number % 2 else wrong) for number in range(8)]
    changed = [
        replace(one, messages=(*one.messages[:-1], answer), ground_truth=tests, score=None, rewards={"final": None})
        for one, answer in zip(made, answers, strict=True)
    ]
    (tmp_path / "0.jsonl").write_bytes(b"".join(map(to_line, changed)))
    command = [str(Path(sys.executable).with_name("toolyard")), "score", "0.jsonl", "--reward", "code", "--json"]
    done = subprocess.run(
        [*command, "--ray", nodes.address], cwd=tmp_path, capture_output=True, text=True, timeout=patient(120)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mean_after"] == 0.5
    refused = subprocess.run(
        [*command, "--ray", "127.0.0.77:1"], cwd=tmp_path, capture_output=True, text=True, timeout=patient(60)
    )
    assert refused.returncode != 0
    assert "--ray '127.0.0.77:1'" in refused.stderr
    assert "ray start --head" in refused.stderr


def test_without_a_connection_the_message_says_what_to_do() -> None:
    script = (
        "import asyncio\nfrom toolyard.sandbox import RaySandbox\n"
        "async def main():\n    async with RaySandbox(): pass\nasyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 1
    assert f"{ConfigError.__name__}: a sandbox on a cluster: this process is not connected to Ray" in done.stderr
