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
START_SECONDS = 120
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
        # Any ports: by default every Ray of this address takes the same ones.
        "--min-worker-port=0", "--max-worker-port=0", f"--ray-client-server-port={free_port(HOST)}",
    ]  # fmt: skip
    # Without a token, which Ray would write to the user's home.
    environment = {**os.environ, name: value, "RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _can_connect(port):
            assert process.poll() is None, "Ray did not start"
            assert time.monotonic() < deadline, f"Ray did not start within {START_SECONDS} s"
            time.sleep(0.1)
        yield RayNode(f"{HOST}:{port}", marker)
    finally:
        while left := processes_of(marker):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()  # or it stays as a zombie
            time.sleep(0.01)
        process.wait()
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


def _can_connect(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=5):
        return True
    return False
