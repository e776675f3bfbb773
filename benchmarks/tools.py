"""The overhead of a tool call over the bare tool, and of the code interpreter over its sandbox.

    python benchmarks/tools.py                 the tables, about a minute
    python benchmarks/tools.py --quick         rougher ones, about fifteen seconds

Compare ratios, not numbers: everything is measured in turn, in several short rounds, on the same, possibly busy,
machine. Times are those of the best round, rates are over all rounds. The code interpreter and "bare sandbox" use the
same sandbox; `num_workers` and `rate_limit` are as high as the number of trajectories.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from toolyard.messages import OpenAIFunctionToolSchema
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Limits, Program
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.code_interpreter.tool import SandboxFusionTool
from toolyard.tools.instance import open_instance, open_instances

ARGUMENTS = {"query": "the height of the Eiffel Tower", "limit": 3}
TEXT = json.dumps(ARGUMENTS)
CODE = "print(6 * 7)"
SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer", "minimum": 1},
                    "language": {"type": "string", "enum": ["en", "de"]},
                },
                "required": ["query"],
            },
        },
    }
)

Work = Callable[[int], Awaitable[None]]
"""Does something N times."""


class NoOp(BaseTool):
    """Returns immediately."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        return ToolResponse(text="324 m"), None, {}


# A call ---------------------------------------------------------------------------------------------------------------


async def bare_calls(count: int) -> None:
    tool = NoOp({}, SCHEMA)
    for _ in range(count):
        await tool.execute("r1", ARGUMENTS)


def calls(arguments: str | dict[str, Any], **policy: Any) -> Work:
    async def work(count: int) -> None:
        tool = NoOp({"call": policy}, SCHEMA)
        async with open_instances({tool.name: tool}, "r1") as instances:
            for _ in range(count):
                await instances.call("search", arguments)

    return work


async def bare_lives(count: int) -> None:
    tool = NoOp({}, SCHEMA)
    for _ in range(count):
        instance_id, _ = await tool.create("r1")
        await tool.calc_reward(instance_id)
        await tool.release(instance_id)


async def lives(count: int) -> None:
    tool = NoOp({}, SCHEMA)
    for _ in range(count):
        async with open_instance(tool, "r1"):
            pass


WHOLE = "call: JSON decoded, checked, time-limited, under a limiter"
COSTS: dict[str, Work] = {
    "bare `await tool.execute(…)`": bare_calls,
    "call: checked, time-limited": calls(ARGUMENTS),
    "call: JSON decoded, checked, time-limited": calls(TEXT),
    WHOLE: calls(TEXT, concurrency=64),
    "bare create, calc_reward, release": bare_lives,
    "an instance: create, calc_reward, release": lives,
}


async def measure_costs(rounds: int, count: int) -> dict[str, float]:
    """Microseconds of each, in the best round."""
    found = dict.fromkeys(COSTS, float("inf"))
    for _ in range(rounds):
        for name, work in COSTS.items():
            start = time.perf_counter()
            await work(count)
            found[name] = min(found[name], (time.perf_counter() - start) / count * 1e6)
    return found


# The code interpreter -------------------------------------------------------------------------------------------------


@dataclass
class Rate:
    runs: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return self.runs / self.seconds


async def keep_going(rate: Rate, callers: list[Callable[[], Awaitable[None]]], seconds: float) -> None:
    """Run all callers concurrently for `seconds`, each making one call after the other."""
    start = time.perf_counter()

    async def one(call: Callable[[], Awaitable[None]]) -> None:
        while time.perf_counter() - start < seconds:
            await call()
            rate.runs += 1

    async with asyncio.TaskGroup() as group:
        for call in callers:
            group.create_task(one(call))
    rate.seconds += time.perf_counter() - start


@contextlib.asynccontextmanager
async def trajectories(tool: SandboxFusionTool, count: int) -> AsyncIterator[list[Callable[[], Awaitable[None]]]]:
    arguments = json.dumps({"code": CODE})
    async with contextlib.AsyncExitStack() as stack:
        instances = [await stack.enter_async_context(open_instance(tool, f"r{number}")) for number in range(count)]

        def caller(instance: Any) -> Callable[[], Awaitable[None]]:
            async def call() -> None:
                result = await instance.call(arguments)
                assert result.response.text == "42\n", result

            return call

        yield [caller(instance) for instance in instances]


async def measure_rates(count: int, rounds: int, seconds: float) -> tuple[Rate, Rate]:
    """The rates of the bare sandbox, and of the code interpreter on top of it."""
    tool = SandboxFusionTool({"num_workers": count, "rate_limit": count})
    bare, whole = Rate(), Rate()
    try:
        async with trajectories(tool, count) as callers:
            await callers[0]()
            sandbox = await tool._sandbox()  # noqa: SLF001 - the same one
            assert isinstance(sandbox, LocalSandbox)
            limits = Limits(run_seconds=30, compile_seconds=30)

            async def run() -> None:
                execution = await sandbox.run(Program(CODE), limits)
                assert execution.stdout == "42\n", execution

            await keep_going(Rate(), [run] * count, seconds / 2)
            for _ in range(rounds):
                await keep_going(bare, [run] * count, seconds)
                await keep_going(whole, callers, seconds)
    finally:
        await tool.close()
    return bare, whole


# Tables ---------------------------------------------------------------------------------------------------------------


async def tables(args: argparse.Namespace) -> None:
    console = Console(width=max(100, Console().width))
    title = f"Python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} cores"
    with console.status("measuring calls"):
        costs = await measure_costs(*((5, 2000) if args.quick else (15, 4000)))
    grid = Table("operation", title=f"microseconds, {title}")
    grid.add_column("µs", justify="right")
    for name, cost in costs.items():
        grid.add_row(name, f"{cost:.1f}")
    console.print(grid)

    levels = (1, 32) if args.quick else (1, 32, 256)
    rates: dict[int, tuple[Rate, Rate]] = {}
    with console.status("measuring the code interpreter") as status:
        for count in levels:
            status.update(f"measuring the code interpreter, {count} trajectories")
            rates[count] = await measure_rates(count, *((3, 0.5) if args.quick else (6, 1.0)))
    grid = Table(title=f"calls per second, {title}")
    for column in ("trajectories", "bare sandbox", "code_interpreter", "share"):
        grid.add_column(column, justify="right")
    for count, (bare, whole) in rates.items():
        share = whole.per_second / bare.per_second
        grid.add_row(str(count), f"{bare.per_second:.0f}", f"{whole.per_second:.0f}", f"{share:.0%}")
    console.print(grid)
    goals(console, costs, rates)


def goals(console: Console, costs: dict[str, float], rates: dict[int, tuple[Rate, Rate]]) -> None:
    overhead = costs[WHOLE] - costs[next(iter(COSTS))]
    lines = [("µs added to a bare call, with everything", overhead, 50.0, "<=")]
    lines += [
        (f"share of the bare sandbox's rate, {count} trajectories", whole.per_second / bare.per_second, 0.8, ">=")
        for count, (bare, whole) in rates.items()
    ]
    for text, value, goal, sense in lines:
        met = value >= goal if sense == ">=" else value <= goal
        console.print(f"{'[green]met [/]' if met else '[red]MISS[/]'} {text}: {value:.2f} (goal {sense} {goal:g})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer levels, less time each")
    asyncio.run(tables(parser.parse_args()))


if __name__ == "__main__":
    main()
