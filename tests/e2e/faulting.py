"""Runs of the real command in which something goes wrong, and what remains of them, counted without Toolyard's
audit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_node import processes_of

GOOD, SAMPLES = 8, 2
TOOLS = '''
import asyncio
import json
import os
import time
from pathlib import Path

from toolyard.limits.local import LocalLimiter
from toolyard.tools.base import BaseTool, ToolResponse


async def swallow():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass


async def fail():
    raise ValueError("a child failed")


class Faulty(BaseTool):
    """Does what its config tells it for the instances of bad tasks, and keeps a diary."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.limiter, self.one = self.limiters()
        self.faults = {}

    def limiters(self):
        return LocalLimiter(1000), LocalLimiter(1)

    def note(self, what, instance_id):
        with open("diary.jsonl", "a") as file:
            file.write(json.dumps([what, instance_id]) + "\\n")

    async def create(self, instance_id=None, **kwargs):
        self.faults[instance_id] = kwargs.get("faults", {})
        await self.act("create", instance_id)
        self.note("created", instance_id)
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        async with self.limiter.permit(instance_id):
            await self.act("execute", instance_id)
            await asyncio.sleep(0.01)
        return ToolResponse(text="42"), None, {}

    async def calc_reward(self, instance_id, **kwargs):
        await self.act("calc_reward", instance_id)
        return 1.0

    async def release(self, instance_id, **kwargs):
        self.note("released", instance_id)
        await self.act("release", instance_id)

    async def act(self, where, instance_id):
        how = self.faults[instance_id].get(where)
        if how == "task group":
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                await asyncio.sleep(60)
        elif how == "GeneratorExit":
            raise GeneratorExit
        elif how == "BaseExceptionGroup":
            raise BaseExceptionGroup("several", [GeneratorExit(), ValueError("and this")])
        elif how == "SystemExit":
            raise SystemExit(3)
        elif how == "CancelledError":
            raise asyncio.CancelledError
        elif how == "cancels itself":
            asyncio.current_task().cancel()
            await asyncio.sleep(60)
        elif how == "cancels a worker":
            next(task for task in asyncio.all_tasks() if "_work()" in repr(task)).cancel()
            await asyncio.sleep(60)
        elif how == "swallows":
            await swallow()
        elif how == "hangs":
            await asyncio.sleep(3600)
        elif how == "blocks":
            time.sleep(3)
        elif how == "blocks for ever":
            Path("blocking").touch()
            while True:
                time.sleep(0.1)
        elif how == "takes a second":
            await asyncio.sleep(1)
        elif how == "leaves a task":
            self.stray = asyncio.create_task(swallow())
        elif how == "leaves a thread":
            await asyncio.to_thread(time.sleep, 3600)
        elif how == "raises":
            raise RuntimeError("no idea")
        elif how == "gets no permit in time":
            async with self.one.permit(), self.one.permit(timeout=0.1):
                pass
        elif how == "waits for a permit for ever":
            async with self.one.permit(), self.one.permit():
                pass

    async def close(self):
        calls = sum("Call._contain" in repr(task) for task in asyncio.all_tasks())
        held = [(await limiter.statistics()).in_flight for limiter in (self.limiter, self.one)]
        Path("closed.json").write_text(json.dumps({"permits": sum(held), "calls": calls}))


class Blocking(Faulty):
    """A plain method: it must run in a thread."""

    def execute(self, instance_id, parameters, **kwargs):
        time.sleep(0.5)
        return ToolResponse(text="42"), None, {}


class Limited(Faulty):
    """Its permits are those of a Ray cluster."""

    def limiters(self):
        import ray
        from toolyard.limits.cluster.ray import RayLimiter

        ray.init(_node_ip_address="127.0.0.2", logging_level="error", log_to_driver=False)
        return RayLimiter("many", 64), RayLimiter("one", 1)

    async def close(self):
        for limiter in (self.limiter, self.one):
            await limiter.close()
'''
SCHEMA = {
    "type": "function",
    "function": {"name": "ask", "parameters": {"type": "object", "properties": {"question": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "ask", "arguments": {"question": "?"}}\n</tool_call>'


@dataclass
class Done:
    """One run, ended."""

    place: Path
    status: int
    stdout: str
    stderr: str
    marker: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.place / "runs/0.jsonl").read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.stdout)

    @property
    def finishes(self) -> Counter[str]:
        return Counter(line["finish_reason"] for line in self.lines)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """`bad-0`, `bad`, `good`."""
        return [line for line in self.lines if f"{line['batch_data_id']}-".startswith(f"{kind}-")]


def make_place(folder: Path, model: Path, *faults: Mapping[str, str], **more: Any) -> Path:
    """A folder with settings, a tool, eight good tasks, and for each of `faults` a task for which the tool fails so."""
    rows = [
        *({"id": f"bad-{number}", "faults": fault} for number, fault in enumerate(faults)),
        *({"id": f"good-{number}", "faults": {}} for number in range(GOOD)),
    ]
    write_tasks(folder, [
        {
            "id": row["id"],
            "prompt": f"How much is {row['id']}?",
            "answer": "42",
            "tools_kwargs": {"ask": {"create_kwargs": {"faults": row["faults"]}}},
        }
        for row in rows
    ])  # fmt: skip
    (folder / "faulty.py").write_text(TOOLS)
    call = {"timeout_seconds": 20, "finish_seconds": 20, "grace_seconds": 0.3, **more.pop("call", {})}
    tool = {
        "class_name": more.pop("class_name", "faulty.Faulty"),
        "config": {"type": "native", "call": call},
        "tool_schema": SCHEMA,
    }
    (folder / "tools.yaml").write_text(json.dumps({"tools": [tool]}))
    (folder / "script.json").write_text(json.dumps([CALL, "#### 42"]))
    settings = {
        "tasks": {"path": "tasks.jsonl"},
        "engine": {"kind": "scripted", "model": str(model), "script": "script.json", **more.pop("engine", {})},
        "chat": {"format": "hermes"},
        "tools": "tools.yaml",
        "n": more.pop("n", SAMPLES),
        "rollout_data_dir": "runs",
        "limits": {"grace_seconds": 0.3, **more.pop("limits", {})},
        **more,
    }
    (folder / "rollout.yaml").write_text(json.dumps(settings))
    return folder


def write_tasks(folder: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_tasks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]


def lines_in(place: Path) -> int:
    dump = place / "runs/0.jsonl"
    return dump.read_bytes().count(b"\n") if dump.exists() else 0


async def until(reached: Callable[[], object], process: asyncio.subprocess.Process) -> None:
    while not reached():
        if process.returncode is not None:
            raise AssertionError(f"it ended: {((await process.communicate())[1] or b'').decode()[-2000:]}")
        await asyncio.sleep(0.01)


running: list[asyncio.subprocess.Process] = []
"""What was started, so that a test that fails leaves nothing behind."""


async def start(
    place: Path, *arguments: str, errors: int = asyncio.subprocess.PIPE, ray: str = ""
) -> tuple[asyncio.subprocess.Process, str]:
    """The process and its marker. `errors`: where stderr goes; an unread pipe would block a run that prints a lot."""
    marker = f"TOOLYARD_TEST_RUN={uuid.uuid4().hex}"
    name, _, value = marker.partition("=")
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("toolyard")),
        "rollout", "rollout.yaml", "--json", *arguments,
        cwd=place,
        env={**os.environ, name: value, "RAY_ADDRESS": ray},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
    )  # fmt: skip
    running.append(process)
    return process, marker


def end_runs() -> None:
    while running:
        process = running.pop()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


async def ended(place: Path, process: asyncio.subprocess.Process, marker: str, seconds: float = 90) -> Done:
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate()
    except TimeoutError:
        process.send_signal(signal.SIGABRT)
        raise AssertionError(f"the run did not end within {seconds} s") from None
    return Done(place, process.returncode or 0, out.decode(), (err or b"").decode(), marker)


async def rolled(place: Path, *arguments: str, seconds: float = 90) -> Done:
    return await ended(place, *await start(place, *arguments), seconds)


def check_accounts(done: Done, *, status: int = 0, tasks: int | None = None, abandoned: int = 0) -> None:
    """Lines, groups, instances, permits, calls and processes of a run that came to its end.

    `abandoned`: permits of calls that the run had to leave behind, and which hold them for as long as they run.
    """
    assert done.status == status, (done.stdout, done.stderr)
    planned = len(read_tasks(done.place)) if tasks is None else tasks
    ids = [line["request_id"] for line in done.lines]
    assert len(ids) == len(set(ids)), "a request has two lines"
    groups = Counter(line["batch_data_id"] for line in done.lines)
    assert (len(groups), set(groups.values())) == (planned, {SAMPLES}), f"groups are short: {groups}"
    for line in done.lines:
        if line["score"] is None:
            failure = line["failure"]
            assert failure is not None, line
            assert failure["whose"] in ("ours", "task"), failure
            assert failure["error"], failure
    diary = done.place / "diary.jsonl"
    if diary.exists():
        notes = [json.loads(line) for line in diary.read_text().splitlines()]
        created = {instance for what, instance in notes if what == "created"}
        assert created == {instance for what, instance in notes if what == "released"}, "instances are left"
        assert len(notes) == 2 * len(created), "created or released twice"
    if not uses_ray(done.place):  # whose permits are counted from outside
        assert json.loads((done.place / "closed.json").read_text()) == {"permits": abandoned, "calls": 0}
    assert not processes_of(done.marker), "processes are left"


def uses_ray(place: Path) -> bool:
    return "faulty.Limited" in (place / "tools.yaml").read_text()


# Servers that misbehave -----------------------------------------------------------------------------------------------

Answer = Callable[[str], bytes | None]
"""Of the request line: what is answered, nothing (None), or the connection is reset (b"")."""


@asynccontextmanager
async def bad_server(answer: Answer) -> AsyncGenerator[str]:
    """The URL of a real server on loopback."""
    writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            while line := (await reader.readline()).decode():
                size = 0
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    if header.lower().startswith(b"content-length:"):
                        size = int(header.partition(b":")[2])
                await reader.readexactly(size)
                said = answer(line)
                if said is None:
                    await asyncio.Event().wait()
                elif not said:
                    break
                else:
                    writer.write(said)
                    await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writers.discard(writer)
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    serving: Iterable[Any] = server.sockets
    try:
        yield f"http://127.0.0.1:{next(iter(serving)).getsockname()[1]}"
    finally:
        server.close()
        for writer in list(writers):
            writer.transport.abort()


def http(status: int, body: Any = None) -> bytes:
    content = json.dumps({} if body is None else body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


MODELS = http(200, {"data": [{"id": "m", "max_model_len": 4096}]})


def stalls(line: str) -> bytes | None:
    return None


def resets(line: str) -> bytes | None:
    return b""


def fails(line: str) -> bytes | None:
    return http(500, {"error": {"message": "boom"}})


def swallows(line: str) -> bytes | None:
    """Healthy, as far as its health check knows."""
    return None if line.startswith("POST") else MODELS


def loses_its_health(line: str) -> bytes | None:
    if line.startswith("POST"):
        return None
    return http(503) if "/health" in line else MODELS
