"""A one-node Ray cluster in separate processes, whose limiters can be killed and counted from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from faulting import free_port, processes_of

_TAKE_ALL = """
import asyncio, contextlib, sys
import ray
from toolyard.limits.cluster.ray import RayLimiter

async def take_all(limiter):
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        for _ in range(limiter.limit):
            await stack.enter_async_context(limiter.permit())
    await limiter.close()

ray.init(sys.argv[1], _node_ip_address="127.0.0.2", logging_level="error", log_to_driver=False)
for name in sys.argv[2:]:
    asyncio.run(take_all(RayLimiter(name)))
"""

_HOST = "127.0.0.2"
"""Not 127.0.0.1, which Ray takes for a mistake and replaces."""


class RayHead:
    """Its address, and what can be done to its limiters."""

    def __init__(self, port: int, marker: str) -> None:
        self.address = f"{_HOST}:{port}"
        self._marker = marker

    def kill_limiters(self) -> int:
        """kill -9 of every limiter's actor; Ray starts them again. How many there were."""
        killed = 0
        for pid in processes_of(self._marker):
            with contextlib.suppress(OSError):
                if b"ray::Lender" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        return killed

    async def check_permits(self, *names: str) -> None:
        """A process of its own takes all permits of these limiters at once: none is held, and none was lost."""
        command = [sys.executable, "-c", _TAKE_ALL, self.address, *names]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        said = (await process.communicate())[1].decode()
        assert process.returncode == 0, f"not all permits of {', '.join(names)} can be had: {said[-2000:]}"


@asynccontextmanager
async def ray_head() -> AsyncGenerator[RayHead]:
    folder = tempfile.mkdtemp(prefix="ty-")  # short: Ray puts sockets in it
    port = free_port(_HOST)
    marker = f"TOOLYARD_TEST_RAY={uuid.uuid4().hex}"
    name, _, value = marker.partition("=")
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
        f"--port={port}", f"--node-ip-address={_HOST}", f"--temp-dir={folder}", "--num-cpus=2",
        "--object-store-memory=100000000", "--include-dashboard=false", "--disable-usage-stats",
        # Without a token, which Ray would write to the user's home.
        env={**os.environ, name: value, "RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            while not await can_connect(port):
                assert process.returncode is None, "Ray did not start"
                await asyncio.sleep(0.1)
        yield RayHead(port, marker)
    finally:
        while left := processes_of(marker):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        await process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def can_connect(port: int) -> bool:
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(_HOST, port)
        writer.close()
        return True
    return False
