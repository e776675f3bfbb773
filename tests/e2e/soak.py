"""Thousands of trajectories, something wrong with every second one, and everything around them killed now and then.

    make soak                                       10,000 trajectories
    make soak ARGS="--trajectories 400"

Real parts: the command in separate processes, an engine over HTTP that fails in many ways, two sandbox services, an
MCP server, limiters of a Ray cluster, tools that do everything they must not. Meanwhile the run is killed with -9 and
started again, the services and the limiters' actors are killed, and the MCP server is stopped (SIGSTOP). In the end
every request must have exactly one line, and no permit may be held or lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from aiohttp import web
from faulting import CALL, Done, ended, lines_in, make_place, start, until
from ray_head import RayHead, ray_head

from patience import patient
from ray_node import free_port, processes_of

GROUP = 4
ENGINE_FAULTS = (
    "500 once",
    "500 always",
    "reset once",
    "stall once",
    "lie once",
    "lie always",
    "abort once",
    "no json",
)
TOOL_FAULTS = (
    "task group",
    "GeneratorExit",
    "BaseExceptionGroup",
    "SystemExit",
    "cancels itself",
    "hangs",
    "swallows",
    "gets no permit in time",
    "waits for a permit for ever",
)
LIMITERS = "many", "one", "rate-limiter"
CODE = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'
LOOP = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "while True: pass"}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 40, "b": 2}}\n</tool_call>'
MCP_SERVER = Path(__file__).with_name("mcp_server.py")


def scenario(number: int) -> tuple[str, dict[str, str]]:
    """What a task does, and what its tool does wrong. Every second task is well-behaved."""
    chance = random.Random(number)
    if number % 2 == 0:
        return chance.choice(["ask", "code", "add"]), {}
    kind = chance.choice(["engine", "tool", "tool", "loop"])
    if kind == "engine":
        return chance.choice(ENGINE_FAULTS), {}
    if kind == "loop":
        return "loop", {}
    return "ask", {
        chance.choice(["create", "execute", "execute", "calc_reward", "release"]): chance.choice(TOOL_FAULTS)
    }


# The engine -----------------------------------------------------------------------------------------------------------


class Engine:
    """Speaks SGLang's API. The prompt decides what it answers and how it fails."""

    def __init__(self, model: Path) -> None:
        from toolyard.chat.tokenizers.opening import load_tokenizer

        self._tokenizer = load_tokenizer(model)
        self._stop = self._tokenizer.special_tokens["<|im_end|>"]
        self._seen: Counter[str] = Counter()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = self._tokenizer.decode(body["input_ids"])
        what = prompt.partition("Play: ")[2].partition(".")[0]
        name = f"{body['rid'].partition('-')[2]} {len(body['input_ids'])}"
        self._seen[name] += 1
        if what.endswith("always") or (what in ENGINE_FAULTS and self._seen[name] == 1):
            failed = await self._fail(request, what.partition(" ")[0])
            if failed is not None:
                return failed
        answered = prompt.count("<|im_start|>assistant") > 1
        said = "#### 42" if answered else {"code": CODE, "loop": LOOP, "add": ADD}.get(what, CALL)
        return self._answer([*self._tokenizer.encode(said), self._stop], "stop")

    async def _fail(self, request: web.Request, how: str) -> web.StreamResponse | None:
        match how:
            case "500":
                return web.json_response({"error": {"message": "boom"}}, status=500)
            case "reset":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            case "stall":
                await asyncio.sleep(5)
                return None
            case "lie":
                return self._answer([10**6, self._stop], "stop")
            case "abort":
                return self._answer([], "abort")
            case _:
                return web.Response(text="{half of it")

    def _answer(self, ids: list[int], finish: str) -> web.Response:
        ended = {"type": finish, "matched": self._stop} if finish == "stop" else {"type": finish}
        logprobs = [[-0.5, one, None] for one in ids]
        meta = {"finish_reason": ended, "output_token_logprobs": logprobs, "weight_version": "1"}
        return web.json_response({"output_ids": ids, "meta_info": meta})


async def open_engine(stack: AsyncExitStack, model: Path) -> str:
    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/generate", Engine(model).generate)
    application.router.add_get("/health", _ok)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def _ok(request: web.Request) -> web.Response:
    return web.Response(text="ok")


# The rest of the world ------------------------------------------------------------------------------------------------


class Service:
    """`toolyard sandbox serve`, which comes back at the same address after it was killed."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = [str(Path(sys.executable).with_name("toolyard")), "sandbox", "serve", "--port", str(self._port)]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.close()
                return
            await asyncio.sleep(0.05)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def write_place(folder: Path, model: Path, engine: str, services: list[Service], trajectories: int) -> Path:
    call = {"timeout_seconds": 1, "finish_seconds": 1, "grace_seconds": 0.2}
    limits = {"engine_retries": 1, "engine_retry_pause_seconds": 0.05, "generate_seconds": 20}
    served = {"kind": "sglang", "urls": [engine]}
    place = make_place(folder, model, class_name="faulty.Limited", call=call, limits=limits, engine=served, n=GROUP)
    rows: list[dict[str, Any]] = []
    for number in range(trajectories // GROUP):
        what, faults = scenario(number)
        kwargs = {"ask": {"create_kwargs": {"faults": faults}}}
        rows.append({"id": f"t{number}", "prompt": f"Play: {what}. ({number})", "answer": "42", "tools_kwargs": kwargs})
    (place / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_servers(place)
    tools = json.loads((place / "tools.yaml").read_text())
    tools["tools"] += [
        {
            "class_name": "toolyard.tools.code_interpreter.SandboxFusionTool",
            "config": {
                "type": "native",
                "sandbox_fusion_url": [service.url for service in services],
                "default_timeout": 1,
            },
        },
        {
            "class_name": "toolyard.tools.mcp.MCPTool",
            "config": {"type": "mcp", "timeout": 3, "ping_seconds": 1, "call": {"retries": 4}},
            "mcp": {"mcp_servers_config_path": "mcp.json", "tool_selected_list": ["add"]},
        },
    ]
    (place / "tools.yaml").write_text(json.dumps(tools))
    return place


def write_servers(place: Path) -> None:
    """Our MCP server, with the marker by which we find its process: servers get no more of our environment."""
    env = {"TOOLYARD_TEST_RUN": "${TOOLYARD_TEST_RUN}"}
    server = {"command": sys.executable, "args": [str(MCP_SERVER), "stdio"], "env": env}
    (place / "mcp.json").write_text(json.dumps({"mcpServers": {"sums": server}}))


def is_mcp_server(pid: int) -> bool:
    return MCP_SERVER.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


class Disturbance:
    """Kills and stops what the runs use, one thing after another, and counts it."""

    def __init__(self, services: list[Service], ray: RayHead, chance: random.Random) -> None:
        self.marker = ""
        """Of the run whose MCP server may be stopped."""
        self.done: Counter[str] = Counter()
        self._services = services
        self._ray = ray
        self._chance = chance

    async def go_on(self) -> None:
        while True:
            for disturb in (self._kill_a_service, self.kill_the_limiters, self._stop_the_mcp_server):
                # On a busy machine, what was killed takes longer to come back.
                await asyncio.sleep(patient(self._chance.uniform(1, 4)))
                await disturb()

    async def _kill_a_service(self) -> None:
        service = self._chance.choice(self._services)
        await service.kill()
        self.done["sandbox services killed"] += 1
        await asyncio.sleep(self._chance.uniform(0, 2))
        await service.start()

    async def kill_the_limiters(self) -> None:
        self.done["limiters killed"] += self._ray.kill_limiters()

    async def _stop_the_mcp_server(self) -> None:
        for pid in processes_of(self.marker) if self.marker else ():
            with contextlib.suppress(OSError):
                if is_mcp_server(pid):
                    os.kill(pid, signal.SIGSTOP)
                    self.done["MCP servers stopped"] += 1


async def soak(folder: Path, model: Path, trajectories: int, kills: int, seed: int = 0) -> tuple[Done, Counter[str]]:
    """Play all of them, through `kills` of the run. The last run, and what was done to all of them."""
    chance = random.Random(seed)
    async with AsyncExitStack() as stack:
        services = [Service(free_port()) for _ in range(2)]
        for service in services:
            await service.start()
            stack.push_async_callback(service.kill)
        ray = stack.enter_context(ray_head())
        engine = await open_engine(stack, model)
        place = write_place(folder, model, engine, services, trajectories)
        errors = stack.enter_context((place / "stderr.txt").open("ab"))
        disturbance = Disturbance(services, ray, chance)
        disturbing = asyncio.create_task(disturbance.go_on())
        stack.push_async_callback(asyncio.wait, [disturbing])
        stack.callback(disturbing.cancel)
        for kill in range(kills):
            process, name = await begin(place, errors.fileno(), ray, disturbance, trajectories)
            await disturbance.kill_the_limiters()  # at least once, however short the run
            enough = trajectories * (kill + 1) // (kills + 1)
            await until(lambda enough=enough: lines_in(place) >= enough, process)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            disturbance.done["runs killed"] += 1
            await ended(place, process, name)
            end_orphans(name)
        done = await ended(place, *await begin(place, errors.fileno(), ray, disturbance, trajectories), seconds=3600)
        disturbing.cancel()
        await asyncio.wait([disturbing])
        await ray.check_permits(*LIMITERS)
        return done, disturbance.done


async def begin(place: Path, errors: int, ray: RayHead, disturbance: Disturbance, trajectories: int) -> tuple[Any, str]:
    """A run that has dumped something, or has nothing left to play: it may be over before it is killed.

    One whose MCP server is stopped while it starts does not begin, and rightly.
    """
    disturbance.marker = ""
    before = min(lines_in(place), trajectories - 1)
    process, name = await start(place, errors=errors, ray=ray.address)
    try:
        await until(lambda: lines_in(place) > before, process)
    except AssertionError as error:
        raise AssertionError(f"{error}{(place / 'stderr.txt').read_text()[-2000:]}") from None
    disturbance.marker = name
    return process, name


def end_orphans(marker: str) -> None:
    """The MCP server of a run that was killed while it was stopped cannot notice."""
    for pid in processes_of(marker):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def check(done: Done, trajectories: int) -> Counter[str]:
    """Count independently: every request once, complete groups, a reason for every missing score. Returns how they
    ended."""
    assert done.status == 0, (done.place / "stderr.txt").read_text()[-3000:]
    lines = done.lines
    ids = [line["request_id"] for line in lines]
    assert len(ids) == len(set(ids)), "a request has two lines"
    groups = Counter(line["batch_data_id"] for line in lines)
    assert groups == {f"t{number}": GROUP for number in range(trajectories // GROUP)}, "groups are short"
    for line in lines:
        if line["score"] is None:
            assert line["failure"]["whose"] in ("ours", "task"), line["failure"]
            assert line["failure"]["error"], line["failure"]
        number = int(line["batch_data_id"][1:])
        if number % 2 == 0:
            told = line["finish_reason"], line["failure"], line["messages"][2:]
            assert line["score"] == 1.0 or (line["failure"] or {}).get("whose") == "ours", told
    accounting = done.summary["accounting"]
    assert (accounting["planned"], accounting["dumped"]) == (trajectories, trajectories)
    assert (accounting["missing"], accounting["problems"]) == ({}, [])
    left = [pid for pid in processes_of(done.marker) if Path(f"/proc/{pid}/stat").exists()]
    assert not left, f"processes are left: {left}"
    return Counter(line["finish_reason"] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=10, help="how often the run is killed and started again")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from byte_model import make_model

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        make_model(model)
        place = Path(folder, "place")
        place.mkdir()
        began = time.monotonic()
        done, disturbed = asyncio.run(soak(place, model, options.trajectories, options.kills, options.seed))
        reasons = check(done, options.trajectories)
    seconds = time.monotonic() - began
    print(f"{options.trajectories} trajectories, {seconds:.0f} s: all accounted for, and no permit lost")
    for what, count in [*reasons.most_common(), *disturbed.most_common()]:
        print(f"{count:>7}  {what}")


if __name__ == "__main__":
    main()
