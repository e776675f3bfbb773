"""What is forked for each message, with and without machine code. In an interpreter of its own, since it forks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolyard.sandbox.guest import clone, steps

SANDBOX = Path(clone.__file__).parents[1]
SCRIPT = """
import array, json, os, signal, socket, sys
sys.path.insert(0, sys.argv[1])
from guest import clone

CONTROL, SIGNALS = 3, [signal.SIGINT, signal.SIGXCPU]
by, close = getattr(clone, sys.argv[2]), json.loads(sys.argv[3])
processors = os.sched_getaffinity(0)
spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(4)]  # so that the sockets have larger numbers
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
begin, argument = by(CONTROL, processors, SIGNALS, close)
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
parent = os.fork()
if parent == 0:
    os.dup2(theirs.fileno(), CONTROL)
    os.closerange(CONTROL + 1, 1 << 16)
    os.sched_setaffinity(0, {min(processors)})
    try:
        begin(argument)
        print(json.dumps({
            "input": sys.stdin.readline(), "parent": os.getppid(), "pid": os.getpid(), "session": os.getsid(0),
            "processors": sorted(os.sched_getaffinity(0)), "blocked": sorted(signal.pthread_sigmask(0, [])),
            "open": sorted(map(int, os.listdir("/proc/self/fd"))), "thread": __import__("threading").get_native_id(),
        }), flush=True)
        print("and this", file=sys.stderr, flush=True)
    finally:
        os._exit(7)
theirs.close()
found = []
for number in range(3):
    pipes = [os.pipe() for _ in range(3)]
    os.write(pipes[0][1], b"message %d\\n" % number)
    given = array.array("i", [pipes[0][0], pipes[1][1], pipes[2][1]])
    os.kill(parent, signal.SIGINT)  # which is for none of them
    ours.sendmsg([b"c"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)])
    for handle in given:
        os.close(handle)
    line = os.read(pipes[1][0], 10000)
    pid, status = os.wait()
    found.append({**json.loads(line), "said": os.read(pipes[2][0], 100).decode(), "waited": pid, "status": status >> 8})
ours.close()
pid, status = os.wait()
about = {"me": os.getpid(), "processors": sorted(processors), "parent": [pid == parent, status]}
print(json.dumps({**about, "found": found}))
"""


def forked(by: str, *, close: bool) -> dict[str, Any]:
    command = [sys.executable, "-c", SCRIPT, str(SANDBOX), by, json.dumps(close)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done
    return json.loads(done.stdout)


@pytest.mark.skipif(not clone.possible(), reason="it is not known how to fork siblings here")
@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("by", ["_siblings_by_steps", "_siblings_by_python"])
def test_a_sibling_for_every_message(by: str, close: bool) -> None:
    if by == "_siblings_by_steps" and not steps.possible():
        pytest.skip("there are no steps on this architecture")
    told = forked(by, close=close)
    for number, one in enumerate(told["found"]):
        assert one["input"] == f"message {number}\n"
        assert one["said"] == "and this\n"
        assert one["parent"] == told["me"]
        assert one["pid"] == one["session"] == one["waited"] == one["thread"]
        assert one["processors"] == told["processors"]
        assert one["blocked"] == []
        assert one["status"] == 7
        streams = [0, 1, 2] if close else [0, 1, 2, 3]
        assert one["open"][: len(streams)] == streams
        assert len(one["open"]) == len(streams) + 1, "and what lists them"
    assert told["parent"] == [True, 0], "it ends by itself when nobody is there any more"


HEIRS = """
import array, json, os, socket, sys
sys.path.insert(0, sys.argv[1])
from guest import clone

CONTROL, TARGET = 4, 3
processors = os.sched_getaffinity(0)
spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(4)]
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
inherit, argument = clone.heirs(CONTROL, TARGET, processors)
origin = os.fork()
if origin == 0:
    os.dup2(theirs.fileno(), CONTROL)
    os.closerange(CONTROL + 1, 1 << 16)
    inherit(argument)
    about = {"pid": os.getpid(), "parent": os.getppid(), "processors": sorted(os.sched_getaffinity(0)),
             "open": sorted(map(int, os.listdir("/proc/self/fd")))[:-1]}
    os.write(TARGET, json.dumps(about).encode())
    os._exit(7)
theirs.close()
found = []
for processor in sorted(processors) * 2:
    read, write = os.pipe()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write]))]
    ours.sendmsg([clone.mask({processor}, processors)], rights)
    os.close(write)
    told = int.from_bytes(ours.recv(8), "little", signed=True)
    said = b""
    while part := os.read(read, 4096):  # ends only if nobody else holds the other end, not the origin either
        said += part
    found.append({**json.loads(said), "told": told, "on": [processor], "status": os.waitpid(told, 0)[1] >> 8})
ours.close()
print(json.dumps({"me": os.getpid(), "found": found, "origin": os.waitpid(origin, 0) == (origin, 0)}))
"""


@pytest.mark.skipif(not clone.possible() or not steps.possible(), reason="there are no steps on this architecture")
def test_an_heir_for_every_message_on_the_processors_it_names() -> None:
    command = [sys.executable, "-c", HEIRS, str(SANDBOX)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done
    told = json.loads(done.stdout)
    assert len({one["pid"] for one in told["found"]}) == len(told["found"]) >= 2
    for one in told["found"]:
        assert one["pid"] == one["told"]
        assert one["parent"] == told["me"]
        assert one["processors"] == one["on"]
        assert one["open"] == [0, 1, 2, 3]
        assert one["status"] == 7
    assert told["origin"], "it ends by itself when nobody is there any more"
