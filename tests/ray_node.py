"""A Ray of one node in processes of its own. Starting one takes seconds, so all files of a test process share it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.2"
"""Not 127.0.0.1, which Ray takes for a mistake and replaces."""
START_SECONDS = 240
"""On a machine with far too much to do; a few otherwise."""


@dataclass(frozen=True)
class RayNode:
    address: str
    marker: str
    """In the environment of each of its processes."""


@contextmanager
def ray_node() -> Generator[RayNode]:
    folder = tempfile.mkdtemp(prefix="ty-")  # short: Ray puts sockets in it
    port = free_port(HOST)
    name, value = "TOOLYARD_TEST_RAY", uuid.uuid4().hex
    marker = f"{name}={value}"
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
        f"--port={port}", f"--node-ip-address={HOST}", f"--temp-dir={folder}", "--num-cpus=2",
        "--object-store-memory=100000000", "--include-dashboard=false", "--disable-usage-stats",
        # Any ports: by default every Ray of this address gives its workers the same ones.
        "--min-worker-port=0", "--max-worker-port=0",
    ]  # fmt: skip
    # Without a token, which Ray would write to the user's home.
    environment = {**os.environ, name: value, "RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
    output = Path(folder, "output")

    def start() -> subprocess.Popen[bytes]:
        with output.open("w") as said:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)

    def stop() -> None:
        while left := processes_of(marker):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()  # or it stays as a zombie
            time.sleep(0.01)
        process.wait()

    process = start()
    try:
        deadline = time.monotonic() + START_SECONDS
        # Not when its port is open: the node itself is there later, and until then nobody can connect.
        while "Ray runtime started" not in output.read_text():
            assert time.monotonic() < deadline, f"not within {START_SECONDS} s: {output.read_text()[-2000:]}"
            if process.poll() is not None:  # on a busy machine: it gives itself 30 s
                stop()
                process = start()
            time.sleep(0.1)
        yield RayNode(f"{HOST}:{port}", marker)
    finally:
        stop()
        shutil.rmtree(folder, ignore_errors=True)


def processes_of(marker: str) -> list[int]:
    """Everything that was started with the marker in its environment."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        return found.getsockname()[1]
