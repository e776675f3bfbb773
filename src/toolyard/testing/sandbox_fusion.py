"""A stand-in for a SandboxFusion server, with the quirks of a real one, for testing clients.

    async with SandboxFusionServer() as server, RemoteSandbox(server.url) as sandbox:
        ...

    python -m toolyard.testing.sandbox_fusion --port 8080        the same, for benchmarks and by hand

Like SandboxFusion it has `POST /run_code` and `GET /v1/ping` with its JSON, runs one program at a time, and

* numpy cannot be imported under a memory limit, which limits address space: OpenBLAS fails to start its threads;
* only the first 256 KiB of each output are returned, without a notice;
* an unknown language, or a body that is not a valid request, is answered with 422.

It runs Python, C++ and bash as the user who started it, without any protection: use it only with your own programs. It
proves nothing about the real server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from pydantic import ValidationError

from toolyard.sandbox.wire import programs as wire

__all__ = ["KEPT_BYTES", "SandboxFusionServer"]

KEPT_BYTES = 256 * 1024
"""Bytes kept of stdout and of stderr, each."""
_NUMPY = 'raise SystemExit("OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 64: limit reached")\n'
_MIB = 1024 * 1024
_SOURCES = {"python": "main.py", "cpp": "main.cpp", "bash": "main.sh"}
_COMMANDS = {"python": [sys.executable, "main.py"], "cpp": ["./main"], "bash": ["bash", "main.sh"]}
_COMPILER = ["g++", "-O1", "main.cpp", "-o", "main"]


class SandboxFusionServer:
    """Use it with `async with`; then `url` is its address, and `requests` are the bodies sent to `/run_code`."""

    def __init__(self, *, port: int = 0, workers: int = 1) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self._port = port
        self._workers = asyncio.Semaphore(workers)
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 * _MIB)
        app.router.add_post("/run_code", self._run_code)
        app.router.add_get("/v1/ping", self._ping)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        self._open.push_async_callback(runner.cleanup)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def _ping(self, request: web.Request) -> web.Response:
        return web.json_response("pong")

    async def _run_code(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            asked = wire.RunCodeRequest.model_validate_json(body)
        except ValidationError as error:
            return web.json_response({"detail": error.errors(include_url=False, include_input=False)}, status=422)
        self.requests.append(await request.json())
        if asked.language not in _SOURCES:
            problem = {"type": "literal_error", "loc": ["body", "language"], "msg": f"unknown: {asked.language}"}
            return web.json_response({"detail": [problem]}, status=422)
        async with self._workers:
            answer = await self._answer(asked)
        return web.Response(body=wire.to_json(answer), content_type="application/json")

    async def _answer(self, asked: wire.RunCodeRequest) -> wire.RunCodeResponse:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file, content in wire.decode_files(asked.files).items():
                (folder / file).write_bytes(content)
            (folder / _SOURCES[asked.language]).write_text(asked.code)
            compiled = None
            if asked.language == "cpp":
                compiled = await _run(_COMPILER, folder, "", asked.compile_timeout)
            ran = None
            if compiled is None or compiled.return_code == 0:
                memory = asked.memory_limit_mb * _MIB
                if memory > 0:
                    (folder / "numpy.py").write_text(_NUMPY)
                ran = await _run(_COMMANDS[asked.language], folder, asked.stdin or "", asked.run_timeout, memory)
            found = [folder / file for file in asked.fetch_files]
            files = wire.encode_files({path.name: path.read_bytes() for path in found if path.is_file()})
        last = ran or compiled
        status = "Success" if last and last.return_code == 0 else "Failed"
        return wire.RunCodeResponse(status=status, compile_result=compiled, run_result=ran, files=files)


async def _run(command: list[str], folder: Path, stdin: str, seconds: float, memory: int = 0) -> wire.StageReport:
    def limit() -> None:
        if memory > 0:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    begun = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.defpath, "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=limit,
    )
    timed_out = False
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate(stdin.encode())
    except TimeoutError:
        timed_out, out, err = True, b"", b""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return wire.StageReport(
        status="TimeLimitExceeded" if timed_out else "Finished",
        execution_time=time.monotonic() - begun,
        return_code=None if timed_out else process.returncode,
        stdout=out[:KEPT_BYTES].decode("utf-8", "replace"),
        stderr=err[:KEPT_BYTES].decode("utf-8", "replace"),
    )


async def _serve(port: int) -> None:
    async with SandboxFusionServer(port=port) as server:
        print(server.url, flush=True)  # noqa: T201
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m toolyard.testing.sandbox_fusion", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="Port to listen on; 0 picks a free one.")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
