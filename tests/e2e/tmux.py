"""A command in a real terminal, under tmux."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

PATIENCE = 30.0

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


def environment() -> dict[str, str]:
    """The environment without variables that override the terminal's size."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


class Tmux:
    """A session under a server of its own."""

    def __init__(self, folder: Path) -> None:
        self._socket = str(folder / "tmux")

    def __call__(self, *arguments: str) -> str:
        command = ["tmux", "-S", self._socket, "-f", "/dev/null", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE, env=environment())
        return done.stdout

    def screen(self) -> str:
        return self("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        self("send-keys", *keys)

    def type(self, text: str) -> None:
        self("send-keys", "-l", text)

    def until(self, *parts: str) -> str:
        """The screen, when it has all of them."""
        end = time.monotonic() + PATIENCE
        while not all(part in (screen := self.screen()) for part in parts):
            assert time.monotonic() < end, f"no {parts} on the screen:\n{screen}"
            time.sleep(0.05)
        return screen

    def until_gone(self) -> None:
        end = time.monotonic() + PATIENCE
        while subprocess.run(["tmux", "-S", self._socket, "has-session"], capture_output=True).returncode == 0:
            assert time.monotonic() < end, self.screen()
            time.sleep(0.05)


@contextmanager
def in_tmux(folder: Path, size: tuple[int, int], *command: str) -> Generator[Tmux]:
    """The working directory is `folder`."""
    tmux = Tmux(folder)
    width, height = size
    tmux("new-session", "-d", "-x", str(width), "-y", str(height), "-c", str(folder), *command)
    try:
        yield tmux
    finally:
        subprocess.run(["tmux", "-S", str(folder / "tmux"), "kill-server"], capture_output=True, timeout=PATIENCE)
