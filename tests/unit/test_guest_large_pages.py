"""An interpreter whose memory was moved goes on as before. In one of its own, since there is no way back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolyard.sandbox.guest import large_pages, steps

SANDBOX = Path(large_pages.__file__).parents[1]
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import ctypes, decimal, json, os, signal, socket, threading
from guest import large_pages

def mappings():
    return open("/proc/self/maps").read().splitlines()

def works():
    import hashlib, sqlite3, zlib  # libraries that are loaded now
    seen = []
    threads = [threading.Thread(target=seen.append, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        (lambda: 1 / 0)()
    except ZeroDivisionError as error:
        seen.append(str(error))
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append("handled"))
    signal.raise_signal(signal.SIGUSR1)
    if not (child := os.fork()):
        big = [str(number) for number in range(200_000)]
        os._exit(len(big) % 7)
    seen.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return [*seen, str(decimal.Decimal(1) / 7), zlib.crc32(b"x"), "%.3f" % ctypes.CDLL(None).abs(-3)]

before, text = mappings(), [repr(one) for one in (sys.modules["os"].__doc__, ctypes.__doc__)]
blocked = signal.pthread_sigmask(0, [])
for _ in range(int(sys.argv[2])):
    large_pages.gather()
after = mappings()
kept = [*text] == [repr(one) for one in (sys.modules["os"].__doc__, ctypes.__doc__)]
if not (child := os.fork()):
    large_pages.collapse()
    sizes = [int(line.split()[1]) for line in open("/proc/self/smaps") if line.startswith("AnonHugePages")]
    os._exit(min(sum(sizes) // 2048, 99) if works() else 111)
collapsed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps({
    "before": len(before), "after": len(after), "kept": kept, "works": works(),
    "collapsed": collapsed, "size": large_pages.size(),
    "signals": blocked == signal.pthread_sigmask(0, []), "executable": sum("rwxp" in line for line in after),
}))
"""


def gathered(times: int) -> dict[str, Any]:
    command = [sys.executable, "-I", "-c", SCRIPT, str(SANDBOX), str(times)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done
    return json.loads(done.stdout)


@pytest.mark.skipif(not steps.possible(), reason="there are no steps on this architecture")
@pytest.mark.parametrize("times", [1, 2])
def test_an_interpreter_in_one_piece_goes_on_as_before(times: int) -> None:
    plain, moved = gathered(0), gathered(times)
    assert moved["works"] == plain["works"]
    assert moved["kept"]
    assert moved["signals"]
    assert plain["before"] == plain["after"] > 60
    assert moved["executable"] > 0 == plain["executable"]
    assert moved["after"] < moved["before"] / 2
    assert plain["size"] == plain["collapsed"] == 0
    large = moved["size"] // (2 << 20)
    assert large > 3
    assert large / 2 <= moved["collapsed"] <= large, "and so does a fork of it with large pages of its own"


@pytest.mark.parametrize(
    ("setting", "given"),
    [("always [madvise] never\n", True), ("[always] madvise never\n", True), ("always madvise [never]\n", False)],
)
def test_without_large_pages_nothing_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, given: bool
) -> None:
    file = tmp_path / "enabled"
    file.write_text(setting)
    moved: list[object] = []
    monkeypatch.setattr(large_pages, "_SETTING", str(file))
    monkeypatch.setattr(large_pages._Move, "__call__", lambda *_: moved.append("a piece"))  # pyright: ignore
    large_pages.gather()
    assert bool(moved) is (given and steps.possible())
    file.unlink()
    moved.clear()
    large_pages.gather()
    assert not moved


def test_mappings_that_lie_together_are_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    monkeypatch.setattr(
        large_pages,
        "_mappings",
        lambda: [
            (1 * mib, 1 * mib + 4096, True),  # far from the next: on its own
            (9 * mib, 10 * mib, True),
            (10 * mib, 12 * mib, True),
            (12 * mib + 8192, 13 * mib, True),  # after a small gap
            (13 * mib, 14 * mib, False),
            (14 * mib, 15 * mib, True),
        ],
    )
    assert large_pages._pieces() == [  # pyright: ignore[reportPrivateUsage]
        ((1 * mib, 1 * mib + 4096), []),
        ((8 * mib, 13 * mib), [(8 * mib, 9 * mib), (12 * mib, 12 * mib + 8192)]),
        ((14 * mib, 15 * mib), []),
    ]
