"""`toolyard view` in real terminals: under tmux, and by the bytes that a terminal receives."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tmux import PATIENCE, environment, in_tmux, needs_tmux
from viewing import demo_dump, demo_lines, hostile_line, write_lines

TOOLYARD = str(Path(sys.executable).with_name("toolyard"))


@pytest.mark.slow
@needs_tmux
def test_a_dump_is_read_searched_filtered_and_followed_under_tmux(tmp_path):
    dump = tmp_path / "dump"
    dump.mkdir()
    demo_dump(dump)
    with in_tmux(tmp_path, (100, 30), TOOLYARD, "view", str(dump)) as tmux:
        screen = tmux.until("16 trajectories", "ASSISTANT  turn 1", "✓ ok", "? help")
        assert len(screen.rstrip("\n").split("\n")) == 30
        tmux.press("n")
        tmux.until("0000a1cb81aaf1530f37ac08")
        tmux.type("sTraceback")  # at once: what follows the key belongs into the field
        tmux.press("Enter")
        tmux.until("search 'Traceback' 1/", "0000cc43597ce91546014802")
        tmux.type("/scor<1")
        tmux.until("did you mean score?")
        tmux.press(*["BSpace"] * 6)
        tmux.type("score=1")
        tmux.press("Enter")
        tmux.until("5 trajectories", "filter score:1")
        write_lines(dump / "1.jsonl", [{**demo_lines()[0], "step": 1}])
        tmux.until("6 trajectories", "step 1")
        tmux.press("q")
        tmux.until_gone()


# The bytes ------------------------------------------------------------------------------------------------------------

EXPECTED = re.compile(
    rb"\x1b\[[?>=<]?[0-9;:]*[A-Za-z]"  # colours, cursor, modes: what textual writes
    rb"|\x1b\[[?0-9;]*\$p"  # whether the terminal can do something
    rb"|\x1b\][0-9]+;[^\x07\x1b]*(?:\x07|\x1b\\)"
    rb"|\x1b[78=>]"
)
OURS = (b"52", b"10", b"11", b"22")
"""Operating system commands that textual may send: the clipboard, questions about colours, the mouse pointer."""


class Pty:
    """A program in a terminal that keeps every byte."""

    def __init__(self, command: list[str], size: tuple[int, int]) -> None:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        env = environment() | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self._master = master
        self.written = b""

    def read(self, seconds: float) -> bool:
        """Whether something came."""
        ready, _, _ = select.select([self._master], [], [], seconds)
        try:
            came = os.read(self._master, 1 << 16) if ready else b""
        except OSError:  # it ended
            came = b""
        self.written += came
        return bool(came)

    def until(self, holds: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, self.written[-2000:]
            self.read(0.1)

    def press(self, keys: str, seen: bytes) -> None:
        """And wait until something that was not there before is."""
        before = len(self.written)
        os.write(self._master, keys.encode())
        self.until(lambda: seen in self.written[before:])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_no_byte_of_a_hostile_dump_reaches_the_terminal_as_it_was(tmp_path):
    escapes = "\x1b[2J\x1b[1;1H\x1bc\x9b31m\x1bP1$r\x1b\\\x1b]52;c;b3duZWQ=\x07\u202e\u2066\u200b\x00\x7f\x08"
    other = hostile_line()
    other["request_id"], other["messages"][-1]["content"] = "other", escapes
    other["turns"][0]["tool_calls"][0]["response"] = escapes
    damaged = b'{"input": "\x1b]0;owned\x07\x1b[31m' + escapes.encode() + b"\n"
    write_lines(tmp_path / "0.jsonl", [hostile_line(), other, damaged])
    terminal = Pty([TOOLYARD, "view", str(tmp_path)], (120, 50))
    try:
        terminal.until(lambda: b"turn 1" in terminal.written and b"? " in terminal.written)
        terminal.press("G", "␛".encode())
        terminal.press("n", b"other")
        terminal.press("r", b"output")
        terminal.press("r", b"ASSISTANT")
        terminal.press("t", b"this request")
        terminal.press("t", b"ASSISTANT")
        terminal.press("y", b"Copy")
        terminal.press("\r", b"\x1b]52;c;")
        terminal.press("n", b"cannot be read")
        os.write(terminal._master, b"q")
        terminal.until(lambda: terminal.process.poll() is not None)
        while terminal.read(0.2):
            pass
    finally:
        terminal.close()
    assert terminal.process.returncode == 0
    written = terminal.written
    assert "␛".encode() in written
    assert "⟨U+202E⟩".encode() in written
    commands = {found[2:].partition(b";")[0] for found in re.findall(rb"\x1b\][^\x07\x1b]*", written)}
    assert commands <= set(OURS)
    for attack in (b"\x1b]0;", b"\x1b[31m", b"\x1bc", b"\x1bP", b"\x1b]52;c;b3duZWQ=", b"\x00", b"\x7f", b"\x08"):
        assert attack not in written
    text = EXPECTED.sub(b"", written).decode()
    found = {char for char in text if not char.isprintable() and char not in "\r\n"}
    assert not found
