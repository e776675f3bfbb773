"""A one-node Ray cluster, whose limiters can be killed and counted from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ray_node import RayNode, processes_of, ray_node

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


class RayHead:
    """Its address, and what can be done to its limiters."""

    def __init__(self, node: RayNode) -> None:
        self.address = node.address
        self._marker = node.marker

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


@contextmanager
def ray_head() -> Generator[RayHead]:
    """Not the one that other tests share: its limiters are killed."""
    with ray_node() as node:
        yield RayHead(node)
