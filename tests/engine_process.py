"""An inference server in a process of its own, for tests that kill it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

_SERVER = """
import asyncio, sys
from toolyard.testing.engine.servers import SGLANG, EngineServer

async def main():
    async with EngineServer([SGLANG], token_seconds=0.002) as server:
        server.weight_version = sys.argv[1]
        print(server.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.contextmanager
def engine_process(version: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the URL of a server whose weights have this version."""
    with subprocess.Popen([sys.executable, "-c", _SERVER, version], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
