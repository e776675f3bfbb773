"""Runs an agent once: a command in a process of its own, or a Python function in this one."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from toolyard.errors import ConfigError
from toolyard.messages import JSON
from toolyard.settings import inherited_environment
from toolyard.supervision import run_in_thread

T = TypeVar("T")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_KEPT_BYTES = 1 << 16
"""Of what an agent prints, its end is kept."""
_TERM_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""
_DRAIN_SECONDS = 0.5
"""After its end, for what it printed last."""
_FOLDERS = "toolyard-agent-"
_UNLOCKED_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent gets."""

    id: str
    prompt: str
    """The text of the task's last message."""
    messages: list[JSON]
    """The task's messages, in OpenAI's form."""
    base_url: str
    """The session's own URL, for OpenAI's clients."""
    api_key: str
    session: str
    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def as_json(self) -> JSON:
        """What is in the task's file: everything but the API key."""
        return {"id": self.id, "prompt": self.prompt, "messages": self.messages, "extra_info": dict(self.extra_info)}


@dataclass(frozen=True, slots=True)
class AgentExit:
    """How an agent ended."""

    code: int | None
    """The exit status, negative for a signal; None: it was killed because its time was over."""
    output: str = ""
    """The end of its standard output, or what the function returned."""
    errors: str = ""
    """The end of its standard error, or a traceback."""
    score: str | None = None
    """The content of its reward file."""
    returned: str | None = None
    """The score that a function returned."""


class Agent(Protocol):
    async def run(self, task: AgentTask, is_over: Callable[[], Awaitable[None]]) -> AgentExit:
        """Run it to its end. When `is_over` returns, it is killed. If cancelled, it is killed as well."""
        ...


def open_agent(spec: str, environment: Mapping[str, str], folder: str | None) -> Agent:
    """`spec`: a command line, or `package.module:function`.

    Raises:
        ConfigError: there is no such program or function.
    """
    if is_function(spec):
        return FunctionAgent(_function(spec), spec)
    words = command_words(spec)
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"agent {spec!r}: there is no program {words[0]!r}; expected a command, or package.module:function"
        )
    return CommandAgent(words, environment, folder)


def is_function(spec: str) -> bool:
    return _FUNCTION.fullmatch(spec) is not None


def _function(spec: str) -> Callable[[AgentTask], Any]:
    module, _, name = spec.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"agent {spec!r}: {error}") from None
    if not callable(found):
        raise ConfigError(f"agent {spec!r} is not a function")
    return found


class FunctionAgent:
    """Calls `function(task)`. It returns nothing, a number (the score), text (its output), or a mapping with `score`
    and `output`."""

    def __init__(self, function: Callable[[AgentTask], Any], name: str) -> None:
        self._function = function
        self._name = name

    async def run(self, task: AgentTask, is_over: Callable[[], Awaitable[None]]) -> AgentExit:
        async with until_over(self._call(task), is_over) as work:
            if work is None:
                return AgentExit(None)
            if (error := work.exception()) is not None:
                return AgentExit(1, errors="".join(traceback.format_exception(error)))
            return _returned(work.result())

    async def _call(self, task: AgentTask) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(task)
        return await run_in_thread(lambda: self._function(task), self._name)


@asynccontextmanager
async def until_over(
    work: Coroutine[Any, Any, T], is_over: Callable[[], Awaitable[None]]
) -> AsyncGenerator[asyncio.Task[T] | None]:
    """The finished task of `work`; None if it had to be cancelled because `is_over` returned first."""
    over, working = asyncio.ensure_future(is_over()), asyncio.create_task(work)
    try:
        await asyncio.wait([over, working], return_when=asyncio.FIRST_COMPLETED)
        yield working if working.done() else None
    finally:
        over.cancel()
        working.cancel()
        await asyncio.wait([over, working])


def _returned(value: Any) -> AgentExit:
    if isinstance(value, Mapping):
        said = cast("Mapping[str, Any]", value)
        score = said.get("score")
        return AgentExit(0, str(said.get("output") or ""), returned=None if score is None else str(score))
    if isinstance(value, int | float):
        return AgentExit(0, returned=str(float(value)))
    return AgentExit(0, "" if value is None else str(value))


class CommandAgent:
    """Runs a command line. `{task}` in it is the path of the task's JSON file, `{prompt}` the text of its last message.
    The same JSON is on its standard input."""

    def __init__(self, words: list[str], environment: Mapping[str, str], folder: str | None) -> None:
        self._words = words
        self._environment = dict(environment)
        self._folder = folder
        # The kernel kills the agent if this process dies, whatever kills it.
        setpriv = shutil.which("setpriv")
        self._prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv is not None else []
        _remove_unlocked_folders()

    async def run(self, task: AgentTask, is_over: Callable[[], Awaitable[None]]) -> AgentExit:
        with _locked_folder() as folder:
            file, reward = folder / "task.json", folder / "reward"
            file.write_text(json.dumps(task.as_json()), encoding="utf-8")
            words = filled(self._words, task, str(file))
            environment = {**inherited_environment(), **variables(task, str(file), str(reward)), **self._environment}
            try:
                async with _process([*self._prefix, *words], environment, self._folder, file) as (process, tails):
                    killed = await _run_to_completion(process, tails, is_over)
                    output, errors = (tail.text for tail in tails)
            except (OSError, ValueError) as error:  # arguments too long, or with a zero; no such folder
                return AgentExit(127, errors=f"the agent cannot be started: {error}")
            score = _beginning_of(reward) if reward.is_file() else None
            return AgentExit(None if killed else process.returncode, output, errors, score)


@contextmanager
def _locked_folder() -> Generator[Path]:
    """A new folder, locked as long as this process lives."""
    with tempfile.TemporaryDirectory(prefix=_FOLDERS, ignore_cleanup_errors=True) as folder, _opened(folder) as opened:
        fcntl.flock(opened, fcntl.LOCK_SH)
        yield Path(folder)


def _remove_unlocked_folders() -> None:
    """Of processes that were killed. Those of the last minute are kept: they may not be locked yet."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        with contextlib.suppress(OSError), _opened(folder) as opened:  # others' folders, and locked ones
            if time.time() - os.fstat(opened).st_mtime > _UNLOCKED_SECONDS:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _opened(folder: str | Path) -> Generator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _beginning_of(file: Path) -> str:
    with file.open("rb") as opened:
        return opened.read(1000).decode("utf-8", "replace")


def command_words(spec: str) -> list[str]:
    """
    Raises:
        ConfigError: it is not a command line.
    """
    try:
        words = shlex.split(spec)
    except ValueError as error:
        raise ConfigError(f"agent {spec!r}: {error}") from None
    if not words:
        raise ConfigError(f"agent {spec!r}: expected a command, or package.module:function")
    return words


def filled(words: Sequence[str], task: AgentTask, file: str) -> list[str]:
    """The command line for one task, whose JSON is in `file`."""
    places = {"{task}": file, "{prompt}": task.prompt.replace("\0", "")}
    return [re.sub(r"\{task\}|\{prompt\}", lambda found: places[found[0]], word) for word in words]


def variables(task: AgentTask, file: str, reward: str) -> dict[str, str]:
    """What an agent finds in its environment: also what OpenAI's and Anthropic's SDKs, and what is built on them, read.

    `reward`: the file for its score.
    """
    return {
        "TOOLYARD_TASK": file,
        "TOOLYARD_REWARD": reward,
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_BASE": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": task.api_key,
        "TOOLYARD_SESSION": task.session,
    }


@asynccontextmanager
async def _process(
    words: list[str], environment: dict[str, str], folder: str | None, given: Path
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, list[_Tail]]]:
    """A process in a session of its own that reads `given`, and the ends of what it prints. At the end nothing of that
    session is left."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        # Pipes of our own: asyncio's would keep `wait` waiting for children that have left the session with them.
        tails: list[_Tail] = []
        ends: list[int] = []
        for _ in range(2):
            ours, theirs = os.pipe()
            transport, tail = await loop.connect_read_pipe(_Tail, os.fdopen(ours, "rb", 0))
            stack.callback(transport.close)
            tails.append(tail)
            ends.append(theirs)
        try:
            with given.open("rb") as stdin:
                process = await asyncio.create_subprocess_exec(
                    *words,
                    stdin=stdin,
                    stdout=ends[0],
                    stderr=ends[1],
                    env=environment,
                    cwd=folder,
                    start_new_session=True,
                )
        finally:
            for end in ends:
                os.close(end)
        try:
            yield process, tails
        finally:
            _signal(process, signal.SIGKILL)  # also what it started and left behind
            await process.wait()


class _Tail(asyncio.Protocol):
    """Keeps the end of what comes. All of it is read, so that the agent never waits for a full pipe."""

    def __init__(self) -> None:
        self._kept = b""
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._kept = (self._kept + data)[-_KEPT_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    @property
    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")


async def _run_to_completion(
    process: asyncio.subprocess.Process, tails: Sequence[_Tail], is_over: Callable[[], Awaitable[None]]
) -> bool:
    """Returns whether it was killed because its time was over."""
    ended, over = asyncio.create_task(process.wait()), asyncio.ensure_future(is_over())
    try:
        await asyncio.wait([ended, over], return_when=asyncio.FIRST_COMPLETED)
        killed = not ended.done()
        if killed:
            _signal(process, signal.SIGTERM)
            await asyncio.wait([ended], timeout=_TERM_SECONDS)
        _signal(process, signal.SIGKILL)
        await ended
        # What it printed last may still be in the pipes. A child in a session of its own may keep them open for ever.
        await asyncio.wait([tail.closed for tail in tails], timeout=_DRAIN_SECONDS)
        return killed
    finally:
        ended.cancel()
        over.cancel()
        await asyncio.wait([ended, over])


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
