"""The speed of running programs, compared with the alternatives, in one run on this machine.

    python benchmarks/sandbox.py                 the table, about five minutes
    python benchmarks/sandbox.py --quick         a rougher one, about one minute
    python benchmarks/sandbox.py --peer URL      with another SandboxFusion-compatible service
    python benchmarks/sandbox.py --ray           with the sandbox of a Ray cluster, of this machine alone
    python benchmarks/sandbox.py --soak 20000    nothing may grow: memory, descriptors, processes, mounts, cgroups

Compare ratios, not numbers: everything is measured in turn on the same, possibly busy, machine. Clients and services
share it: "HTTP service" is measured with a bare socket client, "RemoteSandbox" with ours. Every answer is checked. A
wrong answer of Toolyard stops the benchmark; the peer's are counted, since truncated output counts as wrong. Without
a peer, `python -m toolyard.testing.sandbox_fusion` has a SandboxFusion server's quirks, but not its speed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from toolyard import Limits, LocalSandbox, Program, RaySandbox, RemoteSandbox, Sandbox
from toolyard.sandbox.languages.compiled import CPP_FLAGS

CPP = '#include <iostream>\nint main() { std::cout << "hello" << std::endl; }\n'
PYTHON = {
    "trivial": ("print(1)", "1\n"),
    "numpy": ("import numpy\nprint(numpy.arange(3).sum())", "3\n"),
    "64 KiB": ("print('x' * 65535)", "x" * 65535 + "\n"),
    "300 KB": ("print('x' * 299999)", "x" * 299999 + "\n"),
}
"""Programs and their output."""
LIMITS = Limits(run_seconds=60, compile_seconds=60)
PEER, CPP_HELLO = "peer", "C++ hello"

Call = Callable[[], Awaitable[bool]]
"""Runs a program once. Returns whether the answer was correct."""


@dataclass
class Measured:
    program: str
    in_flight: int
    method: str
    rate: float
    p50: float
    p99: float
    wrong: float


async def measure(call: Call, in_flight: int, seconds: float) -> tuple[float, float, float, float]:
    """Keep `in_flight` calls going for `seconds`: runs per second, p50 and p99 in ms, share of wrong answers."""
    waits: list[float] = []
    wrong = 0
    deadline = time.perf_counter() + seconds

    async def caller() -> None:
        nonlocal wrong
        while True:
            start = time.perf_counter()
            right = await call()
            wrong += not right
            waits.append(time.perf_counter() - start)
            if time.perf_counter() > deadline:
                return

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(caller())
    took = time.perf_counter() - start
    waits.sort()
    return len(waits) / took, waits[len(waits) // 2] * 1e3, waits[len(waits) * 99 // 100] * 1e3, wrong / len(waits)


FLOOR = """
import gc, os, sys, time
sys.path.insert(0, {guest!r})
from guest import immortal, zygote
gc.collect(); immortal.immortalize(); gc.freeze()
waits = []
for _ in range({count}):
    start = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    waits.append(time.perf_counter() - start)
print(sorted(waits)[len(waits) // 2] * 1e3, len(waits) / sum(waits))
"""


def floor(processes: int) -> tuple[float, float]:
    """Fork and exit of the warm interpreter alone: p50 in ms, and forks per second of all processes together."""
    import toolyard.sandbox.local as local

    code = FLOOR.format(guest=str(Path(local.__file__).parent), count=600)
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(processes)]
    results = [tuple(map(float, process.communicate()[0].split())) for process in running]
    return statistics.mean(p50 for p50, _ in results), sum(rate for _, rate in results)


class Alternatives:
    """(a): without a sandbox."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(160)
        self._count = itertools.count()

    def python(self, code: str) -> Call:
        async def call() -> bool:
            command = [sys.executable, "-c", code]
            run = lambda: subprocess.run(command, capture_output=True, check=True)  # noqa: E731
            await asyncio.get_running_loop().run_in_executor(self._threads, run)
            return True

        return call

    def cpp(self) -> Call:
        def compile_and_run() -> None:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "main.cpp").write_text(CPP)
                subprocess.run(["g++", *CPP_FLAGS, "main.cpp", "-o", "main"], cwd=folder, check=True)
                subprocess.run([f"{folder}/main"], capture_output=True, check=True)

        async def call() -> bool:
            await asyncio.get_running_loop().run_in_executor(self._threads, compile_and_run)
            return True

        return call


def sandboxed(
    sandbox: Sandbox,
    code: str,
    language: str = "python",
    *,
    prints: str,
    fresh: bool = False,
    trusted: bool = True,
) -> Call:
    """`trusted`: a wrong answer is an error, not a number."""
    count = itertools.count()
    program = Program(code, language)

    async def call() -> bool:
        task = Program(f"{code}// {os.getpid()} {next(count)}\n", language) if fresh else program
        execution = await sandbox.run(task, LIMITS)
        right = execution.ok and execution.stdout == prints
        assert right or not trusted, execution
        return right

    return call


class BareClient:
    """A minimal HTTP client, to measure the service and not the client."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._address = host, int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def call(self, code: str, language: str = "python", *, prints: str, fresh: bool = False) -> Call:
        count = itertools.count()
        told = json.dumps(prints).encode()

        async def post() -> bool:
            text = f"{code}// bare {os.getpid()} {next(count)}\n" if fresh else code
            body = json.dumps({"code": text, "language": language, "run_timeout": 60, "compile_timeout": 60}).encode()
            kind = "content-type: application/json"
            head = (
                f"POST /run_code HTTP/1.1\r\nhost: localhost\r\n{kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            )
            connection = self._idle.pop() if self._idle else await asyncio.open_connection(*self._address)
            reader, writer = connection
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            content = await reader.readexactly(length)
            assert content.startswith(b'{"status":"Success"'), content
            assert told in content, content
            self._idle.append(connection)
            return True

        return post

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


SERVER = """
import json, sys
from toolyard import LocalSandbox
from toolyard.sandbox.service import ServiceConfig, serve
isolation, options = json.loads(sys.argv[1])
serve(ServiceConfig(port=0, max_wait_seconds=600, **options), LocalSandbox(isolation=isolation),
      on_ready=lambda url: print(url, flush=True))
"""


@contextlib.contextmanager
def service(isolation: str = "best", **options: str) -> Generator[str]:
    """Start the service in its own process, and yield its URL. `options`: fields of `ServiceConfig`."""
    command = [sys.executable, "-c", SERVER, json.dumps([isolation, options])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        url = process.stdout.readline().strip()
        if not url:
            raise SystemExit("the service did not start; it says why above")
        yield url
    finally:
        process.terminate()
        process.wait()


@contextlib.asynccontextmanager
async def ray_sandbox() -> AsyncGenerator[RaySandbox]:
    """Of a new cluster of this machine alone."""
    import ray

    ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        async with RaySandbox() as sandbox:
            yield sandbox
    finally:
        ray.shutdown()


async def table(args: argparse.Namespace) -> None:
    console = Console(width=max(110, Console().width))
    levels = args.in_flight or ([1, 2, 32] if args.quick else [1, 2, 8, 32, 128])
    results: list[Measured] = []
    floors: list[float] = []
    floor_rate = floor(2)[1]
    alternatives = Alternatives()
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(service(args.isolation))
        async with contextlib.AsyncExitStack() as opened:
            local = await opened.enter_async_context(LocalSandbox(isolation=args.isolation))
            bare = BareClient(url)
            opened.callback(bare.close)
            remotes = {"RemoteSandbox": await opened.enter_async_context(RemoteSandbox(url))}
            if args.ray:
                remotes["RaySandbox"] = await opened.enter_async_context(ray_sandbox())
            if args.peer:
                remotes[PEER] = await opened.enter_async_context(RemoteSandbox(args.peer, margin_seconds=120))
            methods: dict[str, Callable[..., Call]] = {
                "LocalSandbox": partial(sandboxed, local),
                "HTTP service": bare.call,
                **{name: partial(sandboxed, remote, trusted=name != PEER) for name, remote in remotes.items()},
            }
            rows: list[tuple[str, str, Call]] = []
            for name, (code, prints) in PYTHON.items():
                rows.append((name, "subprocess", alternatives.python(code)))
                rows += [(name, method, make(code, prints=prints)) for method, make in methods.items()]
            rows.append((CPP_HELLO, "subprocess", alternatives.cpp()))
            for method, make in methods.items():
                if method != "RemoteSandbox":
                    rows.append((CPP_HELLO, f"{method}, new source", make(CPP, "cpp", prints="hello\n", fresh=True)))
                    rows.append((CPP_HELLO, f"{method}, seen source", make(CPP, "cpp", prints="hello\n")))
            rows = [row for row in rows if not args.only or row[0] in args.only]
            await warm_up(rows, args.warm_up)
            with console.status("measuring") as status:
                # Methods are measured one right after the other: the machine may be busier a minute later.
                names = list(dict.fromkeys(name for name, _, _ in rows))
                for name, in_flight in itertools.product(names, levels):
                    for method, call in [(method, call) for found, method, call in rows if found == name]:
                        if "C++" in name and "seen" not in method and in_flight > 32:
                            continue
                        status.update(f"{name}: {method}, {in_flight} in flight")
                        beside_floor = (name, in_flight, method) == ("trivial", 1, "LocalSandbox")
                        floors += [floor(1)[0]] if beside_floor else []
                        seconds = args.seconds * (0.5 if args.quick else 1)
                        results.append(Measured(name, in_flight, method, *await measure(call, in_flight, seconds)))
                        floors += [floor(1)[0]] if beside_floor else []
            show(console, results, statistics.mean(floors or [floor(1)[0]]), floor_rate, local.level)


async def warm_up(rows: list[tuple[str, str, Call]], seconds: float) -> None:
    """Warm up: first calls start zygotes and build headers, but the steady state is measured."""
    for _, _, call in rows:
        await call()
    await asyncio.sleep(seconds)
    for _, _, call in rows:
        await call()


def show(console: Console, results: list[Measured], floor_p50: float, floor_rate: float, level: str) -> None:
    title = f"Python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} cores, isolation {level}"
    grid = Table(title=title)
    for column in ("program", "in flight", "method", "runs/s", "p50 ms", "p99 ms", "× subprocess", "wrong"):
        grid.add_column(column, justify="left" if column in ("program", "method") else "right")
    base = {(row.program, row.in_flight): row.rate for row in results if row.method == "subprocess"}
    last = None
    for row in sorted(
        results, key=lambda row: (list(dict.fromkeys(r.program for r in results)).index(row.program), row.in_flight)
    ):
        if last not in (None, (row.program, row.in_flight)):
            grid.add_section()
        last = (row.program, row.in_flight)
        ratio = f"{row.rate / base[last]:.1f}" if last in base else "–"
        grid.add_row(
            row.program,
            str(row.in_flight),
            row.method,
            f"{row.rate:.0f}",
            f"{row.p50:.2f}",
            f"{row.p99:.2f}",
            ratio,
            f"{row.wrong:.0%}" if row.wrong else "",
        )
    console.print(grid)
    console.print(
        f"floor: fork and exit of the warm interpreter: p50 {floor_p50:.2f} ms, {floor_rate:.0f}/s on two processes"
    )
    if {row.program for row in results} >= {"trivial", "numpy", CPP_HELLO} and ("trivial", 1) in base:
        goals(console, results, floor_p50)


def goals(console: Console, results: list[Measured], floor_p50: float) -> None:
    """Check the claims of the README against this run."""
    by = {(row.program, row.in_flight, row.method): row for row in results}
    local, http, plain = "LocalSandbox", "HTTP service", "subprocess"
    immortal = sys.version_info >= (3, 12)

    def ratio(program: str, method: str, other: str) -> float:
        """The best rate of one over the best rate of the other, each at its own best number in flight."""
        rates = [max(r.rate for r in results if (r.program, r.method) == (program, key)) for key in (method, other)]
        return rates[0] / rates[1]

    added = by["trivial", 1, http].p50 - by["trivial", 1, local].p50
    lines = [
        # 7.5 and 6.0 before decision 14, which says what plainer code costs. In 3.11, forks copy what they refer to.
        ("trivial, rate × subprocess", ratio("trivial", local, plain), 6.5 if immortal else 5.0, ">="),
        ("trivial, p50 × floor, one in flight", by["trivial", 1, local].p50 / floor_p50, 2.0, "<="),
        ("numpy, rate × subprocess", ratio("numpy", local, plain), 40.0, ">="),
        ("HTTP, share of the embedded rate", ratio("trivial", http, local), 0.7, ">="),
        ("HTTP, ms added at p50, one in flight", added, 2.0, "<="),
        ("C++ new source, rate × g++", ratio(CPP_HELLO, f"{local}, new source", plain), 3.0, ">="),
        ("C++ seen source, rate × g++", ratio(CPP_HELLO, f"{local}, seen source", plain), 3.0, ">="),
    ]
    for text, value, goal, sense in lines:
        met = value >= goal if sense == ">=" else value <= goal
        console.print(f"{'[green]met [/]' if met else '[red]MISS[/]'} {text}: {value:.2f} (goal {sense} {goal:g})")


def private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except PermissionError:  # only root can inspect a worker
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(inner for child in children for inner in tree(int(child)))]


def _cgroups() -> list[str]:
    """All cgroups of our descendants."""
    below = tree(os.getpid())
    return sorted({line for pid in below for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()})


def prepared_children() -> list[int]:
    """Processes without children."""
    return [pid for pid in tree(os.getpid())[1:] if len(tree(pid)) == 1]


def holdings() -> dict[str, int]:
    own = os.getpid()
    below = [pid for pid in tree(own) if pid != own]
    return {
        "processes below": len(below),
        "zombies": sum(") Z " in Path(f"/proc/{pid}/stat").read_text() for pid in below),
        "own descriptors": len(os.listdir("/proc/self/fd")),
        "own memory, MB": private_bytes(own) >> 20,
        "memory of workers and zygotes, MB": sum(map(private_bytes, below)) >> 20,
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "cgroups": len([line for line in _cgroups() if "toolyard" in line]),
        "own files in /tmp": len([name for name in os.listdir("/tmp") if name.startswith("toolyard")]),
    }  # fmt: skip


async def soak(count: int, isolation: str) -> None:
    console = Console()
    async with LocalSandbox(isolation=isolation) as sandbox:
        code, prints = PYTHON["trivial"]
        await measure(sandboxed(sandbox, code, prints=prints), 8, 2)
        before = holdings()
        idle = [private_bytes(pid) for pid in prepared_children()]
        semaphore = asyncio.Semaphore(8)

        async def one(number: int) -> None:
            async with semaphore:
                kind = number % 10
                code = {
                    0: "open('x','w').write('y' * 1000)",
                    1: "1 / 0",
                    2: "import subprocess; subprocess.run(['true'])",
                }
                await sandbox.run(Program(code.get(kind, "print(1)")))

        start = time.perf_counter()
        for block in range(0, count, 1000):
            async with asyncio.TaskGroup() as group:
                for number in range(block, min(block + 1000, count)):
                    group.create_task(one(number))
        console.print(f"{count} programs in {time.perf_counter() - start:.0f} s")
        await asyncio.sleep(1)
        after = holdings()
    grid = Table(title=f"{count} executions")
    for column in ("held", "before", "after"):
        grid.add_column(column)
    for name, value in before.items():
        grid.add_row(name, str(value), str(after[name]))
    console.print(grid)
    console.print(f"private memory of an idle prepared child: {statistics.median(idle) / 2**20:.1f} MB (goal <= 6)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer levels, less time each")
    parser.add_argument("--seconds", type=float, default=2.0, help="time per measurement")
    parser.add_argument("--warm-up", type=float, default=12.0, help="seconds of warm-up before measuring")
    parser.add_argument("--only", action="append", metavar="PROGRAM", help=f"one of {[*PYTHON, CPP_HELLO]}; repeatable")
    parser.add_argument("--in-flight", type=int, nargs="+", metavar="N", help="numbers in flight to measure")
    parser.add_argument("--ray", action="store_true", help="also measure RaySandbox")
    parser.add_argument("--peer", help="URL of another SandboxFusion-compatible service")
    parser.add_argument("--isolation", default="required", choices=["required", "best", "confined"])
    parser.add_argument("--soak", type=int, metavar="N", help="only run N programs, and show what grew")
    args = parser.parse_args()
    asyncio.run(soak(args.soak, args.isolation) if args.soak else table(args))


if __name__ == "__main__":
    main()
