"""The cost of security: the same work with and without it, in turns, in one run.

    python benchmarks/security.py             about two minutes
    python benchmarks/security.py --quick     rougher, half a minute

The first table runs programs fully isolated, and as if the kernel lacked one layer. At level `confined`, as in a
container, there are no namespaces; at level `none` there are only limits on time and processes. Without a pid
namespace, leftover processes must be searched for and files counted one by one, so less isolation is slower. The
second table sends requests to the service: with its defaults, with a token, and encrypted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from sandbox import Call, measure, sandboxed, service
from toolyard import Limits, LocalSandbox, Program, RemoteSandbox
from toolyard.sandbox import local
from toolyard.sandbox.isolation import Grants
from toolyard.sandbox.isolation import probe as probe_kernel

CPUS = len(os.sched_getaffinity(0))
NO_SECCOMP, NO_LANDLOCK, NO_CGROUP = "without seccomp", "without Landlock", "memory sampled, without a cgroup"
BATCHED = ("full", NO_LANDLOCK, NO_CGROUP)
"""Where the cases of a batch are forked; elsewhere they are ordinary runs."""
INPUTS = [str(number) for number in range(16)]
PROGRAM = "print(input())"
TOKEN = "a-token-for-this-benchmark"


def batched(sandbox: LocalSandbox) -> Call:
    async def call() -> bool:
        async for execution in sandbox.run_each(Program(PROGRAM), INPUTS, Limits()):
            assert execution.ok, execution
        return True

    return call


async def open_sandbox(
    opened: contextlib.AsyncExitStack, asked: Literal["best", "required", "confined", "none"], **changes: Any
) -> LocalSandbox:
    """A sandbox on a kernel that grants what this one does, except for `changes`."""
    found = await probe_kernel()
    features = {**found.features, **changes.pop("features", {})}

    async def probe(python: str | None = None) -> Grants:
        return found.model_copy(update={"features": features, **changes})

    local.probe = probe
    try:
        return await opened.enter_async_context(LocalSandbox(isolation=asked))
    finally:
        local.probe = probe_kernel


async def open_sandboxes(opened: contextlib.AsyncExitStack) -> dict[str, LocalSandbox]:
    return {
        "full": await open_sandbox(opened, "required"),
        NO_SECCOMP: await open_sandbox(opened, "best", features={"seccomp": "switched off"}),
        NO_LANDLOCK: await open_sandbox(opened, "best", features={"landlock": "switched off"}, landlock_abi=0),
        NO_CGROUP: await open_sandbox(opened, "required", cgroup=None),
        "level confined": await open_sandbox(opened, "confined"),
        "level none": await open_sandbox(opened, "none"),
    }


def certificate(folder: Path) -> dict[str, str]:
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*command, *names, "-out", cert, "-keyout", key], check=True, capture_output=True)
    return {"tls_cert": cert, "tls_key": key}


Rates = dict[str, list[float]]


async def in_turns(calls: dict[str, Call], rounds: int, seconds: float, tell: Callable[[str], None]) -> Rates:
    """Calls per second in every round, with one call in flight per processor."""
    found: Rates = {name: [] for name in calls}
    for call in calls.values():
        await measure(call, CPUS, seconds / 2)
    for number in range(rounds):
        for name, call in calls.items():
            tell(f"round {number + 1} of {rounds}: {name}")
            found[name].append((await measure(call, CPUS, seconds))[0])
    return found


def show(console: Console, title: str, columns: dict[str, Rates], what: str) -> None:
    grid = Table(what, title=title)
    for name in columns:
        grid.add_column(name, justify="right")
        grid.add_column("share", justify="right")
    for row in next(iter(columns.values())):
        cells: list[str] = []
        for rates in columns.values():
            if row not in rates:
                continue
            bases = next(iter(rates.values()))
            share = statistics.median(rate / base for rate, base in zip(rates[row], bases, strict=True))
            cells += [f"{statistics.median(rates[row]):.0f}/s", f"{share:.0%}"]
        grid.add_row(row, *cells)
    console.print(grid)


async def tables(rounds: int, seconds: float) -> None:
    console = Console(width=max(100, Console().width))
    with console.status("measuring") as status:
        async with contextlib.AsyncExitStack() as opened:
            sandboxes = await open_sandboxes(opened)
            single = {name: sandboxed(sandbox, "print(1)", prints="1\n") for name, sandbox in sandboxes.items()}
            batch = {name: batched(sandboxes[name]) for name in BATCHED}
            singles = await in_turns(single, rounds, seconds, status.update)
            batches = await in_turns(batch, rounds, seconds, status.update)
        cases = {name: [rate * len(INPUTS) for rate in rates] for name, rates in batches.items()}
        async with contextlib.AsyncExitStack() as opened:
            folder = opened.enter_context(tempfile.TemporaryDirectory())
            tls = certificate(Path(folder))
            services: dict[str, dict[str, str]] = {
                "defaults": {},
                "with a token": {"token": TOKEN},
                "with a token, encrypted": {"token": TOKEN, **tls},
            }
            calls: dict[str, Call] = {}
            for name, options in services.items():
                url = opened.enter_context(service(**options))
                remote = RemoteSandbox(url, options.get("token"), ca_file=options.get("tls_cert"))
                calls[name] = sandboxed(await opened.enter_async_context(remote), "print(1)", prints="1\n")
            requests = await in_turns(calls, rounds, seconds, status.update)
    title = f"Python {sys.version.split()[0]}, {CPUS} cores, {CPUS} in flight"
    show(console, f"isolation, {title}", {"print(1)": singles, "cases of batches of 16": cases}, "programs")
    show(console, f"the service, {title}", {"print(1)": requests}, "service")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, less time each")
    quick = parser.parse_args().quick
    asyncio.run(tables(3, 0.7) if quick else tables(7, 1.5))


if __name__ == "__main__":
    main()
