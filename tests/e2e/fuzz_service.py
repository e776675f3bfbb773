"""Hostile requests against `toolyard sandbox serve`, as a command: `python tests/e2e/fuzz_service.py --requests 10000`.

A small grammar: well-formed requests with strange values, well-formed sessions with strange code, and bytes that are no
HTTP. Afterwards the server must have answered nothing with a 500, hold no more processes, descriptors, sessions and
memory than before, and serve the next request. Each request follows from the seed and its number alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving import request

TOOLYARD = str(Path(sys.executable).with_name("toolyard"))
CLIENTS = 12
WARM_UP = 100
"""Requests before the state that is compared with: workers start as they are needed."""
OPTIONS = {
    "port": 0,
    "workers": 2,
    "run-timeout": 2,
    "compile-timeout": 5,
    "max-timeout": 5,
    "memory-limit-mb": 256,
    "max-memory-mb": 512,
    "max-request-mb": 1,
    "max-buffered-mb": 8,
    "max-request-seconds": 3,
    "max-files": 20,
    "max-sessions": 12,
    "max-sessions-per-client": 8,
    "session-idle": 2,
    "max-wait": 5,
    "allow-host": "sandbox",
}
ALLOWED_GROWTH = {"processes": 24, "descriptors": 60, "memory_mb": 120}
"""Workers that wait for their next program come and go; a leak of one for every hundred requests would be more."""
NOT_OURS = {500, 502}

DEEP = "[" * 5000 + "]" * 5000
NASTY: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, -1e-9, "", "a", "1", "\0", "\ud800", "é" * 100,
    "../../etc/passwd", "/etc/passwd", "!!", "QUJD", [], {}, [[]], [None], {"": None}, {"a": "!!"}, {"..": "QQ=="},
    {"x" * 300: "QQ=="}, {str(n): "QQ==" for n in range(30)}, ["a"] * 30, ["a\0b", "/", "."], "x" * 70_000,
]  # fmt: skip
CODES = [
    "print(1)", "", "1/0", "print('x' * 100000)", "import sys; sys.exit(3)", "raise SystemExit",
    "import os; os._exit(9)", "import os; os.kill(os.getpid(), 11)", "input()", "print('\\udc80')", "while True: pass",
    "syntax error(", "\0", "import os; os.write(4, b'\\xff\\xff\\xff\\xff')", "import time; time.sleep(0.2)",
    "import os; x = b'[' * 50000; os.write(4, len(x).to_bytes(4, 'little') + x)",
    "raise ValueError('\\ud800')", "display('\\udfff')", "open('made', 'w').write('x' * 1000)",
    "x = [1]; x.append(x); x",
]  # fmt: skip
FIELDS = [
    "run_timeout", "compile_timeout", "memory_limit_MB", "stdin", "files", "fetch_files", "toolyard", "limits",
    "idle_seconds", "seconds", "cell_timeout", "total_timeout", "kernel", "stdins", "cells",
]  # fmt: skip
LANGUAGES = ["python", "python", "python", "bash", "Python", "klingon", "", "pytest"]
HOSTS = ["localhost"] * 60 + ["127.0.0.1:1", "[::1]", "sandbox", "evil.example", "", "[", "a@b", "x" * 300, "\xff"]
TYPES = ["application/json"] * 60 + ["text/plain", "", "application/json;charset=utf-16", "a/b+json", ";" * 5000]


@dataclass
class Outcome:
    statuses: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])
    before: dict[str, int] = field(default_factory=dict[str, int])
    after: dict[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0


class Grammar:
    """One request, with its own random generator."""

    def __init__(self, seed: int, number: int, sessions: list[str]) -> None:
        self._chance = random.Random(f"{seed}/{number}")
        self._sessions = sessions

    def request(self) -> tuple[bytes, bool]:
        """The bytes to send, and whether an answer is due."""
        chance = self._chance
        content, due = self._well_formed()
        if chance.random() < 0.2:
            return self._broken(content), False
        if chance.random() < 0.03:
            return content * chance.randint(2, 5), due
        return content, due

    def _well_formed(self) -> tuple[bytes, bool]:
        pick = self._chance.choice
        session = pick([*self._sessions, "unknown", "..%2f", "%ff"]) if self._sessions else "unknown"
        files = {"files": {pick(["a", "b/c", "..", "/x", "\0"]): pick(["QUJD", "!", None, ""])}}
        names = "&".join(f"name={pick(['made', 'a', '%00', '%2fetc%2fpasswd', '..', '%ff', './'])}" for _ in range(3))
        method, path, body = pick(
            [
                *[("POST", "/run_code", {"code": pick(CODES), "language": pick(LANGUAGES)})] * 6,
                ("POST", "/run_cases", {"code": pick(CODES), "language": "python", "stdins": ["1", None, "x"]}),
                *[("POST", "/submit", self._submission())] * 2,
                ("POST", "/run_jupyter", {"cells": [pick(CODES), pick(CODES)], "total_timeout": 2}),
                *[("POST", "/v1/sessions", {})] * 2,
                *[("POST", f"/v1/sessions/{session}/cells", {"code": pick(CODES), "seconds": 1})] * 3,
                ("PUT", f"/v1/sessions/{session}/files", files),
                ("GET", f"/v1/sessions/{session}/files?{names}", None),
                ("DELETE", f"/v1/sessions/{session}", None),
                *[("GET", path, None) for path in ("/v1/ping", "/healthz", "/metrics", "/", "/run_code", "*", "//")],
                (
                    pick(["OPTIONS", "HEAD", "TRACE", "CONNECT", "PATCH", "QUERY"]),
                    pick(["/run_code", "*", "a:1"]),
                    None,
                ),
            ]
        )
        return self._http(method, path, self._json(body))

    def _submission(self) -> dict[str, Any]:
        pick = self._chance.choice
        case = {"input": {"stdin": pick(["1", "", 7])}, "output": {"stdout": pick(["1\n", ""])}}
        row: dict[str, Any] = {"test": pick([[case] * pick([1, 3, 2000]), {"code": pick(CODES)}, json.dumps([case])])}
        if self._chance.random() < 0.4:
            row[pick(["test", "labels", "language", "test_list", "inputs", "entry_point"])] = pick([*NASTY, DEEP])
        config = {"run_timeout": 1, "provided_data": pick([row, [row], [{**row, "id": 1}]]), "language": "python"}
        if self._chance.random() < 0.2:
            config[pick(["language", "extra", "provided_data", "run_timeout"])] = pick(NASTY)
        return {"dataset": "d", "id": 1, "completion": f"```python\n{pick(CODES)}\n```", "config": config}

    def _json(self, body: dict[str, Any] | None) -> bytes:
        chance = self._chance
        if body is None:
            return b""
        for _ in range(chance.choice([0, 0, 0, 1, 1, 2])):
            key = chance.choice([*body, *FIELDS])
            value = chance.choice(NASTY)
            if key in ("toolyard", "limits") and chance.random() < 0.7:
                limits = {chance.choice(["run_seconds", "memory_bytes", "processes", "output_bytes", "x"]): value}
                value = limits if key == "limits" else {"limits": limits, "stdin": chance.choice(["QQ==", "!", None])}
            body = {**body, key: value}
        text = json.dumps(body)
        if chance.random() < 0.05:
            text = chance.choice(
                ["NaN", "{", DEEP, f'{{"code": {DEEP}}}', '{"code": 1, "code": 2}', "null", "\ufeff{}"]
            )
        return text.encode("utf-8", "surrogatepass")

    def _http(self, method: str, path: str, body: bytes) -> tuple[bytes, bool]:
        chance = self._chance
        lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: " + chance.choice(HOSTS).encode("latin-1")]
        lines.append(b"Connection: close")
        due = method not in ("CONNECT", "QUERY") and path != "a:1"
        if body or method in ("POST", "PUT"):
            lines.append(b"Content-Type: " + chance.choice(TYPES).encode())
        extra = [b"Origin: null", b"Origin: http://localhost", b"Authorization: Bearer x", b"X: " + b"a" * 70_000]
        extra += [b"Upgrade: websocket\r\nConnection: upgrade", b"Expect: 100-continue", b"Cookie: " + b"a=b;" * 1000]
        if chance.random() < 0.15:
            lines.append(chance.choice(extra))
        if chance.random() < 0.1 and body:
            cut = sorted(chance.randrange(len(body)) for _ in range(3))
            parts = [body[start:end] for start, end in zip([0, *cut], [*cut, len(body)], strict=True) if start < end]
            chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(part), chance.choice([b"", b";a=b"]), part) for part in parts)
            trailer = chance.choice([b"", b"Host: evil.example\r\n", b"X: " + b"a" * 70_000 + b"\r\n"])
            return b"\r\n".join(
                [*lines, b"Transfer-Encoding: chunked", b"", chunks + b"0\r\n" + trailer + b"\r\n"]
            ), due
        if chance.random() < 0.01:
            body += b" " * (2 << 20)
        length = [b"Content-Length: %d" % len(body)] if body else []
        return b"\r\n".join([*lines, *length, b"", body]), due

    def _broken(self, content: bytes) -> bytes:
        chance = self._chance
        data = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(5):
                case 0:
                    del data[at:]
                case 1:
                    data[at:at] = chance.randbytes(chance.choice([1, 5, 100]))
                case 2:
                    del data[at : at + chance.randint(1, 20)]
                case 3:
                    data[at:at] = chance.choice([b"\r\n", b"\r\n\r\n", b"\0", b"Content-Length: 9\r\n", b"HTTP/1.1"])
                case _:
                    data[at : at + 1] = b"\r\nTransfer-Encoding: chunked\r\n"
        return bytes(data)


async def send(port: int, content: bytes, *, due: bool) -> bytes:
    """Everything the server says. One that owes an answer has 30 s for it; for nonsense, the client hangs up soon."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    told = b""
    try:
        async with asyncio.timeout(30 if due else 0.3):
            writer.write(content)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            while part := await reader.read(1 << 20):
                told += part
    except TimeoutError:
        if due and not told:
            return b"nothing within 30 s"
    except ConnectionError:
        pass
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return told


def judge(told: bytes) -> tuple[list[str], str | None]:
    """The statuses found, and what is wrong with them."""
    statuses = [found.decode() for found in re.findall(rb"^HTTP/1\.1 (\d{3}) ", told, re.MULTILINE)] or ["hung up"]
    if told.startswith(b"nothing"):
        return ["none"], told.decode()
    if any(status != "hung up" and int(status) in NOT_OURS for status in statuses):
        return statuses, "a 500"
    return statuses, "a bug of ours" if b"internal error" in told else None


async def fuzz(requests: int, *, seed: int = 0) -> Outcome:
    outcome = Outcome()
    sessions: list[str] = []
    began = time.monotonic()
    async with serving() as (process, port, complaints):
        url = f"http://127.0.0.1:{port}"

        async def play(numbers: Any) -> None:
            for number in numbers:
                content, due = Grammar(seed, number, list(sessions)).request()
                told = await send(port, content, due=due)
                statuses, wrong = judge(told)
                outcome.statuses.update(statuses)
                if wrong:
                    outcome.failures.append(f"request {number}: {wrong}: {content[:600]!r} got {told[-600:]!r}")
                for found in re.findall(rb'"session_id":"([\w-]+)"', told):
                    sessions.append(found.decode())
                    del sessions[:-8]

        async def rush(start: int, stop: int) -> None:
            numbers = iter(range(start, stop))
            async with asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(play(numbers))

        await rush(0, min(WARM_UP, requests))
        outcome.before = await settled(url, process.pid)
        await rush(min(WARM_UP, requests), requests)
        outcome.after = await settled(url, process.pid)
        body = {"code": "print(6 * 7)", "language": "python"}
        answer = await request(f"{url}/run_code", "POST", body)
        if answer.status != 200 or answer.json["run_result"]["stdout"] != "42\n":
            outcome.failures.append(f"the next request is not served: {answer}")
        for name, most in ALLOWED_GROWTH.items():
            if outcome.after[name] - outcome.before[name] > most:
                outcome.failures.append(f"{name} grew from {outcome.before[name]} to {outcome.after[name]}")
        for name in ("in_flight", "busy", "waiting", "sessions"):
            if outcome.after[name]:
                outcome.failures.append(f"{outcome.after[name]} {name} at the end")
        family = descendants(process.pid)
        process.terminate()
        if await process.wait():
            outcome.failures.append(f"the server ended with {process.returncode}")
        if left := set(family) & set(processes()):
            outcome.failures.append(f"processes outlived the server: {left}")
        complaints.seek(0)
        if b"Traceback" in (said := complaints.read()):
            outcome.failures.append(f"the server complained: {said[-3000:].decode(errors='replace')}")
    outcome.seconds = time.monotonic() - began
    return outcome


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[asyncio.subprocess.Process, int, Any]]:
    with tempfile.TemporaryFile() as complaints:
        options = [f"--{name}={value}" for name, value in OPTIONS.items()]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
        process = await asyncio.create_subprocess_exec(
            TOOLYARD, "sandbox", "serve", *options, stdout=asyncio.subprocess.PIPE, stderr=complaints, env=environment
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(60):
                told = re.search(rb"http://127\.0\.0\.1:(\d+)", await process.stdout.readline())
            assert told, "it did not start"
            yield process, int(told[1]), complaints
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def settled(url: str, pid: int) -> dict[str, int]:
    """What the server holds once nothing runs and idle sessions are closed."""
    async with asyncio.timeout(60):
        while True:
            health = (await request(f"{url}/healthz")).json
            now = {"in_flight": health["in_flight"], **health["pool"]}
            if not (now["in_flight"] or now["busy"] or now["sessions"]):
                break
            await asyncio.sleep(0.2)
    await asyncio.sleep(1)
    return {
        **{name: now[name] for name in ("in_flight", "busy", "waiting", "sessions")},
        "processes": len(descendants(pid)),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "memory_mb": resident_mb(pid),
    }


def resident_mb(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) // 1024


def processes() -> dict[int, int]:
    """Every process, and its parent."""
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    return found


def descendants(pid: int) -> list[int]:
    parents = processes()
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {pid})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=10_000, help="How many requests to send.")
    parser.add_argument("--seed", type=int, default=0, help="Another seed sends other requests.")
    arguments = parser.parse_args()
    outcome = asyncio.run(fuzz(arguments.requests, seed=arguments.seed))
    print(f"{arguments.requests} requests in {outcome.seconds:.0f} s")
    print("answers:", ", ".join(f"{status} {count}" for status, count in sorted(outcome.statuses.items())))
    print("before:", outcome.before)
    print("after: ", outcome.after)
    for failure in outcome.failures[:20]:
        print("FAILED", failure)
    print(f"{len(outcome.failures)} failures")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
