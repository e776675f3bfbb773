"""MCP tools against real servers: processes of the SDK's own server, over stdio, streamable HTTP and SSE."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from left_behind import alive, children
from patience import patient
from toolyard.errors import ConfigError, ToolError
from toolyard.tools import BaseTool, initialize_tools_from_config, open_instances
from toolyard.tools.instance import ToolOutcome

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="needs toolyard[mcp]")

SERVER = str(Path(__file__).parent / "mcp_server.py")
STDIO = {"command": sys.executable, "args": [SERVER, "stdio"]}
TRANSPORTS = ("stdio", "http", "legacy", "sse")
Tools = Mapping[str, BaseTool]


def load(folder: Path, servers: Mapping[str, Any], selected: list[str] | None = None, **config: Any) -> Tools:
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    entry = {
        "class_name": "toolyard.tools.mcp.MCPTool",
        "config": {"type": "mcp", **config},
        "mcp": {"mcp_servers_config_path": "mcp.json", "tool_selected_list": selected},
    }
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    return {tool.name: tool for tool in initialize_tools_from_config(folder / "tools.yaml")}


async def close(tools: Tools) -> None:
    for tool in tools.values():
        await tool.close()


@contextlib.asynccontextmanager
async def loaded(folder: Path, servers: Mapping[str, Any], **config: Any) -> AsyncIterator[Tools]:
    tools = load(folder, servers, **config)  # blocking, in the thread of a running loop
    try:
        yield tools
    finally:
        await close(tools)


async def said(tool: BaseTool, **arguments: Any) -> str:
    return (await tool.execute("trajectory", arguments))[0].text or ""


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(0.01)


def told(mark: Path, word: str) -> bool:
    return mark.exists() and mark.read_text() == word


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@contextlib.contextmanager
def serving(kind: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, SERVER, kind, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """The URLs of servers that all tests share."""
    ports = {kind: free_port() for kind in ("http", "legacy-http", "sse")}
    with contextlib.ExitStack() as stack:
        for kind, port in ports.items():
            stack.enter_context(serving(kind, port))
        while not all(map(answers, ports.values())):
            time.sleep(0.05)
        yield {kind: f"http://127.0.0.1:{port}/{'sse' if kind == 'sse' else 'mcp'}" for kind, port in ports.items()}


@pytest.fixture(scope="module")
def tools(urls: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    """Tools of four servers with the same tools, so each name gets its server's as a prefix."""
    servers = {
        "stdio": STDIO,
        "http": {"url": urls["http"], "type": "streamable-http"},
        "legacy": {"url": urls["legacy-http"]},
        "sse": {"url": urls["sse"]},
    }
    found = load(tmp_path_factory.mktemp("shared"), servers)
    yield found
    asyncio.run(close(found))


# What a model sees ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_tool_of_any_transport_is_called_with_nested_arguments(tools: Tools, transport: str) -> None:
    order = {"items": [{"name": "nut", "amount": 3}, {"name": "bolt"}], "ship": "sea", "notes": {"a": 1, "b": "ö"}}
    async with open_instances(tools, "trajectory") as instances:
        result = await instances.call(f"{transport}_order", json.dumps({"order": order}))
        assert result.outcome is ToolOutcome.OK
        assert result.response.text == '4 pieces by sea; notes: {"a": 1, "b": "\\u00f6"}'
        assert result.metrics == {"is_error": False}
        refused = await instances.call(f"{transport}_order", {"order": {"items": [{"amount": 3}], "ship": "rail"}})
        assert refused.outcome is ToolOutcome.BAD_ARGUMENTS, "checked against the whole schema, before it is sent"


@pytest.mark.parametrize("name", ["mcp_search_tool.MCPSearchTool", "mcp_base_tool.MCPBaseTool"])
def test_a_tool_file_of_verl_loads_as_it_is_from_the_folder_it_was_written_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mcp_server.json").write_text(json.dumps({"mcpServers": {"Tavily Expert": STDIO}}))
    (tmp_path / "config" / "mcp_tool_config.yaml").write_text(f"""
tools:
  - class_name: verl.tools.{name}
    config:
      rate_limit: 120
      timeout: 120
      type: mcp
    mcp:
      mcp_servers_config_path: ./config/mcp_server.json
      tool_selected_list:
        - add
""")
    monkeypatch.chdir(tmp_path)
    [tool] = initialize_tools_from_config("config/mcp_tool_config.yaml")
    try:
        assert (tool.name, type(tool).__name__) == ("add", "MCPTool")
    finally:
        asyncio.run(tool.close())


async def test_servers_with_the_same_tools_are_told_apart(tools: Tools) -> None:
    pids = {transport: await said(tools[f"{transport}_pid"]) for transport in TRANSPORTS}
    assert len(set(pids.values())) == 4
    assert int(pids["stdio"]) in children()


def test_a_schema_arrives_whole(tools: Tools) -> None:
    schema = tools["stdio_order"].get_openai_tool_schema().model_dump()["function"]
    assert schema["description"] == "Takes an order."
    assert schema["parameters"]["properties"] == {"order": {"$ref": "#/$defs/Order"}}
    order = schema["parameters"]["$defs"]["Order"]
    assert order["properties"]["items"]["items"] == {"$ref": "#/$defs/Item"}
    assert order["properties"]["ship"]["anyOf"] == [{"enum": ["air", "sea"], "type": "string"}, {"type": "null"}]
    assert order["properties"]["notes"]["additionalProperties"]["anyOf"] == [{"type": "string"}, {"type": "integer"}]


@pytest.mark.parametrize("transport", ["stdio", "http", "legacy"])  # over the old SSE the SDK allows no more
async def test_a_picture_larger_than_a_mebibyte_arrives(tools: Tools, transport: str) -> None:
    from mcp_server import PNG

    response, _, _ = await tools[f"{transport}_picture"].execute("trajectory", {"size": 2 << 20})
    assert response.text == "a dot"
    assert response.image is not None
    [image] = response.image
    assert image["mime_type"] == "image/png"
    assert base64.b64decode(image["data"]) == PNG + bytes(2 << 20)


async def test_structured_content_is_json_where_there_is_no_text(tools: Tools) -> None:
    assert json.loads(await said(tools["stdio_structured"])) == {"städte": [{"name": "Köln", "people": 1087863}]}
    assert await said(tools["stdio_add"], a=1, b=2) == "3"


async def test_resources_and_links_are_text_and_their_pictures_are_images(tools: Tools) -> None:
    response, _, _ = await tools["stdio_resources"].execute("trajectory", {})
    assert (response.text or "").splitlines() == [
        "first",
        "[resource file:///notes.txt: notes, what was said]",
        "inside",
        "[resource file:///a.zip: application/zip, 4 bytes]",
        "[audio: audio/wav, 4 bytes]",
    ]
    assert response.image == [{"mime_type": "image/gif", "data": "R0lG"}]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_error_of_the_tool_is_an_answer_for_the_model(tools: Tools, transport: str) -> None:
    async with open_instances(tools, "trajectory") as instances:
        failed = await instances.call(f"{transport}_fail", {"reason": "no such city"})
        assert (failed.outcome, failed.response.text) == (ToolOutcome.OK, "Error: no such city")
        assert failed.metrics == {"is_error": True}
        unknown = await instances.call("nonexistent", {})
        assert unknown.outcome is ToolOutcome.UNKNOWN_TOOL
        assert f"{transport}_add" in (unknown.response.text or "")


async def test_a_name_that_functions_may_not_have_is_replaced_and_found_again(tools: Tools) -> None:
    assert await said(tools["http_files_read_all"]) == "read"


async def test_stderr_of_a_server_goes_to_the_log_and_not_to_the_terminal(
    tools: Tools, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "toolyard.tools.mcp"):
        await said(tools["stdio_complain"], text="no disk left")
        await until(lambda: "stdio: no disk left" in caplog.messages)
    assert "no disk left" not in capfd.readouterr().err


# Many at once ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_hundred_calls_share_one_session(tools: Tools, transport: str) -> None:
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        tool = tools[f"{transport}_together"]
        calls = [group.create_task(said(tool, number=100, me=number)) for number in range(100)]
    assert [call.result() for call in calls] == [str(number) for number in range(100)]


async def test_calls_come_from_any_event_loop(tools: Tools) -> None:
    def elsewhere() -> str:
        return asyncio.run(said(tools["stdio_add"], a=20, b=22))

    assert [await asyncio.to_thread(elsewhere), await said(tools["stdio_add"], a=1, b=1)] == ["42", "2"]


async def test_the_rate_limit_holds_over_all_tools_of_the_entry(tmp_path: Path, urls: dict[str, str]) -> None:
    async with (
        loaded(tmp_path, {"one": {"url": urls["http"]}}, rate_limit=2) as tools,
        asyncio.TaskGroup() as group,
    ):
        calls = [group.create_task(said(tools["busy"], seconds=0.1)) for _ in range(7)]
        other = group.create_task(said(tools["pid"]))
    assert other.result()
    assert max(int(call.result()) for call in calls) == 2


# Time-outs and cancellation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stdio", "http", "legacy-http", "sse"])
async def test_a_slow_server_is_told_that_its_call_was_cancelled_and_goes_on(
    tmp_path: Path, urls: dict[str, str], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "mark"
    server = STDIO if kind == "stdio" else {"url": urls[kind]}
    async with (
        loaded(tmp_path, {"one": server}, timeout=1.5, ping_seconds=30) as tools,
        open_instances(tools, "trajectory") as instances,
    ):
        before = await said(tools["pid"])
        caplog.set_level(logging.INFO, "toolyard.tools.mcp")
        result = await instances.call("slow", {"seconds": 60, "mark": str(mark)})
        assert result.outcome is ToolOutcome.RAISED
        assert result.attempts == 1, "a slow call is not made again"
        assert "did not answer within 1.5 s; the call was cancelled" in (result.response.text or "")
        if kind != "sse":  # of the SDK's own server
            await until(lambda: told(mark, "cancelled"))
        assert await said(tools["pid"]) == before, "the process goes on"
        assert caplog.messages == [], "and so does the session"


@pytest.mark.parametrize("transport", ["stdio", "http", "legacy"])
async def test_a_cancelled_call_is_cancelled_at_the_server(tools: Tools, transport: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    call = asyncio.create_task(said(tools[f"{transport}_slow"], seconds=60, mark=str(mark)))
    await until(lambda: told(mark, "began"))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: told(mark, "cancelled"))
    assert await said(tools[f"{transport}_add"], a=1, b=2) == "3"


# Servers that die, or are not what they should be ---------------------------------------------------------------------


@pytest.mark.slow
async def test_a_killed_server_is_started_again_and_its_tools_are_read_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "toolyard.tools.mcp")
    mark, without, go_on = tmp_path / "mark", tmp_path / "without", tmp_path / "go_on"
    server = {**STDIO, "env": {"WITHOUT": str(without)}}
    async with loaded(tmp_path, {"one": server}) as tools, open_instances(tools, "trajectory") as instances:
        # Direct calls to a tool are not retried.
        first = int(await said(tools["pid"]))
        call = asyncio.create_task(said(tools["slow"], seconds=60, mark=str(mark)))
        await until(lambda: told(mark, "began"))
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ToolError, match="server 'one'") as failure:
            await call
        assert failure.value.retryable

        # The next call finds a new process; an instance's own retry finds one too.
        second = int(await said(tools["pid"]))
        assert second != first
        mark.unlink()
        waits = {"seconds": 0, "mark": str(mark), "until": str(go_on)}
        retried = asyncio.create_task(instances.call("slow", waits))
        await until(lambda: told(mark, "began"))
        os.kill(second, signal.SIGKILL)
        go_on.touch()
        result = await retried
        assert (result.outcome, result.response.text, result.attempts) == (ToolOutcome.OK, "done", 2)

        # The next call does not notice a server that died between calls.
        third = int(await said(tools["pid"]))
        without.touch()
        os.kill(third, signal.SIGKILL)
        await until(lambda: caplog.messages.count("one: the connection has ended") == 3)
        assert (await instances.call("pid", {})).attempts == 1
        gone = await instances.call("extra", {})
        assert "no longer has a tool 'extra'. It has: add, order" in (gone.response.text or "")
        assert gone.metrics == {"is_error": True}
    assert not [pid for pid in (first, second, third) if alive(pid)]


@pytest.mark.slow
async def test_an_http_server_that_was_restarted_gets_a_new_session_and_one_that_is_down_a_clear_error(
    tmp_path: Path,
) -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:

        async def start() -> subprocess.Popen[bytes]:
            process = stack.enter_context(serving("legacy-http", port))
            await until(lambda: answers(port))
            return process

        def stop(process: subprocess.Popen[bytes]) -> None:
            process.kill()
            process.wait()

        process = await start()
        async with (
            loaded(tmp_path, {"one": {"url": f"http://127.0.0.1:{port}/mcp"}}, connect_timeout=5) as tools,
            open_instances(tools, "trajectory") as instances,
        ):
            # Back before anybody called: the session that we believe in is unknown there.
            stop(process)
            process = await start()
            result = await instances.call("add", {"a": 1, "b": 2})
            assert (result.outcome, result.response.text) == (ToolOutcome.OK, "3")

            stop(process)
            begun = time.monotonic()
            failed = await instances.call("add", {"a": 1, "b": 2})
            assert (failed.outcome, failed.attempts) == (ToolOutcome.FAILED, 3)
            assert "server 'one', tool 'add': ConnectError: All connection attempts failed" in (failed.error or "")
            assert time.monotonic() - begun < patient(5)


# Servers that hang ----------------------------------------------------------------------------------------------------

HASTY = {"timeout": 2, "ping_seconds": 1}
"""So that tests need not wait long for a server that hangs. What lives must answer a call within 2 s."""


async def stop(pid: int) -> None:
    """As a server that hangs: it has its connections and its process, takes what it is sent, and says nothing."""
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


@pytest.mark.slow
async def test_a_call_in_flight_at_a_server_that_hangs_is_made_again_at_its_replacement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark, go_on = tmp_path / "mark", tmp_path / "go_on"
    async with loaded(tmp_path, {"one": STDIO}, **HASTY) as tools, open_instances(tools, "trajectory") as instances:
        hung = int(await said(tools["pid"]))
        waits = {"seconds": 0, "mark": str(mark), "until": str(go_on)}
        call = asyncio.create_task(instances.call("slow", waits))
        await until(lambda: told(mark, "began"))
        await stop(hung)
        go_on.touch()
        result = await call
        assert (result.outcome, result.response.text, result.attempts) == (ToolOutcome.OK, "done", 2)
        assert not alive(hung), "there are never two processes of one server"
        assert "one hangs: it sent nothing for 1 s after a ping; the connection is replaced" in caplog.messages

        # Direct calls to a tool are not retried; the caller reads what happened.
        await stop(int(await said(tools["pid"])))
        with pytest.raises(ToolError) as failure:
            await said(tools["add"], a=1, b=2)
        assert failure.value.retryable
        assert str(failure.value).startswith("MCP server 'one', tool 'add': it hangs: it sent nothing for 1 s after a ")
        assert await said(tools["add"], a=1, b=2) == "3"


@pytest.mark.slow
async def test_forty_calls_at_a_server_that_hangs_share_one_ping_and_one_replacement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """More of them than fit into the pipe of a process that does not read."""
    caplog.set_level(logging.INFO, "toolyard.tools.mcp")
    slowly = {name: patient(seconds) for name, seconds in HASTY.items()}  # the replacement answers all of them
    async with loaded(tmp_path, {"one": STDIO}, **slowly) as tools, contextlib.AsyncExitStack() as stack:
        instances = [await stack.enter_async_context(open_instances(tools, f"trajectory {n}")) for n in range(40)]
        hung = int(await said(tools["pid"]))
        await stop(hung)
        async with asyncio.timeout(60 + 3 * sum(slowly.values())), asyncio.TaskGroup() as group:
            calls = [group.create_task(one.call("pid", {"padding": "x" * 16_000})) for one in instances]
        results = [call.result() for call in calls]
        assert {(result.outcome, result.attempts) for result in results} == {(ToolOutcome.OK, 2)}
        [replacement] = {int(result.response.text or "") for result in results}
        assert replacement != hung
        assert sum("hangs" in message for message in caplog.messages) == 1
        assert caplog.messages.count("one: the connection has ended") == 1
        assert not [message for message in caplog.messages if "write blocked" in message], "calls end when cancelled"
        assert not alive(hung)
    assert not alive(replacement)


@pytest.mark.exhaustive
async def test_calls_that_wait_for_their_turn_at_a_server_that_hangs_get_its_replacement(tmp_path: Path) -> None:
    async with (
        loaded(tmp_path, {"one": STDIO}, rate_limit=2, **HASTY) as tools,
        open_instances(tools, "trajectory") as instances,
    ):
        hung = await said(tools["pid"])
        await stop(int(hung))
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            calls = [group.create_task(instances.call("pid", {})) for _ in range(6)]
        results = [call.result() for call in calls]
        assert {result.outcome for result in results} == {ToolOutcome.OK}
        assert len({result.response.text for result in results} - {hung}) == 1
        assert sorted(result.attempts for result in results) == [1, 1, 1, 1, 2, 2]


@pytest.mark.exhaustive
async def test_http_servers_that_hang_are_our_failure_until_they_go_on(tmp_path: Path) -> None:
    kinds = {"http": "mcp", "legacy-http": "mcp", "sse": "sse"}
    ports = {kind: free_port() for kind in kinds}
    servers = {kind: {"url": f"http://127.0.0.1:{ports[kind]}/{path}"} for kind, path in kinds.items()}
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(serving(kind, port)) for kind, port in ports.items()]
        await until(lambda: all(map(answers, ports.values())))
        async with (
            loaded(tmp_path, servers, connect_timeout=4, call={"retries": 1}, **HASTY) as tools,
            open_instances(tools, "trajectory") as instances,
        ):

            async def added() -> dict[str, Any]:
                async with asyncio.timeout(30), asyncio.TaskGroup() as group:
                    calls = {kind: group.create_task(instances.call(f"{kind}_add", {"a": 1, "b": 2})) for kind in kinds}
                return {kind: call.result() for kind, call in calls.items()}

            for process in processes:
                await stop(process.pid)
            for kind, result in (await added()).items():
                assert (result.outcome, result.attempts) == (ToolOutcome.FAILED, 2), kind
                assert f"server '{kind}', tool 'add': could not connect within 4 s" in result.error
            for process in processes:
                process.send_signal(signal.SIGCONT)
            assert {result.response.text for result in (await added()).values()} == {"3"}


@pytest.mark.slow
def test_an_http_server_that_hangs_after_its_introduction_is_given_up_in_time(tmp_path: Path) -> None:
    """Without waiting for it to hear that the session is over."""
    goodbye, ended = threading.Event(), threading.Event()

    class Hanging(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if request["method"] == "initialize":
                information = {"name": "hanging", "version": "0"}
                result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": information}
                self.reply(200, {"jsonrpc": "2.0", "id": request["id"], "result": result})
            elif request["method"] == "tools/list":
                ended.wait()
            else:
                self.reply(202 if request["method"] == "notifications/initialized" else 400)

        def do_GET(self) -> None:
            self.reply(405)

        def do_DELETE(self) -> None:
            goodbye.set()
            ended.wait()

        def reply(self, status: int, content: Any = None) -> None:
            body = b"" if content is None else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Mcp-Session-Id", "1")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hanging) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/mcp"
        begun = time.monotonic()
        try:
            with pytest.raises(ToolError, match="server 'one': could not connect within 2 s"):
                load(tmp_path, {"one": {"url": url}}, connect_timeout=2)
        finally:
            ended.set()
            server.shutdown()
    assert goodbye.is_set()
    assert time.monotonic() - begun < patient(30)


@pytest.mark.exhaustive
async def test_a_server_that_blocks_its_own_event_loop_hangs(tmp_path: Path) -> None:
    async with (
        loaded(tmp_path, {"one": STDIO}, call={"retries": 0}, **HASTY) as tools,
        open_instances(tools, "trajectory") as instances,
    ):
        blocked = int(await said(tools["pid"]))
        result = await instances.call("freeze", {"seconds": 60})
        assert result.outcome is ToolOutcome.FAILED
        assert "MCP server 'one', tool 'freeze': it hangs" in (result.error or "")
        assert (await instances.call("add", {"a": 1, "b": 2})).response.text == "3"
        assert not alive(blocked)


@pytest.mark.exhaustive
async def test_cancelling_the_caller_that_pings_leaves_the_others_their_replacement(tmp_path: Path) -> None:
    async with loaded(tmp_path, {"one": STDIO}, **HASTY) as tools, open_instances(tools, "trajectory") as instances:
        hung = await said(tools["pid"])
        await stop(int(hung))
        first, second = (asyncio.create_task(instances.call("pid", {})) for _ in range(2))
        connection = tools["pid"].source.server._current
        await until(lambda: connection._pinging.locked())
        third = asyncio.create_task(instances.call("pid", {}))  # its own time is not over when the server is given up
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        results = [await second, await third]
        assert {(result.outcome, result.attempts) for result in results} == {(ToolOutcome.OK, 2)}
        assert len({result.response.text for result in results} - {hung}) == 1


OLD = """
import json, sys, time

def tool(name, **properties):
    return {"name": name, "inputSchema": {"type": "object", "properties": properties}}

def nap(given):
    time.sleep(given["seconds"])
    return {"content": []}

PAGES = {None: ([tool("echo", what=True)], "2"), "2": ([tool("refuse"), tool("lie"), tool("nap", seconds=True)], None)}
RESULTS = {
    "echo": lambda given: {"content": [{"type": "text", "text": given["what"]}]},
    "lie": lambda given: {"no": 1},
    "nap": nap,
}

for number, line in enumerate(sys.stdin):
    message = json.loads(line)
    method, given = message["method"], message.get("params") or {}
    if number == 0 and method != "initialize":
        sys.exit(f"expected initialize, got {method}")
    if method == "initialize":
        result = {"protocolVersion": "2024-11-05", "capabilities": {}, "serverInfo": {"name": "old", "version": "0"}}
    elif method == "tools/list":
        tools, cursor = PAGES[given.get("cursor")]
        result = {"tools": tools} | ({"nextCursor": cursor} if cursor else {})
    elif method == "tools/call":
        make = RESULTS.get(given["name"])
        result = make(given["arguments"]) if make else None
    else:
        continue
    answer = {"result": result} if result else {"error": {"code": -32602, "message": "not today"}}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)
"""


async def test_a_server_of_the_first_days_works_and_its_refusals_are_for_the_model(tmp_path: Path) -> None:
    server = {"command": sys.executable, "args": ["-c", OLD]}
    async with loaded(tmp_path, {"old": server}) as tools, open_instances(tools, "trajectory") as instances:
        assert list(tools) == ["echo", "refuse", "lie", "nap"], "of all pages"
        assert (await instances.call("echo", {"what": "hello"})).response.text == "hello"
        refused = await instances.call("refuse", {})
        assert (refused.outcome, refused.response.text) == (ToolOutcome.OK, "Error: not today")
        assert refused.metrics == {"is_error": True}
        lied = await instances.call("lie", {})
        assert (lied.outcome, lied.attempts) == (ToolOutcome.RAISED, 1)
        assert "server 'old', tool 'lie': its answer is not a valid result" in (lied.response.text or "")


@pytest.mark.slow
async def test_a_server_that_does_one_thing_after_the_other_is_slow_and_does_not_hang(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not get to the ping in time, but it answers what came before."""
    server = {"command": sys.executable, "args": ["-c", OLD]}
    async with (
        loaded(tmp_path, {"old": server}, timeout=3, ping_seconds=3) as tools,
        open_instances(tools, "trajectory") as instances,
    ):
        caplog.set_level(logging.INFO, "toolyard.tools.mcp")
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            calls = [group.create_task(instances.call("nap", {"seconds": 1})) for _ in range(8)]
        assert {call.result().outcome for call in calls} == {ToolOutcome.OK, ToolOutcome.RAISED}
        assert caplog.messages == [], "the session goes on"


@pytest.mark.slow
async def test_lines_that_are_not_mcp_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrapper = f"printf 'Welcome!\\n\\377\\376 {{\\n[]\\n\\n'; exec {sys.executable} {SERVER} stdio"
    async with loaded(tmp_path, {"chatty": {"command": "sh", "args": ["-c", wrapper]}}) as tools:
        assert await said(tools["add"], a=1, b=2) == "3"
    assert any("chatty sends data that is not MCP" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("program", "seconds", "reason"),
    [
        ("cat > /dev/null", 0.5, "could not connect within 0.5 s"),
        (
            "yes garbage | head -n 1000; cat > /dev/null",
            1,
            "could not connect within 1 s; it sends data that is not MCP",
        ),
        ("echo 'no license' >&2; exit 3", 20, "connection closed; its stderr ends with: no license"),
    ],
    ids=["silent", "garbage", "dies"],
)
async def test_a_server_that_never_introduces_itself_is_given_up_and_ended(
    tmp_path: Path, program: str, seconds: float, reason: str
) -> None:
    before, start = children(), time.monotonic()
    with pytest.raises(ToolError) as failure:
        load(tmp_path, {"odd": {"command": "sh", "args": ["-c", program]}}, connect_timeout=seconds)
    assert str(failure.value) == f"{tmp_path}/mcp.json: server 'odd': {reason}"
    assert failure.value.retryable
    assert time.monotonic() - start < patient(10)
    assert children() == before


def test_a_program_that_is_not_there_is_an_error_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server 'none': No such file or directory: 'no-such-program'"):
        load(tmp_path, {"none": {"command": "no-such-program"}})


def test_an_http_server_that_refuses_us_is_named_with_its_status(tmp_path: Path) -> None:
    seen: list[str | None] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/mcp"
        with pytest.raises(ToolError, match=r"server 'closed': server returned an error response \(HTTP 401\)"):
            load(tmp_path, {"closed": {"url": url, "auth_token": "wrong"}})
        server.shutdown()
    assert set(seen) == {"Bearer wrong"}


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_closing_the_last_tool_ends_even_a_stubborn_server(tmp_path: Path, urls: dict[str, str]) -> None:
    before = children()
    servers = {"stubborn": {**STDIO, "env": {"STUBBORN": "1"}}, "other": {"url": urls["http"]}}
    tools = load(tmp_path, servers, selected=["stubborn_pid", "stubborn_add"])
    assert sorted(tools) == ["stubborn_add", "stubborn_pid"]
    server = int(await said(tools["stubborn_pid"]))
    await tools["stubborn_pid"].close()
    assert await said(tools["stubborn_add"], a=1, b=2) == "3", "the server is still in use"
    with pytest.raises(ToolError, match="'stubborn_pid' was closed"):
        await said(tools["stubborn_pid"])
    await tools["stubborn_add"].close()
    await tools["stubborn_add"].close()
    assert not alive(server)
    assert children() == before


def test_a_selected_tool_that_no_server_has_is_an_error_and_ends_the_servers(
    tmp_path: Path, urls: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match=r"tool_selected_list: no server has 'subtract'; available: add, order, "):
        load(tmp_path, {"one": {"url": urls["http"]}}, selected=["add", "subtract"])


OWNER = """
import asyncio, sys, time
from pathlib import Path
from toolyard.tools import initialize_tools_from_config
tools = {tool.name: tool for tool in initialize_tools_from_config(sys.argv[1])}
print(asyncio.run(tools["pid"].execute("x", {}))[0].text, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_no_server_outlives_its_owner(tmp_path: Path, urls: dict[str, str]) -> None:
    asyncio.run(close(load(tmp_path, {"one": {"url": urls["http"]}})))  # for its tools.yaml
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"one": STDIO}}))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", OWNER, str(tmp_path / "tools.yaml")]
    with subprocess.Popen(command, **pipes) as leaving, subprocess.Popen(command, **pipes) as killed:
        servers = [int(owner.stdout.readline()) for owner in (leaving, killed)]
        assert all(map(alive, servers))
        killed.kill()
        leaving.stdin.close()
        assert leaving.wait(20) == 0
        assert not alive(servers[0]), "it was waited for"
        assert leaving.stderr.read() == b""
        asyncio.run(until(lambda: not alive(servers[1])))


def test_the_example_prints_what_its_readme_shows_whatever_the_variable_python_holds() -> None:
    example = Path(__file__).parents[2] / "examples" / "mcp_tool"
    done = subprocess.run(
        [sys.executable, str(example / "run.py")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHON": "/nowhere/python"},  # as set by `make PYTHON=…` and many a shell profile
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"```\n{done.stdout}```\n" in (example / "README.md").read_text()
