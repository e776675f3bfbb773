"""Agents that misbehave as processes: what they print, start, ignore and leave behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from toolyard.errors import ConfigError
from toolyard.rollout.agent.run import AgentExit, AgentTask, CommandAgent, open_agent

PROMPT = "What is 6 times 7?"
KEPT = 1 << 16


def task(prompt: str = PROMPT) -> AgentTask:
    messages = [{"role": "user", "content": prompt}]
    return AgentTask("task-1", prompt, messages, "http://127.0.0.1:9/s/session/v1", "key", "session", {"level": 3})


async def never() -> None:
    await asyncio.Event().wait()


def once(ready: Path) -> Callable[[], Awaitable[None]]:
    """Its time is over as soon as the agent has made this file."""

    return lambda: until(ready.exists, 60)


def python(code: str, *words: str) -> CommandAgent:
    return CommandAgent([sys.executable, "-c", textwrap.dedent(code), *words], {}, None)


async def run(
    agent: CommandAgent, is_over: Callable[[], Awaitable[None]] = never, given: AgentTask | None = None
) -> AgentExit:
    async with asyncio.timeout(patient(20)):
        return await agent.run(given or task(), is_over)


def is_alive(pid: int) -> bool:
    """A zombie is not: it only waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(patient(seconds)):
        while not condition():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.02)


async def ended(pid: int) -> None:
    await until(lambda: not is_alive(pid), 5)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither folders of tasks nor open files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert list(folder.iterdir()) == []
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 4  # an event loop of pytest's own may come in between


# What it gets and prints ----------------------------------------------------------------------------------------------


async def test_an_agent_finds_its_task_in_all_places():
    code = """
        import json, os, sys
        given = json.load(open(os.environ["TOOLYARD_TASK"]))
        assert given == json.load(sys.stdin) == json.load(open(sys.argv[1]))
        names = ["OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "TOOLYARD_SESSION"]
        print(json.dumps([sys.argv[2], given["id"], given["extra_info"], *(os.environ[name] for name in names)]))
        open(os.environ["TOOLYARD_REWARD"], "w").write("0.5")
    """
    found = await run(python(code, "{task}", "<{prompt}>"))
    url = "http://127.0.0.1:9/s/session"
    expected = [f"<{PROMPT}>", "task-1", {"level": 3}, f"{url}/v1", url, "key", "key", "session"]
    assert json.loads(found.output) == expected
    assert (found.code, found.errors, found.score) == (0, "", "0.5")


async def test_a_prompt_is_one_word_whatever_is_in_it():
    hostile = "{task} $(id) `id` ; rm -rf / \n'\" --help \0 {prompt}"
    found = await run(python("import sys; print(sys.argv[1:])", "{prompt}"), given=task(hostile))
    assert found.output.strip() == repr([hostile.replace("\0", "")])


async def test_an_agent_that_prints_a_hundred_megabytes_is_not_kept_in_memory():
    code = """
        import sys
        for _ in range(1600):
            sys.stdout.write("x" * 65536); sys.stderr.write("y" * 65536)
        print("the end")
    """
    found = await run(python(code))
    assert found.code == 0
    assert found.output.endswith("xthe end\n")
    assert len(found.output) <= KEPT
    assert len(found.errors) <= KEPT


async def test_output_that_is_not_text_is_replaced():
    found = await run(python("import sys; sys.stdout.buffer.write(bytes(range(256)))"))
    assert "�" in found.output
    assert "A" in found.output


async def test_an_agent_that_never_reads_its_standard_input_does_not_block():
    large = task("x" * 1_000_000)  # more than a pipe holds
    found = await run(python("print('done')"), given=large)
    assert (found.code, found.output) == (0, "done\n")


async def test_an_agent_that_closes_its_standard_input_goes_on():
    code = "import os, time; os.close(0); time.sleep(0.3); print('done')"
    found = await run(python(code), given=task("x" * 1_000_000))
    assert (found.code, found.output) == (0, "done\n")


async def test_an_agent_that_dies_at_once_says_how():
    found = await run(python("import os; os.kill(os.getpid(), 9)"))
    assert found.code == -signal.SIGKILL
    found = await run(python("import sys; sys.exit('no model')"))
    assert (found.code, found.errors) == (1, "no model\n")


def test_a_program_that_does_not_exist_is_found_before_the_run():
    with pytest.raises(ConfigError, match="no program 'no-such-agent'"):
        open_agent("no-such-agent --task {task}", {}, None)


# The reward file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writes", "score"),
    [
        ("open(path, 'w').write('1.5')", "1.5"),
        ("open(path, 'wb').write(b'\\xff\\x00')", "�\0"),
        ("open(path, 'w').write('9' * 100_000)", "9" * 1000),
        ("os.mkdir(path)", None),
        ("os.mkfifo(path)", None),
        ("os.symlink('/dev/zero', path)", None),
        ("os.symlink('/nonexistent', path)", None),
        ("pass", None),
    ],
    ids=["number", "garbage", "endless", "folder", "fifo", "device", "dangling", "none"],
)
async def test_whatever_the_reward_file_is_the_run_ends(writes: str, score: str | None):
    found = await run(python(f"import os; path = os.environ['TOOLYARD_REWARD']; {writes}"))
    assert (found.code, found.score) == (0, score)


# Its end --------------------------------------------------------------------------------------------------------------


async def test_an_agent_whose_time_is_over_is_asked_to_end_first(tmp_path: Path):
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("bye", flush=True), sys.exit(7)))
        print("ready", flush=True)
        open(sys.argv[1], "w")
        time.sleep(60)
    """
    ready = tmp_path / "ready"
    found = await run(python(code, str(ready)), once(ready))
    assert found.output == "ready\nbye\n"


async def test_an_agent_that_ignores_sigterm_is_killed(tmp_path: Path):
    code = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        open(sys.argv[1], "w")
        time.sleep(60)
    """
    ready = tmp_path / "ready"
    found = await run(python(code, str(ready)), once(ready))
    assert found.code != 0
    await ended(int(found.output))


async def test_a_cancelled_run_kills_the_agent_and_what_it_started(tmp_path: Path):
    pids = tmp_path / "pids"
    code = f"""
        import os, signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "60"])
        open({str(pids)!r} + "-", "w").write(f"{{os.getpid()}} {{child.pid}}")
        os.rename({str(pids)!r} + "-", {str(pids)!r})
        time.sleep(60)
    """
    running = asyncio.create_task(python(code).run(task(), never))
    await until(pids.exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    for pid in map(int, pids.read_text().split()):
        await ended(pid)


async def test_children_that_keep_the_pipes_open_do_not_delay_the_end():
    code = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid)
    """
    began = time.monotonic()
    found = await run(python(code))
    assert time.monotonic() - began < patient(5)
    assert found.code == 0
    await ended(int(found.output))


async def test_a_child_that_escapes_into_its_own_session_neither_delays_the_end_nor_hides_the_output():
    code = """
        import subprocess, sys
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        print("pid", subprocess.Popen(sleep, start_new_session=True).pid)
    """
    began = time.monotonic()
    found = await run(python(code))
    assert time.monotonic() - began < patient(6)
    assert (found.code, found.output[:4]) == (0, "pid ")
    os.kill(int(found.output[4:]), signal.SIGKILL)  # it outlives the agent: only a sandbox would hold it


async def test_many_agents_at_once_leave_no_process():
    code = "import os, subprocess; print(os.getpid(), subprocess.Popen(['sleep', '60']).pid)"
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(run(python(code))) for _ in range(16)]
    pids = [int(pid) for one in runs for pid in one.result().output.split()]
    assert len(set(pids)) == 32
    for pid in pids:
        await ended(pid)


def folders_in(place: Path) -> set[Path]:
    return set(place.glob("toolyard-agent-*"))


async def test_a_killed_rollout_takes_its_agents_with_it_and_the_next_removes_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nobody is left to kill them: the kernel does."""
    pid_file = tmp_path / "pid"
    agent = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"""
        import asyncio, sys
        from toolyard.rollout.agent.run import AgentTask, CommandAgent
        agent = CommandAgent([sys.executable, "-c", {agent!r}], {{}}, None)
        asyncio.run(agent.run(AgentTask("t", "p", [], "http://x/v1", "k", "s"), asyncio.Event().wait))
    """
    environment: dict[str, Any] = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(code), env=environment)
    try:
        await until(lambda: pid_file.exists() and bool(pid_file.read_text()))
    finally:
        parent.kill()
        assert await parent.wait() == -signal.SIGKILL
    await ended(int(pid_file.read_text()))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    [left] = folders_in(tmp_path)
    python("pass")
    assert left.exists(), "it is so new that it may not be locked yet"
    ready = tmp_path / "ready"
    running = asyncio.create_task(run(python(f"open({str(ready)!r}, 'w'); import time; time.sleep(60)")))
    await until(ready.exists)
    both = folders_in(tmp_path)
    assert len(both) == 2
    for folder in both:
        os.utime(folder, (0, 0))
    python("pass")
    assert folders_in(tmp_path) == both - {left}, "one is in use"
    running.cancel()
    await asyncio.wait([running])
    assert not folders_in(tmp_path)
