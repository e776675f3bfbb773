"""The gateway's own cost: CPU per request, with an engine that costs nothing, against a bare server.

    python benchmarks/gateway.py             about three minutes
    python benchmarks/gateway.py --quick     rougher, about half a minute
    python benchmarks/gateway.py --profile   where the time of one row goes, instead of the table

512 sessions at once, each on its own connection, play conversations of 1, 8 and 32 turns: the model calls a tool, the
agent sends the result. Client and server are processes of their own; what counts is user and system time of the
server's process, divided by the requests. "floor" is a starlette app under uvicorn that reads the same requests as JSON
and answers with a fixed completion. All rows are measured in the same run; with several rounds, the best one counts,
since the machine may be busy. The engine is scripted and the tokenizer byte-level: a prompt has about four times as
many tokens as with a real one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import uvicorn
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from toolyard.chat.formats import open_format
from toolyard.engines.protocol import Sampling
from toolyard.engines.scripted import ScriptedEngine
from toolyard.gateway.config import GatewayConfig
from toolyard.gateway.server import listen, open_gateway
from toolyard.testing.engine.byte_tokenizer import ByteTokenizer

GOAL_MS = 2.0
"""CPU of the gateway per request."""
CALL = 'Let me see.<tool_call>\n{"name": "add", "arguments": {"numbers": [1, 2, 3]}}\n</tool_call><|im_end|>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds numbers.",
            "parameters": {
                "type": "object",
                "properties": {"numbers": {"type": "array", "items": {"type": "number"}}},
                "required": ["numbers"],
            },
        },
    }
]
SYSTEM = "You are a calculator. " * 20
LENGTHS = (1, 8, 32)


# The servers, in a process of their own -------------------------------------------------------------------------------


def serve_gateway(tell: Connection, profile: bool) -> None:
    gc.set_threshold(50_000, 20, 50)  # as `toolyard gateway` does

    async def serve() -> None:
        tokenizer = ByteTokenizer()
        answer = tokenizer.encode(CALL)
        config = GatewayConfig(port=0, sampling=Sampling(max_tokens=1024))
        listener = listen(config)
        chat = open_format(tokenizer, format="hermes")
        async with (
            ScriptedEngine(lambda *_: answer) as engine,
            open_gateway(config, engine, chat, tokenizer, listener=listener),
        ):
            await _answer_questions(tell, listener.getsockname()[1])

    _run(serve, profile)


def serve_floor(tell: Connection, profile: bool) -> None:
    call = {"id": "t00000c00", "type": "function", "function": {"name": "add", "arguments": '{"numbers": [1, 2, 3]}'}}
    message = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    head = {"id": "chatcmpl-0123456789abcdef01234567", "object": "chat.completion", "created": 1, "model": "m"}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    deltas = [{"role": "assistant", "content": ""}, {"content": "Let me see."}, {"tool_calls": [call]}, {}]

    async def complete(request: Request) -> JSONResponse | StreamingResponse:
        if not (await request.json()).get("stream"):
            return JSONResponse({**head, "choices": [choice], "usage": {"total_tokens": 1}})

        async def events():
            for delta in deltas:
                yield f"data: {json.dumps({**head, 'choices': [{'index': 0, 'delta': delta}]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def serve() -> None:
        app = Starlette(routes=[Route("/s/{session}/v1/chat/completions", complete, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, lifespan="off"))
        listener = listen(GatewayConfig(port=0))
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            await _answer_questions(tell, listener.getsockname()[1])
            server.should_exit = True

    _run(serve, profile)


def _run(serve: Any, profile: bool) -> None:
    if not profile:
        asyncio.run(serve())
        return
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.runcall(asyncio.run, serve())
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(32)


async def _answer_questions(tell: Connection, port: int) -> None:
    """Send the port, then the CPU seconds of this process for everything that is received, until it is None."""
    tell.send(port)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(EOFError):  # the client was killed
        while await loop.run_in_executor(None, tell.recv) is not None:
            tell.send(time.process_time())


@dataclass
class Server:
    process: Any
    tell: Connection
    port: int

    @classmethod
    def start(cls, serve: Any, profile: bool = False) -> Server:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, profile))
        process.start()
        theirs.close()
        return cls(process, ours, ours.recv())

    def cpu(self) -> float:
        self.tell.send("cpu")
        return self.tell.recv()

    def memory_mib(self) -> float:
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

    def stop(self) -> None:
        self.tell.send(None)
        self.process.join()


# The client -----------------------------------------------------------------------------------------------------------


async def play(port: int, session: str, turns: int, stream: bool) -> None:
    """One conversation over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Exercise {session}"}]
    for _ in range(turns):
        body = json.dumps({"model": "m", "messages": messages, "tools": TOOLS, "stream": stream}).encode()
        head = f"POST /s/{session}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        message = await (_streamed(reader) if stream else _whole(reader))
        results = [{"role": "tool", "tool_call_id": one["id"], "content": "6"} for one in message["tool_calls"]]
        messages += [message, *results]
    writer.close()


async def _whole(reader: asyncio.StreamReader) -> Any:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert b" 200 " in head, head
    body = await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
    return json.loads(body)["choices"][0]["message"]


async def _streamed(reader: asyncio.StreamReader) -> Any:
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head, head
    data = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    content, calls = "", list[Any]()
    for line in data.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        delta = json.loads(line[6:])["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append(call)
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return {"role": "assistant", "content": content, "tool_calls": calls}


async def play_all(port: int, name: str, sessions: int, turns: int, stream: bool) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(sessions):
            group.create_task(play(port, f"{name}-{number}", turns, stream))


# The table ------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    turns: int
    stream: bool
    floor_ms: float = float("inf")
    gateway_ms: float = float("inf")
    seconds: float = float("inf")
    """Of the gateway's best round."""

    @property
    def overhead_ms(self) -> float:
        return self.gateway_ms - self.floor_ms


def measure(servers: Sequence[Server], row: Row, sessions: int, label: str) -> None:
    for server, name in zip(servers, ("floor_ms", "gateway_ms"), strict=True):
        before, began = server.cpu(), time.perf_counter()
        asyncio.run(play_all(server.port, label, sessions, row.turns, row.stream))
        spent = (server.cpu() - before) / (sessions * row.turns) * 1000
        if spent < getattr(row, name):
            setattr(row, name, spent)
            if name == "gateway_ms":
                row.seconds = time.perf_counter() - began


def show(rows: Sequence[Row], sessions: int, memory: float) -> None:
    table = Table(box=SIMPLE_HEAD, title=f"CPU per request, {sessions} sessions at once", title_justify="left")
    for name in ("Turns", "Answer"):
        table.add_column(name)
    for name in ("Floor, ms", "Gateway, ms", "Overhead, ms", "Requests/s"):
        table.add_column(name, justify="right")
    for row in rows:
        mark = "" if row.overhead_ms <= GOAL_MS else " [red]over[/]"
        rate = sessions * row.turns / row.seconds
        kind = "stream" if row.stream else "whole"
        costs = (f"{row.floor_ms:.2f}", f"{row.gateway_ms:.2f}", f"{row.overhead_ms:.2f}{mark}")
        table.add_row(str(row.turns), kind, *costs, f"{rate:,.0f}")
    console = Console()
    console.print(table)
    console.print(f"goal: overhead at most {GOAL_MS:g} ms; memory of the gateway at the end: {memory:,.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="One round of 64 sessions.")
    parser.add_argument("--profile", action="store_true", help="Profile 32 turns, not streamed, and exit.")
    parser.add_argument("--sessions", type=int, default=512, help="Sessions at once (default: %(default)s).")
    parser.add_argument("--rounds", type=int, default=1, help="Rounds; the best counts (default: %(default)s).")
    given = parser.parse_args()
    sessions, rounds = (64, 1) if given.quick else (given.sessions, given.rounds)
    if given.profile:
        server = Server.start(serve_gateway, profile=True)
        asyncio.run(play_all(server.port, "profiled", sessions, 32, False))
        server.stop()
        return
    rows = [Row(turns, stream) for stream in (False, True) for turns in LENGTHS]
    servers: list[Server] = []
    memory = 0.0
    for number in range(rounds):
        # Fresh ones for every round: sessions stay open, and their memory would count toward the next.
        servers = [Server.start(serve_floor), Server.start(serve_gateway)]
        try:
            for row in rows:
                measure(servers, row, sessions, f"r{number}t{row.turns}s{int(row.stream)}")
            memory = servers[1].memory_mib()
        finally:
            for server in servers:
                server.stop()
    show(rows, sessions, memory)
    if any(row.overhead_ms > GOAL_MS for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
